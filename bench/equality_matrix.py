"""What `dspark bench equality` varies, one factor at a time, and what each row must have shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

WEIGHT_FORMATS = ("q4", "fp16", "float32")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 1.0, "seed": 11},
    "nucleus": {"temperature": 1.0, "top_p": 0.95, "seed": 11},
}
"""Request fields. Text without a seed is another one each time, so only these can be compared."""
MAX_CONCURRENCY = 16
"""Slots of every server."""
_DEFAULT_CONCURRENCY = 4
_UNTIMED = (("DSPARK_SCHEDULER_MAX_PREFILL_DECODE_STEPS", "0"),)
"""Lets chunks be as large as they are asked for beside decode rows, too."""


@dataclass(frozen=True)
class ServerSettings:
    """What a server is started with; the weight format comes on top."""

    verify_mode: str = "off"
    max_chunk: int | None = None
    """Most token rows in a step, so also of one prompt; None: the default."""
    has_few_pages: bool = False
    """Too little K/V memory for the requests that run together."""
    in_process: bool = False
    has_prefix_cache: bool = False
    changes: tuple[tuple[str, str], ...] = ()
    """Variables of further settings."""


class Variation(NamedTuple):
    """One row of the matrix, apart from weight format and sampling."""

    factor: str
    value: str
    server: ServerSettings = ServerSettings()
    concurrency: int = _DEFAULT_CONCURRENCY


REFERENCE = Variation("reference", f"off, concurrency {_DEFAULT_CONCURRENCY}")


def variations() -> list[Variation]:
    """All of them, the reference first."""
    crowded = ServerSettings(has_few_pages=True)
    everything = ServerSettings(verify_mode="compact", max_chunk=32, has_few_pages=True)
    return [
        REFERENCE,
        *(Variation("concurrency", str(count), concurrency=count) for count in (1, _DEFAULT_CONCURRENCY, 16)),
        *(Variation("mode", mode, ServerSettings(verify_mode=mode)) for mode in ("static", "compact")),
        *(Variation("chunk", str(size), ServerSettings(max_chunk=size, changes=_UNTIMED)) for size in (16, 64, 512)),
        Variation("preemption", "few pages", crowded, MAX_CONCURRENCY),
        Variation("chaining", "off", ServerSettings(changes=(("DSPARK_SCHEDULER_CHAIN_PLAIN_STEPS", "false"),))),
        Variation("prefix cache", "compact", ServerSettings(verify_mode="compact", has_prefix_cache=True)),
        Variation("process", "one", ServerSettings(in_process=True)),
        Variation("together", "compact, chunk 32, few pages", everything, MAX_CONCURRENCY),
    ]


FACTORS = tuple(dict.fromkeys(variation.factor for variation in variations() if variation is not REFERENCE))


def choose(factors: Sequence[str]) -> list[Variation]:
    """The reference and the variations of `factors`; all if empty."""
    return [each for each in variations() if each is REFERENCE or not factors or each.factor in factors]


def few_pages(num_prompt_tokens: Sequence[int], max_tokens: int, page_size: int) -> int:
    """Pages that hold any one request to its end, and all that run together no longer than their prompts."""
    starts = sum(-(-count // page_size) for count in num_prompt_tokens[:MAX_CONCURRENCY])
    ends = [-(-(count + max_tokens) // page_size) for count in num_prompt_tokens]
    return max(starts, *ends, MAX_CONCURRENCY)  # a slot needs a page


def missing_evidence(variation: Variation, counters: dict[str, int]) -> str | None:
    """Why a row with these counters shows nothing, in words; None if what it varies really happened."""
    server = variation.server
    if server.has_few_pages and not counters["num_preemptions"]:
        return "no preemption happened"
    if server.has_prefix_cache and not counters["num_prefix_cache_hits"]:
        return "no prefix was found in the cache"
    if server.verify_mode != "off" and not counters["num_accepted"]:
        return "no draft was accepted"
    if server.verify_mode == "off" and counters["num_drafted"]:
        return "drafts were made"
    return None
