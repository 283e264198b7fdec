"""Another family through all four processes: a tiny Qwen3 target (query and key norms), its drafter and tokenizer.

Also what needs many starts, which a tiny pair makes cheap: traces, and the death of each service.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.conftest import processes_of
from metric_specs import SPECS
from prometheus_client.parser import text_string_to_metric_families
from tiny_target import DRAFTER, END_OF_TURN, TARGET, clone_with_tokenizer

from launcher.models import ModelPair
from launcher.preflight import free_port_pair
from launcher.services import ServeOptions
from launcher.settings import LauncherSettings
from launcher.stack import RunningServer, running_server
from launcher.supervisor import ServiceDiedError, StopRequest
from service_kit.handoff import remove_orphans
from service_kit.settings import CommonSettings

SERVICES = ("verifier", "drafter", "scheduler", "gateway")
NUM_TOKENS = 24

CONTROLS: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.2,
    "logit_bias": {"80": 2, "81": -100},
    "bad_words": ["w300"],
    "min_tokens": 3,
    "logprobs": 2,
    "echo": True,
}

Serve = Callable[..., contextlib.AbstractContextManager[RunningServer]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    directory.mkdir()
    clone_with_tokenizer(TARGET, directory)
    return directory


@pytest.fixture
def serve(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Starts a server on the tiny pair. Weights stay float32: random ones have near ties that fp16 would decide."""
    monkeypatch.setenv("DSPARK_VERIFIER_WEIGHT_FORMAT", "float32")
    pair, common = ModelPair(target, "tiny-qwen3", DRAFTER, ""), CommonSettings(run_dir=tmp_path / "run")

    @contextlib.contextmanager
    def start(verify_mode: str, **options: Any) -> Iterator[RunningServer]:
        sizes = ServeOptions(
            port=free_port_pair(), verify_mode=verify_mode, max_num_seqs=2, kv_memory="16MiB", **options
        )
        with running_server(sizes, pair, common=common, settings=LauncherSettings(), stop=StopRequest()) as server:
            assert server is not None
            yield server

    return start


def _complete(server: RunningServer, **parameters: Any) -> dict[str, Any]:
    body = {"prompt": "hello", "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True, **parameters}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    content: dict[str, Any] = reply.json()
    return content


def test_greedy_tokens_are_those_of_transformers_with_and_without_drafts(serve: Serve, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, local_files_only=True, dtype=torch.float32)
    seeded = {"temperature": 1.0, "seed": 11}
    with serve("off") as server:
        plain = _complete(server, temperature=0)
        plain_seeded = _complete(server, **seeded)
        plain_controlled = [_complete(server, **CONTROLS, **each)["choices"] for each in ({"temperature": 0}, seeded)]
    with serve("static") as server:
        drafted = _complete(server, temperature=0)
        assert _complete(server, **seeded)["choices"] == plain_seeded["choices"]
        controlled = [_complete(server, **CONTROLS, **each)["choices"] for each in ({"temperature": 0}, seeded)]
        assert controlled == plain_controlled
        assert controlled[1][0]["token_ids"] != plain_seeded["choices"][0]["token_ids"]
        assert controlled[0][0]["text"].startswith("hello")
        assert len(controlled[0][0]["logprobs"]["token_logprobs"]) == len("hello") + NUM_TOKENS
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).status_code == 200
    prompt = torch.tensor([plain["choices"][0]["prompt_token_ids"]])
    assert prompt.shape == (1, len("hello"))
    expected = model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=END_OF_TURN + 1)
    assert plain["choices"][0]["token_ids"] == expected[0, prompt.shape[1] :].tolist()
    assert drafted["choices"] == plain["choices"]
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_one_request_is_traced_logged_and_counted_by_all_four_processes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_LOG_FORMAT", "json")
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    with serve("static", trace="console") as server:
        headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01", "x-request-id": "mine"}
        body = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
        page = httpx.get(f"{server.url}/metrics", timeout=60).text
    logs = {name: (server.log_dir / f"{name}.log").read_text() for name in SERVICES}
    spans = [span for log in logs.values() for span in _objects(log) if span.get("context")]
    ours = {span["context"]["span_id"]: span for span in spans if span["context"]["trace_id"] == f"0x{trace_id}"}
    paths = {" > ".join(_names_to(span, ours)) for span in ours.values()}
    step = "POST /v1/completions > text_completion tiny-qwen3 > scheduler.generate > scheduler.step"
    assert {f"{step} > drafter.draft", f"{step} > verifier.step"} <= paths
    assert "/health" not in logs["gateway"], "probes are traced"
    (whole,) = [span["attributes"] for span in ours.values() if span["name"] == "scheduler.generate"]

    lines = {
        name: [each for each in _objects(logs[name]) if each.get("message") == "request ended"] for name in SERVICES
    }
    (gateway,), (scheduler,) = lines["gateway"], lines["scheduler"]
    assert gateway["call_id"] == "mine"
    shared = ("request_id", "reasons", "prompt_tokens", "tokens", "drafted", "verified", "accepted")
    assert [gateway[name] for name in shared] == [scheduler[name] for name in shared]

    assert {name: whole[f"dspark.{name}"] for name in shared[3:]} == {name: gateway[name] for name in shared[3:]}
    assert whole["dspark.request_id"] == gateway["request_id"]

    names = {line.split(" ")[2] for line in page.splitlines() if line.startswith("# TYPE")}
    assert names == set(SPECS)
    samples = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    labels = 'engine="0",model_name="tiny-qwen3"'
    assert float(samples[f"vllm:generation_tokens_total{{{labels}}}"]) == 8
    assert float(samples["dspark_verified_drafts_total"]) == gateway["verified"]
    assert float(samples["dspark_verifier_steps_total"]) >= float(samples["dspark_steps_total"])  # more: costs
    assert float(samples["dspark_drafter_rows_total"]) > 0
    for name in SERVICES:
        assert samples[f'dspark_service_up{{service="{name}"}}'] == "1.0"


def test_services_in_one_process_share_a_page(serve: Serve) -> None:
    with serve("static", in_process=True) as server:
        _complete(server)
        page = httpx.get(f"{server.url}/metrics", timeout=60).text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert len(families) == len(SPECS)
    for spec in SPECS.values():
        assert families[spec.name.removesuffix("_total")].samples, spec.name
    assert [sample.labels for sample in families["process_cpu_seconds"].samples] == [{"service": "server"}]


def _objects(log: str) -> list[dict[str, Any]]:
    """JSON objects of a log: those of a line and those, indented, of the console exporter."""
    decoder, found, end = json.JSONDecoder(), [], 0
    for start in re.finditer(r"^\{", log, re.MULTILINE):
        if start.start() >= end:
            value, end = decoder.raw_decode(log, start.start())
            found.append(value)
    return found


def _names_to(span: dict[str, Any], spans: dict[str, dict[str, Any]]) -> list[str]:
    """Names of the spans from the outermost of ours down to `span`."""
    above = spans.get(span["parent_id"])
    return [*(_names_to(above, spans) if above else []), span["name"]]


@pytest.mark.parametrize("name", SERVICES)
def test_the_death_of_any_service_stops_all_and_is_told_with_its_log(name: str, serve: Serve, tmp_path: Path) -> None:
    with serve("static") as server:
        os.kill(server.supervisor.processes[name].pid, signal.SIGKILL)
        with pytest.raises(ServiceDiedError) as caught:
            server.supervisor.watch(StopRequest())
    first, second, *last_lines = str(caught.value).splitlines()
    assert first == f"{name} ended (signal SIGKILL)"
    assert second == f"log: {server.log_dir / name}.log"
    assert last_lines
    assert processes_of(tmp_path / "run") == []
    assert list((tmp_path / "run").iterdir()) == []
    assert remove_orphans() == []
