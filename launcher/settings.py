"""Settings of the launcher, from DSPARK_LAUNCHER_*, and the environment it hands to the services."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class LauncherSettings(BaseSettings):
    """What the `dspark` command needs besides its options."""

    model_config = SettingsConfigDict(env_prefix="DSPARK_LAUNCHER_", frozen=True, extra="forbid")

    embedded_wheel: Path | None = None
    """Local copy of the embedded target's wheel, for machines without a package index."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for the services to become ready, in seconds."""
    stop_timeout_s: float = Field(default=35.0, gt=0)
    """Longest wait for each service to end after SIGTERM before it is killed, in seconds: their drain time and more."""
    api_key: SecretStr | None = None
    """API key that `dspark chat` sends."""
    keep_logs: int = Field(default=20, ge=1)
    """Runs whose logs are kept."""


def inherited_environment() -> dict[str, str]:
    """A copy of this process's environment, the base of every service's."""
    return dict(os.environ)
