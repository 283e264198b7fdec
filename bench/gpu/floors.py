"""Bytes and operations of every kernel of a step, and the time below which no GPU can do them.

    python -m bench.gpu.floors [--context 1024]

Counted from shapes, nothing is measured: each tensor that a kernel needs is read or written once, in bfloat16 (draft
distributions in float32). A kernel's floor is the larger of its bytes over the memory's bandwidth and its operations
over the bfloat16 peak, both as the vendor publishes them. Windows are 8 rows (anchor and 7 drafts), each in a context
of its own; all rows need logits, and all are sampled by rejection.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kernels.aot_cases import MODELS, Model

TIERS = (8, 16, 32, 64, 128, 256, 512)
_BF16, _FLOAT32 = 2, 4


class Device(NamedTuple):
    """Published figures."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    """bfloat16, dense."""


DEVICES = (Device("H100 SXM", 3.35e12, 989e12), Device("H200", 4.8e12, 989e12))
_MORE_DEVICES = (Device("A100", 2.039e12, 312e12), Device("H100", 3.35e12, 989e12))


def device_of(words: str) -> Device | None:
    """The device whose name is in `words`; None if its figures are not known here."""
    return next((device for device in (*DEVICES, *_MORE_DEVICES) if device.name in words), None)


class Work(NamedTuple):
    """Of one kernel in one step, all layers together."""

    kernel: str
    num_bytes: int
    flops: int

    def floor_us(self, device: Device) -> float:
        """Microseconds."""
        return 1e6 * max(self.num_bytes / device.bytes_per_second, self.flops / device.flops_per_second)


def _linear(name: str, rows: int, num_in: int, num_out: int, times: int = 1) -> Work:
    num_bytes = _BF16 * (num_in * num_out + rows * (num_in + num_out))
    return Work(name, times * num_bytes, times * 2 * rows * num_in * num_out)


def _decoder(name: str, model: Model, rows: int, layers: int) -> Iterator[Work]:
    """Everything of a stack of layers but attention."""
    yield _linear(f"{name}qkv projection", rows, model.hidden, model.q_size + 2 * model.kv_size, layers)
    yield _linear(f"{name}output projection", rows, model.q_size, model.hidden, layers)
    yield _linear(f"{name}gate and up projection", rows, model.hidden, 2 * model.intermediate, layers)
    yield _linear(f"{name}down projection", rows, model.intermediate, model.hidden, layers)
    # Residual in and out, delta in, normed out; twice a layer.
    norm = _BF16 * rows * 4 * model.hidden
    yield Work(f"{name}add_rms_norm", 2 * layers * norm, 2 * layers * rows * 5 * model.hidden)
    yield Work(
        f"{name}silu_mul", layers * _BF16 * rows * 3 * model.intermediate, layers * rows * 5 * model.intermediate
    )


def _attention(name: str, model: Model, rows: int, slots: int, context: int, layers: int) -> Work:
    keys_values = slots * context * 2 * model.kv_size
    return Work(
        name,
        layers * _BF16 * (keys_values + rows * 2 * model.q_size),
        layers * 4 * rows * context * model.q_size,
    )


def step(model: Model, tier: int, context: int, window: int = 0) -> list[Work]:
    """The verifier's step of `tier` rows in windows of so many (1: plain decoding; 0: anchor and whole block)."""
    window = window or model.block_size + 1
    slots = max(1, tier // window)
    drafts = slots * (window - 1)
    write = model.num_layers * _BF16 * tier * 4 * model.kv_size
    accept = _BF16 * tier * model.vocab + _FLOAT32 * drafts * model.vocab
    return [
        *_decoder("", model, tier, model.num_layers),
        Work("RoPE and page write", write, model.num_layers * tier * 3 * model.kv_size),
        _attention("ragged verify attention", model, tier, slots, context, model.num_layers),
        Work("features to the ring", 2 * _BF16 * tier * model.feature_layers * model.hidden, 0),
        _linear("lm_head", tier, model.hidden, model.vocab),
        Work("acceptance", accept, 10 * (tier + drafts) * model.vocab),
    ]


def draft(model: Model, tier: int, context: int) -> list[Work]:
    """The Draft call before a step of `tier` rows: ingest of that many rows, a block of each slot, the head."""
    slots = max(1, tier // (model.block_size + 1))
    rows, layers, rank = slots * model.block_size, model.draft_layers, model.markov_rank
    context_rows = _linear("", tier, model.hidden, 2 * model.kv_size, layers)
    fc = _linear("", tier, model.feature_layers * model.hidden, model.hidden)
    ingest = Work("ingest", fc.num_bytes + context_rows.num_bytes, fc.flops + context_rows.flops)
    # Per slot of the block: W2, base logits in, logits out and in again, distribution out.
    head_bytes = model.block_size * _BF16 * model.vocab * rank
    head_bytes += rows * model.vocab * (_BF16 + 3 * _FLOAT32)
    return [
        ingest,
        *_decoder("draft ", model, rows, layers),
        _attention("draft block attention", model, rows, slots, context, layers),
        _linear("draft lm_head", rows, model.hidden, model.vocab),
        Work("Markov head and sampling", head_bytes, rows * model.vocab * (2 * rank + 10)),
        Work("confidence head", _BF16 * rows * (model.hidden + rank), 2 * rows * (model.hidden + rank)),
    ]


def markdown(name: str, model: Model, context: int, tiers: Sequence[int] = TIERS) -> str:
    """Three tables of a model: megabytes, operations, floors on the devices; one row a kernel, one column a tier.

    Kernels follow each other: the floor of a whole step is the sum of its kernels' floors.
    """
    columns = []
    for tier in tiers:
        steps, drafts = step(model, tier, context), draft(model, tier, context)
        cells = {work.kernel: [work] for work in (*steps, *drafts)}
        columns.append({**cells, "whole step": steps, "whole Draft call": drafts})
    devices = " / ".join(device.name for device in DEVICES)

    def table(title: str, cell: Callable[[Sequence[Work]], str]) -> str:
        lines = [f"| {title} | " + " | ".join(map(str, tiers)) + " |", "|---|" + "---:|" * len(tiers)]
        lines += [f"| {each} | " + " | ".join(cell(column[each]) for column in columns) + " |" for each in columns[0]]
        return "\n".join(lines)

    def floors(works: Sequence[Work]) -> str:
        return " / ".join(_short(sum(work.floor_us(device) for work in works)) for device in DEVICES)

    return "\n\n".join(
        (
            f"### {name}, context {context}",
            table("MB", lambda works: _short(sum(work.num_bytes for work in works) / 1e6)),
            table("GFLOP", lambda works: _short(sum(work.flops for work in works) / 1e9)),
            table(f"floor µs, {devices}", floors),
        )
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.floors")
    parser.add_argument("--context", type=int, default=1024, help="positions of every slot")
    options = parser.parse_args(arguments)
    print("\n\n".join(markdown(name, model, options.context) for name, model in MODELS.items()))


if __name__ == "__main__":
    main()
