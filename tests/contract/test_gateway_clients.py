"""Real clients against a live gateway: the openai package, gRPC, and sockets that vanish."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import openai
import pytest
from dspark.v1 import gateway_pb2, gateway_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from gateway_harness import EOS_ID, GatewayHarness, ScriptedScheduler, encode, wait_until, write_model
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.scheduler_client import SCHEDULER_SERVICE, GrpcScheduler
from service_kit.errors import InvalidRequestError, QueueFullError
from service_kit.rpc import async_server

HI = [{"role": "user", "content": "Hi"}]
EXAMPLE = Path(__file__).parents[2] / "docs/examples/text_client.py"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(model_dir: Path) -> Iterator[GatewayHarness]:
    with GatewayHarness(model_dir, api_keys="key") as harness:
        yield harness.wait_ready()


@pytest.fixture
def gateway(running: GatewayHarness) -> GatewayHarness:
    running.scheduler.__dict__.update(ScriptedScheduler().__dict__)
    return running


@pytest.fixture
def client(gateway: GatewayHarness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="key", max_retries=0) as client:
        yield client


def test_openai_chat_and_completions(client: openai.OpenAI) -> None:
    assert client.models.list().data[0].id == "tiny"
    chat = client.chat.completions.create(model="tiny", messages=HI)  # type: ignore[arg-type]
    assert chat.choices[0].message.content == "Hello, world"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 13
    completion = client.completions.create(model="tiny", prompt="Say", n=2, stop="lo", temperature=0)
    assert [c.text for c in completion.choices] == ["Hel", "Hel"]


def test_openai_streams(client: openai.OpenAI, gateway: GatewayHarness) -> None:
    gateway.scheduler.answers = ["naïve 😀!", "second"]
    stream = client.chat.completions.create(
        model="tiny",
        messages=HI,
        n=2,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    )
    texts, usage = {0: "", 1: ""}, None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert texts == {0: "naïve 😀!", 1: "second"}
    assert usage is not None
    assert usage.completion_tokens == len("naïve 😀!".encode()) + 1 + len("second") + 1
    text = "".join(c.choices[0].text for c in client.completions.create(model="tiny", prompt="a", stream=True))
    assert text == "naïve 😀!"


def test_openai_errors(client: openai.OpenAI, gateway: GatewayHarness) -> None:
    with pytest.raises(openai.NotFoundError, match="served: tiny"):
        client.chat.completions.create(model="gpt", messages=HI)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HI, temperature=9)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 500)
    assert long.value.code == "context_length_exceeded"
    gateway.scheduler.refusal = QueueFullError("full")
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="tiny", messages=HI, stream=True)  # type: ignore[arg-type]
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    gateway.scheduler.refusal, gateway.scheduler.error = None, "broken"
    with pytest.raises(openai.APIError, match="broken"):
        list(client.chat.completions.create(model="tiny", messages=HI, stream=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["chat", "completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_requests(gateway: GatewayHarness, path: str, stream: bool) -> None:
    gateway.scheduler.is_endless, gateway.scheduler.step_s = True, 0.005
    body = json.dumps(
        {"messages": HI, "stream": stream} if path == "chat" else {"prompt": ["a", "b"], "stream": stream}
    )
    url = "/v1/chat/completions" if path == "chat" else "/v1/completions"
    head = f"POST {url} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", gateway.settings.port)) as connection:
            connection.sendall((head + body).encode())
            if stream:
                assert b"200 OK" in connection.recv(4096)
            assert wait_until(lambda: len(gateway.scheduler.live) == (1 if path == "chat" else 2))
        assert wait_until(lambda: not gateway.scheduler.live, 2.0)


def test_a_client_that_leaves_before_the_first_token(gateway: GatewayHarness) -> None:
    gateway.scheduler.first_step_s = 30.0
    with socket.create_connection(("127.0.0.1", gateway.settings.port)) as connection:
        body = json.dumps({"messages": HI, "stream": True})
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert b"200 OK" in connection.recv(4096)  # the headers come at admission
    assert wait_until(lambda: not gateway.scheduler.live, 2.0)


def metadata(key: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {key}"),)


def test_text_over_grpc(gateway: GatewayHarness) -> None:
    with grpc.insecure_channel(gateway.grpc_target) as channel:
        stub = gateway_pb2_grpc.TextServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="dspark.v1.TextService")
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        request = gateway_pb2.GenerateTextRequest(
            messages=[gateway_pb2.ChatMessage(role="user", content="Hi")],
            sampling=scheduler_pb2.SamplingParams(seed=3),
            speculation=scheduler_pb2.SpeculationParams(enabled=False, max_draft_tokens=2),
            stop=["wor"],
        )
        replies = list(stub.GenerateText(request, metadata=metadata("key")))
        pieces = [piece for reply in replies for piece in reply.chunk.pieces]
        assert "".join(piece.text for piece in pieces) == "Hello, "
        assert [piece.is_accepted_draft for piece in pieces[:3]] == [True, True, False]
        summary = replies[-1].summary
        assert summary.finish_reason == scheduler_pb2.FINISH_REASON_STOP
        assert summary.num_completion_tokens == len("Hello, wor")
        assert summary.speculation.num_steps == 2
        assert gateway.scheduler.requests[-1].sampling.seed == 3
        assert gateway.scheduler.requests[-1].speculation.max_draft_tokens == 0
        assert gateway.scheduler.requests[-1].speculation.HasField("max_draft_tokens")
        assert len(gateway.scheduler.requests[-1].isolation_key) == 16
        replies = list(
            stub.GenerateText(gateway_pb2.GenerateTextRequest(prompt="a", max_tokens=2), metadata=metadata("key"))
        )
        assert "".join(p.text for r in replies for p in r.chunk.pieces) == "He"
        assert replies[-1].summary.finish_reason == scheduler_pb2.FINISH_REASON_LENGTH


def test_every_field_of_the_text_service(gateway: GatewayHarness) -> None:
    variables = Struct()
    variables.update({"flavour": "sweet"})
    sweet = gateway_pb2.GenerateTextRequest(
        messages=[
            gateway_pb2.ChatMessage(role="user", content="Hi", name="Ann"),
            gateway_pb2.ChatMessage(role="assistant", content="Well"),
        ],
        stop=["wor"],
        include_stop=True,
        bad_words=["zz"],
        stop_token_ids=[7],
        ignore_eos=True,
        reasoning_effort="low",
        chat_template_kwargs=variables,
        continue_final_message=True,
        num_logprobs=1,
    )
    with grpc.insecure_channel(gateway.grpc_target) as channel:
        stub = gateway_pb2_grpc.TextServiceStub(channel)

        def answer(request: gateway_pb2.GenerateTextRequest) -> tuple[str, list[int], int]:
            chunks = [reply.chunk for reply in stub.GenerateText(request, metadata=metadata("key"))]
            text = "".join(piece.text for chunk in chunks for piece in chunk.pieces)
            ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
            return text, ids, sum(len(chunk.scores) for chunk in chunks)

        assert answer(sweet) == ("Hello, wor", encode("Hello, wor"), 10)
        sent = gateway.scheduler.requests[-1]
        assert list(sent.prompt_token_ids)[-4:] == encode("Well")
        assert (list(sent.stop_token_ids), sent.ignore_eos, sent.num_logprobs) == ([7], True, 1)
        assert [list(word.token_ids) for word in sent.sampling.bad_words] == [encode("zz"), encode(" zz")]
        shown = gateway_pb2.GenerateTextRequest(
            prompt_token_ids=[5, 6, 7], truncate_prompt_tokens=2, show_special_tokens=True, include_stop=True,
            return_token_ids=True,
        )  # fmt: skip
        assert answer(shown) == ("Hello, world<|im_end|>", [*encode("Hello, world"), EOS_ID], 0)
        assert list(gateway.scheduler.requests[-1].prompt_token_ids) == [6, 7]
        assert answer(gateway_pb2.GenerateTextRequest(prompt="a")) == ("Hello, world", [], 0)
        for bad, field in (
            ({"prompt": "a", "prompt_token_ids": [1]}, "prompt"),
            ({"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort"),
            ({"prompt": "a", "num_logprobs": 21}, "logprobs"),
            ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ({"prompt_token_ids": [300]}, "prompt"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                answer(gateway_pb2.GenerateTextRequest(**bad))  # type: ignore[arg-type]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert dict(caught.value.trailing_metadata())["dspark-field"] == field


def test_grpc_refusals(gateway: GatewayHarness) -> None:
    with grpc.insecure_channel(gateway.grpc_target) as channel:
        stub = gateway_pb2_grpc.TextServiceStub(channel)
        cases = [
            (gateway_pb2.GenerateTextRequest(prompt="a"), "wrong", grpc.StatusCode.UNAUTHENTICATED),
            (gateway_pb2.GenerateTextRequest(), "key", grpc.StatusCode.INVALID_ARGUMENT),
            (gateway_pb2.GenerateTextRequest(prompt="a", model="x"), "key", grpc.StatusCode.NOT_FOUND),
            (
                gateway_pb2.GenerateTextRequest(prompt="a", sampling=scheduler_pb2.SamplingParams(top_p=2)),
                "key",
                grpc.StatusCode.INVALID_ARGUMENT,
            ),
        ]
        for request, key, code in cases:
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.GenerateText(request, metadata=metadata(key)))
            assert caught.value.code() is code
        assert dict(caught.value.trailing_metadata())["dspark-field"] == "top_p"


def test_cancelling_the_grpc_call_aborts(gateway: GatewayHarness) -> None:
    gateway.scheduler.is_endless, gateway.scheduler.step_s = True, 0.005
    with grpc.insecure_channel(gateway.grpc_target) as channel:
        call = gateway_pb2_grpc.TextServiceStub(channel).GenerateText(
            gateway_pb2.GenerateTextRequest(prompt="a"), metadata=metadata("key")
        )
        assert next(call).chunk.pieces
        call.cancel()
        assert wait_until(lambda: not gateway.scheduler.live, 2.0)


def test_the_documented_example_runs(gateway: GatewayHarness) -> None:
    command = [sys.executable, str(EXAMPLE), "Hi", "--address", gateway.grpc_target, "--api-key", "key"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert output.startswith("Hello, world\n")


class RemoteScheduler:
    """The scripted scheduler behind a real gRPC server on a Unix socket."""

    def __init__(self, scheduler: ScriptedScheduler, directory: Path) -> None:
        self.scheduler, self.address = scheduler, f"unix:{directory}/scheduler.sock"

    def client(self) -> GrpcScheduler:
        """Starts the server on the running loop, and connects."""
        server, health = async_server(
            SCHEDULER_SERVICE,
            self.address,
            lambda server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self.scheduler, server),
            max_message_bytes=2**20,
        )

        async def start() -> None:
            await server.start()
            await health.set(SCHEDULER_SERVICE, health_pb2.HealthCheckResponse.SERVING)

        self.server, self.health = server, health
        self.started = asyncio.ensure_future(start())
        return GrpcScheduler(self.address)


def test_the_same_over_grpc_to_the_scheduler(model_dir: Path, tmp_path: Path) -> None:
    scheduler = ScriptedScheduler()
    remote = RemoteScheduler(scheduler, tmp_path)
    with GatewayHarness(model_dir, scheduler=remote.client) as gateway:
        gateway.wait_ready()
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        response = gateway.post("/v1/chat/completions", {"messages": HI}, headers={"traceparent": trace})
        assert response.json()["choices"][0]["message"]["content"] == "Hello, world"
        assert scheduler.metadata[-1]["traceparent"].split("-")[1] == trace.split("-")[1]
        assert gateway.chat(stop="wor").json()["choices"][0]["message"]["content"] == "Hello, "
        for refusal, status in ((QueueFullError("full"), 429), (InvalidRequestError("bad", field="top_k"), 400)):
            scheduler.refusal = refusal
            response = gateway.chat(stream=True)
            assert response.status_code == status
            assert response.json()["error"]["param"] == (refusal.field or None)
        scheduler.refusal = None
        scheduler.is_endless, scheduler.step_s = True, 0.005
        with socket.create_connection(("127.0.0.1", gateway.settings.port)) as connection:
            body = json.dumps({"messages": HI, "stream": True})
            connection.sendall(
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            assert b"200 OK" in connection.recv(4096)
        assert wait_until(lambda: not scheduler.live, 2.0)
        asyncio.run_coroutine_threadsafe(remote.server.stop(0), gateway._loop).result()  # type: ignore[arg-type]
        response = gateway.chat()
        assert response.status_code == 503
        assert re.search("draining|not available", response.json()["error"]["message"])
        assert wait_until(lambda: gateway.get("/health").status_code == 503)
        assert gateway.get("/health").json()["error"]["code"] == "unavailable"
