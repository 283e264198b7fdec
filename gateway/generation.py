"""Text in, text out: what the REST API and the gRPC text service share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace

from opentelemetry import metrics

from gateway.deadlines import Deadlines
from gateway.detokenizer import Detokenizer, Piece
from gateway.errors import GenerationFailedError, UnknownModelError
from gateway.genai import Operation, ServerMetrics
from gateway.generation_record import GenerationRecord
from gateway.live_requests import LiveRequests
from gateway.metrics import GatewayMetrics
from gateway.prompt_tokens import PromptTokens
from gateway.prompts import PromptEncoder
from gateway.readiness import Readiness
from gateway.room import fit_prompt
from gateway.scheduler_client import SchedulerClient, TokenStream
from gateway.schemas import ChatRequest, CompletionRequest, GenerationRequest, Speculation
from gateway.schemas.structured import blamed_on
from gateway.settings import GatewaySettings
from gateway.tokenizer import TextTokenizer
from gateway.tokens import ChoiceStats, FinishReason, ModelInfo, Sampling, StepReport, Summary, TokenRequest, Tokens
from service_kit.errors import InvalidRequestError, UnavailableError
from service_kit.scores import TokenScore

_SUMMARY_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Delta:
    """What one step added to one choice."""

    choice: int
    pieces: tuple[Piece, ...]
    token_ids: list[int]
    """The step's tokens, up to the end of a stop string."""
    num_tokens: int
    """Tokens of the choice so far."""
    finish_reason: FinishReason | None
    """Set on the choice's last delta."""

    scores: list[TokenScore] = field(default_factory=list)
    """One for each of `token_ids`, if asked for."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Of the next tokens of the prompt, from the second on."""
    report: StepReport | None = None
    """If asked for: of the step as it was, even where a stop string cut its tokens."""

    @property
    def text(self) -> str:
        """Text that is final since the last delta."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class End:
    """The end of a request."""

    choices: tuple[ChoiceStats, ...]
    """Empty when the scheduler did not say."""
    speculation_off_reason: str
    num_cached_tokens: int
    """Prompt tokens that were in the prefix cache."""


class Generation:
    """One admitted prompt with its choices."""

    def __init__(
        self,
        request: TokenRequest,
        stream: TokenStream,
        scheduler: SchedulerClient,
        detokenizers: list[Detokenizer],
        tokenizer: TextTokenizer,
        *,
        deadlines: Deadlines,
        live: LiveRequests,
        record: GenerationRecord,
    ) -> None:
        """Use TextGenerator."""
        self._deadlines = deadlines
        self._live = live
        live.add(self)
        self.request = request
        self.tokenizer = tokenizer
        self._stream = stream
        self._scheduler = scheduler
        self._detokenizers = detokenizers
        self._num_tokens = [0] * request.num_choices
        self._reasons: list[FinishReason | None] = [None] * request.num_choices
        self._record = record
        self._is_read = False

    async def events(self) -> AsyncGenerator[Delta | End, None]:
        """Deltas of all choices as they come, then one End. Closing the iterator aborts what still runs.

        Raises a ServiceError when the scheduler is lost or fails the request.
        """
        summary: Summary | None = None
        error: Exception | None = None
        self._is_read = True
        try:
            async with aclosing(self._stream.__aiter__()) as messages:
                while (message := await self._next(messages)) is not None:
                    if isinstance(message, Summary):
                        summary = message
                        break
                    if self._reasons[message.choice] is None and (delta := self._take(message)) is not None:
                        yield delta
                        if delta.finish_reason is not None and message.finish_reason is None:  # a stop string
                            await self._scheduler.abort(self.request.request_id, message.choice, "stop")
            if summary is not None and None in self._reasons:
                raise GenerationFailedError(summary.error or "the server aborted this request")
            if summary is None:
                yield End((), "", 0)
            else:
                yield End(summary.choices, summary.speculation_off_reason, summary.num_cached_tokens)
        except Exception as failure:
            error = failure
            raise
        finally:
            self.cancel()
            self._record.end(self._reasons, summary, error)

    def cancel(self) -> None:
        """Aborts what still runs."""
        self._stream.cancel()
        self._deadlines.close()
        self._live.discard(self)
        if not self._is_read:  # else the end is told where the events end
            self._record.end(self._reasons, None, None)

    async def _next(self, messages: AsyncIterator[Tokens | Summary]) -> Tokens | Summary | None:
        """The next message; None when the stream ends, or when only a summary is left that does not come."""
        is_done = None not in self._reasons
        if is_done:
            self._deadlines.close()
        try:
            return await asyncio.wait_for(messages.__anext__(), _SUMMARY_TIMEOUT_S if is_done else None)
        except (StopAsyncIteration, asyncio.TimeoutError):
            if not is_done:
                raise UnavailableError("the scheduler ended the stream early") from None
            return None

    def _take(self, message: Tokens) -> Delta | None:
        """The delta of a message; None when the choice failed (the summary says why)."""
        choice, reason = message.choice, message.finish_reason
        if reason in ("abort", "error"):
            return None
        if message.token_ids:
            self._deadlines.keep_first()
        step = self._detokenizers[choice].push(
            message.token_ids, message.num_accepted, is_last=reason is not None, ends_by_token=reason == "stop"
        )
        self._num_tokens[choice] += step.num_tokens
        self._record.take(choice, step.num_tokens)
        self._reasons[choice] = "stop" if step.is_stopped else reason
        return Delta(
            choice,
            step.pieces,
            message.token_ids[: step.num_tokens],
            self._num_tokens[choice],
            self._reasons[choice],
            message.scores[: step.num_tokens],
            message.prompt_scores,
            message.report,
        )


class TextGenerator:
    """Starts generations: names, prompts, limits, defaults, admission."""

    def __init__(
        self,
        settings: GatewaySettings,
        scheduler: SchedulerClient,
        readiness: Readiness,
        tokenizer: TextTokenizer,
        encoder: PromptEncoder,
    ) -> None:
        """`encoder` must use `tokenizer`."""
        self.model_names = settings.resolved_model_names()
        self.readiness = readiness
        self.live = LiveRequests()
        self.metrics = GatewayMetrics()
        self._server_metrics = ServerMetrics(metrics.get_meter_provider())
        self._settings = settings
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self.prompts = PromptTokens(tokenizer, encoder)

    def resolve_model(self, name: str | None) -> str:
        """The served name a request means. Raises UnknownModelError naming the served ones."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            raise UnknownModelError(f"model {name[:200]!r} does not exist; served: {served}", field="model")
        return name

    async def start_chat(self, request: ChatRequest, isolation_key: bytes) -> Generation:
        """Admits a chat of the caller that `isolation_key` stands for. Raises a ServiceError when it is refused."""
        info = self._prepare(request)
        token_ids = await self.prompts.of_chat(request)
        return await self._start(request, info, token_ids, "messages", isolation_key)

    async def start_completions(self, request: CompletionRequest, isolation_key: bytes) -> list[Generation]:
        """Admits every prompt, or none of them. Raises a ServiceError when one is refused."""
        info = self._prepare(request)
        prompts = await self.prompts.of_prompts(request.prompt)
        async with AsyncExitStack() as undo:
            generations = []
            for token_ids in prompts:
                generations.append(await self._start(request, info, token_ids, "prompt", isolation_key))
                undo.callback(generations[-1].cancel)
            undo.pop_all()
        return generations

    def _prepare(self, request: GenerationRequest) -> ModelInfo:
        """Checks that cost nothing. Returns what is served."""
        self.resolve_model(request.model)
        info = self.readiness.require_info()
        if request.prompt_logprobs is not None and (
            request.stream or (request.echoes and request.num_logprobs is not None)
        ):
            raise InvalidRequestError(
                "prompt_logprobs needs stream to be false, and says the same as echo with logprobs: send one of them",
                field="prompt_logprobs",
            )
        if request.n is not None and request.n > info.max_num_seqs:
            raise InvalidRequestError(f"n: at most {info.max_num_seqs} (max_num_seqs), got {request.n}", field="n")
        for name, token_ids in (("stop_token_ids", request.stop_token_ids), ("logit_bias", request.logit_bias)):
            for token_id in token_ids or ():
                if not 0 <= token_id < info.vocab_size:
                    raise InvalidRequestError(
                        f"{name}: {token_id} is outside the vocabulary of {info.vocab_size}", field=name
                    )
        return info

    async def _start(
        self, request: GenerationRequest, info: ModelInfo, token_ids: list[int], field: str, isolation_key: bytes
    ) -> Generation:
        prompt = fit_prompt(token_ids, request, info, field)
        sampling = _with_defaults(request.sampling(), info.sampling_defaults)
        if words := request.bad_words:
            sampling = replace(sampling, bad_words=await self.prompts.of_bad_words(words))
        speculation = request.speculation or Speculation.model_validate({})
        form = request.requested_form(self._tokenizer.shown_tokens)
        token_request = TokenRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            max_tokens=prompt.max_tokens,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            num_choices=request.n or 1,
            max_draft_tokens=speculation.limit,
            max_time_per_token_ms=speculation.max_time_per_token_ms,
            priority=speculation.priority,
            reports_steps=request.dspark is not None and request.dspark.steps,
            num_logprobs=request.num_logprobs,
            num_prompt_logprobs=request.num_logprobs if request.echoes else request.prompt_logprobs,
            isolation_key=isolation_key,
            structured_output=form.output if form is not None else None,
        )
        operation: Operation = "chat" if isinstance(request, ChatRequest) else "text_completion"
        model = self.resolve_model(request.model)
        record = GenerationRecord(token_request, operation, model, self.metrics, self._server_metrics)
        try:
            with record.entered(), blamed_on(form):
                stream = await self._scheduler.generate(token_request, timeout_s=self._settings.admission_timeout_s)
        except BaseException as error:
            record.refuse(error)
            raise
        detokenizers = [
            Detokenizer(
                self._tokenizer.named_bytes if request.shows_special_tokens else self._tokenizer.token_bytes,
                request.stop,
                sampling.min_tokens,
                keeps_stop=bool(request.include_stop_str_in_output),
            )
            for _ in range(token_request.num_choices)
        ]
        deadlines = Deadlines(stream, self._settings)
        return Generation(
            token_request,
            stream,
            self._scheduler,
            detokenizers,
            self._tokenizer,
            deadlines=deadlines,
            live=self.live,
            record=record,
        )

    def close(self) -> None:
        """Ends the worker threads."""
        self.prompts.close()


def _with_defaults(sampling: Sampling, defaults: Sampling) -> Sampling:
    unset = {
        name: getattr(defaults, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if getattr(sampling, name) is None
    }
    return replace(sampling, **unset)
