"""What a step's result does to the requests: tokens committed and cut, choices finished, events to deliver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeAlias

from scheduler_service.batch import Batch
from scheduler_service.counts import ChoiceCounts
from scheduler_service.ledger import Ledger
from scheduler_service.policy import commit_cut
from scheduler_service.request import Delivery, FinishReason, OffReason, Request, Sequence, Summary, TokenChunk
from scheduler_service.step_plan import PlannedRow
from service_kit.logs import log_event

log = logging.getLogger(__name__)

_MAX_FAILURES = 2
"""Steps in a row that may fail for a row before its choice ends with an error; the retry is plain."""


_Emitted: TypeAlias = "tuple[PlannedRow, list[int], int, bool, FinishReason | None]"
"""A row that has emitted, to be told of: the row; what the verifier emitted for it; drafts that it accepted, whether or
not they are committed; whether the row's first token is among them; why the choice ends there. A plain tuple, since one
is made for every row while everybody waits."""


class Committer:
    """Applies results: what the next step depends on at once, what clients and counters are told when there is time."""

    def __init__(
        self, batch: Batch, ledger: Ledger, speculation_off_reason: str, on_request_end: Callable[[Request], None]
    ) -> None:
        """`on_request_end` is told once for each request, when its last choice has ended."""
        self._batch, self._ledger = batch, ledger
        self._speculation_off_reason, self._on_request_end = speculation_off_reason, on_request_end
        self._untold: list[_Emitted] = []
        self._outbox: list[Delivery] = []
        self.counts = ChoiceCounts(batch.limits.block_size)

    def take_events(self) -> list[Delivery]:
        """What is to be delivered, in order. Ask while an executor has a call, or when nothing is left to do."""
        self._tell()
        events, self._outbox = self._outbox, []
        return events

    def commit(self, row: PlannedRow, num_accepted: int, token_ids: list[int], step_id: int) -> None:
        """Commits one row: `token_ids` are its accepted drafts and one more token; empty for a prefill chunk."""
        sequence, num_drafts = row.sequence, len(row.drafts)
        request, start, num_tokens = sequence.request, sequence.computed, len(sequence.tokens)
        if num_accepted > num_drafts or len(token_ids) != (num_accepted + 1 if row.emits else 0):
            raise ValueError(f"the verifier accepted {num_accepted} of {num_drafts} drafts, {len(token_ids)} tokens")
        kept, num_kept = token_ids, num_accepted
        if row.commit_len < num_drafts:
            num_kept, kept = commit_cut(num_accepted, token_ids, row.commit_len)
        if start != num_tokens - 1:
            self._ledger.num_prefill_tokens += row.num_tokens
        if start == sequence.ingested:
            sequence.uningested_since = step_id
        sequence.computed = start + row.num_tokens + num_kept
        sequence.num_failures = 0
        if request.prompt_source is sequence and len(request.choices) > 1:
            self._batch.share_prompt(sequence)
        if row.prompt_scores:
            self._deliver_prompt_scores(row)
        if not row.emits:
            self._batch.publish(sequence)
            return
        is_first = not sequence.first_token_ns
        if is_first:
            sequence.first_token_ns = time.monotonic_ns()
        reason = None
        if num_tokens + len(kept) >= sequence.max_len or not request.stop_token_ids.isdisjoint(kept):  # hardly ever
            kept, reason = _cut(sequence, kept)
        if sequence.matcher is not None and reason is None:  # a matcher at its end takes no end-of-sequence token
            sequence.matcher.advance(kept)
        sequence.tokens += kept
        row.committed_ids = kept
        self._untold.append((row, token_ids, num_accepted, is_first, reason))
        if reason is not None:
            self._end(sequence, reason)

    def _tell(self) -> None:
        """Counts what has been committed, and makes the events of it."""
        untold, self._untold = self._untold, []
        ledger = self._ledger
        for row, token_ids, num_uncut, is_first, reason in untold:
            sequence, kept, num_drafts = row.sequence, row.committed_ids, len(row.drafts)
            num_accepted = min(num_uncut, row.commit_len, len(kept))  # what is dropped is not charged
            if num_uncut:
                num_uncut = sequence.request.num_until_stop(token_ids[:num_uncut])
                ledger.num_uncut_accepted += num_uncut
                sequence.num_uncut_accepted += num_uncut
            if not is_first:
                sequence.num_steps += 1
                sequence.num_verified += num_drafts
                sequence.num_accepted += num_accepted
                sequence.accepted_histogram[num_accepted] += 1
                self.counts.accepted_lens[num_accepted] += 1
                ledger.num_verify_rows += 1
                ledger.num_verified += num_drafts
                ledger.num_accepted += num_accepted
            elif sequence.choice == 0:
                ledger.num_prompt_tokens += len(sequence.request.prompt)
            ledger.num_committed += len(kept)
            if sequence.is_running:  # else its pages ran out meanwhile
                self._batch.publish(sequence)
            scores = row.scores[: len(kept)]
            chunk = TokenChunk(sequence.choice, kept, num_accepted, num_drafts, reason, scores, report=row.report)
            self._deliver(sequence, chunk)

    def _deliver_prompt_scores(self, row: PlannedRow) -> None:
        """A preempted request computes its prompt once more: what was delivered is not delivered again."""
        sequence, request = row.sequence, row.sequence.request
        scores = row.prompt_scores[max(0, request.num_prompt_scored - row.start - 1) :]
        request.num_prompt_scored += len(scores)
        if scores:
            self._deliver(sequence, TokenChunk(sequence.choice, [], 0, 0, None, prompt_scores=scores))

    def fail_row(self, row: PlannedRow, reason: str) -> None:
        """The verifier could not serve the row: nothing is committed; it is retried once, without drafts."""
        sequence = row.sequence
        sequence.num_failures += 1
        sequence.is_plain_once = True
        log.warning("request %r choice %d: row failed: %s", sequence.request.request_id, sequence.choice, reason)
        if sequence.num_failures >= _MAX_FAILURES:
            self.finish(sequence, FinishReason.ERROR, reason)

    def finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """Ends a choice that has no more tokens to send. Harmless if it has ended already."""
        if sequence.finish_reason is not None:
            return
        self._tell()
        sequence.request.error = sequence.request.error or error
        self._deliver(sequence, TokenChunk(sequence.choice, [], 0, 0, reason))
        self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._tell()
        sequence.finish_reason = reason
        self._count_target(sequence)
        self.counts.end(sequence)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._batch.close(sequence)
        else:
            if reason is FinishReason.ERROR:  # whatever made the row fail may be in its pages
                self._batch.pages.forget(sequence.pages)
            self._batch.release(sequence)
        request = sequence.request
        if any(other.finish_reason is None for other in request.choices):
            return
        off_reason = request.off_reason(self._speculation_off_reason, self._batch.draft_gate.off_reason)
        if off_reason is not None:
            self.counts.count_undrafted(off_reason.kind)
        self._deliver(sequence, request.summary(off_reason))
        self._on_request_end(request)
        _log_end(request, off_reason)

    def _count_target(self, sequence: Sequence) -> None:
        target_ns, num_gaps = sequence.request.target_ns, sequence.num_tokens - 1
        if target_ns is None or num_gaps < 1:
            return
        is_kept = time.monotonic_ns() - sequence.first_token_ns <= target_ns * num_gaps
        self._ledger.num_targeted_choices += 1
        self._ledger.num_on_target_choices += is_kept
        self._ledger.num_targeted_tokens += sequence.num_tokens
        self._ledger.num_on_target_tokens += sequence.num_tokens * is_kept

    def _deliver(self, sequence: Sequence, event: TokenChunk | Summary) -> None:
        self._outbox.append((sequence.request.sink, event))


def _log_end(request: Request, off_reason: OffReason | None) -> None:
    choices = request.choices
    first_ns = min((other.first_token_ns for other in choices if other.first_token_ns), default=None)
    log_event(
        log,
        "request ended",
        request_id=request.request_id,
        reasons=[other.finish_reason.name.lower() for other in choices if other.finish_reason],
        prompt_tokens=len(request.prompt),
        cached_tokens=request.num_cached_tokens or 0,
        tokens=sum(other.num_tokens for other in choices),
        first_token_s=None if first_ns is None else round(first_ns / 1e9 - request.arrived_s, 4),
        seconds=round(time.monotonic() - request.arrived_s, 4),
        steps=sum(other.num_steps for other in choices),
        drafted=sum(other.num_drafted for other in choices),
        verified=sum(other.num_verified for other in choices),
        accepted=sum(other.num_accepted for other in choices),
        speculation_off_reason=off_reason.words if off_reason is not None else None,
        error=request.error or None,
    )


def _cut(sequence: Sequence, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
    """Tokens up to the first stop token or the limit, and the reason if the choice ends there."""
    request, room = sequence.request, sequence.num_remaining
    kept = token_ids[:room]
    kept = kept[: request.num_until_stop(kept)]
    if kept and kept[-1] in request.stop_token_ids:
        return kept, FinishReason.STOP
    return kept, FinishReason.LENGTH if len(kept) == room else None
