"""Settings of the drafter process, from DSPARK_DRAFTER_*."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from service_kit.gpu import DeviceSetting


class DrafterSettings(BaseSettings):
    """What the drafter loads and how it computes. Sizes of slots and pages come with the scheduler's Attach."""

    model_config = SettingsConfigDict(env_prefix="DSPARK_DRAFTER_", frozen=True, extra="forbid")

    model: str
    """Drafter checkpoint: a local directory or a hub id."""
    target: str
    """Target checkpoint, whose embedding and lm_head the drafter uses: a local directory or a hub id."""
    device: DeviceSetting = "cpu"
    """Where the drafter computes. "cuda" refuses to start, in words, on a GPU that cannot serve; "auto" takes the CPU
    then, with a warning that says why. The verifier must be told the same."""
    weight_format: Literal["auto", "float32", "fp16", "q8", "bf16"] = "auto"
    """Format of linear weights; "auto" is q8 where every layer's inputs come in groups of 32, else fp16; on a GPU bf16,
    where float32 is the only other format. On a CPU K/V pages are float16, with "float32" weights float32."""
    kernels: Literal["auto", "cpu", "reference", "triton"] = "auto"
    """Implementation of the operations between the linear layers. "auto" is cpu, on a GPU triton. On a CPU "triton"
    runs only in its interpreter (TRITON_INTERPRET=1), to try kernels."""
    calibration: str = "auto"
    """Temperatures of the confidences: a file as `dspark calibrate` writes it, "auto" for the calibration.json beside
    the drafter if there is one, or "none"."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of tensor work; 0 takes every core this process may use (affinity and container quota), more is lowered
    to that."""
    spin_us: int = Field(default=200, ge=0, le=100_000)
    """How long the threads that help look for more work before they sleep, in microseconds."""
    max_message_bytes: int = Field(default=16 * 2**20, ge=2**16, le=2**31 - 1)
    """Largest gRPC message, in bytes."""
