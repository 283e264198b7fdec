"""Times of the CPU kernels: each operation, and the linear stack of a target beside its floor.

    python -m bench.kernels [--layers 30] [--context 128,512] [--rows 1,2,4,8,16]

Prints milliseconds of one step (all layers) as medians, operations and linears interleaved as a step interleaves them.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.native import num_threads
from kernels.linear import Linear, make_linear
from kernels.registry import Ops, load_ops, use_threads
from service_kit.cpu import available_cores, cpu_name

PAGE_SIZE = 16


class Shape(NamedTuple):
    """Sizes of a target; the defaults are those of SmolLM2-135M."""

    hidden: int = 576
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    intermediate: int = 1536
    vocab: int = 49152


class Layer(NamedTuple):
    """Weights and pages of one decoder layer."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    norm: Tensor
    keys: Tensor
    values: Tensor


class Buffers(NamedTuple):
    """Activations of a step of M rows of one slot, the last `M` positions of its context."""

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    gate_up: Tensor
    activated: Tensor
    positions: Tensor
    row_slots: Tensor


def make_layer(shape: Shape, num_pages: int) -> Layer:
    """Random weights, packed as float16."""

    def linear(num_out: int, num_in: int) -> Linear:
        return make_linear(torch.randn(num_out, num_in) / num_in**0.5, None, "fp16")

    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return Layer(
        linear(heads, shape.hidden),
        linear(shape.hidden, shape.num_heads * shape.head_dim),
        linear(2 * shape.intermediate, shape.hidden),
        linear(shape.hidden, shape.intermediate),
        torch.ones(shape.hidden),
        torch.randn(num_pages, shape.num_kv_heads, shape.head_dim, PAGE_SIZE),
        torch.randn(num_pages, shape.num_kv_heads, PAGE_SIZE, shape.head_dim),
    )


def make_buffers(shape: Shape, num_rows: int, context: int) -> Buffers:
    """Random activations."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return Buffers(
        torch.randn(num_rows, shape.hidden),
        torch.randn(num_rows, shape.hidden),
        torch.randn(num_rows, heads),
        torch.randn(num_rows, shape.num_heads * shape.head_dim),
        torch.randn(num_rows, 2 * shape.intermediate),
        torch.randn(num_rows, shape.intermediate),
        torch.arange(context - num_rows, context, dtype=torch.int32),
        torch.zeros(num_rows, dtype=torch.int32),
    )


def median_ms(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median time of each step, measured in turn so that noise meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def steps_of(
    ops: Ops, layers: list[Layer], buffers: Buffers, pages: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Callable[[], object]]:
    """One step of all layers, by operation."""
    b = buffers
    page_table, cos, sin = pages

    def attention(layer: Layer) -> None:
        place = (b.positions, b.row_slots, page_table, cos, sin, layer.keys, layer.values)
        ops.paged_attention(b.qkv, *place, None, None, 1e-5, 0, b.attended)

    def norms(layer: Layer) -> None:
        ops.add_rms_norm(b.hidden, b.attended, layer.norm, 1e-5, b.normed)
        ops.add_rms_norm(b.hidden, b.attended, layer.norm, 1e-5, b.normed)

    def linears(layer: Layer) -> None:
        layer.qkv(b.normed)
        layer.o(b.attended)
        layer.gate_up(b.normed)
        layer.down(b.activated)

    def step(layer: Layer) -> None:
        layer.qkv(b.normed)
        attention(layer)
        layer.o(b.attended)
        ops.add_rms_norm(b.hidden, b.attended, layer.norm, 1e-5, b.normed)
        layer.gate_up(b.normed)
        ops.silu_mul(b.gate_up, b.activated)
        layer.down(b.activated)
        ops.add_rms_norm(b.hidden, b.attended, layer.norm, 1e-5, b.normed)

    def over_layers(function: Callable[[Layer], None]) -> Callable[[], None]:
        def run() -> None:
            for layer in layers:
                function(layer)

        return run

    return {
        "norms": over_layers(norms),
        "silu": over_layers(lambda layer: ops.silu_mul(b.gate_up, b.activated)),
        "attention": over_layers(attention),
        "linears": over_layers(linears),
        "step": over_layers(step),
    }


def read_bandwidth() -> float:
    """Bytes per second that all threads together read from memory."""
    block = torch.ones(1 << 26)  # 256 MB, more than the caches that one process gets
    return block.numel() * 4 / (median_ms({"sum": block.sum}, 5)["sum"] / 1e3)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--context", default="128,512")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    use_threads(available_cores())
    shape, ops = Shape(), load_ops("cpu")
    contexts = [int(context) for context in options.context.split(",")]
    num_pages = max(contexts) // PAGE_SIZE
    layers = [make_layer(shape, num_pages) for _ in range(options.layers)]
    head = make_linear(torch.randn(shape.vocab, shape.hidden), None, "fp16")
    angles = torch.rand(max(contexts), shape.head_dim // 2)
    pages = (torch.randperm(num_pages, dtype=torch.int32)[None].contiguous(), angles.cos(), angles.sin())
    weight_bytes = sum(linear.weight_bytes for layer in layers for linear in layer[:4])
    bandwidth = read_bandwidth()
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{cpu_name()}, {num_threads()} threads, {capability}, torch {torch.__version__}")
    print(f"memory {bandwidth / 1e9:.1f} GB/s; linears of {options.layers} layers {weight_bytes / 1e6:.0f} MB,")
    print(f"floor {weight_bytes / bandwidth * 1e3:.1f} ms. Milliseconds of all layers:")
    columns = ("norms", "silu", "attention", "linears", "step", "lm_head")
    print("".join(f"{title:>10}" for title in ("rows", "context", *columns, "around")))
    for context in contexts:
        for num_rows in (int(rows) for rows in options.rows.split(",")):
            buffers = make_buffers(shape, num_rows, context)
            steps = steps_of(ops, layers, buffers, pages)
            steps["lm_head"] = functools.partial(head, buffers.normed)
            ms = median_ms(steps, options.repeats)
            times = [ms[column] for column in columns] + [ms["step"] - ms["linears"]]
            print(f"{num_rows:10}{context:10}" + "".join(f"{value:10.2f}" for value in times))


if __name__ == "__main__":
    main()
