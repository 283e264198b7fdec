"""Memory behind addresses as numba arrays, for kernels that index rather than work in lanes."""

from __future__ import annotations

from typing import Any

import numba

from kernels.cpu.jit import compiled, intrinsic, types

carray: Any = numba.carray  # type: ignore[attr-defined]


@intrinsic
def _pointer(typing_context: Any, address: Any, like: Any) -> Any:
    """The address as a pointer to elements of the type of `like`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), emit


@compiled
def float32_at(address: int, count: int) -> Any:
    """`count` float32."""
    return carray(_pointer(address, types.float32(0)), count)


@compiled
def float64_at(address: int, count: int) -> Any:
    """`count` float64."""
    return carray(_pointer(address, types.float64(0)), count)


@compiled
def int64_at(address: int, count: int) -> Any:
    """`count` int64."""
    return carray(_pointer(address, types.int64(0)), count)


@compiled
def uint32_at(address: int, count: int) -> Any:
    """`count` uint32."""
    return carray(_pointer(address, types.uint32(0)), count)
