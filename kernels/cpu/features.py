"""What this CPU offers to compiled code, in the three steps that matter here."""

from __future__ import annotations

import platform
from typing import Literal

from kernels.cpu.jit import CPU_FEATURES

Level = Literal["avx512", "avx2", "generic"]

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
HAS_FMA = not _IS_X86 or "fma" in CPU_FEATURES
"""Whether a fused multiply-add is one instruction; without, it would be a library call for every lane."""
HAS_HALF = not _IS_X86 or "f16c" in CPU_FEATURES
"""Whether float16 becomes float32 in one instruction; without, LLVM calls a function that is not there."""
_RELEVANT = frozenset(
    ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "avxvnni", "neon", "dotprod", "i8mm")
)

LEVEL: Level = (
    "avx512" if "avx512f" in CPU_FEATURES else "avx2" if {"avx2", "fma", "f16c"} <= CPU_FEATURES else "generic"
)
"""Kernels are written once, in sixteen lanes, which LLVM maps to what there is: also to NEON, or to plain SSE2."""


def describe() -> str:
    """The level in words, for one line at start."""
    if LEVEL != "generic":
        return {"avx512": "AVX-512", "avx2": "AVX2"}[LEVEL]
    if _IS_X86:
        return "no AVX2: generic vector code, many times slower, and its rounding differs from other CPUs'"
    return f"no AVX2 ({platform.machine()}): generic vector code, slower"


def relevant_features() -> str:
    """The features that decide which code is compiled, for fingerprints."""
    return " ".join(sorted(CPU_FEATURES & _RELEVANT))
