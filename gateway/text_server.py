"""The gRPC text service: the same generations as the REST API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
from dspark.v1 import gateway_pb2, gateway_pb2_grpc, scheduler_pb2
from opentelemetry.trace import SpanKind

from gateway.auth import ApiKeys
from gateway.conversions import reason_to_pb, report_to_pb, sampling_from_pb, stats_to_pb
from gateway.generation import Delta, End, Generation, TextGenerator
from gateway.key_limits import KeyLimits
from gateway.request_scope import enter_request
from gateway.responses import exactness
from gateway.schemas import ChatRequest, CompletionRequest, parse_request
from gateway.settings import GatewaySettings
from service_kit.errors import InvalidRequestError
from service_kit.rpc import async_server
from service_kit.telemetry import from_metadata, tracer

TEXT_SERVICE = "dspark.v1.TextService"


class TextServicer(gateway_pb2_grpc.TextServiceServicer):
    """TextService over the shared generator."""

    def __init__(self, settings: GatewaySettings, generator: TextGenerator, keys: ApiKeys, limits: KeyLimits) -> None:
        """Shares `generator` and `limits` with the REST API."""
        self._limits = limits
        self._settings = settings
        self._generator = generator
        self._keys = keys

    async def GenerateText(
        self, request: gateway_pb2.GenerateTextRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateTextResponse]:
        """Streams chunks, then the summary; cancelling the call aborts the request."""
        metadata = context.invocation_metadata() or ()
        enter_request(next((str(value) for key, value in metadata if key == "x-request-id"), ""))
        isolation_key = self._keys.require(
            next((str(value) for key, value in metadata if key == "authorization"), None)
        )
        with (
            self._limits.request(isolation_key),
            tracer().start_as_current_span(
                "TextService/GenerateText", context=from_metadata(metadata), kind=SpanKind.SERVER
            ),
        ):
            generation = await self._start(request, isolation_key)
            await context.send_initial_metadata(tuple(exactness(self._generator.readiness.require_info()).items()))
            num_tokens, reason = 0, None
            async with aclosing(generation.events()) as events:
                async for item in events:
                    if isinstance(item, Delta):
                        num_tokens, reason = item.num_tokens, item.finish_reason
                        if item.pieces or item.report is not None:
                            yield gateway_pb2.GenerateTextResponse(chunk=_chunk(item))
                    else:
                        yield gateway_pb2.GenerateTextResponse(
                            summary=gateway_pb2.TextSummary(
                                finish_reason=reason_to_pb(reason),
                                num_prompt_tokens=len(generation.request.prompt_token_ids),
                                num_completion_tokens=num_tokens,
                                speculation=_speculation(item),
                                speculation_off_reason=item.speculation_off_reason,
                                num_cached_tokens=item.num_cached_tokens,
                            )
                        )

    async def _start(self, request: gateway_pb2.GenerateTextRequest, isolation_key: bytes) -> Generation:
        if bool(request.messages) == bool(request.prompt):
            raise InvalidRequestError("give messages or prompt: exactly one of them", field="prompt")
        sampling = sampling_from_pb(request.sampling)
        if sampling.bad_words:
            raise InvalidRequestError(
                "sampling.bad_words holds tokens: use the REST API, which takes words, or SchedulerService",
                field="sampling.bad_words",
            )
        fields: dict[str, Any] = {name: value for name, value in vars(sampling).items() if value is not None}
        del fields["bad_words"]
        fields["logit_bias"] = dict(sampling.logit_bias)
        fields["stop"] = list(request.stop)
        if request.HasField("max_tokens"):
            fields["max_tokens"] = request.max_tokens
        if request.model:
            fields["model"] = request.model
        if request.HasField("speculation"):
            fields["speculation"] = {field.name: value for field, value in request.speculation.ListFields()}
        if request.report_steps:
            fields["dspark"] = {"steps": True}
        if request.HasField("structured_output"):
            fields["structured_outputs"] = _structured_outputs(request.structured_output)
        if request.messages:
            fields["messages"] = [{"role": m.role, "content": m.content} for m in request.messages]
            return await self._generator.start_chat(parse_request(ChatRequest, fields, self._settings), isolation_key)
        fields["prompt"] = request.prompt
        completion = parse_request(CompletionRequest, fields, self._settings)
        return (await self._generator.start_completions(completion, isolation_key))[0]


def _chunk(delta: Delta) -> gateway_pb2.TextChunk:
    return gateway_pb2.TextChunk(
        pieces=[
            gateway_pb2.TextPiece(text=piece.text, is_accepted_draft=piece.is_accepted_draft) for piece in delta.pieces
        ],
        step=report_to_pb(delta.report),
    )


def _structured_outputs(form: scheduler_pb2.StructuredOutput) -> dict[str, str]:
    """The REST API's field for it."""
    kind = form.WhichOneof("form")
    if kind is None:
        raise InvalidRequestError("structured_output: give json_schema, regex or lark", field="structured_output")
    return {{"json_schema": "json", "regex": "regex", "lark": "grammar"}[kind]: getattr(form, kind)}


def _speculation(end: End) -> Any:
    return stats_to_pb(end.choices[0]) if end.choices else None


def _register(servicer: TextServicer, server: grpc.aio.Server) -> None:
    gateway_pb2_grpc.add_TextServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]


def create_text_server(
    settings: GatewaySettings, generator: TextGenerator, keys: ApiKeys, limits: KeyLimits, address: str
) -> tuple[grpc.aio.Server, Any]:
    """The gRPC server bound to `address`, and its health servicer. Not started. Raises OSError if it cannot bind."""
    servicer = TextServicer(settings, generator, keys, limits)
    return async_server(
        TEXT_SERVICE,
        address,
        partial(_register, servicer),
        max_message_bytes=settings.max_body_bytes,
    )
