"""Rows, markdown and JSON of a peers run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import GroupResult
from bench.peers.run import Outcome
from bench.report import fingerprint

Row = dict[str, Any]


def speed_rows(results: Sequence[GroupResult], ours: Sequence[str]) -> list[Row]:
    """One row a (concurrency, engine). `<mode>_ratio` is the speed of our `<mode>` over the row's, group by group."""
    rows = []
    for concurrency in sorted({result.concurrency for result in results}):
        by_engine = _by_engine(result for result in results if result.concurrency == concurrency)
        for name, groups in by_engine.items():
            answers = [answer for group in groups for answer in group.answers]
            ratios = {
                f"{mode}_ratio": _median(
                    own.tokens_per_second / group.tokens_per_second
                    for own, group in zip(by_engine[mode], groups, strict=True)
                )
                for mode in ours
            }
            rows.append(
                {
                    "engine": name,
                    "concurrency": concurrency,
                    "num_groups": len(groups),
                    "num_tokens": sum(answer.num_tokens for answer in answers),
                    **_spread("tokens_per_second", [group.tokens_per_second for group in groups]),
                    **ratios,
                    "ttft_ms": _median(answer.ttft_ms for answer in answers),
                    "tpot_ms": _median(answer.tpot_ms for answer in answers if answer.tpot_ms is not None),
                    "common_prefix": _common_prefix(groups, by_engine[ours[0]]),
                }
            )
    return rows


def first_token_rows(results: Sequence[GroupResult], baseline: str) -> list[Row]:
    """One row an engine: time to the first token after a long prompt; `ratio` is the engine's over `baseline`'s."""
    by_engine = _by_engine(results)
    times = {name: [group.answers[0].ttft_ms for group in groups] for name, groups in by_engine.items()}
    return [
        {
            "engine": name,
            "num_prompts": len(own),
            "num_prompt_tokens": _median(group.answers[0].num_prompt_tokens for group in by_engine[name]),
            **_spread("ttft_ms", own),
            "ratio": _median(mine / base for mine, base in zip(own, times[baseline], strict=True)),
        }
        for name, own in times.items()
    ]


def document(
    outcome: Outcome,
    ours: Sequence[str],
    facts: Mapping[str, Any],
    options: Mapping[str, Any],
    check: Mapping[str, Any],
) -> dict[str, Any]:
    """All that a run found and what it depends on."""
    return {
        "rows": speed_rows(outcome.results, ours),
        "first_token": first_token_rows(outcome.long, ours[0]) if outcome.long else [],
        "engines": dict(facts),
        "failures": outcome.failures,
        "check": dict(check),
        "options": dict(options),
        "environment": fingerprint(),
    }


def markdown(content: Mapping[str, Any]) -> str:
    """The tables of a document."""
    options, environment = content["options"], content["environment"]
    ours = options["modes"]
    lines = [
        f"{environment['device']}, {environment['cores']} cores. {options['model']}, greedy, {options['max_tokens']} "
        f"tokens an answer (none ends earlier), {options['num_groups']} groups of prompts at each concurrency, every "
        "group to every engine in turn. tokens/s: generated tokens over the time from sending to the last token, "
        "prompt included; median (quartiles). Peers are timed in their own processes, ours and llama.cpp-server over "
        "HTTP.",
        "",
        *_table(
            [
                "at once",
                "engine",
                "tokens/s",
                *(f"{mode} ÷ it" for mode in ours),
                "ms to first",
                "ms a token",
                "same tokens",
            ],
            [
                [
                    str(row["concurrency"]),
                    row["engine"],
                    _with_spread(row, "tokens_per_second", 1),
                    *(f"{row[f'{mode}_ratio']:.2f}" for mode in ours),
                    f"{row['ttft_ms']:.0f}",
                    f"{row['tpot_ms']:.1f}",
                    f"{row['common_prefix']:.0f}",
                ]
                for row in content["rows"]
            ],
        ),
        "",
        f"same tokens: how many an answer shares with `{ours[0]}`'s before the first difference, on average.",
    ]
    if content["first_token"]:
        rows = [
            [
                row["engine"],
                f"{row['num_prompt_tokens']:.0f}",
                _with_spread(row, "ttft_ms", 0),
                f"{row['ratio']:.2f}",
            ]
            for row in content["first_token"]
        ]
        lines += ["", *_table(["engine", "prompt tokens", "ms to first token", f"it ÷ {ours[0]}"], rows)]
    facts = [
        [name, fact.get("note", ""), fact.get("dtype", ""), str(fact.get("threads", "")), _versions(fact)]
        for name, fact in content["engines"].items()
    ]
    lines += ["", *_table(["engine", "what", "weights", "threads", "versions"], facts)]
    lines += [f"\n{name} is missing: {reason}" for name, reason in content["failures"].items()]
    return "\n".join(lines) + "\n"


def write(directory: Path, content: Mapping[str, Any]) -> list[Path]:
    """Writes peers.json and peers.md into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = {"peers.json": json.dumps(content, indent=1) + "\n", "peers.md": markdown(content)}
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in texts]


def _by_engine(results: Iterable[GroupResult]) -> dict[str, list[GroupResult]]:
    found: dict[str, list[GroupResult]] = {}
    for result in results:
        found.setdefault(result.mode, []).append(result)
    return found


def _common_prefix(groups: Sequence[GroupResult], reference: Sequence[GroupResult]) -> float:
    lengths = []
    for group, expected in zip(groups, reference, strict=True):
        for own, other in zip(group.answers, expected.answers, strict=True):
            pairs = list(zip(own.token_ids, other.token_ids, strict=True))
            lengths.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)))
    return float(np.mean(lengths))


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def _spread(name: str, values: Sequence[float]) -> Row:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return {name: float(middle), f"{name}_p25": float(low), f"{name}_p75": float(high)}


def _with_spread(row: Row, name: str, digits: int) -> str:
    return f"{row[name]:.{digits}f} ({row[f'{name}_p25']:.{digits}f}-{row[f'{name}_p75']:.{digits}f})"


def _versions(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in facts.get("versions", {}).items())


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
