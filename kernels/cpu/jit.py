"""numba and llvmlite as this package uses them. Their annotations cover only parts, so they are untyped beyond here."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
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
_config: Any = numba.config
_njit: Any = numba.njit


def _cpu_features() -> frozenset[str]:
    """LLVM's names of what compiled code may use: the host's, or those that numba was told to compile for."""
    if _config.CPU_FEATURES is not None:
        return frozenset(part[1:] for part in _config.CPU_FEATURES.split(",") if part.startswith("+"))
    return frozenset(name for name, is_there in llvmlite.binding.get_host_cpu_features().items() if is_there)


CPU_FEATURES = _cpu_features()
HAS_AVX512 = "avx512f" in CPU_FEATURES


def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _separate_caches() -> None:
    """One cache of compiled code per state of all kernels: numba itself does not see that a called file changed."""
    base = Path(_config.CACHE_DIR or Path(__file__).parent / "__pycache__")
    if _config.CACHE_DIR or os.access(Path(__file__).parent, os.W_OK):
        _config.CACHE_DIR = str(base / _source_digest())


_separate_caches()


def compiled(function: Any) -> Any:
    """A function that kernels call. Never fast-math: every rounding stays where it is written."""
    function.__qualname__ = _symbol(function)
    return _njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def _symbol(function: Any) -> str:
    """A name that no function of other code has: one made in a factory is told by what it closes over.

    Compiled code from the cache is linked by name. numba tells apart what one process compiled, but two functions of
    one name, cached by two processes, may carry the same number; a call would then reach the wrong one.
    """
    names = [function.__qualname__]
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        names.append(getattr(getattr(held, "py_func", held), "__qualname__", repr(held)))
    return " ".join(names)


def intrinsic(function: Any) -> Any:
    """A function whose LLVM code is written out; integer constants reach it as constants."""
    return extending.intrinsic(prefer_literal=True)(function)


def c_function(function: Any) -> int:
    """Address of `void function(int64)`, compiled now or taken from numba's cache."""
    decorate: Any = numba.cfunc(types.void(types.int64), cache=True, error_model="numpy")
    return int(decorate(function).address)
