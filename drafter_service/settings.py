"""Settings of the drafter process, from DSPARK_DRAFTER_*."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from kernels.linear import WeightFormat
from kernels.registry import Implementation


class DrafterSettings(BaseSettings):
    """What the drafter loads and how it computes."""

    model_config = SettingsConfigDict(env_prefix="DSPARK_DRAFTER_", frozen=True, extra="forbid")

    model: str
    """Drafter checkpoint: directory or hub id."""
    target: str
    """Target checkpoint, which gives the embedding and the lm_head: directory or hub id."""
    weight_format: WeightFormat = "fp16"
    """Format of the weights of linear layers, embeddings included."""
    threads: int = Field(0, ge=0)
    """Compute threads; 0 takes every core this process may use."""
    kernels: Implementation = "auto"
    """Implementation of the operations between linear layers."""
    max_message_bytes: int = Field(64 * 2**20, ge=2**20)
    """Largest gRPC message, in bytes."""
