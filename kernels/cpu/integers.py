"""Sixteen 32-bit integer lanes: four levels a lane against four activations, summed exactly.

Integer sums have no rounding, so which instruction a CPU has for them does not show in a result: AVX-512 VNNI,
AVX-VNNI, AVX2's multiply-add of byte pairs, or plain shifts and products give the same bits.
"""

from __future__ import annotations

import struct
from typing import Any

from kernels.cpu.jit import CPU_FEATURES, cgutils, extending, intrinsic, ir, types
from kernels.cpu.simd import LANES, emit_fma, float32x16

GROUP = 32
"""Inputs that share a scale."""

_SCALE, _SCALED_SUM, _FIRST, RECORD_BYTES = GROUP, GROUP + 4, GROUP + 8, GROUP + 12
"""Of a rounded group: after GROUP int8 its scale s and s · Σ int8 as float32, -128 · Σ int8 as int32."""

_ONE_127TH = struct.unpack("f", struct.pack("f", 1 / 127))[0]  # llvmlite takes no more digits than a float32 has

_FLOAT, _INT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)
_FLOATS, _INTS, _BYTES = (ir.VectorType(element, LANES) for element in (_FLOAT, _INT, _BYTE))


class _Int32x16(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="int32x16")


int32x16 = _Int32x16()


@extending.register_model(_Int32x16)
class _Int32x16Model(extending.models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _INTS)


def _pointer(builder: Any, base: Any, offset: Any, element: Any) -> Any:
    return builder.inttoptr(builder.add(base, offset), element.as_pointer())


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}"), args)


def _constant(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _splat(builder: Any, scalar: Any) -> Any:
    first = builder.insert_element(ir.Constant(_INTS, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, first, _constant(0))


def _halves(builder: Any, vector: Any) -> list[Any]:
    index = [ir.Constant(ir.VectorType(_INT, 8), list(range(first, first + 8))) for first in (0, 8)]
    return [builder.shuffle_vector(vector, vector, half) for half in index]


def _joined(builder: Any, halves: list[Any]) -> Any:
    return builder.shuffle_vector(*halves, ir.Constant(_INTS, list(range(LANES))))


def _dot_vnni512(builder: Any, total: Any, levels: Any, x: Any, highest: int) -> Any:
    return _call(builder, "x86.avx512.vpdpbusd.512", _INTS, total, levels, x)


def _dot_vnni256(builder: Any, total: Any, levels: Any, x: Any, highest: int) -> Any:
    parts = zip(*(_halves(builder, vector) for vector in (total, levels, x)), strict=True)
    eight = ir.VectorType(_INT, 8)
    return _joined(builder, [_call(builder, "x86.avx512.vpdpbusd.256", eight, *part) for part in parts])


def _dot_avx2(builder: Any, total: Any, levels: Any, x: Any, highest: int) -> Any:
    """Sums of byte pairs must fit 16 bits: levels above 127 go as their high and their low four bits."""
    if highest > 127:
        low = builder.and_(levels, _constant(0x0F0F0F0F))
        high = builder.and_(builder.lshr(levels, _constant(4)), _constant(0x0F0F0F0F))
        return _dot_avx2(builder, _pair_sums(builder, total, high, x, 16), low, x, 15)
    return _pair_sums(builder, total, levels, x, 1)


def _pair_sums(builder: Any, total: Any, levels: Any, x: Any, factor: int) -> Any:
    bytes32, words16, eight = ir.VectorType(_BYTE, 32), ir.VectorType(ir.IntType(16), 16), ir.VectorType(_INT, 8)
    factors = ir.Constant(words16, [factor] * 16)
    sums = []
    for part, other in zip(_halves(builder, levels), _halves(builder, x), strict=True):
        pairs = _call(
            builder, "x86.avx2.pmadd.ub.sw", words16, builder.bitcast(part, bytes32), builder.bitcast(other, bytes32)
        )
        sums.append(_call(builder, "x86.avx2.pmadd.wd", eight, pairs, factors))
    return builder.add(total, _joined(builder, sums))


def _dot_generic(builder: Any, total: Any, levels: Any, x: Any, highest: int) -> Any:
    for shift in (0, 8, 16, 24):
        level = builder.and_(builder.lshr(levels, _constant(shift)), _constant(255))
        activation = builder.ashr(builder.shl(x, _constant(24 - shift)), _constant(24))
        total = builder.add(total, builder.mul(level, activation))
    return total


if {"avx512vnni", "avx512f"} <= CPU_FEATURES:
    _dot = _dot_vnni512
elif "avxvnni" in CPU_FEATURES:
    _dot = _dot_vnni256
elif "avx2" in CPU_FEATURES:
    _dot = _dot_avx2
else:
    _dot = _dot_generic
HAS_BYTE_PRODUCTS = _dot is not _dot_generic
"""Whether there are instructions for sums of products of bytes; without, a whole group unrolled is too much code."""


@intrinsic
def load_levels(typing_context: Any, base: Any, offset: Any) -> Any:
    """64 bytes from byte `offset`; no alignment needed."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], args[1], _INTS), align=4)

    return int32x16(types.int64, types.int64), emit


@intrinsic
def store_levels(typing_context: Any, base: Any, offset: Any, levels: Any) -> Any:
    """64 bytes to byte `offset`; no alignment needed."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(builder, args[0], args[1], _INTS), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, int32x16), emit


@intrinsic
def split_levels(typing_context: Any, levels: Any) -> Any:
    """The low four bits of every byte, and the high four bits."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        mask = _constant(0x0F0F0F0F)
        low, high = builder.and_(args[0], mask), builder.and_(builder.lshr(args[0], _constant(4)), mask)
        return cgutils.pack_array(builder, [low, high])

    return types.UniTuple(int32x16, 2)(int32x16), emit


def _place(builder: Any, offset: Any, stride: Any, row: int, extra: int = 0) -> Any:
    place = builder.add(offset, builder.mul(stride, ir.Constant(stride.type, row)))
    return builder.add(place, ir.Constant(place.type, extra))


def _load_word(builder: Any, base: Any, place: Any) -> Any:
    return _splat(builder, builder.load(_pointer(builder, base, place, _INT), align=4))


@intrinsic
def zero_each(typing_context: Any, like: Any) -> Any:
    """Tuple of zeros, as many as `like` has vectors."""
    count = len(like)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return cgutils.pack_array(builder, [_constant(0)] * count)

    return types.UniTuple(int32x16, count)(like), emit


@intrinsic
def first_each(typing_context: Any, like: Any, base: Any, offset: Any, stride: Any) -> Any:
    """Where sums of levels given by `flip_signs` start: -128 · Σ activations, for the rows' records at byte offset,
    offset + stride, …, as many as `like` has vectors."""
    count = len(like)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, base, offset, stride = args
        words = [_load_word(builder, base, _place(builder, offset, stride, row, _FIRST)) for row in range(count)]
        return cgutils.pack_array(builder, words)

    return types.UniTuple(int32x16, count)(like, types.int64, types.int64, types.int64), emit


@intrinsic
def dot_each(typing_context: Any, totals: Any, levels: Any, highest: Any, base: Any, offset: Any, stride: Any) -> Any:
    """totals[t] + Σ of the four unsigned levels in a lane, none above `highest`, times the four int8 activations at
    byte offset + t · stride."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        totals, levels, _, base, offset, stride = args
        sums = []
        for row in range(len(sig.args[0])):
            x = _load_word(builder, base, _place(builder, offset, stride, row))
            sums.append(_dot(builder, builder.extract_value(totals, row), levels, x, sig.args[2].literal_value))
        return cgutils.pack_array(builder, sums)

    return totals(totals, int32x16, highest, types.int64, types.int64, types.int64), emit


@intrinsic
def dot_group_each(typing_context: Any, totals: Any, levels: Any, highest: Any, base: Any, offset: Any) -> Any:
    """`dot_each` over a whole group, for two columns of lanes: `levels` is the address of GROUP / 4 times 64 bytes of
    the first column and 64 of the second, the rows' records lie one behind the other from byte `offset`. Both columns
    begin with `totals`; returns the two tuples."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        totals, levels, _, base, offset = args
        num_rows, stride = len(sig.args[0]), ir.Constant(offset.type, RECORD_BYTES)
        sums = [[builder.extract_value(totals, row) for row in range(num_rows)] for _ in range(2)]
        for line in range(GROUP // 4):
            places = [ir.Constant(levels.type, 64 * (2 * line + half)) for half in range(2)]
            parts = [builder.load(_pointer(builder, levels, place, _INTS), align=64) for place in places]
            for row in range(num_rows):
                x = _load_word(builder, base, _place(builder, offset, stride, row, 4 * line))
                for part, half in zip(parts, sums, strict=True):
                    half[row] = _dot(builder, half[row], part, x, sig.args[2].literal_value)
        return cgutils.pack_array(builder, [cgutils.pack_array(builder, half) for half in sums])

    return types.UniTuple(totals, 2)(totals, types.int64, highest, types.int64, types.int64), emit


@intrinsic
def accumulate_each(
    typing_context: Any,
    totals: Any,
    sums: Any,
    index: Any,
    sums_stride: Any,
    scale: Any,
    minimum: Any,
    base: Any,
    offset: Any,
    stride: Any,
) -> Any:
    """Adds totals[t] · (scale · s), then minimum · (s · Σ activations) unless `minimum` is None, to the float32 sums
    at element index + t · sums_stride; s and Σ are those of the record at byte offset + t · stride."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        totals, sums, index, sums_stride, scale, minimum, base, offset, stride = args
        for row in range(len(sig.args[0])):
            own = builder.bitcast(_load_word(builder, base, _place(builder, offset, stride, row, _SCALE)), _FLOATS)
            element = builder.shl(_place(builder, index, sums_stride, row), ir.Constant(index.type, 2))
            pointer = _pointer(builder, sums, element, _FLOATS)
            total = builder.sitofp(builder.extract_value(totals, row), _FLOATS)
            result = emit_fma(builder, total, builder.fmul(scale, own), builder.load(pointer, align=4))
            if sig.args[5] is not types.none:
                word = _load_word(builder, base, _place(builder, offset, stride, row, _SCALED_SUM))
                result = emit_fma(builder, minimum, builder.bitcast(word, _FLOATS), result)
            builder.store(result, pointer, align=4)
        return context.get_dummy_value()

    whole = types.int64
    signature = types.void(totals, whole, whole, whole, float32x16, minimum, whole, whole, whole)
    return signature, emit


@intrinsic
def flip_signs(typing_context: Any, levels: Any) -> Any:
    """Signed bytes plus 128, as unsigned bytes."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.xor(args[0], ir.Constant(_INTS, [-0x7F7F7F80] * LANES))

    return int32x16(int32x16), emit


def _reduce(builder: Any, vector: Any, combine: Any) -> Any:
    for width in (8, 4, 2, 1):
        index = ir.Constant(_INTS, [(lane + width) % LANES for lane in range(LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, vector, index))
    return builder.extract_element(vector, ir.Constant(_INT, 0))


@intrinsic
def round_group(typing_context: Any, x: Any, start: Any, record: Any) -> Any:
    """Rounds GROUP float32 from element `start` to int8 multiples of their largest magnitude / 127; writes `record`.

    An input that is not finite makes the scale so.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x, start, record = args
        element = builder.shl(start, ir.Constant(start.type, 2))
        places = [builder.add(element, ir.Constant(element.type, 4 * LANES * half)) for half in range(GROUP // LANES)]
        parts = [builder.load(_pointer(builder, x, place, _FLOATS), align=4) for place in places]

        def maximum(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        # Magnitudes order like their bits, and what is not a number lies above all numbers.
        sizes = [builder.and_(builder.bitcast(part, _INTS), _constant(0x7FFFFFFF)) for part in parts]
        largest = builder.bitcast(_reduce(builder, maximum(*sizes), maximum), _FLOAT)
        zero = ir.Constant(_FLOAT, 0.0)
        inverse = builder.fdiv(ir.Constant(_FLOAT, 127.0), largest)
        inverse = builder.select(builder.fcmp_ordered("==", largest, zero), zero, inverse)
        inverses = builder.bitcast(_splat(builder, builder.bitcast(inverse, _INT)), _FLOATS)
        integers = []
        for half, part in enumerate(parts):
            # Adding 1.5 · 2^23 rounds to an integer, which the lowest bits of the sum then hold.
            shifted = builder.fadd(builder.fmul(part, inverses), ir.Constant(_FLOATS, [12582912.0] * LANES))
            bits = builder.bitcast(shifted, _INTS)
            integers.append(builder.sub(bits, _constant(0x4B400000)))
            pointer = _pointer(builder, record, ir.Constant(record.type, LANES * half), _BYTES)
            builder.store(builder.trunc(bits, _BYTES), pointer, align=1)
        total = _reduce(builder, builder.add(*integers), builder.add)
        scale = builder.fmul(largest, ir.Constant(_FLOAT, _ONE_127TH))
        for place, value in (
            (_SCALE, scale),
            (_SCALED_SUM, builder.fmul(scale, builder.sitofp(total, _FLOAT))),
            (_FIRST, builder.mul(total, ir.Constant(_INT, -128))),
        ):
            builder.store(value, _pointer(builder, record, ir.Constant(record.type, place), value.type), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit
