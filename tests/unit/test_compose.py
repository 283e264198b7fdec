"""compose.yaml and its overrides: valid, and with all that the services need of each other and of the machine."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from compose_file import OBSERVERS, ROOT, SERVICES, copied_paths, image_environment, load_project, size_bytes
from compose_file import variables_of as variables
from pydantic_settings import BaseSettings

from drafter_service.settings import DrafterSettings
from gateway.settings import GatewaySettings
from scheduler_service.settings import SchedulerSettings
from service_kit.handoff import ArenaSpec
from service_kit.settings import SERVICE_PREFIXES, CommonSettings, load_settings
from verifier_service.settings import VerifierSettings

BASE = "compose.yaml"
OVERRIDES = ("compose.gpu.yaml", "compose.keys.yaml")
KEYS = {"API_KEYS_FILE": "./secrets/api-keys"}
SETTINGS: dict[str, type[BaseSettings]] = {
    "verifier": VerifierSettings,
    "drafter": DrafterSettings,
    "scheduler": SchedulerSettings,
    "gateway": GatewaySettings,
}
SHARERS = ("verifier", "drafter", "scheduler")
"""Map arenas."""
COMBINATIONS = [
    (BASE, *chosen) for count in range(len(OVERRIDES) + 1) for chosen in itertools.combinations(OVERRIDES, count)
]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return load_project(BASE)


@pytest.fixture(scope="module")
def services(project: dict[str, Any]) -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = project["services"]
    return services


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, Any]], tuple[Any, CommonSettings]]:
    """Settings that a service would load; raises on a variable nobody knows, as the service would."""

    def load(name: str, project: dict[str, Any]) -> tuple[Any, CommonSettings]:
        with monkeypatch.context() as patch:
            environment = {**image_environment(), **project["services"][name]["environment"]}
            for key, value in environment.items():
                if key.startswith("DSPARK_"):
                    patch.setenv(key, value)
                    foreign = [prefix for prefix in SERVICE_PREFIXES if key.startswith(f"DSPARK_{prefix}")]
                    assert foreign in ([], [f"{name.upper()}_"]), f"{name} is given {key}"
            return load_settings(SETTINGS[name]), load_settings(CommonSettings)

    return load


@pytest.mark.parametrize("names", COMBINATIONS, ids=" ".join)
def test_it_satisfies_the_compose_schema(names: tuple[str, ...], tmp_path: Path) -> None:
    merged = tmp_path / "merged.yaml"
    merged.write_text(yaml.safe_dump(load_project(*names, variables=KEYS)))
    files = [str(merged), *(str(ROOT / name) for name in names)]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout


@pytest.mark.parametrize("names", COMBINATIONS, ids=" ".join)
@pytest.mark.parametrize("name", SERVICES)
def test_every_setting_exists_and_is_valid(name: str, names: tuple[str, ...], settings_of: Any) -> None:
    _, common = settings_of(name, load_project(*names, variables=KEYS))
    assert (str(common.run_dir), str(common.cache_dir)) == ("/run/dspark", "/var/cache/dspark")


def test_the_example_of_an_environment_has_every_variable_with_its_default() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    shown = dict(line.removeprefix("#").split("=", 1) for line in lines if re.match(r"#[A-Z_]+=", line))
    read = set().union(*(variables(name) for name in (BASE, *OVERRIDES)))
    passed_on = {"PIP_INDEX_URL", "TORCH_INDEX_URL"}
    of_compose = {"COMPOSE_FILE", "COMPOSE_PROFILES"}
    assert set(shown) == read | passed_on | of_compose
    names = (BASE, "compose.gpu.yaml")
    assert load_project(*names, variables={key: value for key, value in shown.items() if value}) == load_project(*names)


def test_those_that_map_arenas_share_memory_and_user(services: dict[str, dict[str, Any]]) -> None:
    owner = services["memory"]
    assert owner["ipc"] == "shareable"
    assert {services[name]["ipc"] for name in SHARERS} == {"service:memory"}
    assert {service["user"] for name, service in services.items() if name not in OBSERVERS} == {"10001:10001"}
    for name in SHARERS:
        assert "shm_size" not in services[name]  # the owner's counts
        assert services[name]["depends_on"]["memory"]["condition"] == "service_started"


def test_shared_memory_holds_all_arenas(services: dict[str, dict[str, Any]], project: Any, settings_of: Any) -> None:
    settings, _ = settings_of("scheduler", project)
    config = json.loads((ROOT / "models" / "smollm2-135m-dspark" / "config.json").read_text())
    slots, block = settings.max_num_seqs, config["block_size"]
    feature_size = len(config["target_layer_ids"]) * config["hidden_size"]
    arenas = {
        "features": ArenaSpec((slots, settings.feature_ring_rows, feature_size), np.float32, 2, 1, 1),
        "draft_probs": ArenaSpec((slots, block, config["draft_vocab_size"]), np.float32, 1, 1, 1),
        "draft_to_target": ArenaSpec((config["draft_vocab_size"],), np.uint32, 0, 1, 1),
        "masks": ArenaSpec((slots, block + 1, -(-config["vocab_size"] // 32)), np.uint32, 1, 1, 1),
    }
    needed = sum(spec.total_bytes for spec in arenas.values())
    assert needed > 40 * 2**20, "less than docs/operations.md says: is the sum still right?"
    # Twice: while a session is replaced, the arenas of both may be there.
    assert 2 * needed <= size_bytes(services["memory"]["shm_size"])


def test_sockets_and_models_are_where_services_look(services: dict[str, dict[str, Any]], project: Any) -> None:
    environment = image_environment()
    for name in SERVICES:
        targets = {volume.split(":")[1]: volume.split(":")[0] for volume in services[name]["volumes"]}
        assert targets[environment["DSPARK_RUN_DIR"]] == "run"
        assert targets[environment["DSPARK_CACHE_DIR"]] == "cache"
    assert {"run", "cache"} <= set(project["volumes"])
    targets = {
        services["verifier"]["environment"]["DSPARK_VERIFIER_MODEL"],
        services["drafter"]["environment"]["DSPARK_DRAFTER_TARGET"],
        services["gateway"]["environment"]["DSPARK_GATEWAY_MODEL_DIR"],
        services["setup"]["command"][3],
    }
    assert targets == {"/var/cache/dspark/models/smollm2-135m-instruct"}
    drafter = services["drafter"]["environment"]["DSPARK_DRAFTER_MODEL"]
    assert services["setup"]["command"][4] == drafter
    copied = Path(drafter).relative_to("/app")
    assert (ROOT / copied / "config.json").is_file()
    assert copied.parts[0] in copied_paths()


def test_the_order_of_starts_and_stops(services: dict[str, dict[str, Any]]) -> None:
    for name in SERVICES:
        assert services[name]["depends_on"]["setup"]["condition"] == "service_completed_successfully"
    assert "scheduler" in services["gateway"]["depends_on"]
    assert {"verifier", "drafter"} <= set(services["scheduler"]["depends_on"])


def test_grace_is_longer_than_the_drain(services: dict[str, dict[str, Any]], project: Any, settings_of: Any) -> None:
    drains = [settings_of(name, project)[0].drain_timeout_s for name in ("scheduler", "gateway")]
    for name in SERVICES:
        assert int(services[name]["stop_grace_period"].removesuffix("s")) >= max(drains) + 10


def test_every_service_has_a_patient_health_check(services: dict[str, dict[str, Any]]) -> None:
    for name in SERVICES:
        check = services[name]["healthcheck"]
        assert (
            int(check["start_period"].removesuffix("s")) >= SchedulerSettings.model_fields["startup_timeout_s"].default
        )
        assert check["test"][:4] == ["CMD", "python", "-m", "service_kit.healthcheck"]


def test_services_have_no_more_rights_than_they_need(services: dict[str, dict[str, Any]], project: Any) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["init"] is True, name
        assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"], name
        assert "privileged" not in service, name
    assert project["networks"]["inner"] == {"internal": True}
    for name in SHARERS:
        assert services[name]["networks"] == ["inner"]


@pytest.mark.parametrize("names", COMBINATIONS, ids=" ".join)
def test_only_the_gateway_and_user_interfaces_are_published_and_on_loopback(names: tuple[str, ...]) -> None:
    services = load_project(*names, variables=KEYS)["services"]
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert set(published) == {"gateway", "jaeger", "prometheus", "grafana"}
    assert published["gateway"] == ["127.0.0.1:8000:8000", "127.0.0.1:8001:8001"]
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_published_ports_are_those_it_listens_on(project: Any, settings_of: Any) -> None:
    settings, _ = settings_of("gateway", project)
    inside = [int(port.rpartition(":")[2]) for port in project["services"]["gateway"]["ports"]]
    assert inside == [settings.port, settings.resolved_grpc_port(settings.port)]
    assert (settings.host, settings.grpc_host) == ("0.0.0.0", "0.0.0.0")
    assert f"http://127.0.0.1:{settings.port}/health" in project["services"]["gateway"]["healthcheck"]["test"]


def test_images_are_pinned(services: dict[str, dict[str, Any]]) -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert services["gateway"]["image"] == f"dspark-server:{version[1]}-cpu"
    for name, service in services.items():
        image, _, tag = service["image"].partition(":")
        assert re.search(r"\d+\.\d+\.\d+", tag), f"{name}: {image}:{tag}"
        assert ("build" in service) == (name not in OBSERVERS)


def test_the_observability_profile_is_off_unless_asked_for(services: dict[str, dict[str, Any]]) -> None:
    assert {name for name, service in services.items() if service.get("profiles")} == set(OBSERVERS)
    for name in SERVICES:
        environment = services[name]["environment"]
        assert (environment["DSPARK_TRACE_EXPORTER"], environment["DSPARK_METRICS_EXPORTER"]) == ("none", "none")
        assert not set(OBSERVERS) & set(services[name]["depends_on"])


def test_both_executors_get_the_same_gpu() -> None:
    services = load_project(BASE, "compose.gpu.yaml", variables={"GPU": "3"})["services"]
    for name, service in services.items():
        is_executor = name in ("verifier", "drafter")
        devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")
        assert devices == (
            [{"driver": "nvidia", "device_ids": ["3"], "capabilities": ["gpu"]}] if is_executor else None
        )
        device = service.get("environment", {}).get(f"DSPARK_{name.upper()}_DEVICE")
        assert device == ("cuda" if is_executor else None)
        if "build" in service:
            assert service["build"]["target"] == ("cuda" if is_executor else "cpu")
            assert service["build"]["dockerfile"] == "docker/Dockerfile"
    assert services["verifier"]["ipc"] == services["drafter"]["ipc"] == "service:memory"


def test_keys_come_as_a_secret_and_a_start_without_them_is_refused() -> None:
    project = load_project(BASE, "compose.keys.yaml", variables=KEYS)
    gateway = project["services"]["gateway"]
    assert gateway["environment"]["DSPARK_GATEWAY_API_KEYS_FILE"] == f"/run/secrets/{gateway['secrets'][0]}"
    assert project["secrets"] == {"api_keys": {"file": KEYS["API_KEYS_FILE"]}}
    assert not [name for name, service in project["services"].items() if "secrets" in service and name != "gateway"]
    with pytest.raises(KeyError, match="API_KEYS_FILE"):
        load_project(BASE, "compose.keys.yaml")
    assert "secrets" in (ROOT / ".dockerignore").read_text().split()
    assert "secrets/" in (ROOT / ".gitignore").read_text().split()
