"""Settings of the launcher, from DSPARK_LAUNCHER_*."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class LauncherSettings(BaseSettings):
    """What the `dspark` command needs besides its options."""

    model_config = SettingsConfigDict(env_prefix="DSPARK_LAUNCHER_", frozen=True, extra="forbid")

    embedded_wheel: Path | None = None
    """Local copy of the embedded target's wheel, for machines without a package index."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for the services to become ready, in seconds."""
    stop_timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait for each service to end after SIGTERM before it is killed, in seconds."""
    num_threads: int = Field(default=0, ge=0)
    """OpenMP threads of each executor; 0 takes every core this process may use."""
    spin_count: int = Field(default=20_000, ge=0)
    """GOMP_SPINCOUNT of the executors: how often an idle OpenMP thread polls before it sleeps. 0 slows small forwards,
    unbounded spinning takes the cores from the other executor."""
