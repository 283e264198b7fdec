"""Loads of packed weights: sixteen elements of fewer bits as float32 lanes."""

from __future__ import annotations

from typing import Any

from kernels.cpu.features import HAS_HALF
from kernels.cpu.jit import intrinsic, ir, types
from kernels.cpu.simd import LANES, float32x16

_INT = ir.IntType(32)
_VECTOR, _INT_VECTOR = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT, LANES)
_MEMORY_KINDS = {types.float32: (ir.FloatType(), 2), types.int16: (ir.HalfType(), 1), types.int8: (ir.IntType(8), 0)}
"""Element and its log2 bytes, by the scalar that stands for it in `load_as`."""


def _load_vector(builder: Any, base: Any, index: Any, element: Any, shift: int) -> Any:
    address = builder.add(base, builder.shl(index, ir.Constant(index.type, shift)))
    return builder.load(builder.inttoptr(address, ir.VectorType(element, LANES).as_pointer()), align=1 << shift)


def _half_to_float(builder: Any, half: Any) -> Any:
    """fpext of finite float16 by exact integer and float steps."""
    bits = builder.zext(builder.bitcast(half, ir.VectorType(ir.IntType(16), LANES)), _INT_VECTOR)

    def constant(value: int) -> Any:
        return ir.Constant(_INT_VECTOR, [value] * LANES)

    # The exponents' biases differ by 112; the product also makes normal numbers of subnormal ones.
    small = builder.bitcast(builder.shl(builder.and_(bits, constant(0x7FFF)), constant(13)), _VECTOR)
    magnitude = builder.fmul(small, ir.Constant(_VECTOR, [2.0**112] * LANES))
    sign = builder.shl(builder.and_(bits, constant(0x8000)), constant(16))
    return builder.bitcast(builder.or_(builder.bitcast(magnitude, _INT_VECTOR), sign), _VECTOR)


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
