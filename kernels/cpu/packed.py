"""Memory of fewer bits than float32: sixteen elements of it as float32 lanes, and float32 lanes as float16."""

from __future__ import annotations

from typing import Any

from kernels.cpu.features import HAS_HALF
from kernels.cpu.jit import intrinsic, ir, types
from kernels.cpu.simd import LANES, float32x16

_INT = ir.IntType(32)
_VECTOR, _INT_VECTOR = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT, LANES)
_SHORT_VECTOR = ir.VectorType(ir.IntType(16), LANES)
LARGEST_HALF = 65504.0
_MEMORY_KINDS = {types.float32: (ir.FloatType(), 2), types.int16: (ir.HalfType(), 1), types.int8: (ir.IntType(8), 0)}
"""Element and its log2 bytes, by the scalar that stands for it in `load_as`."""


def _load_vector(builder: Any, base: Any, index: Any, element: Any, shift: int) -> Any:
    address = builder.add(base, builder.shl(index, ir.Constant(index.type, shift)))
    return builder.load(builder.inttoptr(address, ir.VectorType(element, LANES).as_pointer()), align=1 << shift)


def _half_to_float(builder: Any, half: Any) -> Any:
    """fpext of float16 by exact integer and float steps."""
    bits = builder.zext(builder.bitcast(half, ir.VectorType(ir.IntType(16), LANES)), _INT_VECTOR)

    def constant(value: int) -> Any:
        return ir.Constant(_INT_VECTOR, [value] * LANES)

    # The exponents' biases differ by 112; the product also makes normal numbers of subnormal ones.
    small = builder.bitcast(builder.shl(builder.and_(bits, constant(0x7FFF)), constant(13)), _VECTOR)
    magnitude = builder.fmul(small, ir.Constant(_VECTOR, [2.0**112] * LANES))
    magnitude_bits = builder.bitcast(magnitude, _INT_VECTOR)
    is_number = builder.icmp_unsigned("<", builder.and_(bits, constant(0x7FFF)), constant(0x7C00))
    magnitude_bits = builder.select(is_number, magnitude_bits, builder.or_(magnitude_bits, constant(0x7F800000)))
    sign = builder.shl(builder.and_(bits, constant(0x8000)), constant(16))
    return builder.bitcast(builder.or_(magnitude_bits, sign), _VECTOR)


def _float_to_half(builder: Any, vector: Any) -> Any:
    """fptrunc of float32 within float16's range, or not numbers, to the nearest, ties to even."""
    bits = builder.bitcast(vector, _INT_VECTOR)

    def constant(value: int) -> Any:
        return ir.Constant(_INT_VECTOR, [value] * LANES)

    magnitude = builder.and_(bits, constant(0x7FFFFFFF))
    # Adding 1/2 places the spacing of subnormal float16 at float32's last bit, so that the sum is rounded to it.
    half = ir.Constant(_VECTOR, [0.5] * LANES)
    small = builder.fadd(builder.bitcast(magnitude, _VECTOR), half)
    small_bits = builder.sub(builder.bitcast(small, _INT_VECTOR), constant(0x3F000000))
    is_odd = builder.and_(builder.lshr(magnitude, constant(13)), constant(1))
    rounded = builder.add(builder.add(magnitude, constant(0xFFF - (112 << 23))), is_odd)
    normal_bits = builder.lshr(rounded, constant(13))
    is_small = builder.icmp_unsigned("<", magnitude, constant(113 << 23))
    result = builder.select(is_small, small_bits, normal_bits)
    is_number = builder.icmp_unsigned("<=", magnitude, constant(0x7F800000))
    result = builder.select(is_number, result, constant(0x7E00))
    sign = builder.and_(builder.lshr(bits, constant(16)), constant(0x8000))
    return builder.bitcast(builder.trunc(builder.or_(result, sign), _SHORT_VECTOR), ir.VectorType(ir.HalfType(), LANES))


@intrinsic
def store_halves(typing_context: Any, base: Any, index: Any, vector: Any) -> Any:
    """Lanes to sixteen float16 at `index`, counted in float16: rounded to the nearest, ties to even. What lies beyond
    float16's range becomes the end of the range, never infinite."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        base, index, vector = args
        largest, smallest = (ir.Constant(_VECTOR, [limit] * LANES) for limit in (LARGEST_HALF, -LARGEST_HALF))
        vector = builder.select(builder.fcmp_ordered(">", vector, largest), largest, vector)
        vector = builder.select(builder.fcmp_ordered("<", vector, smallest), smallest, vector)
        kind = ir.VectorType(ir.HalfType(), LANES)
        halves = builder.fptrunc(vector, kind) if HAS_HALF else _float_to_half(builder, vector)
        address = builder.add(base, builder.shl(index, ir.Constant(index.type, 1)))
        builder.store(halves, builder.inttoptr(address, kind.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, float32x16), emit


@intrinsic
def copy_half(typing_context: Any, source: Any, source_index: Any, target: Any, target_index: Any) -> Any:
    """One float16 from memory to memory; indices count float16."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def pointer(base: Any, index: Any) -> Any:
            address = builder.add(base, builder.shl(index, ir.Constant(index.type, 1)))
            return builder.inttoptr(address, ir.IntType(16).as_pointer())

        builder.store(builder.load(pointer(args[0], args[1]), align=2), pointer(args[2], args[3]), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), emit


@intrinsic
def load_as(typing_context: Any, like: Any, base: Any, index: Any) -> Any:
    """Sixteen elements as float32 lanes; in memory float32, float16 or int8, as `like` is float32, int16 or int8."""
    element, shift = _MEMORY_KINDS[like]

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector = _load_vector(builder, args[1], args[2], element, shift)
        if shift == 2:
            return vector
        if shift == 0:
            return builder.sitofp(builder.sext(vector, _INT_VECTOR), _VECTOR)
        return builder.fpext(vector, _VECTOR) if HAS_HALF else _half_to_float(builder, vector)

    return float32x16(like, types.int64, types.int64), emit
