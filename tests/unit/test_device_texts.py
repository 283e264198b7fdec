"""What a device is told of controlled texts adds up to the text, whatever is committed, repeated or taken back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernels.logit_controls.triton import ControlSlots
from kernels.rejection_sample import InvalidRowError
from kernels.sampling import LogitControls, TargetOptions
from verifier_service.device_texts import DeviceTexts
from verifier_service.session_memory import SessionSizes

VOCAB, SLOT = 40, 1
SIZES = SessionSizes(2, 8, 64, 16, 0, 3, ())
CONTROLS = LogitControls(1.3, 0.4, 0.6, min_tokens=9, stop_token_ids=(5,))


def options(text: list[int], num_prompt: int, controls: LogitControls = CONTROLS) -> TargetOptions:
    return TargetOptions(controls, tuple(text), num_prompt)


class Device:
    """Adds tokens as the kernel does, one by one."""

    def __init__(self) -> None:
        self.texts = DeviceTexts(SIZES, VOCAB, torch.device("cpu"))
        self.num_takes = 0

    def begin(self, asked: TargetOptions, text: list[int]) -> None:
        """A row whose anchor is the last token of `text`; the counts are then those of the whole text."""
        controls = self.texts.controls
        counts = controls.counts.clone()
        added = self.texts.begin(SLOT, asked, len(text) - 1, text[-1])
        assert len(added) <= SIZES.max_draft_tokens + 1
        self.num_takes += not torch.equal(controls.counts, counts)
        for token_id in added:
            controls.counts[SLOT, token_id] += 1
            controls.missing[SLOT] -= 1
        expected = ControlSlots.empty(1, VOCAB, (1, 1, 1))
        expected.take(0, asked.controls, text, asked.num_prompt)
        torch.testing.assert_close(controls.counts[SLOT], expected.counts[0])
        assert controls.missing[SLOT] == expected.missing[0]


def test_counts_follow_the_committed_text() -> None:
    rng = np.random.default_rng(0)
    device, text = Device(), [3, 7, 3]
    asked = options(text, 3)
    for turn in range(30):
        device.begin(asked, text)
        emitted = rng.integers(0, VOCAB, 1 + turn % 4).tolist()
        device.texts.extend(SLOT, emitted)
        text += emitted[: max(1, len(emitted) - turn % 2)]  # a commit may be cut short
        if turn % 7 == 3:  # the row failed elsewhere: it is run again
            device.begin(asked, text)
    assert device.num_takes == 1


def test_what_cannot_be_added_is_counted_anew() -> None:
    device, text = Device(), [3, 7, 3, 9, 9, 1]
    first = options(text, 3)
    device.begin(first, text)
    device.begin(options(text, 2), text)  # another request, with the same text
    device.begin(first, [*text[:4], 8])  # another token than was counted, further back
    device.begin(first, [*text[:4], 9])  # another one at the same place
    device.texts.extend(SLOT, [1, 2, 3, 4, 5])
    device.begin(first, [*text[:4], 9, 1, 2, 3, 4, 5])  # more than a window
    assert device.num_takes == 5


def test_a_text_that_is_not_known_and_controls_without_room_are_refused() -> None:
    device = Device()
    with pytest.raises(InvalidRowError, match="the text is known up to position 2, the anchor is at 4"):
        device.texts.begin(SLOT, options([1, 2], 2), 4, 1)
    too_long = options([1, 2], 2, LogitControls(banned_sequences=(tuple(range(65)),)))
    for _ in range(2):
        with pytest.raises(
            InvalidRowError, match=r"1 banned sequences of up to 65 tokens.*room for 256 sequences of 64"
        ):
            device.texts.begin(SLOT, too_long, 1, 2)
