"""Penalties, bias and bans: worked examples, and the counting form against the reference over whole texts."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.logit_controls.cpu import ControlledText
from kernels.logit_controls.reference import controlled_logits
from kernels.sampling import LogitControls

LOGITS = np.array([2.0, -1.0, 0.5, 0.0, 3.0], np.float32)
BANNED = -np.inf


@pytest.mark.parametrize(
    ("controls", "expected"),
    [
        (LogitControls(repetition_penalty=2.0), [1.0, -2.0, 0.5, 0.0, 3.0]),
        (LogitControls(frequency_penalty=0.5), [1.0, -1.0, 0.5, 0.0, 3.0]),
        (LogitControls(presence_penalty=0.5), [1.5, -1.0, 0.5, 0.0, 3.0]),
        (LogitControls(repetition_penalty=2.0, frequency_penalty=0.5), [0.0, -2.0, 0.5, 0.0, 3.0]),
        (LogitControls(bias=((3, 7.0), (1, 1.5)), repetition_penalty=2.0), [1.0, 0.25, 0.5, 7.0, 3.0]),
        (
            LogitControls(banned_sequences=((2,), (0, 0, 4), (1, 3), (1, 0, 0, 1), (9,) * 9)),
            [2, BANNED, BANNED, 0, BANNED],
        ),
        (LogitControls(min_tokens=3, stop_token_ids=(4,)), [2.0, -1.0, 0.5, 0.0, BANNED]),
        (LogitControls(min_tokens=2, stop_token_ids=(4,)), LOGITS),
    ],
)
def test_worked_examples(controls: LogitControls, expected: list[float]) -> None:
    """After the prompt [1] and the answer [0, 0]."""
    assert not controls.is_neutral
    np.testing.assert_array_equal(controlled_logits(LOGITS, controls, [1, 0, 0], 1), np.array(expected, np.float32))


def test_neutral_controls_change_nothing() -> None:
    assert LogitControls(stop_token_ids=(4,)).is_neutral
    np.testing.assert_array_equal(controlled_logits(LOGITS, LogitControls(stop_token_ids=(4,)), [1, 0, 0], 1), LOGITS)


@pytest.mark.parametrize(
    "controls",
    [
        LogitControls(1.3, -0.7, 0.4),
        LogitControls(repetition_penalty=0.8, bias=((3, -2.5), (90, 4.0))),
        LogitControls(frequency_penalty=2.0, banned_sequences=((5,), (7, 8), (1, 2, 3))),
        LogitControls(presence_penalty=-2.0, min_tokens=150, stop_token_ids=(0, 1)),
    ],
)
def test_counts_equal_the_reference_after_any_cuts(controls: LogitControls) -> None:
    rng = np.random.default_rng(3)
    vocab_size, num_prompt = 100, 20
    tokens: list[int] = rng.integers(0, vocab_size, num_prompt).tolist()
    text = ControlledText(controls, tokens, num_prompt)
    for _ in range(200):
        logits = rng.normal(0.0, 3.0, vocab_size).astype(np.float32)
        changed = logits.copy()
        text.apply(changed)
        np.testing.assert_array_equal(changed, controlled_logits(logits, controls, tokens, num_prompt))
        added = rng.integers(0, 10 if rng.random() < 0.5 else vocab_size, rng.integers(1, 6)).tolist()
        text.extend(added)
        tokens += added
        length = int(rng.integers(max(num_prompt, len(tokens) - 6), len(tokens) + 1))
        text.cut(length)
        del tokens[length:]
        assert len(text) == len(tokens)
