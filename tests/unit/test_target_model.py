"""The target's forward against `transformers`, which is the reference of every family served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from kernels.registry import load_ops
from service_kit.checkpoint import Checkpoint
from service_kit.settings import default_cache_dir
from verifier_service.config import TargetConfig
from verifier_service.model import PAGE_SIZE, TargetModel, TokenRows, Workspace
from verifier_service.weights import load_weights

GOLDEN = Path(__file__).parents[1] / "golden"
EMBEDDED = default_cache_dir() / "models"
RELATIVE_TOLERANCE = 2e-3
MAX_MODEL_LEN = 128

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "llama_biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama_llama3_rope": LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama_yarn_wide_heads": LlamaConfig(**SMALL, rope_parameters=YARN_ROPE, head_dim=16),
    "qwen3": Qwen3Config(**SMALL, head_dim=16, attention_bias=True),
    "qwen3_windows": Qwen3Config(
        **SMALL, head_dim=8, use_sliding_window=True, sliding_window=9, max_window_layers=1, tie_word_embeddings=True
    ),
}


def load_target(directory: Path) -> TargetModel:
    checkpoint = Checkpoint(str(directory))
    config = TargetConfig.from_checkpoint(checkpoint)
    return TargetModel(config, load_weights(checkpoint, config, "float32"), load_ops("reference"))


def save_random(config: Any, directory: Path) -> Any:
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():  # biases and norms start as 0 and 1, which would hide a forgotten one
        for name, parameter in reference.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    reference.save_pretrained(directory)
    return reference


class Sequences:
    """Token sequences computed piece by piece in scattered pages, each in its own slot."""

    def __init__(self, target: TargetModel, num_slots: int = 1, feature_layer_ids: tuple[int, ...] = ()) -> None:
        self.target = target
        pages_per_slot = MAX_MODEL_LEN // PAGE_SIZE
        num_pages = num_slots * pages_per_slot
        self.space: Workspace = target.workspace(num_pages, MAX_MODEL_LEN, 256, feature_layer_ids)
        for tensor in (*self.space.keys, *self.space.values):
            tensor.fill_(7.5)  # what a page's last owner left behind
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
        self.page_table = order.reshape(num_slots, pages_per_slot)
        self.lengths = [0] * num_slots

    def run(self, *pieces: tuple[int, Tensor]) -> list[Tensor]:
        """Appends (slot, tokens) pieces in one forward; logits of every token, piece by piece."""
        positions = [torch.arange(len(tokens)) + self.lengths[slot] for slot, tokens in pieces]
        rows = TokenRows(
            torch.cat([tokens for _, tokens in pieces]),
            torch.cat(positions).int(),
            torch.cat([torch.full((len(tokens),), slot, dtype=torch.int32) for slot, tokens in pieces]),
        )
        for slot, tokens in pieces:
            self.lengths[slot] += len(tokens)
        logits = self.target.logits(self.target.forward(rows, self.page_table, self.space))
        return list(logits.clone().split([len(tokens) for _, tokens in pieces]))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = RELATIVE_TOLERANCE) -> None:
    """Largest difference within `tolerance` of the largest logit."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = save_random(FAMILIES[family], tmp_path)
    tokens = torch.randint(0, SMALL["vocab_size"], (37,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = reference(tokens[None], output_hidden_states=True)
    sequences = Sequences(load_target(tmp_path), feature_layer_ids=(1, 0))
    sequences.space.features.fill_(torch.nan)
    logits = sequences.run((0, tokens))[0]
    assert_close(logits, expected.logits[0], 1e-4)
    # hidden_states[0] is the embedding; layer k's output is entry k + 1.
    features = torch.cat((expected.hidden_states[2][0], expected.hidden_states[1][0]), dim=-1)
    assert_close(sequences.space.features[: len(tokens)], features, 1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_windows"])
def test_pieces_of_mixed_rows_equal_the_whole(family: str, tmp_path: Path) -> None:
    save_random(FAMILIES[family], tmp_path)
    target = load_target(tmp_path)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, SMALL["vocab_size"], (size,), generator=generator) for size in (50, 33)]
    whole = [Sequences(target).run((0, text))[0] for text in texts]
    pieces = Sequences(target, num_slots=2)
    first, second = texts
    got: tuple[list[Tensor], list[Tensor]] = ([], [])
    for step in (
        [(0, first[:17])],  # a prefill chunk that ends inside a page
        [(1, second[:32]), (0, first[17:18])],  # a chunk beside a decode row
        [(0, first[18:26]), (1, second[32:])],  # a verify window beside a decode row
        [(0, first[26:])],
    ):
        for (slot, _), logits in zip(step, pieces.run(*step), strict=True):
            got[slot].append(logits)
    for slot in (0, 1):
        assert_close(torch.cat(got[slot]), whole[slot], 1e-5)


def test_golden_rounds() -> None:
    """The target's verify logits of three speculative rounds written by the reference implementation."""
    golden = load_file(GOLDEN / "draft_vanilla" / "golden_inference.safetensors")
    sequences = Sequences(load_target(GOLDEN / "target"), feature_layer_ids=(0, 2, 4))
    prompt = sequences.run((0, golden["prompt_ids"]))[0]
    assert prompt[-1].argmax() == golden["anchor_0"]
    assert_close(sequences.space.features[: len(golden["prompt_ids"])], golden["context_features"])
    anchor = golden["anchor_0"]
    for index in range(3):
        accepted = int(golden[f"round{index}_accepted"])
        start = sequences.lengths[0]
        logits = sequences.run((0, torch.cat((anchor, golden[f"round{index}_draft_tokens"]))))[0]
        assert_close(logits, golden[f"round{index}_verify_logits"])
        anchor = golden[f"round{index}_next_anchor"]
        sequences.lengths[0] = start + accepted + 1  # rejected positions are computed again


@pytest.mark.model
@pytest.mark.parametrize("directory", sorted(EMBEDDED.glob("smollm2*")), ids=lambda path: path.name)
def test_embedded_target_equals_transformers(directory: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    tokens = torch.randint(0, 49_000, (40,), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    sequences = Sequences(load_target(directory))
    logits = torch.cat([sequences.run((0, piece))[0] for piece in tokens.split([25, 1, 8, 6])])
    assert_close(logits, expected)
