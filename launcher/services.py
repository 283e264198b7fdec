"""The services of one server: module, environment and health name of each, from the command's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from drafter_service.settings import DrafterSettings
from launcher.models import ModelPair
from launcher.settings import LauncherSettings
from scheduler_service.settings import SchedulerSettings
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings, load_settings
from verifier_service.settings import VerifierSettings


@dataclass(frozen=True)
class ServeOptions:
    """Options of `dspark serve`; None leaves a setting to the service's environment or default."""

    host: str = "127.0.0.1"
    port: int = 8000
    verify_mode: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_batch_tokens: int | None = None
    kv_memory: str | None = None
    api_key_file: Path | None = None
    trace: str | None = None
    """Exporter of spans."""
    trace_file: Path | None = None
    """Gets a line for every step."""
    in_process: bool = False
    """One process for everything, in place of one a service."""
    changes: tuple[tuple[str, str], ...] = ()
    """DSPARK_ variables of further settings, and their values."""

    @property
    def text_port(self) -> int:
        """Port of the text gRPC service: the one after `port`."""
        return self.port + 1

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class ServicePlan(NamedTuple):
    """One service to run."""

    name: str
    """Also the name of its socket and log."""
    module: str
    grpc_service: str
    """Name its standard health answers for; "" for the gateway, which has `/health`."""
    environment: dict[str, str]
    """Variables on top of the inherited ones."""


def plan_services(
    options: ServeOptions, pair: ModelPair, common: CommonSettings, settings: LauncherSettings, run_dir: Path
) -> list[ServicePlan]:
    """Services in the order they start. Without speculation there is no drafter; in one process, just "server".

    Raises ConfigurationError for a bad setting, or settings that do not go together.
    """
    verify_mode = (options.verify_mode or load_settings(SchedulerSettings).verify_mode) if pair.drafter else "off"
    shared = {
        "DSPARK_RUN_DIR": str(run_dir),
        "DSPARK_CACHE_DIR": str(common.cache_dir),
        "DSPARK_TRACE_EXPORTER": options.trace or common.trace_exporter,
        **dict(options.changes),
    }
    scheduler = _set(
        DSPARK_SCHEDULER_VERIFY_MODE=verify_mode,
        DSPARK_SCHEDULER_SPECULATION_OFF_REASON=pair.note or None,
        DSPARK_SCHEDULER_TOKENIZER=pair.target,
        DSPARK_SCHEDULER_MAX_NUM_SEQS=options.max_num_seqs,
        DSPARK_SCHEDULER_MAX_MODEL_LEN=options.max_model_len,
        DSPARK_SCHEDULER_MAX_BATCH_TOKENS=options.max_batch_tokens,
        DSPARK_SCHEDULER_KV_MEMORY=options.kv_memory,
        DSPARK_SCHEDULER_TRACE_ROUNDS=options.trace_file,
    )
    gateway = _set(
        DSPARK_GATEWAY_HOST=options.host,
        DSPARK_GATEWAY_PORT=options.port,
        DSPARK_GATEWAY_GRPC_PORT=options.text_port,
        DSPARK_GATEWAY_MODEL_DIR=pair.target,
        DSPARK_GATEWAY_SERVED_MODEL_NAMES=pair.served_name,
        DSPARK_GATEWAY_API_KEYS_FILE=options.api_key_file,
    )
    verifier = {"DSPARK_VERIFIER_MODEL": str(pair.target)}
    drafter = {"DSPARK_DRAFTER_MODEL": str(pair.drafter), "DSPARK_DRAFTER_TARGET": str(pair.target)}
    tensor = executor_environment(common)
    has_drafter = verify_mode != "off"
    if has_drafter:
        check_devices(dict(options.changes))
    if options.in_process:
        everything = {**shared, **tensor, **verifier, **(drafter if has_drafter else {}), **scheduler, **gateway}
        return [ServicePlan("server", "launcher.one_process", "", everything)]
    plans = [
        ServicePlan("verifier", "verifier_service", "dspark.v1.VerifierService", {**shared, **tensor, **verifier}),
        ServicePlan("scheduler", "scheduler_service", "dspark.v1.SchedulerService", {**shared, **scheduler}),
        ServicePlan("gateway", "gateway", "", {**shared, **gateway}),
    ]
    if has_drafter:
        environment = {**shared, **tensor, **drafter}
        plans.insert(1, ServicePlan("drafter", "drafter_service", "dspark.v1.DrafterService", environment))
    return plans


def check_devices(changes: Mapping[str, str]) -> None:
    """Raises ConfigurationError if verifier and drafter are set to different devices, whose memory they cannot share.

    `changes` are variables that win over the environment.
    """
    keys = ("DSPARK_VERIFIER_DEVICE", "DSPARK_DRAFTER_DEVICE")
    given = [{"device": changes[key]} if key in changes else {} for key in keys]
    verifier = load_settings(VerifierSettings, model="", **given[0]).device
    drafter = load_settings(DrafterSettings, model="", target="", **given[1]).device
    if verifier != drafter:
        raise ConfigurationError(
            f"{keys[0]} is {verifier} and {keys[1]} is {drafter}: set both alike (cpu, cuda or auto), as they share "
            "features and draft distributions",
            field=keys[1],
        )


def kernel_cache(common: CommonSettings) -> Path:
    """Directory of compiled kernels."""
    return common.cache_dir / "numba"


def executor_environment(common: CommonSettings) -> dict[str, str]:
    """Of processes that compute."""
    return {
        "OMP_NUM_THREADS": "1",  # the kernels have their own threads
        "NUMBA_CACHE_DIR": str(kernel_cache(common)),
        "TOKENIZERS_PARALLELISM": "false",
    }


def _set(**values: object) -> dict[str, str]:
    return {key: str(value) for key, value in values.items() if value is not None}
