"""Whether a GPU can serve, found out before any weight is read, and what its memory will hold.

Every process has a context of its own on the device, which takes memory before the first tensor does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from service_kit.device_memory import CudaMemory, DeviceMemory
from service_kit.errors import ConfigurationError
from service_kit.graphs import CudaGraphRunner, GraphRunner
from service_kit.memory_plan import Room

if TYPE_CHECKING:
    import torch

DeviceSetting = Literal["auto", "cpu", "cuda"]
MIN_CAPABILITY = (8, 0)
CONTEXT_BYTES, GRAPH_BYTES = 600 * 2**20, 400 * 2**20
"""Of a process's context with its kernels and libraries, and of a session's graphs with what their kernels allocate.
Estimates that no device has confirmed yet."""
CONTEXT, GRAPHS = "CUDA context and libraries (estimated)", "graphs (estimated)"
"""What a memory plan calls them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GpuFacts:
    """What is known of the first GPU."""

    name: str
    capability: tuple[int, int]
    has_bfloat16: bool
    free_bytes: int
    total_bytes: int
    triton_problem: str = ""
    """Why kernels cannot be run, in words; empty when they can."""

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name}, sm_{major}{minor}"


def probe_gpu() -> GpuFacts | str:
    """Facts of the GPU, or in words why there is none. Tries a Triton kernel on it."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA: install a CUDA build (TORCH_INDEX_URL of scripts/setup)"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device: is a driver installed, and is a device visible to this process?"
    from kernels.triton.check import triton_problem

    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        capability = torch.cuda.get_device_capability()
        name, has_bfloat16 = torch.cuda.get_device_name(), torch.cuda.is_bf16_supported(including_emulation=False)
    except RuntimeError as error:  # taken by others whole, in a mode of one process, broken ...
        return f"the CUDA device cannot be used: {' '.join(str(error).split())[:300]}"
    problem = triton_problem() if capability >= MIN_CAPABILITY else ""
    return GpuFacts(name, capability, has_bfloat16, free_bytes, total_bytes, problem)


def gpu_problem(facts: GpuFacts | str, weight_bytes: int = 0) -> str:
    """Why the GPU cannot serve a model of so many bytes, in words; empty when it can."""
    if isinstance(facts, str):
        return facts
    if facts.capability < MIN_CAPABILITY:
        return f"{facts.name} has compute capability {_dotted(facts.capability)}, {_dotted(MIN_CAPABILITY)} is needed"
    if not facts.has_bfloat16:
        return f"{facts.name} does not compute in bfloat16"
    if facts.triton_problem:
        return f"Triton does not work: {facts.triton_problem}"
    if weight_bytes + CONTEXT_BYTES > facts.free_bytes:
        return (
            f"weights need {weight_bytes / 2**30:.1f} GiB and the process {CONTEXT_BYTES / 2**30:.1f} GiB, "
            f"{facts.free_bytes / 2**30:.1f} GiB of {facts.name} are free: free "
            f"{(weight_bytes + CONTEXT_BYTES - facts.free_bytes) / 2**30:.1f} GiB, or choose a model of at most "
            f"{max(0, facts.free_bytes - CONTEXT_BYTES) / 2**30:.1f} GiB in bfloat16"
        )
    return ""


def choose_device(
    wanted: DeviceSetting,
    setting: str,
    weight_bytes: Callable[[], int],
    probe: Callable[[], GpuFacts | str] = probe_gpu,
) -> GpuFacts | None:
    """The GPU to serve on; None for the CPU.

    Only "auto" falls back to the CPU, with one warning that says why. Raises ConfigurationError, in words, if "cuda" is
    asked for and cannot be.
    """
    if wanted == "cpu":
        return None
    facts = probe()
    problem = gpu_problem(facts, 0 if isinstance(facts, str) else weight_bytes())
    if not problem and not isinstance(facts, str):
        return facts
    if wanted == "auto":
        logger.warning("serving on the CPU (%s=auto): %s", setting, problem)
        return None
    raise ConfigurationError(f"{setting}=cuda: {problem}; or set {setting} to cpu or auto", field="device")


@dataclass(frozen=True)
class Gpu:
    """A device that serves, and what is needed of it besides tensors."""

    device: torch.device
    words: str
    """For people."""
    runner: GraphRunner
    memory: DeviceMemory
    free_and_total: Callable[[], tuple[int, int]]
    """Bytes, as they are now, whoever took the rest."""

    def free_bytes(self) -> int:
        """Memory that nobody has now."""
        return self.room().free_bytes

    def room(self) -> Room:
        """Its memory now."""
        free_bytes, total_bytes = self.free_and_total()
        return Room(self.words, free_bytes, total_bytes)


def open_gpu(facts: GpuFacts) -> Gpu:
    """The first CUDA device, which was found fit."""
    import torch

    return Gpu(torch.device("cuda"), str(facts), CudaGraphRunner(), _memory(), torch.cuda.mem_get_info)


@cache
def _memory() -> CudaMemory:
    """The process's one: a process cannot open its own regions, so services within one must find them."""
    return CudaMemory()


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
