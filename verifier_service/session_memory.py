"""What a session needs of the machine, checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from service_kit.cpu import memory_room
from service_kit.errors import ConfigurationError
from service_kit.gpu import CONTEXT, CONTEXT_BYTES, GRAPH_BYTES, GRAPHS, Gpu
from service_kit.graphs import tiers
from service_kit.memory_plan import MemoryPlan, Remedy, kv_remedy
from verifier_service.model import TargetModel

MAX_BANNED_SEQUENCES, MAX_BANNED_TOKENS, MAX_STOP_IDS = 256, 64, 256
"""Of a request on a device: banned sequences, the tokens of one, stop ids that min_tokens bans. More than the gateway
lets through, unless a banned word has more tokens."""


@dataclass(frozen=True)
class SessionSizes:
    """What a scheduler asks for once a session; fields as in VerifierServiceAttachRequest."""

    num_slots: int
    num_pages: int
    max_model_len: int
    max_batch_tokens: int
    feature_ring_rows: int
    max_draft_tokens: int
    feature_layer_ids: tuple[int, ...]
    kv_page_bytes: int = 0
    """0: not told, the target's own."""

    @property
    def max_logit_rows(self) -> int:
        """Most rows of a step that need logits."""
        return min(self.max_batch_tokens, self.num_slots * (self.max_draft_tokens + 1))


def plan_session(sizes: SessionSizes, target: TargetModel, gpu: Gpu | None) -> MemoryPlan:
    """What the session takes of the memory that the target is in, besides the target.

    Raises ConfigurationError for sizes that the target does not allow.
    """
    _check_sizes(sizes, target)
    held = {CONTEXT: CONTEXT_BYTES} if gpu is not None else {}
    return MemoryPlan(
        service="verifier",
        held={**held, "weights": target.weights.num_bytes},
        parts=_parts(sizes, target, is_on_gpu=gpu is not None),
        room=memory_room() if gpu is None else gpu.room(),
        remedies=_remedies(sizes, target, is_on_gpu=gpu is not None),
    )


def _remedies(sizes: SessionSizes, target: TargetModel, *, is_on_gpu: bool) -> tuple[Remedy, ...]:
    def needed_with(field: str) -> Callable[[int], int]:
        def needed(value: int) -> int:
            changes: dict[str, Any] = {field: value}
            return sum(_parts(replace(sizes, **changes), target, is_on_gpu=is_on_gpu).values())

        return needed

    page_bytes = sizes.kv_page_bytes or target.page_bytes
    return (
        kv_remedy(sizes.num_pages, sizes.num_slots, page_bytes, needed_with("num_pages")),
        Remedy("max_num_seqs", sizes.num_slots, 1, needed_with("num_slots")),
        Remedy("max_batch_tokens", sizes.max_batch_tokens, sizes.num_slots, needed_with("max_batch_tokens")),
    )


def _check_sizes(sizes: SessionSizes, target: TargetModel) -> None:
    config = target.config
    for field in ("num_slots", "num_pages", "max_model_len", "max_batch_tokens"):
        if getattr(sizes, field) < 1:
            raise ConfigurationError(f"{field} must be at least 1", field=field)
    if sizes.max_model_len > config.max_position:
        raise ConfigurationError(
            f"max_model_len {sizes.max_model_len} is more than the target's context: lower it to {config.max_position}",
            field="max_model_len",
        )
    if sizes.feature_ring_rows and not sizes.feature_layer_ids:
        raise ConfigurationError("feature_ring_rows needs feature_layer_ids", field="feature_layer_ids")
    if any(layer_id >= config.num_layers for layer_id in sizes.feature_layer_ids):
        raise ConfigurationError(
            f"feature_layer_ids {list(sizes.feature_layer_ids)}: the target has layers 0 ... {config.num_layers - 1}",
            field="feature_layer_ids",
        )


def _parts(sizes: SessionSizes, target: TargetModel, *, is_on_gpu: bool) -> dict[str, int]:
    """Bytes by what they are for."""
    config, value_bytes = target.config, target.weights.embedding.element_size()
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    feature_size = len(sizes.feature_layer_ids) * config.hidden_size
    width = 3 * config.hidden_size + 2 * q_size + 2 * kv_size + 3 * config.intermediate_size + feature_size
    rotary_bytes = 4 * sizes.max_model_len * config.head_dim
    parts = {
        "K/V pages": sizes.num_pages * target.page_bytes,
        "feature ring": sizes.num_slots * sizes.feature_ring_rows * feature_size * value_bytes,
        "step buffers": sizes.max_batch_tokens * width * value_bytes + rotary_bytes,
        "logits": sizes.max_logit_rows * (config.vocab_size + config.hidden_size) * value_bytes,
    }
    if is_on_gpu:
        from kernels.triton.attention_tiles import largest_parts_bytes

        rows, context_len = tiers(sizes.max_batch_tokens), sizes.max_model_len
        parts["attention states"] = largest_parts_bytes(rows, config.num_heads, config.head_dim, context_len)
        parts["masks and controls"] = _extra_bytes(sizes, config.vocab_size)
        parts[GRAPHS] = GRAPH_BYTES
    return parts


def _extra_bytes(sizes: SessionSizes, vocab_size: int) -> int:
    """Of logits as masks and controls change them, masks, and the controls of every slot."""
    of_row = 4 * vocab_size + vocab_size // 8
    return sizes.max_logit_rows * of_row + sizes.num_slots * (
        8 * vocab_size + 4 * MAX_BANNED_SEQUENCES * MAX_BANNED_TOKENS
    )
