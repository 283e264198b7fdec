"""Loads of packed weights: sixteen elements of fewer bits as float32 lanes."""

from __future__ import annotations

from typing import Any

from kernels.cpu.jit import cgutils, intrinsic, ir, types
from kernels.cpu.simd import LANES, float32x16

_INT = ir.IntType(32)
_VECTOR, _INT_VECTOR = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_INT, LANES)
_MEMORY_KINDS = {types.float32: (ir.FloatType(), 2), types.int16: (ir.HalfType(), 1), types.int8: (ir.IntType(8), 0)}
"""Element and its log2 bytes, by the scalar that stands for it in `load_as`."""


def _load_vector(builder: Any, base: Any, index: Any, element: Any, shift: int) -> Any:
    address = builder.add(base, builder.shl(index, ir.Constant(index.type, shift)))
    return builder.load(builder.inttoptr(address, ir.VectorType(element, LANES).as_pointer()), align=1 << shift)


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
        return builder.fpext(vector, _VECTOR)

    return float32x16(like, types.int64, types.int64), emit


@intrinsic
def load_nibbles(typing_context: Any, base: Any, index: Any) -> Any:
    """Sixteen bytes from byte `index`: lanes of their low halves and of their high halves, each 0 to 15."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        levels = builder.zext(_load_vector(builder, args[0], args[1], ir.IntType(8), 0), _INT_VECTOR)
        low = builder.and_(levels, ir.Constant(_INT_VECTOR, [15] * LANES))
        high = builder.lshr(levels, ir.Constant(_INT_VECTOR, [4] * LANES))
        return cgutils.pack_array(builder, [builder.sitofp(half, _VECTOR) for half in (low, high)])

    return types.UniTuple(float32x16, 2)(types.int64, types.int64), emit
