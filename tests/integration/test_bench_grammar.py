"""`dspark bench grammar` in small, on the real server: answers judged by a package that has no part in making them."""

from __future__ import annotations

import jsonschema
import pytest
from rich.console import Console

from bench.grammar import GrammarRow, print_rows, run_grammar
from bench.grammar_schemas import random_schema
from launcher.stack import RunningServer


@pytest.mark.model
def test_answers_are_valid_and_equal(server: RunningServer) -> None:
    rows = run_grammar(server.url, num_schemas=4, max_tokens=120, concurrency=4)
    assert [row.problem for row in rows] == [""] * 4
    assert any(row.is_complete for row in rows)


def test_schemas_are_schemas_and_vary() -> None:
    schemas = [random_schema(seed) for seed in range(200)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert schemas == [random_schema(seed) for seed in range(200)]
    assert len({str(schema) for schema in schemas}) > 180


def test_what_is_wrong_is_told() -> None:
    console = Console(record=True, width=120)
    rows = [GrammarRow(0, "", True, 30, 10, 40, 19), GrammarRow(7, "'{' is no JSON", True, 30, 20, 40, 1)]
    print_rows(console, rows)
    text = console.export_text()
    assert "1.67" in text, "tokens of all steps over all steps"
    assert "schema 7: '{' is no JSON" in text
