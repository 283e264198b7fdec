"""Follows measured steps: the cost model times factors that a robust running update learns.

Everything it knows comes from steps that have ended, so costs that move with it stay lossless (design 5.1).

Factors are kept as logarithms. *Drift* of everything, fast. *Drafted*: a target's pass beside a draft pass against a
plain one, which the verifier may run back to back with the next, slow. *Sizes*: a curve by token rows, and one by
drafted rows for each block length. An error counts up to `_MAX_ERROR`, so that one spike moves a prediction by a few
per cent. What a size has learned fades with every step measured: one that once looked dear, and was avoided since,
becomes what it was in the model and is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_service.cost_model import CostModel, Floats, extended, shown_sizes
from scheduler_service.policy.base import StepWork

_MAX_ERROR = 0.25
"""Largest logarithm of measured / predicted that counts in one step."""
_DRIFT_GAIN, _SIZE_GAIN, _DRAFTED_GAIN = 0.1, 0.04, 0.04
"""Shares of an error taken up at once. Their sum is well below 1, so the update cannot swing."""
_FADE = 1 / 400
"""Share of a size's own factor that is forgotten with each step measured, at whatever size."""
_MAX_SIZE_FACTOR = np.log(2.0)


@dataclass
class ErrorCounters:
    """Predicted against measured time, summed since start; predicted before the step was learned from."""

    num_measured: int = 0
    num_capped: int = 0
    """Errors beyond what may count in one step: spikes, or a machine that has become another."""
    predicted_ns: float = 0.0
    measured_ns: float = 0.0
    error_ns: float = 0.0
    """Sum of |measured - predicted|."""

    def add(self, predicted_ns: float, measured_ns: float, *, is_capped: bool) -> None:
        """Counts one measurement."""
        self.num_measured += 1
        self.num_capped += is_capped
        self.predicted_ns += predicted_ns
        self.measured_ns += measured_ns
        self.error_ns += abs(measured_ns - predicted_ns)


class _SizeCurve:
    """A curve of the model, corrected at a few sizes and in between."""

    def __init__(self, curve: Floats) -> None:
        self._curve, self._last = curve, curve.size - 1
        self._knots = np.array(shown_sizes(self._last), np.float64)
        self._factors = np.zeros(self._knots.size)
        self._corrected: Floats | None = None

    def learn(self, size: int, error: float) -> None:
        """Takes up an error at `size`, in the knots beside it."""
        at = np.interp(size, self._knots, np.arange(self._knots.size))
        below = int(at)
        share = at - below
        self._factors[below] += _SIZE_GAIN * (1 - share) * error
        if share:
            self._factors[below + 1] += _SIZE_GAIN * share * error
        np.clip(self._factors, -_MAX_SIZE_FACTOR, _MAX_SIZE_FACTOR, out=self._factors)

    def fade(self) -> None:
        """Forgets a little."""
        self._factors *= 1 - _FADE
        self._corrected = None

    @property
    def values(self) -> Floats:
        """The corrected curve, monotone: the mean of the least curve above and the greatest one below it."""
        if self._corrected is None:
            factors = np.interp(np.arange(self._last + 1), self._knots, self._factors)
            raw = self._curve * np.exp(factors)
            above, below = np.maximum.accumulate(raw), np.minimum.accumulate(raw[::-1])[::-1]
            self._corrected = (above + below) / 2
        return self._corrected


class OnlineCosts:
    """A cost model that follows the machine; implements `policy.StepCosts`. Used by the step thread alone."""

    def __init__(self, model: CostModel) -> None:
        """Predicts what `model` does until something is measured."""
        self.model = model
        self.step_errors, self.draft_errors = ErrorCounters(), ErrorCounters()
        self._drift = self._drafted = self._draft_drift = 0.0
        self._tokens = _SizeCurve(model.bias_ns + model.token_ns)
        self._drafts = {length: _SizeCurve(curve) for length, curve in model.block_draft_ns.items()}

    def total_ns(self, work: StepWork, contexts: Floats) -> Floats:
        """See `policy.StepCosts`."""
        read = work.num_context + np.concatenate(([0.0], np.cumsum(contexts)))
        tokens = extended(self._tokens.values, work.num_tokens, contexts.size)
        step = self.model.row_ns * work.num_rows + tokens + self.model.context_ns * read
        factor = float(np.exp(self._drift + _side(work) * self._drafted))
        return factor * step + self.draft_ns(work.num_drafted, work.block_len)

    def plain_ns(self, num_rows: int, num_tokens: int, num_context: float) -> float:
        """The same step without drafting."""
        return float(self.total_ns(StepWork(num_rows, 0, num_tokens, num_context), np.empty(0))[0])

    def draft_ns(self, num_drafted: int, block_len: int = 0) -> float:
        """δ; see `CostModel.draft_ns`."""
        if not num_drafted or not self._drafts:
            return 0.0
        curve = self._drafts[self.model.block_of(block_len)].values
        return float(np.exp(self._drift + self._draft_drift) * extended(curve, num_drafted, 0)[0])

    def observe(self, work: StepWork, *, step_ns: float, draft_ns: float = 0.0) -> None:
        """Learns from a step that has ended.

        `work`: what was really done, verified drafts included in its token rows and context. `step_ns`: wall time of
        the step without the `Draft` call, `draft_ns`: that of the `Draft` call. Not for steps with prefill chunks,
        whose rows have no logits and cost less, nor `Draft` calls that ingest a prompt. Times that are not positive
        are no measurement.
        """
        if step_ns > 0:
            step_only = self.total_ns(work, np.empty(0))[0] - self.draft_ns(work.num_drafted, work.block_len)
            error = _capped_error(float(step_only), step_ns, self.step_errors)
            self._tokens.learn(work.num_tokens, error)
            self._drift += _DRIFT_GAIN * error
            if abs(error) < _MAX_ERROR:  # beyond it is the machine, for both kinds alike
                self._drafted += _side(work) * _DRAFTED_GAIN * error
        if draft_ns > 0 and work.num_drafted and self._drafts:
            error = _capped_error(self.draft_ns(work.num_drafted, work.block_len), draft_ns, self.draft_errors)
            self._drafts[self.model.block_of(work.block_len)].learn(work.num_drafted, error)
            self._draft_drift += _DRIFT_GAIN * error
        for curve in (self._tokens, *self._drafts.values()):
            curve.fade()


def _side(work: StepWork) -> float:
    return 0.5 if work.num_drafted else -0.5


def _capped_error(predicted_ns: float, measured_ns: float, counters: ErrorCounters) -> float:
    """Logarithm of measured / predicted, capped; counts it. 0 where nothing was predicted to cost anything."""
    if predicted_ns <= 0:
        return 0.0
    error = float(np.log(measured_ns / predicted_ns))
    counters.add(predicted_ns, measured_ns, is_capped=abs(error) > _MAX_ERROR)
    return max(-_MAX_ERROR, min(_MAX_ERROR, error))
