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
import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional


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
    """[Vd, r]"""
    projection: npt.NDArray[np.float32] | None = None
    """gated: gate_proj.weight [r, H + r]; rnn: joint_proj.weight [3r, 2r + H]; vanilla: None."""
    projection_bias: npt.NDArray[np.float32] | None = None
    """gated: [r]; rnn: [3r]; vanilla: None."""

    def __post_init__(self) -> None:
        """Makes every array C-contiguous, writeable float32 (torch shares no other). Raises ValueError on shapes."""
        for name in ("w1", "w2", "projection", "projection_bias"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, np.require(getattr(self, name), np.float32, ("C", "W")))
        num_outputs = {MarkovKind.VANILLA: 0, MarkovKind.GATED: self.rank, MarkovKind.RNN: 3 * self.rank}[self.kind]
        shapes = [None if array is None else len(array) for array in (self.projection, self.projection_bias)]
        if self.w2.shape[1] != self.rank or shapes != ([num_outputs] * 2 if num_outputs else [None] * 2):
            raise ValueError(
                f"{self.kind.value} Markov head of rank {self.rank}: w2 is {self.w2.shape} and its projection has "
                f"{shapes[0]} outputs, {shapes[1]} biases instead of {num_outputs}"
            )

    @property
    def rank(self) -> int:
        """r."""
        return int(self.w1.shape[1])

    @functools.cached_property
    def packed_w2(self) -> Tensor:
        """W2 as `kernels.markov_sample.head` reads it; float16 where that changes no weight."""
        from kernels.markov_sample.head import COLUMNS

        w2 = torch.from_numpy(self.w2)
        half = w2.half()
        exact = half if torch.equal(half.float(), w2) else w2
        return functional.pad(exact, (0, 0, 0, -len(w2) % COLUMNS)).view(-1, COLUMNS, self.rank).mT.contiguous()

    @functools.cached_property
    def projection_parts(self) -> tuple[Tensor, Tensor]:
        """The projection's part for the hidden state [outputs, H], and the others' transposed [inputs, outputs]."""
        assert self.projection is not None
        projection = torch.from_numpy(self.projection)
        if self.kind == MarkovKind.GATED:
            of_previous, of_hidden = projection[:, -self.rank :], projection[:, : -self.rank]
        else:
            of_previous, of_hidden = projection[:, : 2 * self.rank], projection[:, 2 * self.rank :]
        return of_hidden.contiguous(), of_previous.T.contiguous()


@dataclass(frozen=True)
class ConfidenceHead:
    """Weights of the confidence head."""

    weight: npt.NDArray[np.float32]
    """[1, H], or [1, H + r] when it sees W1[x[k - 1]] too."""
    bias: float = 0.0

    def __post_init__(self) -> None:
        """Makes the weight C-contiguous, writeable float32."""
        object.__setattr__(self, "weight", np.require(self.weight, np.float32, ("C", "W")))


class BlockDraft(NamedTuple):
    """Drafted blocks of B rows, G slots each."""

    token_ids: npt.NDArray[np.uint32]
    """[B, G] target ids."""
    confidence_logits: npt.NDArray[np.float32]
    """[B, G], uncalibrated; +inf throughout without a confidence head."""
