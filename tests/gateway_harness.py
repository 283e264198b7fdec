"""A gateway on loopback over a scripted scheduler, and a tiny byte-level tokenizer."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from dspark.v1 import scheduler_pb2, types_pb2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.metrics_page import MetricsSource
from gateway.scheduler_client import LocalScheduler
from gateway.server import serve
from gateway.settings import GatewaySettings
from service_kit.errors import ServiceError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 300  # larger than the tokenizer, as models pad theirs
EOS_ID = 257


def tiny_tokenizer() -> Tokenizer:
    """One token a byte, and two special tokens: 256 <|im_start|>, 257 <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def encode(text: str, *, plain: bool = False) -> list[int]:
    """Ids of a text; special tokens in it count unless it is `plain`."""
    tokenizer = tiny_tokenizer()
    tokenizer.encode_special_tokens = plain
    return list(tokenizer.encode(text).ids)


def write_model(directory: Path, *, template: str | None = CHATML) -> Path:
    """A model directory as the gateway needs it."""
    directory.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def score(token_id: int) -> types_pb2.TokenScore:
    """What the scripted scheduler says of any token: the one before it in the vocabulary was twice as likely."""
    top_ids, top_logprobs = [max(token_id - 1, 0)], [-token_id / 512]
    return types_pb2.TokenScore(logprob=-token_id / 256, rank=2, top_token_ids=top_ids, top_logprobs=top_logprobs)


def _report(step: list[int]) -> dict[str, Any]:
    """What the scripted scheduler tells of a step."""
    confidences = [0.875, 0.75, 0.5, float("nan")]
    accepted = {"num_uncut_accepted": min(2, len(step) - 1)}
    return {"num_drafted": 4, "confidences": confidences, "budget": 6, "num_rows": 2, **accepted}


class ScriptedScheduler:
    """A SchedulerService that answers from a script, three tokens a step of which two are accepted drafts."""

    def __init__(self) -> None:
        self.answers = ["Hello, world"]
        """Text of each choice; the last one serves all further choices."""
        self.max_model_len = 200
        self.sampling_defaults = scheduler_pb2.SamplingParams()
        self.inexact_reason = ""
        self.refusal: ServiceError | None = None
        self.failure: ServiceError | None = None
        """Raised after the first step."""
        self.error = ""
        """Ends the request with FINISH_REASON_ERROR after the first step."""
        self.num_cached_tokens = 0
        self.load: Any = None
        """What GetLoad answers, if set."""
        self._polls = 0
        self.is_endless = False
        self.stop_ids = {EOS_ID}
        """Tokens that end an answer with `stop` where it ends."""
        self.step_s = 0.0
        self.first_step_s = 0.0
        self.live: set[str] = set()
        self.requests: list[Any] = []
        self.aborts: list[Any] = []
        self.metadata: list[dict[str, str]] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.live.add(request.request_id)
        # As the real one does: a stream cancelled while a message is being written is never resumed.
        context.add_done_callback(lambda _: self.live.discard(request.request_id))
        await context.send_initial_metadata(())
        await asyncio.sleep(self.first_step_s)
        if request.HasField("num_prompt_logprobs"):
            for token_id in request.prompt_token_ids[1:]:
                chunk = scheduler_pb2.TokenChunk(choice=0, prompt_scores=[score(token_id)])
                yield scheduler_pb2.GenerateResponse(chunk=chunk)
        running = {choice: self._tokens(request, choice) for choice in range(max(1, request.num_choices))}
        counts = dict.fromkeys(running, 0)
        while running:
            for choice in list(running):
                if any(a.request_id == request.request_id and a.choice == choice for a in self.aborts):
                    del running[choice]
                    continue
                step, running[choice] = running[choice][:3], running[choice][3:]
                counts[choice] += len(step)
                is_last = not running[choice] and not self.is_endless
                reason = 0
                if is_last:
                    is_eos = step[-1] in self.stop_ids and not request.ignore_eos
                    reason = scheduler_pb2.FINISH_REASON_STOP if is_eos else scheduler_pb2.FINISH_REASON_LENGTH
                    del running[choice]
                elif not running[choice]:
                    running[choice] = self._tokens(request, choice)
                if self.error:
                    reason = scheduler_pb2.FINISH_REASON_ERROR
                    running.clear()
                yield scheduler_pb2.GenerateResponse(
                    chunk=scheduler_pb2.TokenChunk(
                        choice=choice,
                        token_ids=step,
                        num_accepted=min(2, len(step) - 1),
                        num_verified=4,
                        finish_reason=reason,
                        scores=[score(token_id) for token_id in step] if request.HasField("num_logprobs") else [],
                        **(_report(step) if request.report_steps else {}),
                    )
                )
                await asyncio.sleep(self.step_s)
                if self.failure is not None:
                    raise self.failure
        yield self._summary(request, counts)

    def _tokens(self, request: Any, choice: int) -> list[int]:
        tokens = [*encode(self.answers[min(choice, len(self.answers) - 1)]), EOS_ID]
        return tokens[: request.max_tokens]

    def _summary(self, request: Any, counts: dict[int, int]) -> Any:
        choices = [
            scheduler_pb2.ChoiceSummary(
                choice=choice,
                finish_reason=scheduler_pb2.FINISH_REASON_STOP,
                num_tokens=count,
                num_steps=2,
                num_drafted_steps=2,
                num_uncut_accepted=4,
                num_drafted=8,
                num_verified=6,
                num_accepted=3,
                accepted_histogram=[0, 1, 1, 0, 0],
            )
            for choice, count in counts.items()
        ]
        summary = scheduler_pb2.GenerateSummary(
            choices=choices,
            num_prompt_tokens=len(request.prompt_token_ids),
            error=self.error,
            num_cached_tokens=self.num_cached_tokens,
        )
        return scheduler_pb2.GenerateResponse(summary=summary)

    async def Abort(self, request: Any, context: Any) -> Any:
        self.aborts.append(request)
        return scheduler_pb2.AbortResponse()

    async def GetLoad(self, request: Any, context: Any) -> Any:
        self._polls += 1  # so that it never looks stalled
        return self.load or scheduler_pb2.GetLoadResponse(num_running=len(self.live), num_committed=self._polls)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return scheduler_pb2.GetModelInfoResponse(
            model="tiny",
            drafter="tiny-drafter",
            verify_mode="static",
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=4,
            eos_token_ids=[EOS_ID],
            block_size=4,
            sampling_defaults=self.sampling_defaults,
            inexact_reason=self.inexact_reason,
        )


def free_port() -> int:
    """A port nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Polls `condition`; False after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class GatewayHarness:
    """The whole gateway (`serve`) in a thread. A context manager."""

    def __init__(
        self, model_dir: Path, *, scheduler: Any = None, sources: Sequence[MetricsSource] = (), **settings: Any
    ) -> None:
        """`scheduler` makes a SchedulerClient when called on the loop; without one, a ScriptedScheduler serves.
        `sources` are services whose metrics are shown."""
        self._sources = sources
        self.scheduler = ScriptedScheduler()
        """Its settings that GetModelInfo reports must be made before entering the context."""
        self._make_client = scheduler or (lambda: LocalScheduler(self.scheduler))
        self.settings = GatewaySettings(
            port=free_port(), grpc_port=free_port(), model_dir=model_dir, **{"served_model_names": "tiny", **settings}
        )
        self.url = f"http://127.0.0.1:{self.settings.port}"
        self.grpc_target = f"127.0.0.1:{self.settings.grpc_port}"
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=10)
        """Keeps its connections."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            client = self._make_client()
            await serve(self.settings, client, self._stop, sources=self._sources)
            await client.close()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> GatewayHarness:
        self._thread.start()
        assert wait_until(lambda: self._error is not None or self._is_up()), "the gateway did not start"
        if self._error is not None:
            self.http.close()
            raise self._error
        return self

    def _is_up(self) -> bool:
        try:
            return self.get("/health/live").status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self) -> GatewayHarness:
        """Returns once /health says so."""
        assert wait_until(lambda: self.get("/health").status_code == 200)
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.close()
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=10)
        assert not self._thread.is_alive(), "the gateway did not stop"

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A POST; `body` is sent as JSON unless it is bytes."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.http.post(path, **content, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """A GET."""
        return self.http.get(path, **options)

    def chat(self, text: str = "Hi", **fields: Any) -> httpx.Response:
        """One chat request: of a single turn unless `messages` are given."""
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})
