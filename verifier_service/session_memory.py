"""What a session needs of the machine, checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from service_kit.cpu import available_memory_bytes
from service_kit.errors import ConfigurationError
from service_kit.gpu import GRAPH_BYTES, Gpu, MemoryPlan
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


def require_memory(sizes: SessionSizes, target: TargetModel, gpu: Gpu | None) -> None:
    """Raises ConfigurationError, naming the setting to lower, for sizes that cannot be had here."""
    _check_sizes(sizes, target)
    if gpu is not None:
        device_plan(sizes, target, gpu).require("kv_memory", sizes.num_pages * target.page_bytes)
    elif sizes.num_pages * target.page_bytes > available_memory_bytes():
        raise pages_too_large(sizes.num_pages, target.page_bytes)


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


def device_plan(sizes: SessionSizes, target: TargetModel, gpu: Gpu) -> MemoryPlan:
    """What a session takes of a device whose weights are loaded."""
    config, value_bytes = target.config, target.weights.embedding.element_size()
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    feature_size = len(sizes.feature_layer_ids) * config.hidden_size
    width = 3 * config.hidden_size + 2 * q_size + 2 * kv_size + 3 * config.intermediate_size + feature_size
    parts = {
        "K/V pages": sizes.num_pages * target.page_bytes,
        "step buffers": sizes.max_batch_tokens * width * value_bytes,
        "logits": sizes.max_logit_rows * (config.vocab_size + config.hidden_size) * value_bytes,
        "masks and controls": _extra_bytes(sizes, config.vocab_size),
        "feature ring": sizes.num_slots * sizes.feature_ring_rows * feature_size * value_bytes,
        "graphs": GRAPH_BYTES,
    }
    return MemoryPlan(parts, gpu.free_bytes())


def _extra_bytes(sizes: SessionSizes, vocab_size: int) -> int:
    """Of logits as masks and controls change them, masks, and the controls of every slot."""
    of_row = 4 * vocab_size + vocab_size // 8
    return sizes.max_logit_rows * of_row + sizes.num_slots * (
        8 * vocab_size + 4 * MAX_BANNED_SEQUENCES * MAX_BANNED_TOKENS
    )


def pages_too_large(num_pages: int, bytes_per_page: int) -> ConfigurationError:
    """The error for pages that the CPU's memory does not hold."""
    free = available_memory_bytes()
    return ConfigurationError(
        f"{num_pages} K/V pages need {num_pages * bytes_per_page / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free: "
        f"lower kv_memory to {int(free * 0.8) // 2**20}MiB",
        field="kv_memory",
    )
