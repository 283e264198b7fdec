"""The gRPC text service: the same generations as the REST API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
from dspark.v1 import gateway_pb2, gateway_pb2_grpc
from opentelemetry.trace import SpanKind

from gateway.auth import ApiKeys
from gateway.conversions import reason_to_pb, report_to_pb, stats_to_pb
from gateway.generation import Delta, End, Generation, TextGenerator
from gateway.key_limits import KeyLimits
from gateway.request_scope import enter_request
from gateway.responses import exactness
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.settings import GatewaySettings
from gateway.text_request import parse_text_request
from service_kit.rpc import async_server
from service_kit.scores import scores_to_pb
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
            generation = await self._start(parse_text_request(request, self._settings), isolation_key)
            with_ids = request.return_token_ids or request.HasField("num_logprobs")
            await context.send_initial_metadata(tuple(exactness(self._generator.readiness.require_info()).items()))
            num_tokens, reason = 0, None
            async with aclosing(generation.events()) as events:
                async for item in events:
                    if isinstance(item, Delta):
                        num_tokens, reason = item.num_tokens, item.finish_reason
                        if item.pieces or item.report is not None or (with_ids and item.token_ids):
                            yield gateway_pb2.GenerateTextResponse(chunk=_chunk(item, with_ids=with_ids))
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

    async def _start(self, request: ChatRequest | CompletionRequest, isolation_key: bytes) -> Generation:
        if isinstance(request, ChatRequest):
            return await self._generator.start_chat(request, isolation_key)
        return (await self._generator.start_completions(request, isolation_key))[0]


def _chunk(delta: Delta, *, with_ids: bool) -> gateway_pb2.TextChunk:
    return gateway_pb2.TextChunk(
        pieces=[
            gateway_pb2.TextPiece(text=piece.text, is_accepted_draft=piece.is_accepted_draft) for piece in delta.pieces
        ],
        step=report_to_pb(delta.report),
        token_ids=delta.token_ids if with_ids else (),
        scores=scores_to_pb(delta.scores),
    )


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
