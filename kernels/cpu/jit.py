"""numba and llvmlite as this package uses them. Their annotations cover only parts, so they are untyped beyond here."""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import llvmlite.ir
import numba
import numba.core.cgutils
import numba.extending

ir: Any = llvmlite.ir
types: Any = numba.types
cgutils: Any = numba.core.cgutils
extending: Any = numba.extending


HAS_AVX512 = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))


def compiled(function: Any) -> Any:
    """A function that kernels call. Never fast-math: every rounding stays where it is written."""
    return numba.njit(error_model="numpy")(function)


def intrinsic(function: Any) -> Any:
    """A function whose LLVM code is written out; integer constants reach it as constants."""
    return extending.intrinsic(prefer_literal=True)(function)


def c_function(function: Any) -> int:
    """Address of `void function(int64)`, compiled now or taken from numba's cache."""
    decorate: Any = numba.cfunc(types.void(types.int64), cache=True, error_model="numpy")
    return int(decorate(function).address)
