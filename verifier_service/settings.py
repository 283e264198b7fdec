"""Settings of the verifier process, from DSPARK_VERIFIER_*."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from service_kit.gpu import DeviceSetting


class VerifierSettings(BaseSettings):
    """What the verifier loads and how it computes. Sizes of slots and pages come with the scheduler's Attach."""

    model_config = SettingsConfigDict(env_prefix="DSPARK_VERIFIER_", frozen=True, extra="forbid")

    model: str
    """Target checkpoint: a local directory or a hub id."""
    device: DeviceSetting = "cpu"
    """Where the target computes. "cuda" refuses to start, in words, on a GPU that cannot serve; "auto" takes the CPU
    then, with a warning that says why. The drafter must be told the same."""
    weight_format: Literal["auto", "float32", "fp16", "q4", "bf16"] = "auto"
    """Format of linear weights. "fp16" halves the bytes that every step reads; "q4" takes the levels of the one .gguf
    file beside the tensors as they are, a third of fp16's. "auto" is q4 where such a file fits, else fp16; on a GPU
    bf16, where float32 is the only other format. On a CPU K/V pages are float16, with "float32" weights float32."""
    kernels: Literal["auto", "cpu", "reference", "triton"] = "auto"
    """Implementation of the operations between the linear layers. "auto" is cpu, on a GPU triton. On a CPU "triton"
    runs only in its interpreter (TRITON_INTERPRET=1), to try kernels."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of tensor work; 0 takes every core this process may use (affinity and container quota), more is lowered
    to that."""
    spin_us: int = Field(default=200, ge=0, le=100_000)
    """How long the threads that help look for more work before they sleep, in microseconds."""
    max_message_bytes: int = Field(default=16 * 2**20, ge=2**16, le=2**31 - 1)
    """Largest gRPC message, in bytes."""
