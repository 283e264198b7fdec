"""Feeds the block-accept estimator from the steps of the engine, and asks the verifier for what it needs.

The window is what was *committed*: in `cap-accept` the estimate comes from the windows as if nothing behind them had
been verified, so it can be checked against `num_uncut_accepted` of the very same rounds, in every regime.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kernels.sampling import Regime
from scheduler_service.executor_types import TargetProbAsks
from scheduler_service.ledger import Ledger
from scheduler_service.policy.block_accept import BlockAcceptEstimator, BlockRound
from scheduler_service.request import Sequence
from scheduler_service.step_plan import PlannedRow
from scheduler_service.step_record import RowRound, StepObserver, StepRecord


class BlockAcceptObserver(StepObserver):
    """Keeps the ledger's block-accept counters up to date."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._estimator: BlockAcceptEstimator[Sequence] = BlockAcceptEstimator()

    def asks(self, rows: Iterable[PlannedRow]) -> TargetProbAsks:
        """What the verifier is asked in a step of `rows`, their drafts chosen: the target probabilities of trimmed
        drafts at the positions that the step may emit, rejection rows only.

        A chained step is asked before the token ahead of it is known; if that is another one than the draft, the answer
        is not used. Right behind a step that drafted a block and verified none of it, that block is not known here yet:
        it stays open.
        """
        asks, waiting = TargetProbAsks([], [], []), self._estimator.waiting
        for index, row in enumerate(rows):
            sequence, anchor, window = row.sequence, row.start + row.num_tokens - 1, row.commit_len
            if not row.emits or sequence.sampling.regime is not Regime.REJECTION:
                continue
            if sequence in waiting:
                for position, token_id in self._estimator.wanted(sequence, anchor, row.drafts[:window]):
                    asks.rows.append(index)
                    asks.positions.append(position)
                    asks.token_ids.append(token_id)
            if window < len(row.block_ids):
                asks.rows.append(index)
                asks.positions.append(anchor + 1 + window)
                asks.token_ids.append(row.block_ids[window])
        return asks

    def observe(self, record: StepRecord) -> None:
        """See `StepObserver`."""
        estimator, ledger = self._estimator, self._ledger
        has_changed = False
        for each in record.rounds:
            is_waiting = each.sequence in estimator.waiting
            if not each.draft_ids and not is_waiting:
                continue
            has_changed = True
            block_len = each.sequence.request.num_until_stop(each.draft_ids)
            if not is_waiting and each.num_accepted < min(each.commit_len, block_len):  # most often
                estimator.observe_rejected(each.num_accepted)
            else:
                estimator.observe(each.sequence, _block_round(each, block_len))
        for sequence in [row for row in estimator.waiting if row.finish_reason is not None]:
            estimator.finish(sequence)
            has_changed = True
        if has_changed:
            low, high, num_blocks, num_open = estimator.interval()
            ledger.block_accept_low, ledger.block_accept_high = low * num_blocks, high * num_blocks
            ledger.num_blocks, ledger.num_open_blocks = num_blocks, num_open


def _block_round(each: RowRound, block_len: int) -> BlockRound:
    """`block_len`: drafts up to a stop token."""
    window = min(each.commit_len, block_len)
    is_sampled = each.sequence.sampling.regime is Regime.REJECTION
    return BlockRound(
        each.position,
        each.draft_ids[:block_len],
        window,
        min(each.num_accepted, window),
        each.committed_ids,
        each.draft_probs[:block_len].tolist() if is_sampled else (),
        lambda position, token_id: each.target_probs.get((position, token_id), math.nan),
    )
