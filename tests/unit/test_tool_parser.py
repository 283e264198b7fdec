"""Tool calls out of text: the same whatever the text's pieces are."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tools.form import call_text
from gateway.tools.parser import ArgumentsPart, CallStart, TextPart, ToolCallParser

WEATHER = call_text("get_weather", '{"city": "Köln"}')
NESTED = call_text("f", r'{"a": {"b": ["}", "\"{", "\\"]}, "c": "</tool_call>\n<tool_call>"}')
EMPTY = call_text("g-1", "{}")


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]], bool]:
    """Text, calls (name, arguments), and whether it ended as a call. Checks the order of the parts."""
    parser = ToolCallParser()
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.push("", is_last=True)
    text, calls, ids = "", [], set()
    for part in parts:
        if isinstance(part, TextPart):
            assert part.text
            text += part.text
        elif isinstance(part, CallStart):
            assert part.call == len(calls)
            calls.append((part.name, ""))
            ids.add(part.call_id)
        else:
            assert isinstance(part, ArgumentsPart)
            assert part.text
            assert part.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    assert len(ids) == len(calls) == parser.num_calls
    return text, calls, parser.has_called


CASES: list[tuple[str, Any]] = [
    ("", ("", [], False)),
    ("Hello <b>, 1 < 2 <tool", ("Hello <b>, 1 < 2 <tool", [], False)),
    (WEATHER, ("", [("get_weather", '{"city": "Köln"}')], True)),
    (f"Let me see.\n{WEATHER}", ("Let me see.\n", [("get_weather", '{"city": "Köln"}')], True)),
    (f"<tool_<tool_call{EMPTY}", ("<tool_<tool_call", [("g-1", "{}")], True)),
    (NESTED, ("", [("f", r'{"a": {"b": ["}", "\"{", "\\"]}, "c": "</tool_call>\n<tool_call>"}')], True)),
    (f"{WEATHER}\n{EMPTY}\n{EMPTY}", ("", [("get_weather", '{"city": "Köln"}'), ("g-1", "{}"), ("g-1", "{}")], True)),
    # Cut short.
    (WEATHER[:-1], ("", [("get_weather", '{"city": "Köln"}')], True)),
    (WEATHER[: WEATHER.index("}") + 1], ("", [("get_weather", '{"city": "Köln"}')], True)),
    (WEATHER[: WEATHER.index("}")], ("", [("get_weather", '{"city": "Köln"')], False)),
    (WEATHER[: WEATHER.index("{", 20)], (WEATHER[: WEATHER.index("{", 20)], [], False)),
    (f"{EMPTY}\n{WEATHER[:12]}", (f"\n{WEATHER[:12]}", [("g-1", "{}")], True)),
    # No call of this form.
    ("<tool_call>{}", ("<tool_call>{}", [], False)),
    ('<tool_call>\n{"name": "", "arguments": {}}', ('<tool_call>\n{"name": "", "arguments": {}}', [], False)),
    (f"<tool_call>\n{EMPTY}", ("<tool_call>\n", [("g-1", "{}")], True)),
    (f"{EMPTY} and\n{EMPTY}", (" and\n", [("g-1", "{}"), ("g-1", "{}")], True)),
    (call_text("a" * 64, "{}"), ("", [("a" * 64, "{}")], True)),
    (call_text("a" * 65, "{}"), (call_text("a" * 65, "{}"), [], False)),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=range(len(CASES)))
def test_every_split_in_two_and_character_by_character(text: str, expected: Any) -> None:
    assert read([text]) == expected
    assert read(list(text)) == expected
    for cut in range(len(text) + 1):
        assert read([text[:cut], text[cut:]]) == expected


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_split(data: st.DataObject) -> None:
    # Parts of calls and what looks like them, in any order: whole calls are likely, and so are broken ones.
    atoms = [
        "<tool_call>",
        '\n{"name": "',
        "f",
        '", "arguments": ',
        "{",
        "}",
        '"',
        "\\",
        "}\n</tool_call>",
        "\n",
        "<",
        "é",
    ]
    pieces = st.lists(st.sampled_from([*atoms, WEATHER, NESTED, EMPTY]), max_size=12)
    text = "".join(data.draw(pieces))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    borders = [0, *sorted(cuts), len(text)]
    assert read([text[a:b] for a, b in pairwise(borders)]) == read([text])


@given(st.text("<tol_ca>n", max_size=40))
def test_text_is_told_at_once_up_to_what_a_call_could_begin_with(text: str) -> None:
    parser = ToolCallParser()
    told = "".join(part.text for part in parser.push(text) if isinstance(part, TextPart))
    held = text[len(told) :]
    assert text.startswith(told)
    assert held == "" or held.startswith("<tool_call>"[: len(held)])


@pytest.mark.parametrize(
    "text", ["<tool_call>{", '<tool_call>\n{"name": "f" ', call_text("a b", ""), call_text("f", "1")]
)
def test_what_is_no_call_is_told_as_soon_as_that_is_known(text: str) -> None:
    parser = ToolCallParser()
    assert "".join(part.text for part in parser.push(text) if isinstance(part, TextPart)) == text


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=9) | st.dictionaries(st.text(max_size=2), st.none())))
def test_arguments_stream_as_they_come(arguments: dict[str, Any]) -> None:
    text = json.dumps(arguments, ensure_ascii=False)
    parser = ToolCallParser()
    parser.push(f'<tool_call>\n{{"name": "f", "arguments": {text[0]}')
    for character in text[1:]:
        assert parser.push(character) == [ArgumentsPart(0, character)]
    assert parser.push("}\n</tool_call>", is_last=True) == []
