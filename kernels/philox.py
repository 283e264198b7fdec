"""Counter-based randomness (design 5.5): every draw has an address, and nothing depends on what was drawn before.

A stream is addressed by (key, purpose, position, round). numpy's Philox4x64-10 is the generator; its 2-word key holds
(key, purpose), its counter (0, position, round, 0), so that streams of different addresses never overlap
(a stream of one vocabulary advances only the lowest counter word).
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt


class Purpose(enum.IntEnum):
    """What a draw is for; part of its address."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4
    COUPLED = 5
    CHOICE_KEY = 6


_COUPLED_ROUND = 0
"""Coupled noise ignores the round: that is what makes the text independent of speculation."""


def uniforms(key: int, purpose: Purpose, position: int, round_: int, size: int) -> npt.NDArray[np.float64]:
    """`size` uniforms in [0, 1) of one stream, 53 bits each."""
    return np.random.Generator(_stream(key, purpose, position, round_)).random(size)


def _stream(key: int, purpose: Purpose, position: int, round_: int) -> np.random.Philox:
    return np.random.Philox(
        key=np.array((key, purpose), np.uint64), counter=np.array((0, position, round_, 0), np.uint64)
    )


def coupled_exponentials(key: int, position: int, vocab_size: int) -> npt.NDArray[np.float64]:
    """Unit exponentials E[v] of a seeded position, one per *target* token id.

    arg min E[v] / p[v] is arg max log p[v] + Gumbel[v] with Gumbel = -log E: target and draft use the same E.
    """
    draws = uniforms(key, Purpose.COUPLED, position, _COUPLED_ROUND, vocab_size)
    # 1 - u is in (0, 1]; u = 0 would give E = 0 and a token that wins whatever its probability.
    return -np.log1p(-np.maximum(draws, 2.0**-54))


def derive_key(key: int, index: int) -> int:
    """Key of choice `index` of a request: the request's own for 0, an independent one otherwise."""
    if index == 0:
        return key
    return int(_stream(key, Purpose.CHOICE_KEY, index, 0).random_raw())
