"""The Dockerfile, and what the observability profile mounts: lint, and names, ports and paths that agree."""

from __future__ import annotations

import ast
import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_file import OBSERVERS, ROOT, SERVICES, copied_paths, image_environment, load_project
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DOCKERFILE = ROOT / "docker" / "Dockerfile"
STACK = ROOT / "docker" / "observability"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = load_project("compose.yaml")["services"]
    return services


def _instructions() -> list[str]:
    lines = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text()).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _stage(name: str) -> list[str]:
    instructions = _instructions()
    start = next(i for i, line in enumerate(instructions) if line.endswith(f" AS {name}"))
    end = next((i for i in range(start + 1, len(instructions)) if instructions[i].startswith("FROM ")), None)
    return instructions[start:end]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint has a wheel for Linux on x86-64 only")
def test_the_dockerfile_passes_lint() -> None:
    check = subprocess.run([str(HADOLINT), "--no-color", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout


def test_images_are_small_unprivileged_and_pinned() -> None:
    base = next(line for line in _instructions() if line.startswith("ARG PYTHON="))
    assert re.fullmatch(r"ARG PYTHON=\d+\.\d+\.\d+-slim-\w+", base)
    stages = [line.split()[1] for line in _instructions() if line.startswith("FROM ")]
    assert set(stages) <= {"scratch", "python:${PYTHON}", "packages", "runtime"}
    assert _stage("runtime")[-1] == "USER 10001:10001"
    for target in ("cpu", "cuda"):
        first, *own, venv, app = _stage(target)
        assert first == f"FROM runtime AS {target}"
        assert [venv, app] == [f"COPY --from=packages-{target} {path} {path}" for path in ("/opt/venv", "/app")]
        if target == "cuda":  # a C compiler for Triton, nothing else
            environment, root, compiler, user = own
            assert (environment, root, user) == (
                "ENV TRITON_CACHE_DIR=/var/cache/dspark/triton",
                "USER 0:0",
                "USER 10001:10001",
            )
            assert "install --yes --no-install-recommends gcc libc6-dev &&" in compiler
        else:
            assert own == []
    assert _instructions()[-1].startswith("COPY --from=packages-cpu")  # what is built where no target is named


def test_what_is_copied_exists_is_not_ignored_and_is_all_that_is_imported() -> None:
    copied = copied_paths()
    assert [path for path in copied if not (ROOT / path).exists()] == []
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert [path for path in copied for pattern in ignored if fnmatch.fnmatch(path, pattern)] == []
    packages = {path for path in copied if (ROOT / path).is_dir()} - {"models", "proto"}
    own = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    imported = {
        name.partition(".")[0]
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        for name in _imports(path)
    }
    assert imported & own <= packages


def _imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_all_that_the_project_requires_is_pinned_within_its_bounds() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    lines = (ROOT / "docker" / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    torch = set(re.findall(r" torch==(\S+)", DOCKERFILE.read_text()))
    assert len(torch) == 1, "both targets take one version"
    pins["torch"] = torch.pop()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in map(Requirement, project["dependencies"]):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"docker/requirements.txt has no {name}"
        assert pins[name] in requirement.specifier, (
            f"docker/requirements.txt: {name}=={pins[name]} is not {requirement}"
        )


def test_variables_of_the_image_are_those_of_an_executor() -> None:
    from launcher.services import executor_environment
    from service_kit.settings import CommonSettings

    environment = image_environment()
    common = CommonSettings(cache_dir=Path(environment["DSPARK_CACHE_DIR"]))
    assert executor_environment(common).items() <= environment.items()


def test_everything_that_is_mounted_exists(services: dict[str, dict[str, Any]]) -> None:
    for name in OBSERVERS:
        sources = [volume.split(":")[0] for volume in services[name].get("volumes", [])]
        assert [source for source in sources if source.startswith(".") and not (ROOT / source).exists()] == []


def test_the_collector_is_where_services_send_spans_and_reaches_those_it_sends_to(
    services: dict[str, dict[str, Any]],
) -> None:
    config = yaml.safe_load((STACK / "collector.yaml").read_text())
    port = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    for name in SERVICES:
        assert services[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://collector:{port}"
        assert set(services[name]["networks"]) & set(services["collector"]["networks"])
    assert services["collector"]["command"] == ["--config=/etc/otelcol/config.yaml"]
    assert services["collector"]["volumes"][0].split(":")[1] == "/etc/otelcol/config.yaml"
    assert config["exporters"]["otlp/jaeger"]["endpoint"] == "jaeger:4317"
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(config[kind])
    used = {
        name for pipeline in config["service"]["pipelines"].values() for names in pipeline.values() for name in names
    }
    assert used == {name for kind in ("receivers", "processors", "exporters") for name in config[kind]}


def test_prometheus_scrapes_what_is_there(services: dict[str, dict[str, Any]]) -> None:
    config = yaml.safe_load((STACK / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    collector = yaml.safe_load((STACK / "collector.yaml").read_text())
    port = collector["exporters"]["prometheus"]["endpoint"].rpartition(":")[2]
    assert jobs == {
        "dspark": [f"gateway:{services['gateway']['environment']['DSPARK_GATEWAY_PORT']}"],
        "collector": [f"collector:{port}"],
    }
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in services["prometheus"]["volumes"]}
    assert (
        f"--config.file={next(path for path in mounted if path.endswith('.yml'))}" in services["prometheus"]["command"]
    )
    assert [str(Path(pattern).parent) in mounted for pattern in config["rule_files"]] == [True]


def test_grafana_finds_its_sources_and_dashboards(services: dict[str, dict[str, Any]]) -> None:
    provisioning = STACK / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "datasources.yml").read_text())["datasources"]
    assert {source["url"] for source in sources} == {"http://prometheus:9090", "http://jaeger:16686"}
    for name in ("prometheus", "jaeger"):
        source = next(source for source in sources if source["type"] == name)
        assert source["uid"] == name
        assert services[name]["ports"][0].endswith(f":{source['url'].rpartition(':')[2]}")
        assert set(services[name]["networks"]) & set(services["grafana"]["networks"])
    providers = yaml.safe_load((provisioning / "dashboards" / "dashboards.yml").read_text())["providers"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in services["grafana"]["volumes"]}
    assert mounted[providers[0]["options"]["path"]] == f"./{(STACK / 'grafana' / 'dashboards').relative_to(ROOT)}"
    assert mounted["/etc/grafana/provisioning"] == f"./{provisioning.relative_to(ROOT)}"
