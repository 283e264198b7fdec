"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from gateway.generation import TextGenerator
from gateway.routes.generate import ignored_parameters
from gateway.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest, parse_request
from gateway.settings import GatewaySettings
from gateway.web import json_response, read_json
from service_kit.errors import InvalidRequestError


def add_tokenize_routes(app: FastAPI, settings: GatewaySettings, generator: TextGenerator) -> None:
    """The two endpoints. They need a model that is served, but never its engine."""

    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        body = await read_json(http, settings.max_body_bytes)
        is_chat = isinstance(body, dict) and body.get("messages") is not None
        request: TokenizeChatRequest | TokenizeTextRequest
        if is_chat:
            request = parse_request(TokenizeChatRequest, body, settings)
        else:
            request = parse_request(TokenizeTextRequest, body, settings)
        generator.resolve_model(request.model)
        info = generator.readiness.require_info()
        token_ids = await generator.prompts.of_tokenize(request)
        strings = await generator.prompts.texts(token_ids) if request.return_token_strs else None
        content = {"count": len(token_ids), "max_model_len": info.max_model_len, "tokens": token_ids}
        return json_response({**content, "token_strs": strings}, headers=ignored_parameters(request))

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        request = parse_request(DetokenizeRequest, await read_json(http, settings.max_body_bytes), settings)
        generator.resolve_model(request.model)
        vocab_size = generator.readiness.require_info().vocab_size
        for token_id in (min(request.tokens, default=0), max(request.tokens, default=0)):
            if not 0 <= token_id < vocab_size:
                message = f"tokens: {token_id} is outside the vocabulary of {vocab_size}"
                raise InvalidRequestError(message, field="tokens")
        content = {"prompt": await generator.prompts.text(request.tokens)}
        return json_response(content, headers=ignored_parameters(request))
