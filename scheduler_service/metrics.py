"""The scheduler's metrics, read off its counters when somebody asks. Names: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client.metrics_core import Metric

from scheduler_service.counts import ChoiceCounts, WindowCounts
from scheduler_service.ledger import Load
from service_kit.metrics import Histogram, MetricSpec

if TYPE_CHECKING:
    from scheduler_service.service import Scheduler

_NS = 1e-9

_COUNTERS = {
    "num_steps": MetricSpec("dspark_steps_total", "counter", "Steps run."),
    "num_chained_steps": MetricSpec(
        "dspark_chained_steps_total", "counter", "Steps sent behind the one that ran, before its tokens were known."
    ),
    "num_committed": MetricSpec("vllm:generation_tokens_total", "counter", "Tokens generated."),
    "num_prompt_tokens": MetricSpec(
        "vllm:prompt_tokens_total", "counter", "Tokens of prompts that were computed, cached ones included."
    ),
    "num_prefill_tokens": MetricSpec(
        "dspark_prefill_tokens_total", "counter", "Positions computed before a choice decodes."
    ),
    "num_drafted_rows": MetricSpec("vllm:spec_decode_num_drafts_total", "counter", "Blocks drafted: rows, not steps."),
    "num_drafted": MetricSpec("vllm:spec_decode_num_draft_tokens_total", "counter", "Drafts drafted, verified or not."),
    "num_accepted": MetricSpec(
        "vllm:spec_decode_num_accepted_tokens_total", "counter", "Drafts committed to an answer."
    ),
    "num_verified": MetricSpec("dspark_verified_drafts_total", "counter", "Drafts verified by the target."),
    "num_uncut_accepted": MetricSpec(
        "dspark_uncut_accepted_drafts_total",
        "counter",
        "Drafts that the target accepted, in mode cap-accept also those that were not committed.",
    ),
    "num_verify_rows": MetricSpec(
        "dspark_verify_rows_total",
        "counter",
        "Row-steps after the first token, drafted or not: what accepted lengths are divided by.",
    ),
    "num_drafted_steps": MetricSpec("dspark_drafted_steps_total", "counter", "Steps that drafted."),
    "num_invalid_confidences": MetricSpec(
        "dspark_invalid_confidences_total", "counter", "Windows ended early by a confidence that is no probability."
    ),
    "num_audited_rounds": MetricSpec(
        "dspark_audited_rounds_total", "counter", "Blocks verified whole to judge the confidences."
    ),
    "num_audit_drafts": MetricSpec("dspark_audit_drafts_total", "counter", "Drafts verified in audited blocks."),
    "num_blocks": MetricSpec("dspark_blocks_total", "counter", "Blocks in the block-accept estimate."),
    "num_predictions": MetricSpec(
        "dspark_predictions_total", "counter", "Steps and draft passes whose time was predicted and measured."
    ),
    "num_capped_errors": MetricSpec(
        "dspark_capped_predictions_total", "counter", "Predictions too far off to be learned from in full."
    ),
    "num_targeted_choices": MetricSpec(
        "dspark_targeted_choices_total", "counter", "Ended choices that had a target for the time per token."
    ),
    "num_on_target_choices": MetricSpec(
        "dspark_on_target_choices_total", "counter", "Ended choices that kept their target."
    ),
    "num_targeted_tokens": MetricSpec("dspark_targeted_tokens_total", "counter", "Tokens of choices with a target."),
    "num_on_target_tokens": MetricSpec(
        "dspark_on_target_tokens_total", "counter", "Tokens of choices that kept their target: goodput."
    ),
    "num_decode_steps": MetricSpec("dspark_decode_steps_total", "counter", "Steps without prefill."),
    "num_decode_committed": MetricSpec("dspark_decode_tokens_total", "counter", "Tokens of steps without prefill."),
}
"""By field of the ledger."""

_SECONDS = {
    "step_ns": MetricSpec("dspark_step_seconds_total", "counter", "Wall time of steps, seconds."),
    "draft_call_ns": MetricSpec(
        "dspark_draft_call_seconds_total", "counter", "Wall time inside Draft calls, as the scheduler saw it, seconds."
    ),
    "step_call_ns": MetricSpec(
        "dspark_step_call_seconds_total", "counter", "Wall time inside Step calls, as the scheduler saw it, seconds."
    ),
    "decode_step_ns": MetricSpec(
        "dspark_decode_step_seconds_total", "counter", "Wall time of steps without prefill, seconds."
    ),
    "decode_draft_call_ns": MetricSpec(
        "dspark_decode_draft_call_seconds_total", "counter", "Draft calls of steps without prefill, seconds."
    ),
    "decode_step_call_ns": MetricSpec(
        "dspark_decode_step_call_seconds_total", "counter", "Step calls of steps without prefill, seconds."
    ),
    "predicted_ns": MetricSpec("dspark_predicted_seconds_total", "counter", "Time that was predicted, seconds."),
    "predicted_measured_ns": MetricSpec(
        "dspark_predicted_measured_seconds_total", "counter", "Time that the predicted took, seconds."
    ),
    "prediction_error_ns": MetricSpec(
        "dspark_prediction_error_seconds_total", "counter", "Distances between predicted and measured, seconds."
    ),
    "predicted_gain_ns": MetricSpec(
        "dspark_predicted_gain_seconds",
        "gauge",
        "Time that drafting was expected to save since the start, seconds; can fall.",
    ),
    "measured_gain_ns": MetricSpec(
        "dspark_measured_gain_seconds",
        "gauge",
        "Time that drafting saved since the start by what steps took and brought, seconds; falls where it loses.",
    ),
}
"""By field of the ledger, which has nanoseconds."""

_BLOCK_ACCEPT = {
    "block_accept_low": MetricSpec(
        "dspark_block_accept_tokens_low",
        "gauge",
        "Accepted length of whole blocks, summed over dspark_blocks_total: at least. One more token each included.",
    ),
    "block_accept_high": MetricSpec(
        "dspark_block_accept_tokens_high",
        "gauge",
        "Accepted length of whole blocks, summed: at most. Falls as trimmed drafts are settled.",
    ),
    "num_open_blocks": MetricSpec("dspark_open_blocks", "gauge", "Blocks whose length is not known to the end."),
}

_GAUGES = {
    "num_running": MetricSpec("vllm:num_requests_running", "gauge", "Choices running."),
    "num_waiting": MetricSpec("vllm:num_requests_waiting", "gauge", "Choices waiting for a slot or pages."),
    "num_slots": MetricSpec("dspark_slots", "gauge", "Choices that can run at once."),
    "num_free_slots": MetricSpec("dspark_free_slots", "gauge", "Slots that nobody holds."),
    "num_pages": MetricSpec("dspark_pages", "gauge", "K/V pages."),
    "num_free_pages": MetricSpec("dspark_free_pages", "gauge", "K/V pages that can be given out, cached ones too."),
    "num_cached_pages": MetricSpec("dspark_cached_pages", "gauge", "Free K/V pages kept for the prefix they hold."),
}
_LOAD_COUNTERS = {
    "num_preemptions": MetricSpec("vllm:num_preemptions_total", "counter", "Choices put back for lack of pages."),
    "num_prefix_cache_queries": MetricSpec(
        "vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache."
    ),
    "num_prefix_cache_hits": MetricSpec(
        "vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache."
    ),
}
"""By field of the load."""

_CACHE_USE = MetricSpec("vllm:kv_cache_usage_perc", "gauge", "Share of K/V pages in use, 0 to 1; cached ones are not.")
_CACHE_INFO = MetricSpec(
    "vllm:cache_config_info",
    "gauge",
    "1; labels: positions a page, pages, reuse of prefixes.",
    ("block_size", "num_gpu_blocks", "prefix_cache"),
)
_INFO = MetricSpec(
    "dspark_model_info",
    "gauge",
    "1; labels: what is served, and why nothing is drafted or texts are not exact, if so.",
    ("target", "drafter", "verify_mode", "speculation_off_reason", "inexact_reason"),
)
_PER_POSITION = MetricSpec(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "counter",
    "Drafts committed by position in the block, from 0: row-steps that committed more than so many.",
    ("position",),
)
_WINDOWS = MetricSpec("dspark_verify_window_drafts", "histogram", "Drafts verified of each drafted block.")
_BUDGETS = MetricSpec("dspark_verify_budget_drafts", "histogram", "Drafts verified in each drafted step, all rows.")
_ENDED = MetricSpec("vllm:request_success_total", "counter", "Choices that ended, by reason.", ("finished_reason",))
_UNDRAFTED = MetricSpec(
    "dspark_undrafted_requests_total",
    "counter",
    "Requests that ended without a draft: speculation is off (server) or not wanted (request), the draft context was "
    "lost (context), drafting did not pay (gate), or the answer was too short (short).",
    ("reason",),
)
_REFUSED = MetricSpec(
    "dspark_refused_requests_total", "counter", "Requests not taken: queue_full or draining.", ("reason",)
)
_QUEUE = {
    "requests": MetricSpec("dspark_queued_requests", "gauge", "Requests not admitted yet."),
    "tokens": MetricSpec("dspark_queued_tokens", "gauge", "Prompt tokens of requests not admitted yet."),
    "max_requests": MetricSpec("dspark_max_queued_requests", "gauge", "Requests that may wait."),
    "max_tokens": MetricSpec("dspark_max_queued_tokens", "gauge", "Prompt tokens that may wait."),
}
_CHOICES = {
    "queue_s": MetricSpec("vllm:request_queue_time_seconds", "histogram", "From submission to a slot, seconds."),
    "prefill_s": MetricSpec(
        "vllm:request_prefill_time_seconds", "histogram", "From a slot to the first token, seconds."
    ),
    "decode_s": MetricSpec(
        "vllm:request_decode_time_seconds", "histogram", "From the first token to the end, seconds."
    ),
    "inference_s": MetricSpec("vllm:request_inference_time_seconds", "histogram", "From a slot to the end, seconds."),
    "prompt_tokens": MetricSpec("vllm:request_prompt_tokens", "histogram", "Prompt tokens of ended choices."),
    "generation_tokens": MetricSpec("vllm:request_generation_tokens", "histogram", "Tokens of ended choices."),
    "max_tokens": MetricSpec(
        "vllm:request_max_num_generation_tokens", "histogram", "Most tokens that ended choices could have had."
    ),
}
"""By field of the choice counts."""

_CALIBRATION_LABELS = ("regime", "position")
_CALIBRATION = {
    "error": MetricSpec(
        "dspark_calibration_error",
        "gauge",
        "Expected calibration error of the survival up to a position, 0 to 1, by regime.",
        _CALIBRATION_LABELS,
    ),
    "num_observed": MetricSpec(
        "dspark_calibration_rounds", "gauge", "Rounds that the error stands on; older ones fade.", _CALIBRATION_LABELS
    ),
    "correction": MetricSpec(
        "dspark_calibration_correction_logits", "gauge", "Added to the logits of confidences.", _CALIBRATION_LABELS
    ),
}

SPECS = (
    *_COUNTERS.values(),
    *_SECONDS.values(),
    *_BLOCK_ACCEPT.values(),
    *_GAUGES.values(),
    *_LOAD_COUNTERS.values(),
    *(_CACHE_USE, _CACHE_INFO, _INFO, _PER_POSITION, _WINDOWS, _BUDGETS, _ENDED, _UNDRAFTED, _REFUSED),
    *_QUEUE.values(),
    *_CHOICES.values(),
    *_CALIBRATION.values(),
)
"""Every family of the scheduler."""


def scheduler_metrics(scheduler: Scheduler) -> Iterator[Metric]:
    """A snapshot. Call from any thread."""
    load = scheduler.load()
    yield from _load_metrics(load)
    yield from _choice_metrics(scheduler.choice_counts)
    yield from _window_metrics(scheduler.window_counts)
    yield _REFUSED.by_label({(reason,): count for reason, count in scheduler.num_refused.items()})
    num_requests, num_tokens = scheduler.queue
    settings, info, limits = scheduler.settings, scheduler.info, scheduler.limits
    yield _QUEUE["requests"].of(num_requests)
    yield _QUEUE["tokens"].of(num_tokens)
    yield _QUEUE["max_requests"].of(settings.max_queued_requests)
    yield _QUEUE["max_tokens"].of(settings.max_queued_tokens)
    yield _CACHE_INFO.by_label({(str(limits.page_size), str(limits.num_pages), settings.prefix_cache): 1})
    reasons = (info.speculation_off_reason, info.inexact_reason)
    yield _INFO.by_label({(info.model, info.drafter, info.verify_mode, *reasons): 1})


def _load_metrics(load: Load) -> Iterator[Metric]:
    for name, spec in (*_GAUGES.items(), *_LOAD_COUNTERS.items()):
        yield spec.of(getattr(load, name))
    yield _CACHE_USE.of(1 - load.num_free_pages / load.num_pages)
    for name, spec in (*_COUNTERS.items(), *_BLOCK_ACCEPT.items()):
        yield spec.of(getattr(load.ledger, name))
    for name, spec in _SECONDS.items():
        yield spec.of(getattr(load.ledger, name) * _NS)
    for name, spec in _CALIBRATION.items():
        errors = load.calibration_errors
        yield spec.by_label(
            {(each.regime.name.lower(), str(each.position - 1)): getattr(each, name) for each in errors}
        )


def _choice_metrics(counts: ChoiceCounts) -> Iterator[Metric]:
    yield _ENDED.by_label({(reason.name.lower(),): count for reason, count in counts.num_ended.items()})
    yield _UNDRAFTED.by_label({(kind,): count for kind, count in counts.num_undrafted.items()})
    for name, spec in _CHOICES.items():
        yield spec.distribution({(): getattr(counts, name)})
    reached = np.cumsum(counts.accepted_lens[::-1])[::-1]
    yield _PER_POSITION.by_label({(str(position),): float(count) for position, count in enumerate(reached[1:])})


def _window_metrics(counts: WindowCounts) -> Iterator[Metric]:
    windows = Histogram(range(len(counts.by_len)))
    for length, count in enumerate(counts.by_len):
        windows.observe(length, count)
    yield _WINDOWS.distribution({(): windows})
    yield _BUDGETS.distribution({(): counts.budgets})
