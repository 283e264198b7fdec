"""/openapi.json describes every route, and requests, answers and errors as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import GatewayHarness, write_model
from jsonschema import Draft202012Validator

from gateway.app import create_app
from gateway.auth import ApiKeys
from gateway.key_limits import KeyLimits
from gateway.metrics_page import MetricsPage
from gateway.routes.metrics import METRICS_PATH
from gateway.scheduler_client import LocalScheduler
from gateway.server import create_generator

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def gateway(model_dir: Path) -> Iterator[GatewayHarness]:
    with GatewayHarness(model_dir) as harness:
        yield harness.wait_ready()


@pytest.fixture(scope="module")
def document(gateway: GatewayHarness) -> dict[str, Any]:
    return dict(gateway.get("/openapi.json").json())


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


def request_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    return dict(document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])


def test_every_route_is_described(gateway: GatewayHarness, document: dict[str, Any]) -> None:
    described = {
        (path, method.upper()) for path, item in document["paths"].items() for method in item if method != "parameters"
    }
    for path, method in described - {(METRICS_PATH, "GET")}:
        url = path.replace("{name}", "tiny")
        response = gateway.get(url) if method == "GET" else gateway.post(url, {})
        assert response.status_code == (200 if method == "GET" else 400), path
        assert gateway.http.delete(url).status_code == 405
    served = {path.replace("{name:path}", "{name}") for path in route_paths(gateway)}
    pages = {path for path in served if path == "/" or path.startswith("/static")}
    assert served - pages == set(document["paths"])


def route_paths(gateway: GatewayHarness) -> set[str]:
    generator = create_generator(gateway.settings, LocalScheduler(gateway.scheduler))
    page: MetricsPage = None  # type: ignore[assignment]  # nothing here asks for it
    app = create_app(gateway.settings, generator, ApiKeys([]), KeyLimits(gateway.settings), page)
    return {route.path for route in app.routes}  # type: ignore[attr-defined]


def test_schemas_are_schemas_and_every_reference_resolves(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from [value["$ref"]] if "$ref" in value else []
            for item in value.values():
                yield from references(item)
        elif isinstance(value, list):
            for item in value:
                yield from references(item)

    assert {ref.removeprefix("#/components/schemas/") for ref in references(document)} <= set(schemas)
    assert '"ge"' not in str(document).replace("'", '"')


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "stop": "x", "logit_bias": {"3": 1}, "tool_choice": "auto", "top_k": -1}),
        ("/v1/chat/completions", {**CHAT, "stop": ["x"], "seed": 2**63, "dspark": {"pieces": None}, "user": "me"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": None}], "stop": None}),
        ("/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True}),
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/completions", {"prompt": [[1], "a"], "max_tokens": 2.0}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {**CHAT, "return_token_strs": True}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
    ids=str,
)
def test_requests_and_answers_are_as_described(
    gateway: GatewayHarness, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    validator(document, request_schema(document, path)).validate(body)
    response = gateway.post(path, body)
    assert response.status_code == 200, response.text
    described = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    validator(document, described).validate(response.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {**CHAT, "top_k": -2}),
        ("/v1/chat/completions", {**CHAT, "min_tokens": -1}),
        ("/v1/chat/completions", {**CHAT, "stop": 5}),
        ("/v1/chat/completions", {**CHAT, "logit_bias": {"x": 1}}),
        ("/v1/chat/completions", {**CHAT, "logit_bias": {"1": 101}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/v1/chat/completions", {**CHAT, "speculation": {"x": 1}}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/responses", {"input": []}),
        ("/v1/responses", {"input": "a", "previous_response_id": "x"}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": "a"}),
    ],
    ids=str,
)
def test_what_is_described_as_wrong_is_refused(
    gateway: GatewayHarness, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    assert not validator(document, request_schema(document, path)).is_valid(body)
    response = gateway.post(path, body)
    assert response.status_code == 400
    described = document["paths"][path]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    validator(document, described).validate(response.json())


def test_keys_are_described_where_there_are_some(model_dir: Path, document: dict[str, Any]) -> None:
    assert "security" not in document
    with GatewayHarness(model_dir, api_keys="k") as gateway:
        assert gateway.get("/openapi.json").status_code == 401
        closed = gateway.get("/openapi.json", headers={"Authorization": "Bearer k"}).json()
    assert closed["security"] == [{"key": []}]
    assert closed["paths"]["/health"]["get"]["security"] == []
    assert "401" in closed["paths"]["/tokenize"]["post"]["responses"]
    assert "401" not in document["paths"]["/tokenize"]["post"]["responses"]
