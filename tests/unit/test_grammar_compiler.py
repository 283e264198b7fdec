"""Forms to grammars: what is refused and how it says so, limits that hold against hostile ones, what is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_target import END_OF_TURN, NUM_TOKENS, tiny_tokenizer_file

from scheduler_service.grammar.compiler import GrammarCompiler, GrammarOptions
from scheduler_service.grammar.form import StructuredOutput
from scheduler_service.grammar.matcher import Grammar
from service_kit.errors import InvalidRequestError, QueueFullError

HOSTILE = json.dumps({"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}"} for i in range(1, 60)]})
"""Compiles in minutes and gigabytes."""
VOCAB_SIZE = NUM_TOKENS + 30


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> GrammarOptions:
    file = tiny_tokenizer_file(tmp_path_factory.mktemp("tokenizer"))
    return GrammarOptions(file, VOCAB_SIZE, (END_OF_TURN,), max_bytes=20_000, timeout_s=60.0)


@pytest.fixture(scope="module")
def compiler(options: GrammarOptions) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(options)
    yield compiler
    compiler.close()


def refusal_of(compiler: GrammarCompiler, kind: str, text: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutput(kind, text)).result()  # type: ignore[arg-type]
    assert caught.value.field == "structured_output"
    assert caught.value.message.startswith("structured_output: ")
    return caught.value.message


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a whole answer of these bytes has the form; the tokenizer's first ids are bytes."""
    ids = grammar.matcher().state
    tokens = tokenize(text)
    return ids.try_consume_tokens(tokens) == len(tokens) and ids.is_accepting()


def tokenize(text: str) -> list[int]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ((piece, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [alphabet.index(character) for character in piece]


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "(yes|no)!?", "no!", "maybe"),
        ("lark", 'start: "<" INNER ">"\nINNER: /[a-c]+/', "<abba>", "<d>"),
        ("json_schema", '{"type": "array", "items": {"type": "integer"}, "maxItems": 2}', "[1, -2]", "[1, 2, 3]"),
        ("json_schema", "{}", '{"a": null}', '{"a": nul}'),
    ],
)
def test_each_kind_allows_its_texts(compiler: GrammarCompiler, kind: str, text: str, good: str, bad: str) -> None:
    grammar = compiler.compile(StructuredOutput(kind, text)).result()  # type: ignore[arg-type]
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)
    mask = np.frombuffer(grammar.matcher().state.compute_bitmask(), np.uint32)
    assert mask.size == -(-VOCAB_SIZE // 32), "a mask for every row of the head"


def test_white_space_in_json_is_limited_unless_the_schema_says_otherwise(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    grammar = compiler.compile(StructuredOutput("json_schema", json.dumps(schema))).result()
    assert accepts(grammar, "[" + " " * 20 + "1]")
    assert not accepts(grammar, "[" + " " * 21 + "1]")
    own = {**schema, "x-guidance": {"whitespace_flexible": False, "lenient": True}, "contains": {}}
    assert "contains" in refusal_of(compiler, "json_schema", json.dumps(own)), "leniency is not to be had"
    del own["contains"]
    grammar = compiler.compile(StructuredOutput("json_schema", json.dumps(own))).result()
    assert accepts(grammar, "[1,2]")
    assert not accepts(grammar, "[1, 2]")


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"type":', "not JSON"),
        ("json_schema", "[]", "must be an object"),
        ("json_schema", '{"a":' * 3000 + "1" + "}" * 3000, "not JSON"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("regex", "a((", "unclosed group"),
        ("regex", "a(?=b)", "look-ahead"),
        ("lark", "start: other", "other"),
        ("regex", "x" * 20_001, "DSPARK_SCHEDULER_MAX_GRAMMAR_BYTES"),
    ],
)
def test_what_cannot_be_had_is_refused_in_words(compiler: GrammarCompiler, kind: str, text: str, words: str) -> None:
    assert words in refusal_of(compiler, kind, text)


def test_a_hostile_form_is_stopped_and_the_next_one_served(options: GrammarOptions) -> None:
    compiler = GrammarCompiler(replace(options, timeout_s=1.0))
    for _ in range(2):
        assert "DSPARK_SCHEDULER_GRAMMAR_TIMEOUT_S" in refusal_of(compiler, "json_schema", HOSTILE)
    assert accepts(compiler.compile(StructuredOutput("regex", "ab+")).result(), "abb")
    compiler.close()


def test_compiled_forms_are_kept_and_every_answer_has_a_matcher_of_its_own(compiler: GrammarCompiler) -> None:
    form = StructuredOutput("regex", "[ab]c")
    grammar = compiler.compile(form).result()
    assert compiler.compile(StructuredOutput("regex", "[ab]c")).result() is grammar
    first, second = grammar.matcher(), grammar.matcher()
    before = second.state.compute_bitmask()
    first.advance(tokenize("a"))
    assert second.state.compute_bitmask() == before
    assert first.state.compute_bitmask() != before


def test_few_forms_wait_and_those_of_clients_that_left_are_forgotten(
    options: GrammarOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, gate, compiled = GrammarCompiler(options), threading.Event(), []

    def compile_later(self: GrammarCompiler, form: StructuredOutput) -> str:
        gate.wait()
        compiled.append(form.text)
        return form.text

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_later)
    futures: list[Future[Grammar]] = [compiler.compile(StructuredOutput("regex", str(i))) for i in range(32)]
    with pytest.raises(QueueFullError, match="try again"):
        compiler.compile(StructuredOutput("regex", "one more"))
    assert futures[5].cancel()
    futures.append(compiler.compile(StructuredOutput("regex", "one more")))
    gate.set()
    for index, future in enumerate(futures):
        if index != 5:
            future.result()
    assert compiled == [str(i) for i in range(32) if i != 5] + ["one more"]
    compiler.close()


def test_a_tokenizer_that_cannot_be_used_is_told(tmp_path: Path, options: GrammarOptions) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for given in (replace(options, tokenizer=tmp_path / "tokenizer.json"), replace(options, vocab_size=100)):
        compiler = GrammarCompiler(given)
        assert "tokenizer.json cannot be used" in refusal_of(compiler, "regex", "a")
        compiler.close()


def test_closing_ends_what_is_compiled(options: GrammarOptions) -> None:
    compiler = GrammarCompiler(options)
    compiler.compile(StructuredOutput("regex", "a")).result()
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(refusal_of, compiler, "json_schema", HOSTILE)
        while not compiler._num_pending:
            pass
        compiler.close()
        refused.exception()  # refused or forgotten: it does not hang
