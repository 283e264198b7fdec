"""Sequential head of a DSpark drafter: draws a block token by token and says how sure it is (paper, section 3).

Slot k (from 0) of a block predicts the token at anchor position + 1 + k. Its logits are the parallel backbone's base
logits plus a bias that depends on the token before it, x[k - 1] (the anchor for slot 0):

- vanilla: W2 @ W1[x];
- gated:   W2 @ (W1[x] * sigmoid(gate [hidden; W1[x]]));
- rnn:     a state of size r, zero at the block's start: (g, c, o) = joint [state; W1[x]; hidden],
           state = sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c), bias W2 @ tanh(o).

Confidence k is the logit of "draft k is accepted if all before it were": weight . [hidden; W1[x[k - 1]]] + bias. It
never sees x[k], which is what makes scheduling on it lossless.

`sample_block(...) -> BlockDraft` in `reference.py` and `cpu.py`. Draft distributions are softmax(logits / temperature),
without top-k, top-p or min-p:

- greedy: the arg max, lowest draft index first;
- coupled: arg min E[target id] / prob with the target's own noise of that position;
- rejection: inverse-CDF draw from the float32 probabilities that are left in draft_probs_out, bit for bit.

A slot whose logits hold NaN, +inf or nothing finite gets confidence NaN (the window ends there), draft index 0 and, in
the rejection regime, all its probability on that index: a certain draft, which acceptance handles exactly.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class MarkovKind(enum.Enum):
    """Kind of sequential head, by its name in checkpoint configurations."""

    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


@dataclass(frozen=True)
class MarkovHead:
    """Weights of the sequential head. V target vocabulary, Vd draft vocabulary, r rank, H draft hidden size."""

    kind: MarkovKind
    w1: npt.NDArray[np.float32]
    """[V, r], by target id."""
    w2: npt.NDArray[np.float32]
    """[Vd, r], C-contiguous."""
    projection: npt.NDArray[np.float32] | None = None
    """gated: gate_proj.weight [r, H + r]; rnn: joint_proj.weight [3r, 2r + H]; vanilla: None."""
    projection_bias: npt.NDArray[np.float32] | None = None
    """gated: [r]; rnn: [3r]; vanilla: None."""

    @property
    def rank(self) -> int:
        """r."""
        return int(self.w1.shape[1])


@dataclass(frozen=True)
class ConfidenceHead:
    """Weights of the confidence head."""

    weight: npt.NDArray[np.float32]
    """[1, H], or [1, H + r] when it sees W1[x[k - 1]] too."""
    bias: float = 0.0


class BlockDraft(NamedTuple):
    """Drafted blocks of B rows, G slots each."""

    token_ids: npt.NDArray[np.uint32]
    """[B, G] target ids."""
    confidence_logits: npt.NDArray[np.float32]
    """[B, G], uncalibrated; +inf throughout without a confidence head."""
