"""What a session takes of the memory that the drafter is in, planned before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable

from drafter_service.model import INGEST_ROWS, DrafterModel
from drafter_service.records import SessionSizes
from service_kit.cpu import memory_room
from service_kit.gpu import CONTEXT, CONTEXT_BYTES, GRAPH_BYTES, GRAPHS, Gpu
from service_kit.graphs import powers
from service_kit.memory_plan import MemoryPlan, Remedy, kv_remedy


def plan_session(sizes: SessionSizes, model: DrafterModel, gpu: Gpu | None) -> MemoryPlan:
    """What the session takes besides the drafter."""
    held = {CONTEXT: CONTEXT_BYTES} if gpu is not None else {}
    return MemoryPlan(
        service="drafter",
        held={**held, "weights": model.weights.num_bytes},
        parts=_parts(sizes, model, is_on_gpu=gpu is not None),
        room=memory_room() if gpu is None else gpu.room(),
        remedies=_remedies(sizes, model, is_on_gpu=gpu is not None),
    )


def _remedies(sizes: SessionSizes, model: DrafterModel, *, is_on_gpu: bool) -> tuple[Remedy, ...]:
    def needed_with(field: str) -> Callable[[int], int]:
        return lambda value: sum(_parts(sizes._replace(**{field: value}), model, is_on_gpu=is_on_gpu).values())

    page_bytes = sizes.kv_page_bytes or model.page_bytes
    return (
        kv_remedy(sizes.num_pages, sizes.num_slots, page_bytes, needed_with("num_pages")),
        Remedy("max_num_seqs", sizes.num_slots, 1, needed_with("num_slots")),
    )


def _parts(sizes: SessionSizes, model: DrafterModel, *, is_on_gpu: bool) -> dict[str, int]:
    """Bytes by what they are for."""
    config, value_bytes = model.config, model.like.element_size()
    q_size, kv_size = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    width = 3 * config.hidden_size + 2 * q_size + 2 * kv_size + 3 * config.intermediate_size
    width += config.feature_size + config.draft_vocab_size
    num_rows = max(INGEST_ROWS, sizes.num_slots * config.block_size)
    parts = {
        "K/V pages": sizes.num_pages * model.page_bytes,
        "draft distributions": sizes.num_slots * config.block_size * config.draft_vocab_size * 4,
        "buffers with logits": num_rows * width * value_bytes + 4 * sizes.max_model_len * config.head_dim,
    }
    if is_on_gpu:
        from kernels.triton.attention_tiles import largest_parts_bytes

        rows = (count * block for count in powers(sizes.num_slots) for block in config.elastic_block_sizes)
        parts["attention states"] = largest_parts_bytes(rows, config.num_heads, config.head_dim, sizes.max_model_len)
        parts[GRAPHS] = GRAPH_BYTES
    return parts
