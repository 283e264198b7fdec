"""Unseeded rows with controls follow the controlled target exactly, though the drafter knows nothing of controls.

The rig and the statistic are those of `test_acceptance_distribution`; the target of three tokens is enumerated by the
reference rules, each position with the text before it. Controls that count too little or too late must be rejected.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from unit.test_acceptance_distribution import (
    ANCHOR_ID,
    ANCHOR_POSITION,
    NORMAL_QUANTILE,
    NUM_REQUESTS,
    NUM_TOKENS,
    TARGET_LOGITS,
    VOCAB_SIZE,
    Rules,
    full_length,
    generate,
    lagged_length,
)

from kernels.logit_controls.cpu import ControlledText
from kernels.logit_controls.reference import controlled_logits
from kernels.rejection_sample import RowOutcome
from kernels.rejection_sample.cpu import accept_row
from kernels.sampling import LogitControls, Regime, SlotSampling
from kernels.target_probs import reference

SAMPLING = SlotSampling(Regime.REJECTION, temperature=1.2, top_p=0.97)
CONTROLS = {
    "penalties": LogitControls(1.6, 0.8, 0.7),
    "bias and bans": LogitControls(bias=((0, -3.0), (2, 1.0)), banned_sequences=((4,), (2, 2), (2, 3, 2))),
    "end": LogitControls(frequency_penalty=-1.0, min_tokens=2, stop_token_ids=(2,)),
}


class ControlledAcceptance:
    """What the verifier does with a window of a controlled slot, for many requests: told apart by their keys."""

    def __init__(self, controls: LogitControls, ignored: str = "") -> None:
        self.controls, self.ignored = controls, ignored
        self.texts: dict[int, ControlledText] = {}
        self.anchors: dict[int, int] = {}

    def __call__(
        self,
        logits: npt.NDArray[np.float32],
        draft_ids: npt.NDArray[np.uint32],
        draft_probs: npt.NDArray[np.float32],
        draft_to_target: npt.NDArray[np.uint32],
        sampling: SlotSampling,
        position: int,
        round_: int,
    ) -> RowOutcome:
        text = self.texts.setdefault(sampling.key, ControlledText(self.controls, [ANCHOR_ID], 1))
        controlled = logits.copy()
        text.cut(position - ANCHOR_POSITION)
        window = [self.anchors.get(sampling.key, ANCHOR_ID), *draft_ids.tolist()]
        for index, (token_id, row) in enumerate(zip(window, controlled, strict=True)):
            if not (self.ignored == "drafts" and index):
                text.extend((token_id,))
            text.apply(row)
        if self.ignored == "drafts":
            text.extend(window[1:])
        elif self.ignored == "bonus":
            controlled[-1] = logits[-1]
        outcome = accept_row(controlled, draft_ids, draft_probs, draft_to_target, sampling, position, round_)
        self.anchors[sampling.key] = outcome.token_ids[-1]
        return outcome


def chi_square_excess(samples: list[list[int]], controls: LogitControls) -> float:
    """Pearson's statistic over the enumerated texts, divided by its critical value."""
    counts = dict.fromkeys(itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS), 0)
    for tokens in samples:
        counts[tuple(tokens)] += 1
    expected = np.full(len(counts), float(len(samples)))
    for index, path in enumerate(counts):
        text = [ANCHOR_ID]
        for token_id in path:
            logits = controlled_logits(TARGET_LOGITS[text[-1]], controls, text, 1)
            expected[index] *= reference.target_probs(logits[None], SAMPLING)[0, token_id]
            text.append(token_id)
    observed = np.array(list(counts.values()))
    if observed[expected == 0.0].any():
        return float(np.inf)
    is_rare = expected < 5.0
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    observed = np.append(observed[~is_rare], observed[is_rare].sum())
    keep = expected > 0.0
    freedom = int(keep.sum()) - 1
    spread = 2.0 / (9.0 * freedom)
    statistic = float((((observed - expected)[keep]) ** 2 / expected[keep]).sum())
    return statistic / (freedom * (1.0 - spread + NORMAL_QUANTILE * spread**0.5) ** 3)


@pytest.mark.parametrize("name", CONTROLS)
def test_output_follows_the_controlled_target(name: str) -> None:
    rules = Rules(accept=ControlledAcceptance(CONTROLS[name]), length=lagged_length)
    assert chi_square_excess(generate(range(NUM_REQUESTS), SAMPLING, rules), CONTROLS[name]) < 1.0


@pytest.mark.parametrize(
    ("name", "ignored", "length"), [("penalties", "drafts", full_length), ("end", "bonus", lagged_length)]
)
def test_statistic_rejects_controls_that_miss_something(name: str, ignored: str, length: Any) -> None:
    rules = Rules(accept=ControlledAcceptance(CONTROLS[name], ignored), length=length)
    assert chi_square_excess(generate(range(NUM_REQUESTS), SAMPLING, rules), CONTROLS[name]) > 1.0
