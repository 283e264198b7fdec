"""Where simulated requests come from: their lengths, and for each block its confidences and how much would be accepted.

Requests are numbered; what number n is like follows from n and the seed alone, so every mode serves the same ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]


class Blocks(NamedTuple):
    """Drafted blocks, whole."""

    confidences: npt.NDArray[np.float32]
    """[rows, block]: as the drafter would report them."""
    num_accepted: Ints
    """[rows] drafts accepted when all are verified; of the first n, min(n, that)."""


class RequestSizes(NamedTuple):
    """Of each of a few new requests."""

    class_ids: Ints
    prompt_lens: Ints
    answer_lens: Ints
    """Tokens until it ends and the next one takes its row."""


class Stream(ABC):
    """The requests of one simulated run, in rows."""

    @abstractmethod
    def start(self, rows: Ints) -> RequestSizes:
        """The next requests take the given rows, in order."""

    @abstractmethod
    def draft(self, rows: Ints) -> Blocks:
        """The next block of each given row."""


class Population(ABC):
    """Makes streams."""

    block_size: int
    class_names: list[str]

    @abstractmethod
    def stream(self, num_rows: int, seed: int) -> Stream:
        """A fresh stream for so many rows."""
