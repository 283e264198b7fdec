"""What `dspark serve` decides and refuses before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli import app
from launcher.models import ModelPair, choose_models
from launcher.preflight import check_port, free_port_pair, instance_run_dir
from launcher.serve import ready_line
from launcher.services import ServeOptions, check_devices, plan_services
from launcher.settings import LauncherSettings
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings

_GOLDEN = Path(__file__).parents[1] / "golden"
_TARGET, _DRAFTER = _GOLDEN / "target", _GOLDEN / "draft_vanilla"


@pytest.fixture
def common(tmp_path: Path) -> CommonSettings:
    return CommonSettings(run_dir=tmp_path / "run", cache_dir=tmp_path / "cache")


def _choose(model: str, drafter: str | None, common: CommonSettings) -> ModelPair:
    return choose_models(model, drafter, common, LauncherSettings())


def test_port_in_use_names_the_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} .*choose another --port"):
            check_port("127.0.0.1", port, "--port")
    check_port("127.0.0.1", free_port_pair(), "--port")


def test_a_target_without_drafter_serves_off_and_says_so(common: CommonSettings) -> None:
    assert _choose(str(_TARGET), None, common) == (
        _TARGET,
        "target",
        None,
        "speculation off: no --drafter for this target",
    )
    assert _choose(str(_TARGET), "none", common).note == "speculation off: --drafter none"


def test_a_fitting_drafter_is_taken(common: CommonSettings) -> None:
    assert _choose(str(_TARGET), str(_DRAFTER), common) == (_TARGET, "target", _DRAFTER, "")


def test_hub_ids_are_found_in_the_hub_cache_without_a_network(tmp_path: Path) -> None:
    for name, source in (("models--org--tiny", _TARGET), ("models--org--drafter", _DRAFTER)):
        shutil.copytree(source, tmp_path / "hub" / name / "snapshots" / "abc")
        (tmp_path / "hub" / name / "refs").mkdir()
        (tmp_path / "hub" / name / "refs" / "main").write_text("abc")
    code = (
        "from launcher.models import choose_models; from launcher.settings import LauncherSettings\n"
        "from service_kit.settings import CommonSettings\n"
        "print(*choose_models('org/tiny', 'org/drafter', CommonSettings(), LauncherSettings()), sep='|')"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "DSPARK_CACHE_DIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    target, drafter = (tmp_path / "hub" / f"models--org--{name}/snapshots/abc" for name in ("tiny", "drafter"))
    assert found.stdout == f"{target}|org/tiny|{drafter}|\n"


def test_a_pair_is_checked_again_once_a_file_changes(tmp_path: Path, common: CommonSettings) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(_DRAFTER, drafter)
    for _ in range(2):
        assert _choose(str(_TARGET), str(drafter), common).drafter == drafter
    with (drafter / "model.safetensors").open("r+b") as weights:
        weights.truncate(1000)
    with pytest.raises(ConfigurationError, match="safetensors"):
        _choose(str(_TARGET), str(drafter), common)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 999}, "vocab_size"),
        ({"hidden_size": 999}, "hidden_size"),
        ({"num_target_layers": 99}, "num_target_layers"),
        ({"target_layer_ids": [0, 98]}, "target_layer_ids"),
    ],
)
def test_a_mismatching_drafter_is_refused_in_words(
    change: dict[str, object], words: str, tmp_path: Path, common: CommonSettings
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(_DRAFTER, drafter)
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigurationError, match=words) as caught:
        _choose(str(_TARGET), str(drafter), common)
    assert "--drafter" in caught.value.message


def test_a_corrupt_drafter_is_refused(tmp_path: Path, common: CommonSettings) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(_DRAFTER, drafter)
    weights = drafter / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigurationError, match="safetensors"):
        _choose(str(_TARGET), str(drafter), common)


def test_plans_carry_options_to_the_services_that_own_them(tmp_path: Path, common: CommonSettings) -> None:
    pair = ModelPair(_TARGET, "tiny", _DRAFTER, "")
    options = ServeOptions(port=9000, verify_mode="static", max_num_seqs=3, kv_memory="64MiB", trace="console")
    plans = {plan.name: plan for plan in plan_services(options, pair, common, LauncherSettings(), tmp_path)}
    assert list(plans) == ["verifier", "drafter", "scheduler", "gateway"]
    assert (
        plans["scheduler"].environment.items()
        >= {
            "DSPARK_SCHEDULER_VERIFY_MODE": "static",
            "DSPARK_SCHEDULER_MAX_NUM_SEQS": "3",
            "DSPARK_SCHEDULER_KV_MEMORY": "64MiB",
            "DSPARK_RUN_DIR": str(tmp_path),
            "DSPARK_TRACE_EXPORTER": "console",
        }.items()
    )
    assert "DSPARK_SCHEDULER_MAX_MODEL_LEN" not in plans["scheduler"].environment
    assert plans["drafter"].environment["DSPARK_DRAFTER_TARGET"] == str(_TARGET)
    assert plans["gateway"].environment["DSPARK_GATEWAY_GRPC_PORT"] == "9001"
    assert "OMP_NUM_THREADS" in plans["verifier"].environment
    assert "OMP_NUM_THREADS" not in plans["gateway"].environment


def test_without_speculation_there_is_no_drafter_process(tmp_path: Path, common: CommonSettings) -> None:
    without = ModelPair(_TARGET, "tiny", None, "speculation off: --drafter none")
    plans = plan_services(ServeOptions(verify_mode="static"), without, common, LauncherSettings(), tmp_path)
    assert [plan.name for plan in plans] == ["verifier", "scheduler", "gateway"]
    assert plans[1].environment["DSPARK_SCHEDULER_VERIFY_MODE"] == "off"
    assert plans[1].environment["DSPARK_SCHEDULER_SPECULATION_OFF_REASON"] == without.note
    off = plan_services(
        ServeOptions(verify_mode="off"), ModelPair(_TARGET, "tiny", _DRAFTER, ""), common, LauncherSettings(), tmp_path
    )
    assert "drafter" not in [plan.name for plan in off]


def test_executors_on_different_devices_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, common: CommonSettings, tmp_path: Path
) -> None:
    check_devices({})
    monkeypatch.setenv("DSPARK_VERIFIER_DEVICE", "cuda")
    with pytest.raises(
        ConfigurationError, match="DSPARK_VERIFIER_DEVICE is cuda and DSPARK_DRAFTER_DEVICE is cpu: set"
    ):
        check_devices({})
    check_devices({"DSPARK_DRAFTER_DEVICE": "cuda"})
    pair = ModelPair(_TARGET, "tiny", _DRAFTER, "")
    plan_services(ServeOptions(verify_mode="off"), pair, common, LauncherSettings(), tmp_path)
    with pytest.raises(ConfigurationError, match="set both alike"):
        plan_services(ServeOptions(verify_mode="static"), pair, common, LauncherSettings(), tmp_path)
    monkeypatch.setenv("DSPARK_DRAFTER_DEVICE", "tpu")
    with pytest.raises(ConfigurationError, match="DSPARK_DRAFTER_DEVICE: "):
        check_devices({})


def test_run_directories_of_dead_servers_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    dead = tmp_path / "serve-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "verifier.sock").touch()
    with instance_run_dir(tmp_path) as first:
        assert not dead.exists()
        assert first.stat().st_mode & 0o777 == 0o700
        with instance_run_dir(tmp_path) as second:
            assert first.exists()
            assert first != second
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_too_long_for_sockets_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="DSPARK_RUN_DIR"), instance_run_dir(tmp_path / ("x" * 100)):
        pass


def test_ready_line_says_where_and_how_to_chat() -> None:
    pair = ModelPair(_TARGET, "tiny", None, "")
    line = ready_line(ServeOptions(port=9000), pair, 3.21)
    assert line == ("ready in 3.2 s: tiny at http://127.0.0.1:9000/v1 · chat: dspark chat --url http://127.0.0.1:9000")
    assert ready_line(ServeOptions(), pair, 1.0).endswith("chat: dspark chat")


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:9000"), ("::", "http://[::1]:9000"), ("::1", "http://[::1]:9000")],
)
def test_the_url_is_one_that_a_client_on_this_machine_can_use(host: str, url: str) -> None:
    assert ServeOptions(host=host, port=9000).url == url


def test_the_command_reports_errors_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(tmp_path))
    result = CliRunner().invoke(app, ["serve", "--model", str(tmp_path / "absent")])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "absent is not a directory" in result.stderr
    assert result.stderr.count("\n") == 1


def test_unknown_settings_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_LAUNCHER_SPIN", "1")
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 1
    assert "DSPARK_LAUNCHER_SPIN" in result.stderr


@pytest.mark.parametrize("arguments", [["--modes", "fast"], ["--concurrency", "0"], ["--concurrency", "a"]])
def test_bench_options_are_checked(arguments: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "--prompts", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
