"""Grammars that the gateway writes, as llguidance reads them."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import pytest
from gateway_harness import EOS_ID, VOCAB_SIZE, tiny_tokenizer
from tokenizers import AddedToken

from gateway.tokenizer import TextTokenizer
from gateway.tokens import StructuredOutput
from gateway.tools.form import CALL_TAGS, Tool, call_text
from gateway.tools.grammar import MAX_CALLS, choice_grammar, json_text, tool_grammar
from gateway.tools.parser import ArgumentsPart, CallStart, ToolCallParser

EOS = 256


class _ByteTokens:
    eos_token_id, bos_token_id = EOS, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (EOS,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteTokens()))
WEATHER = Tool(
    "get_weather",
    "Weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 1}},
    },
)
ANY = Tool("get", None, {"type": "object"})
CITY = call_text("get_weather", '{"city": "<tool_call>", "days": 3}')
NOTHING = call_text("get", "{}")


def matcher(form: StructuredOutput) -> llguidance.LLMatcher:
    grammars = {
        "lark": llguidance.LLMatcher.grammar_from_lark,
        "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
        "regex": llguidance.LLMatcher.grammar_from_regex,
    }
    made = llguidance.LLMatcher(TOKENIZER, grammars[form.kind](form.text))
    assert not made.is_error(), made.get_error()
    return made


def allows(form: StructuredOutput, text: str) -> bool:
    """Whether the text, whole, has the form."""
    state, ids = matcher(form), list(text.encode())
    return state.validate_tokens(ids) == len(ids) and state.consume_tokens(ids) and state.is_accepting()


def grammar(**options: Any) -> StructuredOutput:
    defaults = {"is_required": False, "is_parallel": True, "content_schema": None, "added_tokens": {}}
    return tool_grammar([WEATHER, ANY], **{**defaults, **options})


@pytest.mark.parametrize(
    ("text", "auto", "required", "single", "with_schema"),
    [
        ("Hello <tool_call and </tool_call>", True, False, True, False),
        ("", True, False, True, False),
        (CITY, True, True, True, True),
        (f"{CITY}\n{NOTHING}\n{CITY}", True, True, False, True),
        (f"A < b <tool_call{CITY}\n{NOTHING}", True, False, False, False),
        (f"Let me see.\n{NOTHING}", True, False, True, False),
        ('{"a": 1}', True, False, True, True),
        (f'{{"a": 1}}{NOTHING}', True, False, True, False),
        ("A tag <tool_call> in text", False, False, False, False),
        (f"{CITY}{NOTHING}", False, False, False, False),
        (f"{CITY} done", False, False, False, False),
        (call_text("other", "{}"), False, False, False, False),
        (call_text("get", "[]"), False, False, False, False),
        (call_text("get_weather", '{"days": 3}'), False, False, False, False),
        (call_text("get_weather", '{"city": "x", "days": 0}'), False, False, False, False),
        (call_text("get_weather", '{"city":  "x"}'), False, False, False, False),
    ],
)
def test_what_an_answer_with_tools_may_be(
    text: str, auto: bool, required: bool, single: bool, with_schema: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert allows(grammar(), text) is auto
    assert allows(grammar(is_required=True), text) is required
    assert allows(grammar(is_parallel=False), text) is single
    assert allows(grammar(content_schema=schema), text) is with_schema


def test_the_number_of_calls_is_bounded() -> None:
    assert allows(grammar(is_required=True), "\n".join([NOTHING] * MAX_CALLS))
    assert not allows(grammar(is_required=True), "\n".join([NOTHING] * (MAX_CALLS + 1)))


def test_choices_are_taken_literally() -> None:
    choices = ['a "q" \\ /b/', "é😀", "line\nbreak", "a", "ab", "[x]{2}", "\x01\u2028"]
    form = choice_grammar(choices)
    assert all(allows(form, choice) for choice in choices)
    assert not any(allows(form, text) for text in ("", "abc", "xx", "é", "line", "A"))


def test_json_stands_on_one_line_unless_the_schema_says_otherwise() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    form = StructuredOutput("json_schema", json_text(schema))
    assert allows(form, '{"a": [1, 2]}')
    assert not allows(form, '{"a":[1,2]}')
    assert not allows(form, '{"a": [1,\n 2]}')
    loose = StructuredOutput("json_schema", json_text({**schema, "x-guidance": {"whitespace_flexible": True}}))
    assert allows(loose, '{"a": [1,\n 2]}')
    assert json.loads(json_text({"x-guidance": {"lenient": True}})) == {"x-guidance": {"lenient": False}}


def test_a_random_answer_reads_as_calls_of_the_tools() -> None:
    rng = random.Random(7)
    inner = {"type": "object", "properties": {"on": {"type": "boolean"}}, "additionalProperties": False}
    parameters = {
        "type": "object",
        "properties": {"unit": {"enum": ["°C", 'a"b\\', "}"]}, "deep": inner},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tools = [Tool("a", None, parameters), Tool("b-2", None, parameters)]
    form = tool_grammar(tools, is_required=True, is_parallel=True, content_schema=None, added_tokens={})
    num_calls = 0
    for _ in range(30):
        state, answer = matcher(form), bytearray()
        while not state.is_stopped() and len(answer) < 500:
            mask = int.from_bytes(state.compute_bitmask(), "little")
            token = rng.choice([id for id in range(EOS + 1) if mask >> id & 1])
            assert state.consume_token(token)
            if token == EOS:
                break
            answer.append(token)
        parser = ToolCallParser()
        parts = parser.push(answer.decode(), is_last=True)
        calls = [part.name for part in parts if isinstance(part, CallStart)]
        texts = [part.text for part in parts if isinstance(part, ArgumentsPart)]
        assert len(calls) == len(texts) > 0
        assert len(parts) == 2 * len(calls)
        assert parser.has_called
        assert all(set(calls) <= {"a", "b-2"} and json.loads(text)["unit"] in ("°C", 'a"b\\', "}") for text in texts)
        num_calls += len(calls)
    assert num_calls > 35


NAMES = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<other>", "[x]", "    "]
ROME = call_text("get_weather", '{"city": "Rome"}')


@pytest.mark.parametrize("tokens", [NAMES, NAMES[2:], NAMES[:1], NAMES[1:2]], ids=["all", "no tags", "open", "end"])
@pytest.mark.parametrize("is_special", [False, True], ids=["added", "special"])
def test_tags_and_marks_that_are_tokens(tokens: list[str], is_special: bool) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(t, special=is_special and t in CALL_TAGS, normalized=False) for t in tokens])
    text_tokenizer = TextTokenizer(tokenizer)
    grammar_tokenizer = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS_ID])

    def is_allowed(text: str, **options: Any) -> bool:
        form = grammar(added_tokens=text_tokenizer.shown_tokens, **options)
        state = llguidance.LLMatcher(grammar_tokenizer, llguidance.LLMatcher.grammar_from_lark(form.text))
        token_ids = tokenizer.encode(text).ids
        # What the target sees as tokens is text again for the parser.
        assert b"".join(map(text_tokenizer.token_bytes, token_ids)).decode() == text
        for token_id in [*token_ids, EOS_ID]:
            mask = int.from_bytes(state.compute_bitmask(), "little")
            assert not state.is_error(), state.get_error()
            if not mask >> token_id & 1:
                return False
            state.consume_token(token_id)
        return True

    assert is_allowed("A text    with [x] in it")
    assert is_allowed(f"{ROME}\n{NOTHING}")
    assert is_allowed(f"Well. {ROME}\n{NOTHING}")
    assert is_allowed(f"<think>Hm</think>Well.<other><other>{ROME}")
    assert is_allowed("<think></think>")
    assert is_allowed(f"{ROME}\n{NOTHING}", is_required=True)
    assert is_allowed(NOTHING, content_schema={"type": "object"})
    assert not is_allowed("<think></think><tool_call>")
    assert not is_allowed(f"{NOTHING}<think>")
    assert not is_allowed("<think>", is_required=True)
    assert not is_allowed(f"{ROME}\n{NOTHING}", is_parallel=False)
