"""Whether Triton can compile and run a kernel on this machine's GPU, or interpret one on its CPU."""

from __future__ import annotations


def interpreter_problem() -> str:
    """Why kernels cannot run on tensors of the CPU, in words; empty when they can."""
    try:
        from triton import knobs
    except ImportError as error:
        return f"Triton is not installed ({error}): install the extra gpu"
    if knobs.runtime.interpret:
        return ""
    return "on a CPU Triton's kernels run in its interpreter alone, to try them: set TRITON_INTERPRET=1"


def triton_problem() -> str:
    """Runs a small kernel on the current CUDA device. Why that failed, in words; empty when it did not."""
    import torch

    try:
        from triton import knobs

        from kernels.triton.probe import add_one
    except ImportError as error:
        return f"it is not installed ({error}): install the extra gpu"
    if knobs.runtime.interpret:
        return "it only interprets kernels: unset TRITON_INTERPRET"
    try:
        numbers = torch.arange(100, dtype=torch.float32, device="cuda")
        add_one(numbers)
        is_right = torch.equal(numbers.cpu(), torch.arange(1, 101, dtype=torch.float32))
    except Exception as error:  # a missing C compiler, a driver too old, a cache that cannot be written ...
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return "" if is_right else "a kernel gave a wrong result"
