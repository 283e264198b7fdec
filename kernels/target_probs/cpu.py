"""numpy, without ranking a vocabulary: filters rank only the tokens that can survive."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.sampling import Regime, SlotSampling
from kernels.target_probs import InvalidRowError


def target_probs(logits: npt.NDArray[np.float32], sampling: SlotSampling) -> npt.NDArray[np.float64]:
    """Filtered target distributions, [n, V]. Raises InvalidRowError (see the package)."""
    probs = np.empty(logits.shape)
    for row, out in zip(logits, probs, strict=True):
        _write_probs(row, sampling, out)
    return probs


def greedy_token(logits: npt.NDArray[np.float32]) -> int:
    """Arg max of one row [V], lowest id first. Raises InvalidRowError."""
    token_id = int(np.argmax(logits))  # the first NaN, if there is one
    if not np.isfinite(logits[token_id]):
        raise InvalidRowError("target logits hold NaN or +inf, or no finite value")
    return token_id


def _write_probs(row: npt.NDArray[np.float32], sampling: SlotSampling, out: npt.NDArray[np.float64]) -> None:
    best_id = greedy_token(row)
    if sampling.regime == Regime.GREEDY:
        out[:] = 0.0
        out[best_id] = 1.0
        return
    if 0 < sampling.top_k < row.size:
        last = row.size - sampling.top_k
        ids = _ranked(row, np.flatnonzero(row >= np.partition(row, last)[last]))[: sampling.top_k]
        weights = _weights(row[ids], row[best_id], sampling)
        total = weights.sum()
    else:
        _weights(row, row[best_id], sampling, out)
        total = out.sum()
        if not (sampling.top_p < 1.0 or sampling.min_p > 0.0):
            out /= total
            return
        # Tokens below their fair share of the mass that top-p may drop hold less than all of it together.
        floor = max(sampling.min_p, (1.0 - sampling.top_p) * total / row.size)
        ids = np.flatnonzero(out >= min(floor, 1.0))
        if sampling.top_p < 1.0:
            ids = _ranked(row, ids)
        weights = out[ids]

    if sampling.top_p < 1.0:
        num_kept = 1 + np.searchsorted(np.cumsum(weights[:-1]), sampling.top_p * total)
        ids, weights = ids[:num_kept], weights[:num_kept]
    weights = np.where(weights >= min(sampling.min_p, 1.0), weights, 0.0)
    out[:] = 0.0
    out[ids] = weights / weights.sum()


def _weights(
    logits: npt.NDArray[np.float32],
    best: np.float32,
    sampling: SlotSampling,
    out: npt.NDArray[np.float64] | None = None,
) -> npt.NDArray[np.float64]:
    """Unnormalised probabilities, 1 for the best token."""
    weights = np.subtract(logits, best, out=out, dtype=np.float64)
    if sampling.temperature != 1.0:
        weights /= sampling.temperature
    return np.exp(weights, out=weights)


def _ranked(row: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`ids` by logit, highest first, then id, lowest first."""
    bits = (row[ids] + np.float32(0)).view(np.int32)  # + 0 makes -0 and 0 one logit
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    return np.sort((-ascending.astype(np.int64) << 32) | ids) & 0xFFFFFFFF  # one integer sort, ties included
