"""The REST API over loopback: transcripts, usage, errors, keys."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dspark.v1 import scheduler_pb2
from gateway_harness import EOS_ID, GatewayHarness, encode, wait_until, write_model

from gateway.app import create_app
from gateway.auth import ApiKeys
from gateway.key_limits import KeyLimits
from gateway.scheduler_client import GrpcScheduler, LocalScheduler
from gateway.server import create_generator, create_metrics_page
from service_kit.errors import ConfigurationError, InvalidRequestError, QueueFullError, UnavailableError

PROMPT_IDS = [256, *encode("user\nHi"), 257, *encode("\n"), 256, *encode("assistant\n")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(model_dir: Path) -> Iterator[GatewayHarness]:
    with GatewayHarness(model_dir, served_model_names="tiny,alias", keepalive_s=0.05, max_body_bytes=20_000) as harness:
        yield harness.wait_ready()


@pytest.fixture
def gateway(running: GatewayHarness) -> GatewayHarness:
    fresh = type(running.scheduler)()
    running.scheduler.__dict__.update(fresh.__dict__)
    return running


def normal(text: str) -> str:
    """A transcript without what changes from run to run."""
    text = re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]{32}"', r'"id":"\1-0"', text)
    text = re.sub(r'"created":\d{10}', '"created":1', text)
    return re.sub(r'"system_fingerprint":"fp_[0-9a-f]{12}"', '"system_fingerprint":"fp"', text)


def chunk(choices: str, after_root: str = "", tail: str = "") -> str:
    root = '"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"tiny","system_fingerprint":"fp"'
    return f'data: {{{root}{after_root},"choices":[{choices}]{tail}}}\n\n'


def delta(body: str, finish: str = "null") -> str:
    return f'{{"index":0,"delta":{body},"logprobs":null,"finish_reason":{finish}}}'


def events(response: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return dict(body)


def test_the_exact_bytes_of_a_stream(gateway: GatewayHarness) -> None:
    response = gateway.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    assert normal(response.text) == (
        chunk(delta('{"role":"assistant","content":""}'))
        + chunk(delta('{"content":"Hel"}'))
        + chunk(delta('{"content":"lo,"}'))
        + chunk(delta('{"content":" wo"}'))
        + chunk(delta('{"content":"rld"}'))
        + chunk(delta("{}", '"stop"'))
        + "data: [DONE]\n\n"
    )


def test_the_exact_bytes_of_a_stream_with_usage(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = ["Hello"]
    null = ',"usage":null'
    metrics = (
        ',"usage":{"prompt_tokens":21,"completion_tokens":6,"total_tokens":27,"prompt_tokens_details":{"cached_tokens":0}}'
        ',"metrics":{"speculative_decoding":{"mean_acceptance_length":2.5,"draft_acceptance_rate":0.375,'
        '"acceptance_histogram":[0,1,1,0,0],"num_spec_steps":2,"num_accepted_draft_tokens":3,"num_draft_tokens":8,'
        '"num_verified_tokens":6,"num_drafted_steps":2,"num_uncut_accepted_tokens":4,"num_spec_tokens":4}}'
    )
    assert normal(gateway.chat(stream=True, stream_options={"include_usage": True}).text) == (
        chunk(delta('{"role":"assistant","content":""}'), null)
        + chunk(delta('{"content":"Hel"}'), null)
        + chunk(delta('{"content":"lo"}', '"stop"'), null)
        + chunk("", "", metrics)
        + "data: [DONE]\n\n"
    )


def test_a_whole_answer(gateway: GatewayHarness) -> None:
    body = gateway.chat().json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(PROMPT_IDS),
        "completion_tokens": 13,
        "total_tokens": len(PROMPT_IDS) + 13,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert len(body["metrics"]["speculative_decoding"]["acceptance_histogram"]) == 5
    request = gateway.scheduler.requests[-1]
    assert list(request.prompt_token_ids) == PROMPT_IDS
    assert request.max_tokens == 200 - len(PROMPT_IDS)
    assert not request.sampling.HasField("temperature")


def test_continuous_usage_counts_tokens_not_chunks(gateway: GatewayHarness) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [e["usage"]["completion_tokens"] for e in events(gateway.chat(stream=True, stream_options=options))]
    assert counts == [3, 3, 6, 9, 12, 13, 13]


def test_pieces_and_token_ids(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = ["a😀b"]
    fields = {"dspark": {"pieces": True}, "return_token_ids": True}
    chunks = events(gateway.chat(stream=True, **fields))
    assert chunks[0]["prompt_token_ids"] == PROMPT_IDS
    choices = [c["choices"][0] for c in chunks[1:]]
    for choice in choices:
        assert "".join(text for text, _ in choice["dspark"]["pieces"]) == choice["delta"].get("content", "")
    assert [i for c in choices for i in c["token_ids"]] == [*encode("a😀b"), EOS_ID]
    assert [p for c in choices for p in c["dspark"]["pieces"]] == [
        ["a", True], ["", True], ["", False], ["", True], ["😀", True], ["b", False], ["", False],
    ]  # fmt: skip
    whole = gateway.chat(**fields).json()
    assert whole["prompt_token_ids"] == PROMPT_IDS
    assert whole["choices"][0]["token_ids"] == [*encode("a😀b"), EOS_ID]
    assert whole["choices"][0]["message"]["content"] == "a😀b"


def test_characters_split_between_steps_arrive_whole(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = ["ab😀é日本"]
    texts = [e["choices"][0]["delta"].get("content", "") for e in events(gateway.chat(stream=True))]
    assert "".join(texts) == "ab😀é日本"
    assert all("\ufffd" not in text for text in texts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_the_request(gateway: GatewayHarness, stream: bool) -> None:
    gateway.scheduler.answers = ["one STOP two"]
    gateway.scheduler.is_endless = True
    response = gateway.chat(stop=["STOP"], stream=stream, stream_options={"include_usage": True} if stream else None)
    if stream:
        chunks = events(response)
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
        reason, usage = chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
    else:
        choice = response.json()["choices"][0]
        text, reason, usage = choice["message"]["content"], choice["finish_reason"], response.json()["usage"]
    assert (text, reason) == ("one ", "stop")
    assert usage["completion_tokens"] == len("one STOP")
    assert [a.reason for a in gateway.scheduler.aborts] == [scheduler_pb2.FINISH_REASON_STOP]
    assert wait_until(lambda: not gateway.scheduler.live)


def test_length_is_the_reason_when_it_comes_first(gateway: GatewayHarness) -> None:
    choice = gateway.chat(max_tokens=4, stop="world").json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hell", "length")
    choice = gateway.chat(max_tokens=4, stop="ll").json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("He", "stop")


def test_choices_interleave_by_index(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = ["first", "second one", "third"]
    chunks = events(gateway.chat(n=3, stream=True))
    texts = dict.fromkeys(range(3), "")
    for c in chunks:
        texts[c["choices"][0]["index"]] += c["choices"][0]["delta"].get("content", "")
    assert texts == {0: "first", 1: "second one", 2: "third"}
    order = [c["choices"][0]["index"] for c in chunks]
    assert order != sorted(order)
    body = gateway.chat(n=3, stop="on").json()
    assert [c["message"]["content"] for c in body["choices"]] == ["first", "sec", "third"]
    assert body["usage"]["completion_tokens"] == len("first") + 1 + len("secon") + len("third") + 1
    assert "metrics" not in body


def test_completions_take_every_form_of_prompt(gateway: GatewayHarness) -> None:
    body = gateway.post("/v1/completions", {"prompt": "Say", "max_tokens": 5, "return_token_ids": True}).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0] == {
        "index": 0,
        "text": "Hello",
        "prompt_token_ids": encode("Say"),
        "logprobs": None,
        "finish_reason": "length",
        "token_ids": encode("Hello"),
    }
    gateway.post("/v1/completions", {"prompt": [1, 2, 3]})
    assert list(gateway.scheduler.requests[-1].prompt_token_ids) == [1, 2, 3]
    body = gateway.post("/v1/completions", {"prompt": ["a", [5, 6]], "n": 2, "max_tokens": 2}).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "He"), (1, "He"), (2, "He"), (3, "He")]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 8
    chunks = events(gateway.post("/v1/completions", {"prompt": ["a", "b"], "stream": True, "max_tokens": 4}))
    texts = {0: "", 1: ""}
    for c in chunks:
        texts[c["choices"][0]["index"]] += c["choices"][0]["text"]
    assert texts == {0: "Hell", 1: "Hell"}


def test_a_refused_prompt_undoes_the_admitted_ones(gateway: GatewayHarness) -> None:
    gateway.scheduler.is_endless = True
    response = gateway.post("/v1/completions", {"prompt": ["a", "b" * 300]})
    assert error_of(response)["code"] == "context_length_exceeded"
    assert wait_until(lambda: not gateway.scheduler.live)


def test_sampling_goes_through_and_the_models_defaults_fill_the_rest(model_dir: Path) -> None:
    harness = GatewayHarness(model_dir)
    harness.scheduler.sampling_defaults = scheduler_pb2.SamplingParams(temperature=0.5, top_k=20, top_p=0.25)
    with harness as gateway:
        gateway.wait_ready()
        fields = {"top_k": -1, "min_p": 0.125, "seed": 7, "stop_token_ids": [5], "ignore_eos": True, "n": 2}
        gateway.chat(max_tokens=10**9, **fields)
        request = gateway.scheduler.requests[-1]
        assert request.sampling == scheduler_pb2.SamplingParams(
            temperature=0.5, top_k=0, top_p=0.25, min_p=0.125, seed=7
        )
        assert list(request.stop_token_ids) == [5]
        assert request.ignore_eos
        assert request.num_choices == 2
        assert request.max_tokens == 200 - len(PROMPT_IDS)


@pytest.mark.parametrize(
    ("asked", "limit"),
    [(None, None), ({}, None), ({"enabled": True}, None), ({"enabled": False}, 0), ({"max_draft_tokens": 3}, 3)],
)
def test_a_request_can_limit_speculation(gateway: GatewayHarness, asked: Any, limit: int | None) -> None:
    assert gateway.chat(speculation=asked).status_code == 200
    sent = gateway.scheduler.requests[-1].speculation
    assert (sent.max_draft_tokens if sent.HasField("max_draft_tokens") else None) == limit


def test_answers_of_an_inexact_machine_are_marked(model_dir: Path, gateway: GatewayHarness) -> None:
    assert gateway.get("/health").json() == {"status": "ready", "bit_exact": True}
    assert "x-dspark-exact" not in gateway.chat().headers
    harness = GatewayHarness(model_dir)
    harness.scheduler.inexact_reason = "no exact row count"
    with harness as inexact:
        inexact.wait_ready()
        health = {"status": "ready", "bit_exact": False, "inexact_reason": "no exact row count"}
        assert inexact.get("/health").json() == inexact.get("/health/ready").json() == health
        for is_stream in (False, True):
            assert inexact.chat(stream=is_stream).headers["x-dspark-exact"] == "false"
        assert inexact.post("/v1/completions", {"prompt": "a"}).headers["x-dspark-exact"] == "false"


BAD: list[tuple[Any, int, str | None, str | None]] = [
    (b"{", 400, None, None),
    (b"", 400, None, None),
    (b'{"messages": NaN}', 400, None, None),
    (b"[]", 400, None, None),
    (b'"\xff"', 400, None, None),
    (b'{"messages":[' + b" " * 20_000 + b"]}", 413, None, "body_too_large"),
    ({"temperature": "hot"}, 400, "temperature", None),
    ({"max_tokens": -1}, 400, "max_tokens", None),
    ({"n": 5}, 400, "n", None),
    ({"speculation": {"enabled": 1}}, 400, "speculation.enabled", None),
    ({"speculation": {"max_draft_tokens": -1}}, 400, "speculation.max_draft_tokens", None),
    ({"speculation": {"draft": 1}}, 400, "speculation.draft", None),
    ({"stop_token_ids": [300]}, 400, "stop_token_ids", None),
    ({"logprobs": 2}, 400, "logprobs", None),
    ({"top_logprobs": 1}, 400, "top_logprobs", None),
    ({"logit_bias": {"300": 1}}, 400, "logit_bias", None),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "messages", "context_length_exceeded"),
    ({"model": "other"}, 404, "model", "model_not_found"),
    ({"chat_template": "{{ 1 }}"}, 400, "chat_template", None),
]


@pytest.mark.parametrize(("body", "status", "param", "code"), BAD, ids=lambda value: repr(value)[:30])
def test_bad_requests(gateway: GatewayHarness, body: Any, status: int, param: str | None, code: str | None) -> None:
    for stream in (False, True):
        default = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        sent = body if isinstance(body, bytes) else {**default, **body}
        response = gateway.post("/v1/chat/completions", sent)
        error = error_of(response)
        assert (response.status_code, error["param"], error["code"]) == (status, param, code)
        assert not gateway.scheduler.requests


def test_messages_of_the_errors_that_clients_parse(gateway: GatewayHarness) -> None:
    num_prompt = len(PROMPT_IDS) - len("Hi") + 300
    assert error_of(gateway.chat("x" * 300))["message"].startswith(
        "This model's maximum context length is 200 tokens. "
        f"However, you requested {num_prompt + 1} tokens ({num_prompt} in"
    )
    assert "tiny, alias" in error_of(gateway.chat(model="other"))["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_scheduler_are_real_statuses(gateway: GatewayHarness, stream: bool) -> None:
    for refusal, status, code in (
        (QueueFullError("the queue is full"), 429, "queue_full"),
        (UnavailableError("draining"), 503, "unavailable"),
        (InvalidRequestError("top_k is odd", field="top_k"), 400, None),
    ):
        gateway.scheduler.refusal = refusal
        response = gateway.chat(stream=stream)
        assert (response.status_code, error_of(response)["code"]) == (status, code)
        assert (response.headers.get("retry-after") is not None) == (status in (429, 503))


def test_a_failure_in_the_middle_ends_the_stream_properly(gateway: GatewayHarness) -> None:
    for field, value, message in (
        ("failure", UnavailableError("gone"), "gone"),
        ("error", "page table corrupt", "page table corrupt"),
    ):
        setattr(gateway.scheduler, field, value)
        response = gateway.chat(stream=True)
        assert response.status_code == 200
        parts = response.text.split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        assert json.loads(parts[-3][6:])["error"]["message"] == message
        whole = gateway.chat()
        assert whole.status_code >= 500
        assert error_of(whole)["message"] == message
        setattr(gateway.scheduler, field, None if field == "failure" else "")


def test_silence_is_filled_with_comments(gateway: GatewayHarness) -> None:
    gateway.scheduler.first_step_s = 0.3
    text = gateway.chat(stream=True).text
    assert text.startswith(": keep-alive\n\n")
    assert all(line.startswith((":", "data: ")) for line in text.split("\n\n") if line)


def test_models_health_version_and_unknown_paths(gateway: GatewayHarness) -> None:
    data = gateway.get("/v1/models").json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in data] == [("tiny", 200), ("alias", 200)]
    assert gateway.get("/v1/models/alias").json()["id"] == "alias"
    assert gateway.get("/v1/models/x").status_code == 404
    assert gateway.get("/health/live").status_code == gateway.get("/health/ready").status_code == 200
    assert gateway.get("/version").json()["version"]
    assert error_of(gateway.get("/nothing"))
    assert gateway.get("/v1/completions").status_code == 405
    assert gateway.chat(model="alias").json()["model"] == "alias"


def test_request_ids_and_ignored_parameters_come_back(gateway: GatewayHarness) -> None:
    response = gateway.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "flavour": 1, "a\r\nb: c": 2, "user": "me"},
        headers={"X-Request-Id": "abc-1"},
    )
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "abc-1"
    assert response.headers["x-dspark-ignored-parameters"] == "a??b??c,flavour"
    assert "server" not in response.headers
    assert "x-dspark-ignored-parameters" not in gateway.chat().headers
    assert gateway.get("/nothing", headers={"X-Request-Id": "bad id!"}).headers["x-request-id"] != "bad id!"


def test_health_is_503_until_the_scheduler_serves(model_dir: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/absent.sock"
    with GatewayHarness(model_dir, scheduler=lambda: GrpcScheduler(address)) as gateway:
        response = gateway.get("/health")
        assert (response.status_code, error_of(response)["code"]) == (503, "loading")
        assert gateway.get("/health/live").status_code == 200
        response = gateway.chat()
        assert (response.status_code, error_of(response)["code"]) == (503, "loading")
        assert response.headers["retry-after"] == "1"
        assert gateway.get("/v1/models").status_code == 503


def test_a_port_in_use_is_named(model_dir: Path, gateway: GatewayHarness) -> None:
    for field, key in (("port", "DSPARK_GATEWAY_PORT"), ("grpc_port", "DSPARK_GATEWAY_GRPC_PORT")):
        other = GatewayHarness(model_dir)
        taken = getattr(gateway.settings, field)
        other.settings = other.settings.model_copy(update={field: taken})
        with pytest.raises(ConfigurationError, match=rf"{taken}.*{key}"):
            other.__enter__()


def test_every_route_needs_a_key_except_health(model_dir: Path) -> None:
    with GatewayHarness(model_dir, api_keys="k1,k2") as gateway:
        gateway.wait_ready()
        generator = create_generator(gateway.settings, LocalScheduler(gateway.scheduler))
        app = create_app(
            gateway.settings, generator, ApiKeys([]), KeyLimits(gateway.settings), create_metrics_page(generator)
        )
        paths = {route.path for route in app.routes}  # type: ignore[attr-defined]
        pages = {path for path in app.state.open_paths if path == "/" or path.startswith("/static/")}
        assert app.state.open_paths - pages == {"/health", "/health/live", "/health/ready"}  # one more is a decision
        assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/version"} <= paths
        for path in paths | {"/nothing", "/health/", "/docs", "//health"}:
            for method in ("GET", "POST", "OPTIONS"):
                response = gateway.http.request(method, f"{gateway.url}{path}")
                assert (response.status_code == 401) == (path not in app.state.open_paths), (method, path)
        assert error_of(gateway.get("/version"))["code"] == "invalid_api_key"
        assert gateway.get("/version", headers={"Authorization": "Bearer k3"}).status_code == 401
        for key in ("k1", "k2"):
            assert gateway.get("/version", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_each_api_key_has_an_isolation_key_that_does_not_tell_it(model_dir: Path) -> None:
    seen = []
    with GatewayHarness(model_dir, api_keys="k1,k2") as gateway:
        gateway.wait_ready()
        for key in ("k1", "k2", "k1"):
            headers = {"Authorization": f"Bearer {key}"}
            chat = {"messages": [{"role": "user", "content": "Hi"}]}
            assert gateway.post("/v1/chat/completions", chat, headers=headers).status_code == 200
            assert gateway.post("/v1/completions", {"prompt": ["a", "b"]}, headers=headers).status_code == 200
            sent = {request.isolation_key for request in gateway.scheduler.requests[-3:]}
            assert len(sent) == 1
            seen += sent
    assert seen[0] == seen[2] != seen[1]
    assert all(len(key) == 16 for key in seen)
    assert hashlib.sha256(b"k1").digest()[:16] != seen[0]


def test_tokens_found_in_the_prefix_cache_are_told(gateway: GatewayHarness) -> None:
    gateway.scheduler.num_cached_tokens = 16
    assert gateway.chat().json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    two = gateway.post("/v1/completions", {"prompt": ["a", "b"]}).json()
    assert two["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    (*_, last) = events(gateway.chat(stream=True, stream_options={"include_usage": True}))
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert gateway.scheduler.requests[-1].isolation_key == b""
