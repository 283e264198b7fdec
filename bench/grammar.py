"""`dspark bench grammar`: random JSON schemas, greedily, with speculation on and off.

Every answer must be valid under its schema by the `jsonschema` package, which has no part in making it, and both must
have the same text. Reported: how many tokens a step commits under a form.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean

from rich.console import Console
from rich.table import Table

from bench.grammar_schemas import Schema, random_schema
from launcher.client import Answer, Client, ServerError, new_answer
from service_kit.errors import ConfigurationError

_COUNTS = ("num_spec_steps", "num_verified_tokens", "num_accepted_draft_tokens")


@dataclass(frozen=True)
class GrammarRow:
    """One schema, asked for twice."""

    seed: int
    problem: str
    """What is wrong with the answers, in words; empty if nothing is."""
    is_complete: bool
    """Whether the answer ended before max_tokens; only then it can be judged by its schema."""
    num_tokens: int
    num_steps: int
    """After the first token, with speculation."""
    num_verified: int
    num_accepted: int

    @property
    def accepted_length(self) -> float:
        """Tokens a step committed."""
        return 1.0 + self.num_accepted / max(1, self.num_steps)


def run_grammar(url: str, num_schemas: int, max_tokens: int, concurrency: int) -> list[GrammarRow]:
    """Asks the server at `url` for all schemas. Raises ServerError, or ConfigurationError without `jsonschema`."""
    try:
        import jsonschema  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ConfigurationError("bench grammar judges answers by jsonschema: pip install jsonschema") from error
    client = Client(url)

    def judge(seed: int) -> GrammarRow:
        schema = random_schema(seed)
        drafted, plain = (_ask(client, schema, max_tokens, is_drafting=on) for on in (True, False))
        problem, is_complete = "", drafted.finish_reason == "stop"
        if drafted.text != plain.text or drafted.num_tokens != plain.num_tokens:
            problem = f"with speculation {drafted.text!r}, without {plain.text!r}"
        elif is_complete:
            try:
                jsonschema.validate(json.loads(drafted.text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                problem = f"{drafted.text!r}: {error}"
        elif drafted.finish_reason != "length":
            problem = f"ended by {drafted.finish_reason!r}"
        counts = drafted.speculation or {}
        found = (int(counts.get(name, 0)) for name in _COUNTS)
        return GrammarRow(seed, problem, is_complete, drafted.num_tokens, *found)

    try:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(judge, range(num_schemas)))
    finally:
        client.close()


def _ask(client: Client, schema: Schema, max_tokens: int, *, is_drafting: bool) -> Answer:
    answer = new_answer()
    question = f"Make up an example of this as JSON: {json.dumps(schema)}"
    asked = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "example", "schema": schema}},
        "speculation": {"enabled": is_drafting},
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    for _ in client.chat([{"role": "user", "content": question}], answer, **asked):
        pass
    return answer


def print_rows(console: Console, rows: Sequence[GrammarRow]) -> None:
    """What came of all schemas together, then what went wrong."""
    complete = [row for row in rows if row.is_complete]
    table = Table("schemas", "complete", "wrong", "tokens", "tokens/step", "drafts accepted", "best", "worst")
    lengths = [row.accepted_length for row in rows]
    num_steps, num_accepted = sum(row.num_steps for row in rows), sum(row.num_accepted for row in rows)
    table.add_row(
        f"{len(rows)}",
        f"{len(complete)}",
        f"{sum(bool(row.problem) for row in rows)}",
        f"{mean(row.num_tokens for row in rows):.1f}",
        f"{1 + num_accepted / max(1, num_steps):.2f}",
        f"{num_accepted / max(1, sum(row.num_verified for row in rows)):.0%}",
        f"{max(lengths):.2f}",
        f"{min(lengths):.2f}",
    )
    console.print(table)
    for row in rows:
        if row.problem:
            console.print(f"schema {row.seed}: {row.problem}", style="red", markup=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit status 1 if an answer is wrong."""
    parser = argparse.ArgumentParser("dspark bench grammar", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a running server")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=4)
    options = parser.parse_args(arguments)
    try:
        rows = run_grammar(options.url, options.schemas, options.max_tokens, options.concurrency)
    except (ServerError, ConfigurationError) as error:
        print(f"bench grammar: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    print_rows(Console(), rows)
    raise SystemExit(any(row.problem for row in rows))
