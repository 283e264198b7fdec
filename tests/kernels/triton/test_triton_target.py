"""A whole tiny target on the Triton kernels against the reference operations: logits, and greedy text."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.registry import Implementation, load_ops
from service_kit.checkpoint import Checkpoint
from tests.tiny_target import TARGET
from verifier_service.config import TargetConfig
from verifier_service.model import PAGE_SIZE, TargetModel, TokenRows
from verifier_service.weights import load_weights

_PROMPTS = ((5, 71, 300, 2, 9, 44, 8, 131, 17, 6, 90, 3, 3, 250, 77, 18, 101, 12, 13, 400), (9, 8, 7))
"""The first ends inside its second page."""
_MAX_LEN, _NEW_TOKENS, _WRONG = 64, 2, 7


class Run:
    """Two sequences whose rows share forwards."""

    def __init__(self, kind: Implementation) -> None:
        checkpoint = Checkpoint(str(TARGET))
        config = TargetConfig.from_checkpoint(checkpoint)
        self.target = TargetModel(config, load_weights(checkpoint, config, "float32"), load_ops(kind))
        pages = _MAX_LEN // PAGE_SIZE
        self.space = self.target.workspace(2 * pages, _MAX_LEN, 64)
        self.table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(1)).int().view(2, pages)
        self.logits: list[Tensor] = []

    def step(self, *pieces: tuple[int, int, list[int]]) -> Tensor:
        """Logits of pieces (slot, first position, tokens)."""
        rows = TokenRows(
            torch.tensor([token for _, _, tokens in pieces for token in tokens]),
            torch.tensor([start + i for _, start, tokens in pieces for i in range(len(tokens))], dtype=torch.int32),
            torch.tensor([slot for slot, _, tokens in pieces for _ in tokens], dtype=torch.int32),
        )
        logits = self.target.logits(self.target.forward(rows, self.table, self.space)).clone()
        self.logits.append(logits)
        return logits

    def texts(self) -> list[list[int]]:
        """Greedy texts: a chunked prefill beside decoding, then verify windows whose last drafts are wrong."""
        first, second = list(_PROMPTS[0]), list(_PROMPTS[1])
        self.step((0, 0, first[:17]))
        logits = self.step((0, 17, first[17:]), (1, 0, second))
        first.append(int(logits[2].argmax()))
        second.append(int(logits[5].argmax()))
        for _ in range(_NEW_TOKENS):
            logits = self.step((0, len(first) - 1, [first[-1], _WRONG, _WRONG]), (1, len(second) - 1, [second[-1]]))
            first.append(int(logits[0].argmax()))
            second.append(int(logits[3].argmax()))
        return [first, second]


def test_logits_and_greedy_text_equal_the_reference() -> None:
    reference, compared = Run("reference"), Run("triton")
    assert compared.texts() == reference.texts()
    for logits, expected in zip(compared.logits, reference.logits, strict=True):
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
