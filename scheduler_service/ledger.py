"""Cumulative counters since start: what was done, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.calibration_monitor import CalibrationError
from scheduler_service.cost_model_online import ErrorCounters


@dataclass
class Ledger:
    """Written by the step thread only; reading single counters from elsewhere is safe."""

    num_steps: int = 0
    num_chained_steps: int = 0
    """Steps that were sent behind the one that ran."""
    num_committed: int = 0
    """Tokens committed, first tokens included."""
    num_prompt_tokens: int = 0
    """Of prompts that were computed to their end, positions from the prefix cache included."""
    num_drafted: int = 0
    num_drafted_rows: int = 0
    """Blocks drafted."""
    num_verified: int = 0
    num_accepted: int = 0
    """Drafts committed."""
    num_uncut_accepted: int = 0
    """Drafts that the verifier accepted, up to a stop token: in `cap-accept`, also those beyond the window that is
    committed."""
    block_accept_low: float = 0.0
    block_accept_high: float = 0.0
    """Accepted length that whole blocks would have had, summed over `num_blocks`: at least, and at most (see
    `policy.block_accept`)."""
    num_blocks: int = 0
    num_open_blocks: int = 0
    """Blocks whose length is not known to the end."""
    num_verify_rows: int = 0
    """Emitting row-steps after the first token: the denominator of the accepted length."""
    num_prefill_tokens: int = 0
    num_invalid_confidences: int = 0
    """Windows that ended early by a confidence that was NaN or outside [0, 1]."""
    num_audited_rounds: int = 0
    num_audit_drafts: int = 0
    """Rounds whose whole block was verified to judge the confidences, and drafts verified in them; most of those would
    have been trimmed otherwise."""
    num_drafted_steps: int = 0
    predicted_gain_ns: int = 0
    """Time that drafting was expected to save against plain decoding, when it was decided on."""
    measured_gain_ns: int = 0
    """Time that it saved by what drafted steps took and brought; below 0 if it lost."""
    num_predictions: int = 0
    """Steps and draft passes whose time the cost model predicted and that were measured. Not those with prefill."""
    num_capped_errors: int = 0
    """Those of them that were too far off to be learned from in full."""
    predicted_ns: int = 0
    predicted_measured_ns: int = 0
    prediction_error_ns: int = 0
    """Of those, the time predicted, the time measured, and the sum of the distances between the two."""
    num_targeted_choices: int = 0
    """Choices that ended with two tokens or more and had a target for the time per token."""
    num_on_target_choices: int = 0
    """Those that kept it: goodput."""
    num_targeted_tokens: int = 0
    num_on_target_tokens: int = 0
    num_decode_steps: int = 0
    num_decode_committed: int = 0
    """Steps without prefill, and the tokens that they committed."""
    decode_step_ns: int = 0
    decode_draft_call_ns: int = 0
    decode_step_call_ns: int = 0
    """Of these steps: wall time, and that inside the calls."""
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

    def set_prediction_errors(self, *counters: ErrorCounters) -> None:
        """Takes over the sums of what the cost model has counted."""
        self.num_predictions = sum(each.num_measured for each in counters)
        self.num_capped_errors = sum(each.num_capped for each in counters)
        self.predicted_ns = round(sum(each.predicted_ns for each in counters))
        self.predicted_measured_ns = round(sum(each.measured_ns for each in counters))
        self.prediction_error_ns = round(sum(each.error_ns for each in counters))


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
    calibration_errors: list[CalibrationError]
    ledger: Ledger
