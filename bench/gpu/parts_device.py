"""Parts that need kernels alone: right results first, then times beside their floors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.gpu import unfused
from bench.gpu.floors import Work, draft, step
from bench.gpu.part import Bench, Row
from kernels.ragged_rows.triton import index_rows, scatter_rows
from kernels.verify_lens.triton import verify_lens


def parity(bench: Bench) -> Iterator[Row]:
    """Forwards with Triton's kernels against the reference operations on the same device."""
    pair = bench.pair
    for tier in bench.scale.tiers:
        rows = pair.windows(tier, bench.scale.context)
        own, reference = pair.logits(rows, "triton"), pair.logits(rows, "reference")
        difference = float((own - reference).abs().max() / reference.abs().max())
        yield {"tier": tier, "largest difference": difference, "ok": difference < pair.tolerance}


def invariance(bench: Bench) -> Iterator[Row]:
    """Whether attention gives a row the same bits alone and in the largest tier."""
    largest = max(bench.scale.tiers)
    rows = bench.pair.windows(largest, bench.scale.context)
    whole, first = bench.pair.attention(rows), bench.pair.attention(rows.first(8))
    yield {"rows": f"8 of {largest}", "ok": torch.equal(whole[:8], first)}


def kernels(bench: Bench) -> Iterator[Row]:
    """Kernels alone, all layers of a step, beside the time that their bytes and operations take."""
    model, context = bench.scale.model, bench.scale.context
    for tier in bench.scale.tiers:
        works = {work.kernel: work for work in (*step(model, tier, context), *draft(model, tier, context))}
        for name, work in bench.pair.kernels(tier, context):
            floor = bench.floor_us(works[name])
            yield {"tier": tier, "kernel": name, **_beside(bench.timed_us(work), floor)}


def steps(bench: Bench) -> Iterator[Row]:
    """Whole verify steps and the drafter's backbone with head, from graphs."""
    model, context = bench.scale.model, bench.scale.context
    for tier in bench.scale.tiers:
        verify = _beside(
            bench.timed_us(bench.pair.verify_step(tier, context)), bench.floor_us(*step(model, tier, context))
        )
        yield {"tier": tier, "of": "verify step", **verify}
        drafting = bench.timed_us(bench.pair.backbone(tier, context)) + bench.timed_us(bench.pair.head(tier))
        works = [work for work in draft(model, tier, context) if work.kernel != "ingest"]
        yield {"tier": tier, "of": "block and head", **_beside(drafting, bench.floor_us(*works))}


def head_share(bench: Bench) -> Iterator[Row]:
    """What the sequential head takes of a round that drafts and verifies whole blocks of R requests."""
    model, context, window = bench.scale.model, bench.scale.context, bench.scale.model.block_size + 1
    for requests in bench.scale.head_rows:
        tier = requests * window
        head, backbone, verify = (
            bench.timed_us(work)
            for work in (
                bench.pair.head(tier),
                bench.pair.backbone(tier, context),
                bench.pair.verify_step(tier, context),
            )
        )
        works = draft(model, tier, context)
        floor = bench.floor_us(next(work for work in works if work.kernel == "Markov head and sampling"))
        round_floor = bench.floor_us(*works, *step(model, tier, context))
        yield {
            "requests": requests,
            "head us": head,
            "block us": backbone,
            "verify us": verify,
            "share": head / (head + backbone + verify),
            "floor us": floor,
            "floor of share": None if floor is None or not round_floor else floor / round_floor,
        }


def fused(bench: Bench) -> Iterator[Row]:
    """Fused kernels beside the same in plain torch (`unfused`), both captured."""
    for requests in bench.scale.head_rows:
        for name, work, own, other in (
            _scatter(bench, requests),
            _schedule(bench, requests),
            _acceptance(bench, requests),
            _head(bench, requests),
        ):
            fused_us, unfused_us = bench.timed_us(own), bench.timed_us(other)
            yield {
                "operation": name,
                "requests": requests,
                "fused us": fused_us,
                "unfused us": unfused_us,
                "ratio": unfused_us / fused_us,
                "floor us": bench.floor_us(work),
            }


_Comparison = tuple[str, Work, Callable[[], object], Callable[[], object]]


def _scatter(bench: Bench, requests: int) -> _Comparison:
    """Hidden states of windows of all lengths back to their requests. Raises RuntimeError if the two differ."""
    model, device, width = bench.scale.model, bench.gpu.device, bench.scale.model.block_size + 1
    lens = torch.arange(1, requests + 1, device=device).remainder(width).add(1).int()
    packed = torch.randn(requests * width, model.hidden, device=device).to(bench.scale.dtype)
    starts, owners = torch.empty_like(lens), torch.empty(len(packed), dtype=torch.int32, device=device)
    padded = packed.new_zeros(requests + 1, width, model.hidden)
    fused_padded = torch.zeros_like(padded)[:requests]

    def own() -> None:
        index_rows(lens, starts, owners)
        scatter_rows(packed, starts, owners, fused_padded)

    def other() -> None:
        unfused.scatter(lens, packed, padded)

    own()
    other()
    if not torch.equal(fused_padded, padded[:requests]):
        raise RuntimeError("scatter: fused and unfused differ")
    return "scatter", Work("scatter", 2 * packed.element_size() * int(lens.sum()) * model.hidden, 0), own, other


def _schedule(bench: Bench, requests: int) -> _Comparison:
    """Verify lengths of survivals with many ties. Raises RuntimeError if the two differ."""
    block, device = bench.scale.model.block_size, bench.gpu.device
    survivals = (torch.rand(requests, block, device=device) * 16).ceil().div(16).cumprod(1)
    limits = torch.full((requests,), block, dtype=torch.int32, device=device)
    budget = torch.full((1,), requests * block // 2, dtype=torch.int32, device=device)
    lens, other_lens = torch.zeros_like(limits), torch.zeros_like(limits)

    def own() -> None:
        verify_lens(survivals, limits, budget, lens)

    def other() -> None:
        unfused.schedule(survivals, limits, budget, other_lens)

    own()
    other()
    if not torch.equal(lens, other_lens):
        raise RuntimeError("schedule: fused and unfused differ")
    return "schedule", Work("schedule", 4 * survivals.numel(), 0), own, other


def _acceptance(bench: Bench, requests: int) -> _Comparison:
    """Acceptance of whole blocks by rejection sampling; the noise differs, so results are not compared."""
    model, device, window = bench.scale.model, bench.gpu.device, bench.scale.model.block_size + 1
    logits = torch.randn(requests * window, model.vocab, device=device).to(bench.scale.dtype)
    draft_ids = torch.zeros(requests, model.block_size, dtype=torch.int32, device=device)
    probs = torch.full((requests, model.block_size, model.vocab), 1 / model.vocab, device=device)
    work = next(work for work in step(model, requests * window, bench.scale.context) if work.kernel == "acceptance")
    rows = logits.view(requests, window, -1)
    own = bench.pair.acceptance(requests * window, logits)
    return "acceptance", work, own, lambda: unfused.accept(rows, draft_ids, probs, 1.0)


def _head(bench: Bench, requests: int) -> _Comparison:
    """The vanilla Markov head with its draws; without the confidence head, which the fused one has."""
    model, device, tensors = bench.scale.model, bench.gpu.device, bench.pair.head_tensors
    tier = requests * (model.block_size + 1)
    logits = torch.randn(requests, model.block_size, model.vocab, device=device).to(bench.scale.dtype)
    anchors = torch.arange(requests, device=device)
    work = next(work for work in draft(model, tier, bench.scale.context) if work.kernel == "Markov head and sampling")
    own = bench.pair.head(tier)
    return "Markov head", work, own, lambda: unfused.sample_blocks(logits, tensors.w1, tensors.w2, anchors, 1.0)


def _beside(measured_us: float, floor_us: float | None) -> Row:
    ratio = None if not floor_us else measured_us / floor_us
    return {"measured us": measured_us, "floor us": floor_us, "ratio": ratio}
