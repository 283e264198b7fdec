"""What speculation did for an answer, under the names other servers and benchmark tools use."""

from __future__ import annotations

from typing import Any

from gateway.generation import End
from gateway.tokens import ChoiceStats, ModelInfo


def speculation_statistics(end: End | None, info: ModelInfo) -> dict[str, Any]:
    """`metrics` and `dspark` of an answer with a single choice; nothing while there is no `end`."""
    if end is None:
        return {}
    off = {"dspark": {"speculation_off_reason": end.speculation_off_reason}} if end.speculation_off_reason else {}
    if not end.choices or info.block_size == 0:
        return off
    return {"metrics": {"speculative_decoding": _speculation(end.choices[0], info.block_size)}, **off}


def _speculation(stats: ChoiceStats, block_size: int) -> dict[str, Any]:
    histogram = [*stats.accepted_histogram, *[0] * (block_size + 1 - len(stats.accepted_histogram))]
    return {
        "mean_acceptance_length": 1 + stats.num_accepted / stats.num_steps if stats.num_steps else None,
        "draft_acceptance_rate": stats.num_accepted / stats.num_drafted if stats.num_drafted else None,
        "acceptance_histogram": histogram,
        "num_spec_steps": stats.num_steps,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_drafted,
        "num_verified_tokens": stats.num_verified,
        "num_drafted_steps": stats.num_drafted_steps,
        "num_uncut_accepted_tokens": stats.num_uncut_accepted,
        "num_spec_tokens": block_size,
    }
