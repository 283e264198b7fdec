"""The OpenAPI document, made of the request models and served at /openapi.json. Handlers do not use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)

_ID = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_REFUSALS = {
    400: "A field at fault, or a prompt that does not fit.",
    401: "No API key, or a wrong one.",
    404: "No such model.",
    413: "The body is too large.",
    429: "The queue is full, or the key's limit is reached; see Retry-After.",
    500: "The server failed this request.",
    503: "Loading, draining or restarting; see Retry-After.",
    504: "A deadline passed.",
}


def openapi_document(version: str, *, open_paths: frozenset[str], has_keys: bool) -> dict[str, Any]:
    """The document. `open_paths` need no key even where there are keys."""
    paths: dict[str, Any] = {
        "/v1/chat/completions": _post("Answers a chat.", [ChatRequest], _ref("ChatCompletion"), is_stream=True),
        "/v1/completions": _post("Continues raw prompts.", [CompletionRequest], _ref("Completion"), is_stream=True),
        "/v1/responses": _post(
            "Answers a chat, stateless, as the Responses API does.",
            [ResponsesRequest],
            _ref("Response"),
            is_stream=True,
        ),
        "/tokenize": _post(
            "Token ids of a raw prompt, or of a chat as the template renders it.",
            [TokenizeTextRequest, TokenizeChatRequest],
            _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT), token_strs=_or_null(_list(_ID))),
        ),
        "/detokenize": _post("Text of token ids.", [DetokenizeRequest], _object(prompt=_ID)),
        "/v1/models": _get("The served models.", _object(object=_ID, data=_list(_ref("Model"))), (401, 503)),
        "/v1/models/{name}": _get("One served model.", _ref("Model"), (401, 404, 503))
        | {"parameters": [{"name": "name", "in": "path", "required": True, "schema": _ID}]},
        "/version": _get("Version of the server.", _object(version=_ID), (401,)),
        "/openapi.json": _get("This document.", {"type": "object"}, (401,)),
        "/health": _get("200 if requests are served and tokens come.", _object(status=_ID), (503,)),
        "/health/ready": _get("The same as /health.", _object(status=_ID), (503,)),
        "/health/live": _get("200 while the process runs.", _object(status=_ID), ()),
        "/metrics": _get("Metrics of all services, in Prometheus's text format.", None, (401,)),
    }
    for path, item in paths.items():
        for operation in (item[method] for method in ("get", "post") if method in item):
            if path in open_paths or not has_keys:
                operation["security"] = []
                operation["responses"].pop("401", None)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "DSpark", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**_request_schemas(), **_ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return document | ({"security": [{"key": []}]} if has_keys else {})


def _request_schemas() -> dict[str, Any]:
    models = (
        *(ChatRequest, CompletionRequest, ResponsesRequest),
        *(TokenizeTextRequest, TokenizeChatRequest, DetokenizeRequest),
    )
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = _bounds_renamed(definitions["$defs"])
    return schemas


def _bounds_renamed(schema: Any) -> Any:
    """Bounds that pydantic could not name, since another validator comes before them, under JSON schema's names."""
    if isinstance(schema, list):
        return [_bounds_renamed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    names = {"ge": "minimum", "le": "maximum"} if schema.get("type") == "integer" else {}
    return {names.get(key, key): _bounds_renamed(value) for key, value in schema.items()}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _responses(content: dict[str, Any], statuses: Sequence[int]) -> dict[str, Any]:
    refusals = {
        str(status): {
            "description": _REFUSALS[status],
            "content": {"application/json": {"schema": _ref("Error")}},
            **({"headers": {"Retry-After": {"schema": _COUNT}}} if status in (429, 503) else {}),
        }
        for status in statuses
    }
    return {"200": {"description": "The answer.", "content": content}, **refusals}


def _get(summary: str, answer: dict[str, Any] | None, statuses: Sequence[int]) -> dict[str, Any]:
    kind, schema = ("text/plain", _ID) if answer is None else ("application/json", answer)
    return {"get": {"summary": summary, "responses": _responses({kind: {"schema": schema}}, statuses)}}


def _post(
    summary: str, models: Sequence[type[BaseModel]], answer: dict[str, Any], *, is_stream: bool = False
) -> dict[str, Any]:
    refs = [_ref(model.__name__) for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if is_stream:
        content["text/event-stream"] = {}  # readers apply a schema to the body or to each event, so there is none
    statuses = [status for status in _REFUSALS if is_stream or status != 504]
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": _responses(content, statuses),
        }
    }


_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_REASON = {"enum": ["stop", "length", "tool_calls"]}
_MESSAGE = _object(role={"const": "assistant"}, content=_or_null(_ID))
_ANSWERS: dict[str, Any] = {
    "Error": _object(error=_object(message=_ID, type=_ID, param=_or_null(_ID), code=_or_null(_ID))),
    "Model": _object(id=_ID, object=_ID, created=_COUNT, owned_by=_ID, root=_ID, max_model_len=_COUNT),
    "ChatCompletion": _object(
        id=_ID,
        object={"const": "chat.completion"},
        created=_COUNT,
        model=_ID,
        system_fingerprint=_ID,
        choices=_list(_object(index=_COUNT, message=_MESSAGE, finish_reason=_REASON)),
        usage=_USAGE,
    ),
    "Completion": _object(
        id=_ID,
        object={"const": "text_completion"},
        created=_COUNT,
        model=_ID,
        system_fingerprint=_ID,
        choices=_list(_object(index=_COUNT, text=_ID, finish_reason=_REASON)),
        usage=_USAGE,
    ),
    "Response": _object(
        id=_ID,
        object={"const": "response"},
        created_at=_COUNT,
        status={"enum": ["completed", "incomplete"]},
        model=_ID,
        output=_list({"type": "object"}),
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
    ),
}
"""What answers always have; they may have more."""
