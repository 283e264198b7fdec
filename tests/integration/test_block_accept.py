"""The block-accept estimate from trimmed windows against what whole blocks were worth, in every regime.

`cap-accept` commits the scheduled windows and verifies whole blocks. Its estimate uses the windows alone, its count
of uncut accepted drafts is the truth of the very same rounds; and in greedy and seeded texts `compact` runs through the
same rounds without that truth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from fakes.rig import Stream
from in_process import GOLDEN_DRAFTERS, Executors

from launcher.embedded import embedded_dir, is_ready
from scheduler_service import startup, step
from scheduler_service.block_accept_observer import BlockAcceptObserver
from scheduler_service.cost_model import CostModel
from scheduler_service.ledger import Ledger
from scheduler_service.policy import DraftedBatch, VerifyPolicy
from scheduler_service.policy.cap_accept import CapAcceptPolicy
from scheduler_service.policy.causal import CausalPolicy
from scheduler_service.request import GenerateSpec, SamplingOptions
from scheduler_service.step_record import StepRecord
from service_kit.settings import default_cache_dir

DRAFTER = Path(__file__).parents[2] / "models" / "smollm2-135m-dspark"
QUESTIONS = (
    "A farmer has 12 rows of 15 apple trees and sells a third of them. How many trees are left? Think step by step.",
    "Write a Python function that returns the prime factors of a number.",
    "What is 17 * 23? Show every step.",
)
COSTS = CostModel(4e6, 2e5, 40.0, np.arange(65) * 6e5, {7: np.arange(9) * 1e6})
"""A first draft is worth verifying where it is likely; whole blocks are not."""


class ScatteredWindows(VerifyPolicy):
    """Windows of 0 ... 3 drafts, by position."""

    def choose(
        self, batch: DraftedBatch, usable: npt.NDArray[np.intp], survival: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.intp]:
        return np.minimum(usable, np.asarray(batch.contexts) // 3 % 4)


class Measured(NamedTuple):
    """A run's estimate, and what it committed and could have."""

    low: float
    high: float
    num_blocks: int
    censored: float
    """Mean length of what was committed of blocks."""
    whole: float
    """Mean accepted length of whole blocks, where they were verified; else that of the windows."""
    margin: float
    """4 standard errors of what the windows left out: the one thing that is estimated."""


class Recorder(BlockAcceptObserver):
    """Keeps what each drafted round brought."""

    lens: list[tuple[int, int]]
    """Drafts accepted; those of the window."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        type(self).lens = []

    def observe(self, record: StepRecord) -> None:
        for each in record.rounds:
            if each.draft_ids:
                block_len = each.sequence.request.num_until_stop(each.draft_ids)
                num_accepted = min(each.num_accepted, block_len)
                self.lens.append((num_accepted, min(num_accepted, each.commit_len)))
        super().observe(record)


def measure(
    executors: Executors,
    policy: VerifyPolicy,
    prompts: list[list[int]],
    num_tokens: int,
    sampling: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> tuple[Measured, list[list[int]]]:
    """One request after the other, so that the rounds do not depend on time; also returns their texts."""
    monkeypatch.setattr(startup, "create_policy", lambda *_: policy)
    monkeypatch.setattr(step, "BlockAcceptObserver", Recorder)
    texts = []
    with executors.scheduler("threshold", audit_share=0.0, **settings) as scheduler:
        for index, prompt in enumerate(prompts):
            stream = Stream()
            seed = {"seed": 5 + index} if "seed" in sampling else {}
            options = SamplingOptions(**{**sampling, **seed})
            scheduler.submit(GenerateSpec(f"r{index}", prompt, options, num_tokens), stream)
            stream.ended.wait(120)
            texts.append(stream.text())
        ledger = scheduler.load().ledger
    whole, censored = np.array(Recorder.lens).T
    count = ledger.num_blocks
    assert count == len(whole)
    assert ledger.num_uncut_accepted == whole.sum()
    measured = Measured(
        ledger.block_accept_low / count,
        ledger.block_accept_high / count,
        count,
        1 + float(censored.mean()),
        1 + float(whole.mean()),
        4 * float((whole - censored).std()) / math.sqrt(count),
    )
    print(f"{sampling} {type(policy).__name__} {measured} open {ledger.num_open_blocks}")
    return measured, texts


GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": True}
UNSEEDED: dict[str, Any] = {"temperature": 1.0}


@pytest.fixture(scope="module")
def golden() -> Iterator[Executors]:
    executors = Executors(drafters=GOLDEN_DRAFTERS[1:])
    yield executors
    executors.close()


@pytest.mark.parametrize("sampling", [{"temperature": 4.0}, {"temperature": 2.5, "top_p": 0.9, "min_p": 0.01}])
def test_rejection_rows(golden: Executors, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[(7 * i + 11 * j) % 512 for j in range(5 + i)] for i in range(12)]
    found, _ = measure(golden, CapAcceptPolicy(ScatteredWindows()), prompts, 60, sampling, monkeypatch)
    assert found.censored + found.margin < found.low < found.high
    assert found.low - found.margin <= found.whole <= found.high + found.margin


@pytest.fixture(scope="module")
def embedded() -> Iterator[tuple[Executors, list[list[int]]]]:
    from transformers import AutoTokenizer

    directory = embedded_dir(default_cache_dir())
    if not is_ready(directory):
        pytest.skip("needs the embedded target: run `make setup`")
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    executors = Executors(directory, [DRAFTER], weight_format="auto", threads=2)
    yield executors, prompts
    executors.close()


@pytest.mark.model
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, UNSEEDED], ids=["greedy", "seeded", "unseeded"])
def test_the_embedded_pair(
    embedded: tuple[Executors, list[list[int]]], sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    executors, prompts = embedded
    scheduled = CausalPolicy(COSTS)
    sizes = {"max_model_len": 256, "max_batch_tokens": 64, "kv_memory": "64MiB"}
    whole, texts = measure(executors, CapAcceptPolicy(scheduled), prompts, 48, sampling, monkeypatch, **sizes)
    assert whole.censored < whole.low
    if sampling is UNSEEDED:
        assert whole.low - whole.margin <= whole.whole <= whole.high + whole.margin
        return
    compact, compact_texts = measure(executors, scheduled, prompts, 48, sampling, monkeypatch, **sizes)
    assert compact_texts == texts
    lens = [compact.low, compact.high, whole.low, whole.high]
    assert lens == pytest.approx([whole.whole] * 4, rel=1e-9)  # means of the same integers
    assert [compact.censored, compact.whole] == pytest.approx([whole.censored] * 2, rel=1e-9)
