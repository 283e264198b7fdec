"""Request fields for structured output and tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.schemas import ChatRequest, CompletionRequest, parse_request
from gateway.schemas.structured import RequestedForm, blamed_on
from gateway.settings import GatewaySettings
from gateway.tokens import StructuredOutput
from gateway.tools.grammar import JSON_STYLE, choice_grammar, json_text
from service_kit.errors import InvalidRequestError, QueueFullError

SETTINGS = GatewaySettings(max_tools=3, max_form_bytes=1000)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
STYLED = json.dumps({**SCHEMA, "x-guidance": {**JSON_STYLE, "lenient": False}}, separators=(",", ":"))


def chat(**fields: Any) -> ChatRequest:
    return parse_request(ChatRequest, {"messages": [{"role": "user", "content": "Hi"}], **fields}, SETTINGS)


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


@pytest.mark.parametrize(
    ("fields", "field", "output"),
    [
        ({}, "", None),
        ({"response_format": None, "structured_outputs": None, "tools": None}, "", None),
        ({"response_format": {"type": "text"}, "structured_outputs": {}, "tools": []}, "", None),
        ({"structured_outputs": {"json": None, "json_object": False}}, "", None),
        (
            {"response_format": {"type": "json_object", "json_schema": None}},
            "response_format",
            StructuredOutput("json_schema", json_text({"type": "object"})),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            "response_format",
            StructuredOutput("json_schema", STYLED),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs", StructuredOutput("json_schema", STYLED)),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            "structured_outputs",
            StructuredOutput("json_schema", STYLED),
        ),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs", StructuredOutput("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs", choice_grammar(["a", "b"])),
        (
            {"structured_outputs": {"grammar": 'start: "a"', "regex": None}},
            "structured_outputs",
            StructuredOutput("lark", 'start: "a"'),
        ),
    ],
)
def test_forms(fields: dict[str, Any], field: str, output: StructuredOutput | None) -> None:
    expected = None if output is None else RequestedForm(field, output)
    assert chat(**fields).requested_form({}) == expected
    if "tools" not in fields:
        assert parse_request(CompletionRequest, {"prompt": "a", **fields}, SETTINGS).requested_form({}) == expected


DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"items": DEEP}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": "y" * 999}}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}}, "response_format.json_schema"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 1001}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": {}, "grammar": "start:"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "tools": [tool()]}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool("a\n")]}, "tools[0].function.name"),
    ({"tools": [tool("a" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool(), tool()]}, "tools"),
    ({"tools": [tool("a"), tool("b"), tool("c"), tool("d")]}, "tools"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"x": "y" * 999})]}, "tools[0].function.parameters"),
    ({"tools": [tool("a", parameters={"x": "y" * 500}), tool("b", parameters={"x": "y" * 500})]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": tool("g")}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [tool("a b", arguments="")]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [tool("a", arguments={})]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_refused_names_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.field == field
    assert field in caught.value.message


def test_schemas_nested_too_deeply_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="nested"):
        chat(response_format={"type": "json_schema", "json_schema": {"schema": DEEP}})
    with pytest.raises(InvalidRequestError, match="nested"):
        chat(tools=[tool(parameters=DEEP)])
    with pytest.raises(InvalidRequestError, match="nested"):
        chat(structured_outputs={"json": json.dumps(DEEP)})


def test_tool_choices() -> None:
    tools = [tool("a", strict=True), tool("b", parameters={}, description="B")]
    auto, none, required, named = (
        chat(tools=tools, tool_choice=choice) for choice in (None, "none", "required", tool("b"))
    )
    assert [t.name for t in auto.offered_tools] == ["a", "b"]
    assert auto.offered_tools[0].parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert auto.offered_tools[1][1:] == ("B", {"type": "object"})
    assert none.offered_tools == ()
    assert none.requested_form({}) is None
    assert [t.name for t in named.offered_tools] == ["b"]
    texts = {
        (form.field, form.output.text) for r in (auto, required, named) if (form := r.requested_form({})) is not None
    }
    assert {field for field, _ in texts} == {"tools"}
    assert len(texts) == 3
    alone = chat(tools=tools, parallel_tool_calls=False).requested_form({})
    beside_json = chat(tools=tools, response_format={"type": "json_object"}).requested_form({})
    assert alone is not None
    assert beside_json is not None
    assert len(texts | {("tools", alone.output.text), ("tools", beside_json.output.text)}) == 5


def test_turns_of_a_chat_with_tools() -> None:
    call = {"id": "call_1", **tool("a", arguments='{"x": 1}')}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "content": "Two", "tool_calls": []},
    ]
    assert chat(messages=messages).template_messages() == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        {"role": "assistant", "content": "Two"},
    ]


def test_the_scheduler_s_refusal_is_told_of_the_field_that_asked() -> None:
    form = RequestedForm("response_format", StructuredOutput("regex", "("))
    with pytest.raises(InvalidRequestError) as caught, blamed_on(form):
        raise InvalidRequestError("structured_output: unclosed group", field="structured_output")
    assert (caught.value.field, caught.value.message) == ("response_format", "response_format: unclosed group")
    with (
        pytest.raises(InvalidRequestError, match=r"^ignore_eos goes not with response_format$") as other,
        blamed_on(form),
    ):
        raise InvalidRequestError("ignore_eos goes not with structured_output", field="ignore_eos")
    assert other.value.field == "ignore_eos"
    with pytest.raises(QueueFullError), blamed_on(form):
        raise QueueFullError("full")
