"""Parity of the float32 path with the reference implementation: three rounds over paged context (tests/golden).

GOLDEN_DRAFT and GOLDEN_TARGET in the environment check other folders of the same make.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_harness import DrafterHarness
from safetensors.numpy import load_file

from kernels.markov_sample.reference import markov_feature
from kernels.sampling import Regime

GOLDEN = Path(__file__).parents[1] / "golden"
TARGET = Path(os.environ.get("GOLDEN_TARGET", GOLDEN / "target"))
DRAFTERS = [Path(os.environ["GOLDEN_DRAFT"])] if "GOLDEN_DRAFT" in os.environ else sorted(GOLDEN.glob("draft_*"))
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
ROUNDS = (0, 1, 2)
SLOT = 1


@pytest.fixture(params=DRAFTERS, ids=lambda path: path.name)
def drafter_dir(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(params=["reference", "cpu"])
def harness(request: pytest.FixtureRequest, drafter_dir: Path, tmp_path: Path) -> Iterator[DrafterHarness]:
    with DrafterHarness(drafter_dir, TARGET, kernels=request.param) as harness:
        yield harness


def target_features(prompt: np.ndarray, committed: list[int], layer_ids: tuple[int, ...]) -> np.ndarray:
    """Features of every position by transformers' own model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    ids = torch.tensor([[*prompt.tolist(), *committed]])
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[layer_id + 1][0] for layer_id in layer_ids], dim=-1).numpy()


def test_three_rounds_equal_the_reference(drafter_dir: Path, harness: DrafterHarness) -> None:
    golden = load_file(drafter_dir / "golden_inference.safetensors")
    prompt = golden["prompt_ids"]
    committed = [int(golden["anchor_0"][0])]
    for round_ in ROUNDS:
        drafts = golden[f"round{round_}_draft_tokens"][: int(golden[f"round{round_}_accepted"][0])]
        committed += [*drafts.tolist(), int(golden[f"round{round_}_next_anchor"][0])]
    features = target_features(prompt, committed[:-1], harness.model.config.target_layer_ids)
    np.testing.assert_allclose(features[: len(prompt)], golden["context_features"], **TOLERANCE)

    harness.admit(SLOT, Regime.GREEDY, pages=[5, 2, 9, 0, 7])
    ingested, anchor = 0, len(prompt)
    for round_ in ROUNDS:
        harness.write_features(SLOT, ingested, features[ingested:anchor], step_id=round_ + 1)
        anchor_id = committed[anchor - len(prompt)]
        reply = harness.draft(
            ingests=[(SLOT, ingested, anchor - ingested, round_ + 1, round_ + 1)],
            rows=[(SLOT, anchor_id, anchor, round_ + 1)],
            num_drafts=harness.model.config.block_size,
        )
        ingested = anchor
        prefix = f"round{round_}"
        assert not reply.ingest_failures
        np.testing.assert_array_equal(reply.token_ids, golden[f"{prefix}_draft_tokens"])
        logits = golden[f"{prefix}_confidence_logits"]
        np.testing.assert_allclose(np.frombuffer(reply.confidences, "<f4"), 1 / (1 + np.exp(-logits)), **TOLERANCE)

        forward = harness.last_forward
        base_logits = forward.base_logits[0].numpy()
        np.testing.assert_allclose(forward.hidden[0], golden[f"{prefix}_block_hidden"], **TOLERANCE)
        np.testing.assert_allclose(base_logits, golden[f"{prefix}_base_logits"], **TOLERANCE)
        corrected = base_logits + markov_biases(harness, forward.hidden[0].numpy(), [anchor_id, *reply.token_ids[:-1]])
        np.testing.assert_allclose(corrected, golden[f"{prefix}_corrected_logits"], **TOLERANCE)
        anchor += int(golden[f"{prefix}_accepted"][0]) + 1


def markov_biases(harness: DrafterHarness, hidden: np.ndarray, previous_ids: list[int]) -> np.ndarray:
    head = harness.model.weights.markov
    assert head is not None
    state, biases = np.zeros(head.rank, np.float32), []
    for slot_hidden, previous_id in zip(hidden, previous_ids, strict=True):
        feature, state = markov_feature(head, slot_hidden, head.w1[previous_id], state)
        biases.append(head.w2 @ feature)
    return np.stack(biases)
