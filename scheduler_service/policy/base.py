"""The interface of a verify policy.

Lossless by rule (design 5.1): whether draft k of a row is verified may depend only on what was known before it was
drawn. The confidence of draft k is known then (it does not see draft k), that of draft k + 1 is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class DraftedBatch:
    """What a policy may look at."""

    confidences: npt.NDArray[np.float32]
    """[drafted rows, drafts]: probability that a draft survives given that all before it in its row did."""
    max_drafts: list[int]
    """Most drafts each drafted row may verify; fixed before drafting."""
    num_emitting: int
    """Rows of the step that emit at least one token, drafted or not."""
    num_tokens: int
    """Token rows of the step before any draft: anchors and prefill chunks."""


class VerifyPolicy(Protocol):
    """Chooses how many drafts of each row are verified."""

    def verify_lens(self, batch: DraftedBatch) -> list[int]:
        """Length of each drafted row, 0 ... its max_drafts."""
        ...
