"""Seeded requests: the same text in every mode, at any load, with any drafter, across preemption (golden models)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fakes.rig import Stream
from in_process import GOLDEN_DRAFTERS, Executors

from scheduler_service.cost_model import CostModel
from scheduler_service.cost_model_file import StoredCosts
from scheduler_service.cost_model_start import CostSource
from scheduler_service.ledger import Load
from scheduler_service.prefill_limit import PrefillCosts
from scheduler_service.request import GenerateSpec, SamplingOptions

NUM_TOKENS = 40
PROMPTS = [[(7 * i + 11 * j) % 512 for j in range(5 + 3 * i)] for i in range(8)]
COSTS = StoredCosts(
    CostModel(4e6, 2e5, 40.0, np.arange(65) * 3e5, {7: np.arange(9) * 1e6}), PrefillCosts(1e6, {1: 1e6}, 0.0)
)


@pytest.fixture(scope="module")
def executors() -> Iterator[Executors]:
    executors = Executors(drafters=GOLDEN_DRAFTERS)
    yield executors
    executors.close()


def generate(executors: Executors, mode: str, concurrency: int, drafter: int, **settings: Any) -> tuple[Any, Load]:
    """Texts of all prompts. At these temperatures the two untrained models often agree on a seeded token."""
    with executors.scheduler(mode, drafter, max_num_seqs=8, max_batch_tokens=64, **settings) as scheduler:
        streams = []
        for index, prompt in enumerate(PROMPTS):
            stream = Stream()
            options = SamplingOptions(temperature=1.5 + index % 3, top_p=1.0 - 0.05 * (index % 2), seed=100 + index)
            scheduler.submit(GenerateSpec(f"r{index}", prompt, options, NUM_TOKENS), stream)
            streams.append(stream)
            if concurrency == 1:
                stream.wait()
        assert all(stream.wait().error == "" for stream in streams)
        return [stream.text() for stream in streams], scheduler.load()


def test_seeded_texts(executors: Executors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostSource, "obtain", lambda *_: COSTS)
    few_pages = {"kv_memory": 15 * executors.page_bytes, "prefix_cache": "off"}
    expected, _ = generate(executors, "off", 1, 0)
    assert len({tuple(text) for text in expected}) == len(PROMPTS)
    texts, load = generate(executors, "off", 8, 0, **few_pages)
    assert load.num_preemptions > 0
    assert texts == expected
    for drafter in (0, 1):
        for mode in ("static", "compact"):
            for concurrency in (1, 8):
                case = f"{mode}, drafter {drafter}, concurrency {concurrency}"
                texts, load = generate(executors, mode, concurrency, drafter, **(few_pages if concurrency > 1 else {}))
                assert texts == expected, case
                assert (load.num_preemptions > 0) == (concurrency > 1), case
                assert 0 < load.ledger.num_accepted < load.ledger.num_verified, case
                if mode == "compact":
                    assert load.ledger.num_verified < load.ledger.num_drafted, case
