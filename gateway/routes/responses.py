"""POST /v1/responses."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from gateway.generation import TextGenerator
from gateway.responses import exactness
from gateway.responses_stream import ResponsesAnswer
from gateway.routes.generate import ignored_parameters
from gateway.schemas import ResponsesRequest, parse_request
from gateway.schemas.responses import renamed
from gateway.settings import GatewaySettings
from gateway.sse import EventStream, answer_while_connected
from gateway.web import json_response, read_json
from service_kit.errors import InvalidRequestError


def add_responses_routes(app: FastAPI, settings: GatewaySettings, generator: TextGenerator) -> None:
    """The endpoint."""

    async def respond(request: ResponsesRequest, isolation_key: bytes) -> Response:
        model = generator.resolve_model(request.model)
        chat = request.to_chat(settings)
        try:
            generation = await generator.start_chat(chat, isolation_key)
        except InvalidRequestError as error:
            raise renamed(error) from error
        info = generator.readiness.require_info()
        answer = ResponsesAnswer(request, generation, model=model, info=info)
        headers = ignored_parameters(request) | exactness(info)
        if request.stream:
            return EventStream(
                answer.chunks(), answer.cancel, headers, keepalive_s=settings.keepalive_s, to_failure=answer.failure
            )
        return json_response(await answer.whole(), headers=headers)

    @app.post("/v1/responses")
    async def responses(http: Request) -> Response:
        request = parse_request(ResponsesRequest, await read_json(http, settings.max_body_bytes), settings)
        return await answer_while_connected(http, respond(request, http.state.isolation_key))
