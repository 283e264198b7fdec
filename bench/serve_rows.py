"""Rows of `dspark bench serve`: speed, what was drafted and accepted, and where the time of a token goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.comparison import paired_ratio
from bench.decomposition import Round, find_levers
from bench.measure import GroupResult
from bench.pareto import Gains, Missing, Point, gains
from bench.prompts import ALL
from launcher.client import Answer

Row = dict[str, Any]
CAP_ACCEPT = "cap-accept"
_LEAST_DRAFTED = 0.02
"""Share of rounds below which nothing that drafting costs can be told from noise."""


class Drafting(NamedTuple):
    """Sums over answers, from the statistics that came with them."""

    num_rounds: int
    """Steps of a request after its first token."""
    num_drafted_rounds: int
    """Those of them that drafted."""
    num_drafted: int
    num_verified: int
    num_accepted: int
    num_uncut_accepted: int
    """Drafts that the verifier accepted; in `cap-accept`, also those that were not committed."""

    @property
    def accepted_len(self) -> float:
        """Tokens that a request commits a round."""
        return 1.0 + self.num_accepted / max(1, self.num_rounds)


def sum_drafting(answers: Sequence[Answer]) -> Drafting:
    """Answers without statistics are of servers that never draft: a token a round."""
    sums = Drafting(0, 0, 0, 0, 0, 0)
    for answer in answers:
        stats = answer.speculation
        own = (
            Drafting(max(0, answer.num_tokens - 1), 0, 0, 0, 0, 0)
            if stats is None
            else Drafting(
                stats["num_spec_steps"],
                stats["num_drafted_steps"],
                stats["num_draft_tokens"],
                stats["num_verified_tokens"],
                stats["num_accepted_draft_tokens"],
                stats["num_uncut_accepted_tokens"],
            )
        )
        sums = Drafting(*(one + other for one, other in zip(sums, own, strict=True)))
    return sums


def make_rows(results: Sequence[GroupResult], baseline: str) -> list[Row]:
    """One row a (concurrency, class, mode), then one over all classes. Ratios pair each group, and each answer, with
    `baseline`'s."""
    rows = []
    for concurrency in sorted({result.concurrency for result in results}):
        chosen = [result for result in results if result.concurrency == concurrency]
        classes = list(dict.fromkeys(name for result in chosen for name in result.answer_classes))
        for name in [*classes, ALL] if len(classes) > 1 else classes:
            by_mode = {
                mode: _Sample(name, [result for result in chosen if result.mode == mode and result.has_class(name)])
                for mode in dict.fromkeys(result.mode for result in chosen)
            }
            rows += [_row(mode, concurrency, own, by_mode, baseline) for mode, own in by_mode.items() if own.groups]
    _add_gains(rows, baseline)
    return rows


class _Sample:
    """What one mode did for one class at one concurrency."""

    def __init__(self, class_name: str, groups: Sequence[GroupResult]) -> None:
        self.class_name, self.groups = class_name, groups
        self.is_whole = class_name == ALL or all(group.prompt_class == class_name for group in groups)
        """Whether groups hold nothing else, so that speeds and counters of groups are the class's own."""
        self.answers = [
            answer
            for group in groups
            for own, answer in zip(group.answer_classes, group.answers, strict=True)
            if class_name in (ALL, own)
        ]
        self.drafting = sum_drafting(self.answers)
        self.speeds = [group.tokens_per_second for group in groups]
        self.counters = (
            {name: sum(group.counters[name] for group in groups) for name in groups[0].counters} if groups else {}
        )

    @property
    def decode_speeds(self) -> list[float]:
        """Tokens per second of each group's steps without prefill, as the scheduler saw them; 0 if there are none."""
        return [
            group.counters.get("num_decode_committed", 0) / max(1, group.counters.get("decode_step_ns", 0)) * 1e9
            for group in self.groups
        ]

    def round(self) -> Round | None:
        """Means over steps without prefill; None if there were none."""
        steps = self.counters.get("num_decode_steps", 0)
        if not steps:
            return None
        draft, call, whole = (
            self.counters[f"decode_{name}"] / steps / 1e6 for name in ("draft_call_ns", "step_call_ns", "step_ns")
        )
        verified = self.drafting.num_verified / max(1, self.drafting.num_rounds)
        return Round(draft, call, whole - draft - call, self.drafting.accepted_len, verified)


def _row(mode: str, concurrency: int, own: _Sample, by_mode: dict[str, _Sample], baseline: str) -> Row:
    base = by_mode[baseline]
    tpots = [answer.tpot_ms for answer in own.answers if answer.tpot_ms is not None]
    user_pairs = [
        (base_ms, own_ms)
        for mine, other in zip(own.answers, base.answers, strict=False)
        if (own_ms := mine.tpot_ms) is not None and (base_ms := other.tpot_ms) is not None
    ]
    row: Row = {
        "class": own.class_name,
        "mode": mode,
        "concurrency": concurrency,
        "num_requests": len(own.answers),
        "num_tokens": sum(answer.num_tokens for answer in own.answers),
        "user_tokens_per_second": _quantile([1000 / ms for ms in tpots], 50),
        "user_speedup": _quantile([base_ms / own_ms for base_ms, own_ms in user_pairs], 50),
        "ttft_ms_p50": _quantile([answer.ttft_ms for answer in own.answers], 50),
        "tpot_ms_p50": _quantile(tpots, 50),
        "tpot_ms_p95": _quantile(tpots, 95),
    }
    if own.is_whole:
        num_groups = min(len(own.speeds), len(base.speeds))
        ratio = paired_ratio(own.speeds[:num_groups], base.speeds[:num_groups])
        row |= {
            "num_groups": len(own.groups),
            "tokens_per_second": _quantile(own.speeds, 50),
            "tokens_per_second_p25": _quantile(own.speeds, 25),
            "tokens_per_second_p75": _quantile(own.speeds, 75),
            "speedup": ratio.median,
            "speedup_p25": ratio.p25,
            "speedup_p75": ratio.p75,
        }
    if own.counters:
        cap = next((other for name, other in by_mode.items() if name.split(":")[0] == CAP_ACCEPT), None)
        row |= _drafting_columns(own.drafting, cap.drafting if cap is not None else None)
        if own.is_whole:
            row |= _step_columns(own, base)
    return row


def _drafting_columns(own: Drafting, cap: Drafting | None) -> Row:
    """`cap`: what `cap-accept` did with the same prompts.

    Utilisation is the accepted length of the rounds that drafted over the one that whole blocks would have had.
    """
    rounds, drafted = max(1, own.num_rounds), own.num_drafted_rounds
    row: Row = {
        "accepted_length": own.accepted_len,
        "verify_length": own.num_verified / rounds,
        "drafted_length": own.num_drafted / rounds,
        "drafted_share": drafted / rounds,
    }
    if drafted:
        row |= {
            "accepted_length_drafted": 1.0 + own.num_accepted / drafted,
            "verify_length_drafted": own.num_verified / drafted,
            "drafted_length_drafted": own.num_drafted / drafted,
            "acceptance_rate": own.num_accepted / own.num_verified if own.num_verified else None,
        }
    if drafted and cap is not None and cap.num_drafted_rounds:
        ceiling = cap.num_uncut_accepted / cap.num_drafted_rounds
        row["uncut_accepted_length"] = 1.0 + ceiling
        row["utilisation"] = (1.0 + own.num_accepted / drafted) / (1.0 + ceiling)
        row["draft_utilisation"] = own.num_accepted / drafted / ceiling if ceiling else None
    return row


def _step_columns(own: _Sample, base: _Sample) -> Row:
    """Means of a step from the scheduler's counters; the model forwards are what the executors timed themselves."""
    counters, round_, plain = own.counters, own.round(), base.round()
    if round_ is None:
        return {}
    steps, step_ns = counters["num_steps"], counters["step_ns"]
    outside = step_ns - counters["drafter_model_ns"] - counters["verifier_model_ns"]
    row: Row = {
        "decode_tokens_per_second": _quantile(own.decode_speeds, 50),
        "decode_speedup": paired_ratio(own.decode_speeds, base.decode_speeds).median
        if all(base.decode_speeds)
        else None,
        "rows": counters["num_decode_committed"] / counters["num_decode_steps"] / round_.accepted_len,
        "step_ms": round_.total_ms,
        "draft_ms": round_.draft_ms,
        "verify_ms": round_.verify_ms,
        "other_ms": round_.other_ms,
        "token_ms": round_.token_ms,
        "drafter_model_ms": counters["drafter_model_ns"] / steps / 1e6,
        "verifier_model_ms": counters["verifier_model_ns"] / steps / 1e6,
        "accept_ms": counters["verifier_accept_ns"] / steps / 1e6,
        "outside_models_ms": outside / steps / 1e6,
        "outside_models_share": outside / step_ns,
        "drafted_steps_share": counters["num_drafted_steps"] / steps,
        "num_preemptions": counters["num_preemptions"],
    }
    if counters["predicted_gain_ns"] or counters["measured_gain_ns"]:  # only the guard predicts
        row["predicted_speedup"] = 1.0 + counters["predicted_gain_ns"] / step_ns
        row["ledger_speedup"] = 1.0 + counters["measured_gain_ns"] / step_ns
    drafts = own.drafting.num_drafted_rounds >= _LEAST_DRAFTED * own.drafting.num_rounds
    levers = find_levers(round_, plain) if plain is not None and drafts else []
    row["lever"] = levers[0].words if levers else "drafts hardly or not"
    row |= {f"loss_{lever.name.replace(' ', '_')}": lever.loss for lever in levers}
    return row


def _add_gains(rows: list[Row], baseline: str) -> None:
    """Adds gains at equal user speed and at equal throughput over the baseline's curve, class by class."""
    for name in dict.fromkeys(row["class"] for row in rows):
        own = [row for row in rows if row["class"] == name and _point(row) is not None]
        curve = [point for row in own if row["mode"] == baseline and (point := _point(row)) is not None]
        for row in own if len(curve) > 1 else ():
            point = _point(row)
            if point is None or row["mode"] == baseline:
                continue
            found: Gains = gains(point, curve)
            row["throughput_gain_at_user_speed"] = _value(found.throughput)
            row["user_gain_at_throughput"] = _value(found.user_speed)


def _point(row: Row) -> Point | None:
    speed, throughput = row["user_tokens_per_second"], row.get("tokens_per_second")
    return Point(speed, throughput) if speed is not None and throughput is not None else None


def _value(gain: float | Missing) -> float | str:
    return gain.value if isinstance(gain, Missing) else gain


def _quantile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
