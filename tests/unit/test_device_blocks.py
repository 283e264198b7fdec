"""Blocks on a GPU that is not there: what the drafter's graph publishes, and what the verifier's makes of it."""

from __future__ import annotations

import numpy as np
import torch
from dspark.v1 import types_pb2
from fakes.gpu import fake_gpu
from torch import Tensor

from drafter_service.calibration import Calibration
from drafter_service.device_blocks import DeviceBlocks as Published
from kernels.sampling import Regime, SlotSampling
from kernels.survivals import corrected, survivals
from kernels.verify_lens.cpu import verify_lens
from service_kit.staging import Field, Staging
from verifier_service.block_windows import with_drafts
from verifier_service.device_blocks import DeviceBlocks
from verifier_service.device_inputs import DeviceInputs
from verifier_service.session_memory import SessionSizes
from verifier_service.steps import BlockRows, StepBatch, emitted_rows, token_rows, window_of

GPU = fake_gpu()
SAMPLING = SlotSampling(Regime.GREEDY, 0.0, 0, 1.0, 0.0, 5)
NUM_SLOTS, BLOCK = 5, 4
SIZES = SessionSizes(
    num_slots=NUM_SLOTS,
    num_pages=8,
    max_model_len=64,
    max_batch_tokens=40,
    feature_ring_rows=6,
    max_draft_tokens=3,
    feature_layer_ids=(0,),
)

FILLED = ("token_ids", "positions", "slots", "ring_rows", "logit_rows", "request_of_row", "row_starts", "verify_lens")


def lens_by_torch(survival: Tensor, limits: Tensor, budget: Tensor, lens: Tensor) -> None:
    """As the kernel, no value read: a capture refuses that."""
    usable = (torch.arange(survival.shape[1]) < limits[:, None]) & (survival > 0)
    order = torch.where(usable, survival, 0.0).T.flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    chosen = (rank.view(survival.shape[1], -1).T.lt(budget)) & usable
    lens.copy_(torch.where(limits >= 0, chosen.sum(1), lens))


def test_a_graph_publishes_what_the_cpu_would() -> None:
    rng = np.random.default_rng(0)
    inputs = Staging({"slots": Field((NUM_SLOTS,)), "regimes": Field((NUM_SLOTS,))}, GPU.device)
    fields = {"token_ids": Field((NUM_SLOTS, BLOCK)), "confidences": Field((NUM_SLOTS, BLOCK), np.float32)}
    outputs = Staging(fields, GPU.device)
    calibration = Calibration(
        rng.random((4, BLOCK)).astype(np.float32) + 0.5, rng.random((4, BLOCK)).astype(np.float32), "made up"
    )
    rows = torch.full((2 * NUM_SLOTS + 1, BLOCK), -1.0, dtype=torch.float64)
    published = Published(calibration, inputs, outputs, GPU)
    published.capture(rows)
    slots, regimes = [3, 0, 4], [1, 3, 2]
    inputs.host["slots"][:] = [*slots, -1, -1]
    inputs.host["regimes"][:3] = regimes
    inputs.upload()
    logits = rng.standard_normal((3, BLOCK)).astype(np.float32) * 3
    logits[0, 1], logits[2, 0] = np.nan, np.inf
    outputs.device["confidences"].fill_(np.nan)
    outputs.device["confidences"][:3] = torch.from_numpy(logits)
    outputs.device["token_ids"].copy_(torch.arange(NUM_SLOTS * BLOCK).view(NUM_SLOTS, BLOCK))
    odds = rng.random((3, 3)) + 0.5
    odds[1] = np.nan  # lost
    rows.fill_(-1.0)
    published.publish(odds)
    confidences = calibration.confidences(logits[:, :3], regimes)
    expected = survivals(corrected(confidences, odds))
    for place, slot in enumerate(slots):
        assert rows[2 * slot].tolist() == list(range(place * BLOCK, (place + 1) * BLOCK))
        np.testing.assert_allclose(rows[2 * slot + 1, :3], expected[place], rtol=1e-6)
        assert rows[2 * slot + 1, 3] == 0.0
    assert expected[0, 0] > expected[0, 1] == 0.0
    assert expected[2, 0] == 1.0
    assert not expected[1].any()
    assert (rows[[2, 3, 4, 5]] == -1.0).all()  # slots 1 and 2


def step(rng: np.random.Generator) -> StepBatch:
    """Prefill chunks that emit or not, plain rows and rows with blocks, in any order."""
    num_rows = int(rng.integers(1, NUM_SLOTS + 1))
    slots = rng.permutation(NUM_SLOTS)[:num_rows]
    is_chunk = rng.random(num_rows) < 0.3
    is_chunk[int(rng.integers(num_rows))] = False
    counts = np.where(is_chunk, rng.integers(1, 7, num_rows), 1)
    emits = ~is_chunk | (rng.random(num_rows) < 0.5)
    able = rng.permutation(np.flatnonzero(~is_chunk))
    rows = able[: int(rng.integers(1, len(able) + 1))]
    blocks = BlockRows(
        rows, rng.integers(1, 4, len(rows)), rng.choice(np.array([1.0, 2.0]), len(rows)), int(rng.integers(0, 12))
    )
    return StepBatch(
        session=1,
        epoch=1,
        step_id=1,
        slots=types_pb2.SlotUpdates(),
        row_slots=slots,
        row_starts=rng.integers(0, 50, num_rows),
        row_num_tokens=counts,
        row_num_drafts=np.zeros(num_rows, np.int64),
        row_emits=emits,
        row_rounds=np.ones(num_rows, np.int64),
        token_ids=rng.integers(1, 500, counts.sum()),
        blocks=blocks,
    )


def test_a_graph_fills_the_inputs_as_the_host_would() -> None:
    rng = np.random.default_rng(1)
    inputs, expected = DeviceInputs(SIZES, GPU.device), DeviceInputs(SIZES, GPU.device)
    settler = DeviceBlocks(SIZES, inputs.device, lens_by_torch, GPU)
    arena = torch.zeros((2 * NUM_SLOTS + 1, BLOCK), dtype=torch.float64)
    settler.capture(arena)
    num_drafts = 0
    for _ in range(60):
        batch = step(rng)
        blocks = batch.blocks
        assert blocks is not None
        token_ids = rng.integers(1, 500, (NUM_SLOTS, BLOCK))
        survival = np.cumprod(rng.choice(np.array([0.0, 0.5, 0.5, 0.9, 1.0]), (NUM_SLOTS, BLOCK)), axis=1)
        arena[:-1].view(NUM_SLOTS, 2, BLOCK).copy_(torch.from_numpy(np.stack((token_ids, survival), axis=1)))
        failed = {int(row): "stale" for row in blocks.rows if rng.random() < 0.2}

        own = batch.row_slots[blocks.rows]
        lens = torch.zeros(len(own), dtype=torch.int32)
        limits = np.where(np.isin(blocks.rows, list(failed)), 0, blocks.max_drafts)
        weighted = torch.from_numpy(survival[own, :3] * blocks.weights[:, None])
        verify_lens(weighted, torch.from_numpy(limits.astype(np.int32)), torch.tensor([blocks.budget]), lens)
        settled = with_drafts(batch, blocks.rows, lens.numpy().astype(np.int64), token_ids[own, :3])
        num_drafts += int(lens.sum())

        expected.blank()
        emitted = emitted_rows(settled)
        expected.fill_tokens(settled, token_rows(settled), emitted)
        ends = np.cumsum(settled.row_num_tokens)
        for place, (row, offset) in enumerate(zip(emitted.rows.tolist(), emitted.offsets.tolist(), strict=True)):
            if row not in failed:
                window = window_of(settled, row, int(ends[row]))
                expected.fill_window(window, SAMPLING, place, offset, has_draft_probs=False)
        expected.upload()

        inputs.blank()
        inputs.upload()
        settler.start(batch, failed)
        found = settler.settled(batch)
        for name in ("row_num_tokens", "row_num_drafts", "token_ids"):
            assert getattr(found, name).tolist() == getattr(settled, name).tolist()
        assert found.blocks is None
        for name in (*FILLED, "draft_ids"):
            assert inputs.device[name].tolist() == expected.device[name].tolist(), name
    assert num_drafts > 60
