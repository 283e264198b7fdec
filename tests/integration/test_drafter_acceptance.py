"""The embedded drafter on the embedded target: drafts that the target would accept, over real features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_harness import DrafterHarness

from kernels.sampling import Regime
from launcher.embedded import embedded_dir, is_ready
from service_kit.settings import default_cache_dir

pytestmark = pytest.mark.model

DRAFTER = Path(__file__).parents[2] / "models" / "smollm2-135m-dspark"
QUESTION = (
    "A farmer has 12 rows of 15 apple trees and sells a third of them. How many trees are left? Think step by step."
)
NUM_TOKENS, BLOCK = 64, 7


@pytest.fixture(scope="module")
def target_dir() -> Path:
    directory = embedded_dir(default_cache_dir())
    if not is_ready(directory):
        pytest.skip("needs the embedded target: run `make setup`")
    return directory


@pytest.fixture(scope="module")
def answer(target_dir: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Token ids of prompt and greedy answer, feature rows of each, and the prompt's length, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target_dir)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model: Any = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
        states = model(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer + 1][0] for layer in (1, 8, 15, 22, 28)], dim=-1)
    return ids[0].numpy(), features.numpy(), prompt["input_ids"].shape[1]


@pytest.mark.parametrize("weight_format", ["float32", "fp16", "q8"])
def test_the_target_accepts_its_drafts(
    target_dir: Path, answer: tuple[np.ndarray, np.ndarray, int], weight_format: str, tmp_path: Path
) -> None:
    ids, features, prompt_len = answer
    committed = []
    with DrafterHarness(DRAFTER, target_dir, max_model_len=256, ring_rows=256, weight_format=weight_format) as harness:
        harness.admit(0, Regime.GREEDY, pages=list(range(16)))
        harness.write_features(0, 0, features, step_id=1)
        ingested, anchor = 0, prompt_len  # the first answer token
        while anchor + 1 < len(ids):
            reply = harness.draft(
                ingests=[(0, ingested, anchor - ingested, 1, 1)],
                rows=[(0, int(ids[anchor]), anchor, len(committed) + 1)],
                num_drafts=BLOCK,
            )
            truth = ids[anchor + 1 : anchor + 1 + BLOCK]
            agrees = np.array(reply.token_ids[: len(truth)]) == truth
            accepted = len(agrees) if agrees.all() else int(agrees.argmin())
            committed.append(accepted + 1)
            ingested, anchor = anchor, anchor + accepted + 1
    # Another feature layer, a shifted slot or a wrong row of the draft vocabulary leaves about 1.0.
    assert np.mean(committed) > 2.0, f"mean accepted length {np.mean(committed):.2f} over {len(committed)} rounds"
