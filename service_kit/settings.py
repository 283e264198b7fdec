"""Settings shared by every process. Each service adds its own class with the prefix DSPARK_<SERVICE>_.

The environment is read here and nowhere else.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from service_kit.errors import ConfigurationError

SERVICE_PREFIXES = ("VERIFIER_", "DRAFTER_", "SCHEDULER_", "GATEWAY_", "LAUNCHER_")


def default_run_dir() -> Path:
    """Where sockets live: the user's runtime directory, or a private folder under the temporary one."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "dspark" if base else Path(tempfile.gettempdir()) / f"dspark-{os.getuid()}"


def default_cache_dir() -> Path:
    """Where converted models, compiled kernels and measured tables are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark"


class CommonSettings(BaseSettings):
    """Settings of every process, from DSPARK_*."""

    model_config = SettingsConfigDict(env_prefix="DSPARK_", frozen=True, extra="forbid")

    run_dir: Path = Field(default_factory=default_run_dir)
    """Directory (mode 0700) of the Unix sockets."""
    cache_dir: Path = Field(default_factory=default_cache_dir)
    """Directory of converted models, compiled kernels and self-test results."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log line that is printed."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines; json: one object a line."""
    trace_exporter: Literal["none", "console", "otlp"] = "none"
    """Where OpenTelemetry spans go. "otlp" honours the standard OTEL_EXPORTER_OTLP_* variables."""
    metrics_exporter: Literal["none", "otlp"] = "none"
    """Where the gateway's OpenTelemetry metrics of generative AI go, besides Prometheus's at `/metrics`."""


SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def load_settings(settings_class: type[SettingsT], **overrides: Any) -> SettingsT:
    """Reads a service's settings; `overrides` (from the command line) win over the environment.

    Raises ConfigurationError naming the key: a bad value, or a DSPARK_ variable that no setting answers to.
    """
    own_prefix = str(settings_class.model_config["env_prefix"])
    common = {f"DSPARK_{name.upper()}" for name in CommonSettings.model_fields}
    own = {f"{own_prefix}{name.upper()}" for name in settings_class.model_fields}
    foreign = tuple(f"DSPARK_{prefix}" for prefix in SERVICE_PREFIXES if f"DSPARK_{prefix}" != own_prefix)
    for key in os.environ:
        if key.startswith("DSPARK_") and not key.startswith(foreign) and key not in common | own:
            raise ConfigurationError(f"unknown setting {key} in the environment", field=key)
    try:
        return settings_class(**overrides)
    except ValidationError as error:
        first = error.errors()[0]
        key = f"{own_prefix}{'_'.join(str(part) for part in first['loc']).upper()}"
        raise ConfigurationError(f"{key}: {first['msg']} (got {first.get('input')!r})", field=key) from error
