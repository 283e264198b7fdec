"""Log-probabilities and echo over REST: OpenAI's two shapes, whole and streamed, cut where the text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dspark.v1 import scheduler_pb2
from gateway_harness import GatewayHarness, encode, write_model


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    with GatewayHarness(write_model(tmp_path_factory.mktemp("model"))) as harness:
        yield harness.wait_ready()


@pytest.fixture
def gateway(running: GatewayHarness) -> GatewayHarness:
    running.scheduler.__dict__.update(type(running.scheduler)().__dict__)
    return running


def choices(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ") and line[6:] != "[DONE]"]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


def entry(token_id: int, token: str, data: list[int]) -> dict[str, Any]:
    return {"token": token, "logprob": pytest.approx(-token_id / 256), "bytes": data}


def test_every_token_of_a_chat_has_an_entry(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = ["b€"]
    fields = {"logprobs": True, "top_logprobs": 1}
    content = gateway.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    ids = [*encode("b€"), 257]
    names = ["b", "\ufffd", "\ufffd", "\ufffd", "<|im_end|>"]
    datas = [[98], [0xE2], [0x82], [0xAC], list(b"<|im_end|>")]
    assert [{key: each[key] for key in ("token", "logprob", "bytes")} for each in content] == [
        entry(*each) for each in zip(ids, names, datas, strict=True)
    ]
    assert content[0]["top_logprobs"] == [{"token": "a", "logprob": pytest.approx(-ids[0] / 512), "bytes": [97]}]
    request = gateway.scheduler.requests[-1]
    assert (request.num_logprobs, request.HasField("num_prompt_logprobs")) == (1, False)

    streamed = choices(gateway.chat(stream=True, **fields))
    assert [each for choice in streamed if choice["logprobs"] for each in choice["logprobs"]["content"]] == content
    assert gateway.chat().json()["choices"][0]["logprobs"] is None
    assert not gateway.scheduler.requests[-1].HasField("num_logprobs")


def test_entries_end_with_the_stop_string(gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = ["abcdefgh"]
    body = gateway.chat(stop="de", logprobs=True).json()
    assert body["choices"][0]["message"]["content"] == "abc"
    assert len(body["choices"][0]["logprobs"]["content"]) == body["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_completions_have_the_older_shape(gateway: GatewayHarness, echo: bool, n: int) -> None:
    gateway.scheduler.answers = ["x€"]
    body = {"prompt": ["€a", "q"], "logprobs": 0, "echo": echo, "n": n}
    found = gateway.post("/v1/completions", body).json()["choices"]
    assert len(found) == 2 * n
    for index, choice in enumerate(found):
        prompt = ["€a", "q"][index // n] if echo else ""
        text = prompt + "x€"
        ids = [*encode(prompt), *encode("x€"), 257]
        logprobs = choice["logprobs"]
        assert choice["text"] == text
        names = {encode("€")[0]: "bytes:\\xe2", encode("€")[1]: "bytes:\\x82", encode("€")[2]: "bytes:\\xac"}
        plain = {encode(each)[0]: each for each in "axq"} | {257: "<|im_end|>"}
        assert logprobs["tokens"] == [(names | plain)[token_id] for token_id in ids]
        known = ids[1:] if echo else ids
        assert logprobs["token_logprobs"][-len(known) :] == pytest.approx([-token_id / 256 for token_id in known])
        assert (logprobs["token_logprobs"][0] is None, logprobs["top_logprobs"][0] is None) == (echo, echo)
        assert list(logprobs["top_logprobs"][-1].values()) == pytest.approx([-256.0 / 512 - 1 / 512, -257 / 256])
        starts = [0, 0, 0, 1, 2, 3, 3, 3, 4] if prompt == "€a" else [0, 1, 2, 2, 2, 3] if echo else [0, 1, 1, 1, 2]
        assert logprobs["text_offset"] == starts[: len(ids)]

    streamed: dict[int, dict[str, Any]] = {}
    for part in choices(gateway.post("/v1/completions", {**body, "stream": True})):
        whole = streamed.setdefault(part["index"], {"text": "", "logprobs": {key: [] for key in part["logprobs"]}})
        whole["text"] += part["text"]
        for key, values in part["logprobs"].items():
            whole["logprobs"][key] += values
    assert [streamed[index] for index in range(2 * n)] == [
        {key: choice[key] for key in ("text", "logprobs")} for choice in found
    ]


def test_echo_alone_asks_for_no_scores(gateway: GatewayHarness) -> None:
    choice = gateway.post("/v1/completions", {"prompt": encode("ab"), "echo": True}).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("abHello, world", None)
    assert not gateway.scheduler.requests[-1].HasField("num_prompt_logprobs")


def test_controls_reach_the_scheduler(gateway: GatewayHarness) -> None:
    fields = {"frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.25, "min_tokens": 2}
    gateway.chat(logit_bias={"5": -2.5, "299": 100}, bad_words=["ab", " c"], **fields)
    sampling = gateway.scheduler.requests[-1].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert dict(sampling.logit_bias) == {5: -2.5, 299: 100.0}
    words = [list(word.token_ids) for word in sampling.bad_words]
    assert words == [encode("ab"), encode(" ab"), encode(" c")]


def test_the_models_own_repetition_penalty_is_the_default(tmp_path: Path) -> None:
    harness = GatewayHarness(write_model(tmp_path / "model"))
    harness.scheduler.sampling_defaults = scheduler_pb2.SamplingParams(repetition_penalty=1.25)
    with harness as gateway:
        gateway.wait_ready()
        gateway.chat()
        gateway.chat(repetition_penalty=1)
        assert [request.sampling.repetition_penalty for request in gateway.scheduler.requests] == [1.25, 1.0]
