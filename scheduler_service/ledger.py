"""Cumulative counters since start: what was done, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ledger:
    """Written by the step thread only; reading single counters from elsewhere is safe."""

    num_steps: int = 0
    num_committed: int = 0
    """Tokens committed, first tokens included."""
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    """Drafts committed."""
    num_uncut_accepted: int = 0
    """Drafts that the verifier accepted: in `cap-accept`, also those beyond the window that is committed."""
    num_verify_rows: int = 0
    """Emitting row-steps after the first token: the denominator of the accepted length."""
    num_prefill_tokens: int = 0
    num_invalid_confidences: int = 0
    """Windows that ended early by a confidence that was NaN or outside [0, 1]."""
    num_drafted_steps: int = 0
    predicted_gain_ns: int = 0
    """Time that drafting was expected to save against plain decoding, when it was decided on."""
    measured_gain_ns: int = 0
    """Time that it saved by what drafted steps took and brought; below 0 if it lost."""
    step_ns: int = 0
    """Wall time of whole steps."""
    draft_call_ns: int = 0
    step_call_ns: int = 0
    """Wall time inside the calls, as seen from here."""
    drafter_model_ns: int = 0
    """Ingest, backbone and head, as the drafter measured them."""
    verifier_model_ns: int = 0
    """Forward and head, as the verifier measured them."""
    verifier_accept_ns: int = 0


@dataclass(frozen=True)
class Load:
    """Gauges, with the counters at the same moment."""

    num_running: int
    num_waiting: int
    num_free_slots: int
    num_slots: int
    num_free_pages: int
    num_pages: int
    num_preemptions: int
    num_cached_pages: int
    """Idle pages kept for their content; free as well."""
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    """Prompt tokens looked up in the prefix cache since start, and found."""
    ledger: Ledger
