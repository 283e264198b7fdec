"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import re

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

from gateway.generation import TextGenerator
from gateway.responses import Answer, exactness
from gateway.schemas import ChatRequest, CompletionRequest, GenerationRequest, parse_request, unknown_parameters
from gateway.settings import GatewaySettings
from gateway.sse import EventStream, answer_while_connected
from gateway.web import json_response, read_json

_MAX_NAMED_PARAMETERS = 20


def add_generate_routes(app: FastAPI, settings: GatewaySettings, generator: TextGenerator) -> None:
    """The two generation endpoints."""

    async def respond(request: GenerationRequest, isolation_key: bytes) -> Response:
        model = generator.resolve_model(request.model)
        is_chat = isinstance(request, ChatRequest)
        if isinstance(request, ChatRequest):
            generations = [await generator.start_chat(request, isolation_key)]
        else:
            assert isinstance(request, CompletionRequest)
            generations = await generator.start_completions(request, isolation_key)
        info = generator.readiness.require_info()
        answer = Answer(request, generations, model=model, info=info, is_chat=is_chat)
        headers = ignored_parameters(request) | exactness(info)
        if request.stream:
            return EventStream(answer.chunks(), answer.cancel, headers, keepalive_s=settings.keepalive_s)
        return json_response(await answer.whole(), headers=headers)

    async def handle(http: Request, request_class: type[GenerationRequest]) -> Response:
        body = await read_json(http, settings.max_body_bytes)
        request = parse_request(request_class, body, settings)
        return await answer_while_connected(http, respond(request, http.state.isolation_key))

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await handle(http, ChatRequest)

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await handle(http, CompletionRequest)


def ignored_parameters(request: BaseModel) -> dict[str, str]:
    """The header that names what nobody knows: a few names, cut and without anything that a header may not hold."""
    names = [re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII) for name in unknown_parameters(request)]
    return {"x-dspark-ignored-parameters": ",".join(names[:_MAX_NAMED_PARAMETERS])} if names else {}
