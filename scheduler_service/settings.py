"""Settings of the scheduler, from DSPARK_SCHEDULER_*."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: Any) -> Any:
    """Bytes of "1GiB", "512 MiB", "1.5gb" or a plain number. Raises ValueError naming the units."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError('a size is a number with a unit of B, KB, MB, GB, KiB, MiB or GiB, e.g. "1GiB"')
    return int(float(match[1]) * _UNITS[match[2].lower()])


class SchedulerSettings(BaseSettings):
    """Settings of the scheduler process."""

    model_config = SettingsConfigDict(env_prefix="DSPARK_SCHEDULER_", frozen=True, extra="forbid")

    verify_mode: Literal["off", "static", "fixed", "threshold", "compact", "cap-accept"] = "compact"
    """off: plain decoding, the drafter is never called. compact: drafts verified where that pays, none drafted where it
    does not. For comparison: static verifies whole blocks, fixed `fixed_window` drafts of each, threshold up to the
    first confidence below `confidence_threshold`; cap-accept verifies whole blocks and commits what compact would."""
    lossless_rule: Literal["adaptive", "causal", "lagged"] = "adaptive"
    """How compact chooses lengths without looking at what they decide about. causal: drafts in the order of their
    survival until one more does not pay. lagged: the number of drafts from older confidences. adaptive: causal, but
    lagged in steps where older confidences show that stopping early would leave cheaper tokens behind a jump of the
    costs."""
    budget_lag: int = Field(1, ge=1)
    """Steps between the confidences that set the lagged rule's budget and the step that spends it."""
    verify_lens_on_device: bool = False
    """Whether compact lets the verifier choose lengths in steps of the lagged rule, from confidences that the drafter
    hands it directly: drafting and verifying then follow each other without a way through this process. Both services
    must be able to. Steps of the causal rule, or with audits, masks, logit controls or scores, go the usual way."""
    fixed_window: int = Field(1, ge=1)
    """Drafts of each row that fixed drafts and verifies; at most the drafter's block."""
    confidence_threshold: float = Field(0.5, ge=0, le=1)
    """Least confidence that threshold verifies."""
    guard: bool = True
    """Whether compact and cap-accept draft only what pays by earlier steps; else every row's whole block."""
    elastic_blocks: bool = True
    """Whether the guard may draft fewer slots than a block where the drafter was trained for that (its config lists
    `elastic_block_sizes`)."""
    guard_probe_share: float = Field(0.005, ge=0, le=1)
    """Most of the time, as a share, that the guard may lose to learning whether drafting would pay."""
    max_time_per_token_ms: float = Field(0.0, ge=0)
    """Time per token, in milliseconds, that drafts must not push any request beyond (where compact or cap-accept
    schedules); requests may ask for their own. 0: none."""
    guard_margin: float = Field(0.02, ge=0)
    """Least gain for which the guard lets a step draft, as a share of a plain step."""
    audit_share: float = Field(0.01, ge=0, le=1)
    """Share of drafted rows whose whole block is verified, whatever the confidences, so that these can be judged; only
    in modes that trim by confidence. 0: none."""
    recalibrate: bool = True
    """Whether confidences are corrected, slowly, by what audited rows show."""
    speculation_off_reason: str = ""
    """Why verify_mode is off, told to clients (e.g. that no drafter fits the target)."""
    max_num_seqs: int = Field(16, ge=1, le=1024)
    """Most choices running at once (slots)."""
    max_model_len: int = Field(0, ge=0)
    """Longest context, prompt and answer, in tokens; 0: the target's own, capped by what kv_memory holds."""
    max_batch_tokens: int = Field(256, ge=1)
    """Most token rows in one step: verify rows and prefill chunks together."""
    max_prefill_decode_steps: float = Field(8.0, ge=0)
    """Most time that prefill may add to a step in which others decode, in one-row decode steps as measured at start:
    how far a long prompt may slow the answers that run beside it. 0: bounded by max_batch_tokens alone."""
    cost_file: Path | None = None
    """Costs measured by `dspark profile`, to be used in place of those in the cache directory; refused if they were
    measured on another engine. Unset: the cache directory's, measured at start if there are none."""
    kv_memory: Annotated[int, BeforeValidator(parse_bytes)] = Field(2**30, ge=1)
    """Bytes of target and draft K/V pages together, as a number or e.g. "1GiB"."""
    chain_plain_steps: bool = True
    """Send a step without drafts behind the one that runs, before its tokens are known: the verifier then does not wait
    for the scheduler in between. Changes no text."""
    prefix_cache: Literal["off", "isolated", "shared"] = "isolated"
    """Reuse of computed prompt prefixes and earlier answers. isolated: only among requests of one API key, since the
    time to the first token tells whether somebody sent the same prefix before. shared: among all. off: never."""
    max_queued_requests: int = Field(256, ge=1)
    """Most requests waiting for admission; more are refused."""
    max_queued_tokens: int = Field(2**20, ge=1)
    """Most prompt tokens waiting for admission; more are refused."""
    feature_ring_rows: int = Field(256, ge=1)
    """Feature rows kept per slot in shared memory; caps a prefill chunk. Unused when verify_mode is off."""
    tokenizer: Path | None = None
    """Directory of the target, whose tokenizer.json structured output needs. Unset: requests for it are refused."""
    max_grammar_bytes: int = Field(2**16, ge=1)
    """Longest JSON schema, regular expression or grammar of a request, in bytes."""
    grammar_timeout_s: float = Field(5.0, gt=0)
    """Seconds of computing that compiling one may take; else the request is refused."""
    trace_steps: Path | None = None
    """File that gets a JSON line for every phase of every step: step_id, phase, start_ns, end_ns (monotonic clock). The
    verifier's phases, and this process's draft_call, masks, step_call and commit."""
    trace_rounds: Path | None = None
    """File that gets a JSON line for every step: its sizes and times, and for each row that went on the confidences of
    its block and how many drafts were verified, accepted and committed. Numbers alone: no text, no token ids. For
    `dspark simulate`; record it with verify_mode static, where every draft is verified."""
    startup_timeout_s: float = Field(600.0, gt=0)
    """Seconds to wait for the executors to load."""
    step_timeout_s: float = Field(120.0, gt=0)
    """Deadline of one call to an executor, in seconds."""
    drain_timeout_s: float = Field(30.0, ge=0)
    """Seconds that running requests get to finish after SIGTERM."""

    @property
    def max_message_bytes(self) -> int:
        """Bound of a gRPC message: the longest prompt the queue may hold, plus page tables and framing."""
        return 2**20 + 8 * self.max_queued_tokens
