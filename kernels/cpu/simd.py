"""Sixteen float32 lanes as a numba type: arithmetic whose every rounding is written down.

Compiled without fast-math, so the optimiser may neither reorder nor contract anything: a result depends on the operands
alone, never on the code around it, the batch or the thread. LLVM maps the lanes to what the CPU has (one AVX-512
register, two AVX2 or four NEON ones). Addresses are integers, indices count 4-byte elements.

Functions whose names end in `_each` work on a tuple of vectors, one per query, and are unrolled.
"""

from __future__ import annotations

import operator
from typing import Any

from kernels.cpu.features import HAS_FMA
from kernels.cpu.jit import cgutils, compiled, extending, intrinsic, ir, types

LANES = 16

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR, _INT_VECTOR = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


class _Float32x16(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = _Float32x16()


@extending.register_model(_Float32x16)
class _Float32x16Model(extending.models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _VECTOR)


def _define_operator(function: Any, instruction: str) -> None:
    def type_operator(context: Any) -> Any:
        return lambda a, b: float32x16 if a is float32x16 and b is float32x16 else None

    def lower_operator(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)

    extending.type_callable(function)(type_operator)
    extending.lower_builtin(function, _Float32x16, _Float32x16)(lower_operator)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_function, _instruction)


def _pointer(builder: Any, base: Any, index: Any, element: Any) -> Any:
    address = builder.add(base, builder.shl(index, ir.Constant(index.type, 2)))
    return builder.inttoptr(address, element.as_pointer())


def _splat(builder: Any, scalar: Any) -> Any:
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, first, ir.Constant(_INT_VECTOR, [0] * LANES))


def _splat_at(builder: Any, base: Any, index: Any) -> Any:
    return _splat(builder, builder.load(_pointer(builder, base, index, _FLOAT), align=4))


def _call_llvm(builder: Any, name: str, *args: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}f32"), args)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Code of a · b + c; two roundings on CPUs without that instruction."""
    return _call_llvm(builder, "fma", a, b, c) if HAS_FMA else builder.fadd(builder.fmul(a, b), c)


@intrinsic
def splat(typing_context: Any, scalar: Any) -> Any:
    """A float32 in all lanes."""
    return float32x16(types.float32), lambda context, builder, sig, args: _splat(builder, args[0])


@intrinsic
def zeros(typing_context: Any, count: Any) -> Any:
    """Tuple of `count` vectors of zeros."""
    number = count.literal_value

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return cgutils.pack_array(builder, [ir.Constant(_VECTOR, [0.0] * LANES)] * number)

    return types.UniTuple(float32x16, number)(count), emit


@intrinsic
def stack_floats(typing_context: Any, count: Any) -> Any:
    """Address of room for `count` float32, a multiple of 64 and valid in this call."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(_FLOAT, count.literal_value))
        room.align = 64
        return builder.ptrtoint(room, ir.IntType(64))

    return types.int64(count), emit


@intrinsic
def load(typing_context: Any, base: Any, index: Any) -> Any:
    """Lanes from memory; no alignment needed."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], args[1], _VECTOR), align=4)

    return float32x16(types.int64, types.int64), emit


@intrinsic
def store(typing_context: Any, base: Any, index: Any, vector: Any) -> Any:
    """Lanes to memory."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(builder, args[0], args[1], _VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, float32x16), emit


def _scalar_load(element: Any, numba_type: Any) -> Any:
    def load_scalar(typing_context: Any, base: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.load(_pointer(builder, args[0], args[1], element), align=4)

        return numba_type(types.int64, types.int64), emit

    return load_scalar


load_float = intrinsic(_scalar_load(_FLOAT, types.float32))
load_int = intrinsic(_scalar_load(_INT, types.int32))


@intrinsic
def store_float(typing_context: Any, base: Any, index: Any, value: Any) -> Any:
    """One float32 to memory."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(builder, args[0], args[1], _FLOAT), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), emit


def _copy(builder: Any, source: tuple[Any, Any], target: tuple[Any, Any], count: Any) -> None:
    with cgutils.for_range(builder, count, intp=count.type) as loop:
        value = builder.load(_pointer(builder, source[0], builder.add(source[1], loop.index), _FLOAT), align=4)
        builder.store(value, _pointer(builder, target[0], builder.add(target[1], loop.index), _FLOAT), align=4)


@intrinsic
def _load_tail(typing_context: Any, base: Any, index: Any, count: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        base, index, count = args
        lanes = cgutils.alloca_once(builder, _VECTOR)
        builder.store(ir.Constant(_VECTOR, [0.0] * LANES), lanes)
        _copy(builder, (base, index), (builder.ptrtoint(lanes, base.type), ir.Constant(index.type, 0)), count)
        return builder.load(lanes)

    return float32x16(types.int64, types.int64, types.int64), emit


@intrinsic
def _store_tail(typing_context: Any, base: Any, index: Any, count: Any, vector: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        base, index, count, vector = args
        lanes = cgutils.alloca_once(builder, _VECTOR)
        builder.store(vector, lanes)
        _copy(builder, (builder.ptrtoint(lanes, base.type), ir.Constant(index.type, 0)), (base, index), count)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, float32x16), emit


@compiled
def load_part(base: int, index: int, count: int) -> Any:
    """The first `count` lanes from memory (all of them from 16 on), 0 in the others: for the end of a row."""
    return load(base, index) if count >= LANES else _load_tail(base, index, count)


@compiled
def store_part(base: int, index: int, count: int, vector: Any) -> None:
    """The first `count` lanes to memory, all of them from 16 on."""
    if count >= LANES:
        store(base, index, vector)
    else:
        _store_tail(base, index, count, vector)


@intrinsic
def prefetch(typing_context: Any, base: Any, index: Any) -> Any:
    """Asks for the cache line of an element that will be read soon; any address is harmless."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        pointer = builder.bitcast(_pointer(builder, args[0], args[1], _FLOAT), byte_pointer)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, (pointer, ir.Constant(_INT, 0), ir.Constant(_INT, 3), ir.Constant(_INT, 1)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once; twice on CPUs without that instruction."""
    return (
        float32x16(float32x16, float32x16, float32x16),
        lambda context, builder, sig, args: emit_fma(builder, *args),
    )


@intrinsic
def maximum(typing_context: Any, a: Any, b: Any) -> Any:
    """The larger of each lane; b where a is not a number."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return float32x16(float32x16, float32x16), emit


@intrinsic
def keep_lanes(typing_context: Any, vector: Any, first: Any, last: Any, other: Any) -> Any:
    """`vector` in lanes first … last, `other` elsewhere."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector, first, last, other = args
        lane = ir.Constant(_INT_VECTOR, list(range(LANES)))

        def splat_int(scalar: Any) -> Any:
            one = builder.insert_element(
                ir.Constant(_INT_VECTOR, ir.Undefined), builder.trunc(scalar, _INT), ir.Constant(_INT, 0)
            )
            return builder.shuffle_vector(one, one, ir.Constant(_INT_VECTOR, [0] * LANES))

        not_before = builder.icmp_signed(">=", lane, splat_int(first))
        not_after = builder.icmp_signed("<=", lane, splat_int(last))
        return builder.select(builder.and_(not_before, not_after), vector, other)

    return float32x16(float32x16, types.int64, types.int64, float32x16), emit


def _reduce(builder: Any, vector: Any, combine: Any) -> Any:
    width = LANES // 2
    while width:
        indices = [(lane + width) % LANES for lane in range(LANES)]
        vector = combine(vector, builder.shuffle_vector(vector, vector, ir.Constant(_INT_VECTOR, indices)))
        width //= 2
    return builder.extract_element(vector, ir.Constant(_INT, 0))


@intrinsic
def sum_lanes(typing_context: Any, vector: Any) -> Any:
    """Sum of the lanes as a tree: i + (i + 8), then 4, 2, 1 apart."""
    return types.float32(float32x16), lambda context, builder, sig, args: _reduce(builder, args[0], builder.fadd)


@intrinsic
def max_lanes(typing_context: Any, vector: Any) -> Any:
    """Largest lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _reduce(builder, args[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return types.float32(float32x16), emit


@intrinsic
def exp2(typing_context: Any, vector: Any) -> Any:
    """2^x for x clamped to [-126, 127]; relative error under 2e-7 (polynomial of Cephes' exp2f)."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def constant(value: float) -> Any:
            return ir.Constant(_VECTOR, [value] * LANES)

        x = args[0]
        x = builder.select(builder.fcmp_ordered(">", x, constant(-126.0)), x, constant(-126.0))
        x = builder.select(builder.fcmp_ordered("<", x, constant(127.0)), x, constant(127.0))
        whole = _call_llvm(builder, "rint", x)
        part = builder.fsub(x, whole)
        result = constant(1.535336188319500e-4)
        for coefficient in (
            1.339887440266574e-3,
            9.618437357674640e-3,
            5.550332471162809e-2,
            2.402264791363012e-1,
            6.931472028550421e-1,
            1.0,
        ):
            result = emit_fma(builder, result, part, constant(coefficient))
        biased = builder.add(builder.fptosi(whole, _INT_VECTOR), ir.Constant(_INT_VECTOR, [127] * LANES))
        power = builder.bitcast(builder.shl(biased, ir.Constant(_INT_VECTOR, [23] * LANES)), _VECTOR)
        return builder.fmul(result, power)

    return float32x16(float32x16), emit


def _each(builder: Any, signature: Any, args: Any, make: Any) -> Any:
    accumulators = [builder.extract_value(args[0], query) for query in range(len(signature.args[0]))]
    return cgutils.pack_array(builder, [make(query, vector) for query, vector in enumerate(accumulators)])


def _element(builder: Any, index: Any, stride: Any, query: int) -> Any:
    return builder.add(index, builder.mul(stride, ir.Constant(stride.type, query)))


@intrinsic
def load_each(typing_context: Any, like: Any, base: Any, index: Any, stride: Any) -> Any:
    """Vectors at index, index + stride, …, as many as `like` has."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _each(
            builder,
            sig,
            args,
            lambda query, _: builder.load(
                _pointer(builder, args[1], _element(builder, args[2], args[3], query), _VECTOR), align=4
            ),
        )

    return like(like, types.int64, types.int64, types.int64), emit


@intrinsic
def store_each(typing_context: Any, vectors: Any, base: Any, index: Any, stride: Any) -> Any:
    """Vectors to index, index + stride, …"""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for query in range(len(sig.args[0])):
            pointer = _pointer(builder, args[1], _element(builder, args[2], args[3], query), _VECTOR)
            builder.store(builder.extract_value(args[0], query), pointer, align=4)
        return context.get_dummy_value()

    return types.void(vectors, types.int64, types.int64, types.int64), emit


@intrinsic
def fma_each(typing_context: Any, vectors: Any, base: Any, index: Any, stride: Any, factor: Any) -> Any:
    """vectors[t] + scalar at (index + t · stride) · factor."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, base, index, stride, factor = args
        return _each(
            builder,
            sig,
            args,
            lambda query, vector: emit_fma(
                builder, _splat_at(builder, base, _element(builder, index, stride, query)), factor, vector
            ),
        )

    return vectors(vectors, types.int64, types.int64, types.int64, float32x16), emit


@intrinsic
def scale_each(typing_context: Any, vectors: Any, base: Any, index: Any, stride: Any) -> Any:
    """vectors[t] · scalar at (index + t · stride)."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _each(
            builder,
            sig,
            args,
            lambda query, vector: builder.fmul(
                vector, _splat_at(builder, args[1], _element(builder, args[2], args[3], query))
            ),
        )

    return vectors(vectors, types.int64, types.int64, types.int64), emit


@intrinsic
def add_each(typing_context: Any, first: Any, second: Any) -> Any:
    """Element by element sum of two tuples of vectors."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _each(
            builder, sig, args, lambda query, vector: builder.fadd(vector, builder.extract_value(args[1], query))
        )

    return first(first, first), emit
