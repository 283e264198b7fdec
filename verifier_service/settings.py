"""Settings of the verifier process, from DSPARK_VERIFIER_*."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class VerifierSettings(BaseSettings):
    """What the verifier loads and how it computes. Sizes of slots and pages come with the scheduler's Attach."""

    model_config = SettingsConfigDict(env_prefix="DSPARK_VERIFIER_", frozen=True, extra="forbid")

    model: str
    """Target checkpoint: a local directory or a hub id."""
    weight_format: Literal["auto", "float32", "fp16", "q4"] = "auto"
    """Format of linear weights. "fp16" halves the bytes that every step reads; "q4" takes the levels of the one .gguf
    file beside the tensors as they are, a third of fp16's. "auto" is q4 where such a file fits, else fp16."""
    kernels: Literal["auto", "cpu", "reference"] = "auto"
    """Implementation of the operations between the linear layers."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads of tensor work; 0 takes every core this process may use (affinity and container quota), more is lowered
    to that."""
    spin_us: int = Field(default=200, ge=0, le=100_000)
    """How long the threads that help look for more work before they sleep, in microseconds."""
    max_message_bytes: int = Field(default=16 * 2**20, ge=2**16, le=2**31 - 1)
    """Largest gRPC message, in bytes."""
