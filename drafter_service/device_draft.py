"""A session's Draft calls on a GPU: ingest, block and sequential head, captured once for every number of rows.

Blocks of each trained length have graphs of their own; where fewer drafts are asked for, the rest of the block is
drawn too and dropped (a draft does not depend on those after it). A Draft call is one graph for its ingest, if it has
any, and one for its blocks; the host reads tokens, confidences and probabilities at the end.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter_service.calibration import Calibration
from drafter_service.device_blocks import DeviceBlocks
from drafter_service.model import INGEST_ROWS, DrafterModel
from drafter_service.records import DraftRows
from drafter_service.session import FeatureRows, Session
from kernels.markov_sample import BlockDraft
from kernels.markov_sample.triton import Blocks, ConfidenceTensors, HeadTensors, sample_blocks
from kernels.sampling import Regime
from kernels.triton.rows import NOBODY, SamplingRows, as_signed
from service_kit.gpu import Gpu
from service_kit.graphs import Geometry, StepGraphs, powers, tiers
from service_kit.staging import Field, Staging


class _Heads(NamedTuple):
    """The sequential head on the device."""

    markov: HeadTensors | None
    confidence: ConfidenceTensors | None
    draft_to_target: Tensor | None  # [Vd] int32
    draft_index: Tensor | None  # [V] int64, draft index by target id; as draft_to_target None for the identity


class DeviceDraft:
    """Inputs, outputs and graphs of a session's calls. Used on the engine thread only."""

    def __init__(self, model: DrafterModel, calibration: Calibration, session: Session, gpu: Gpu) -> None:
        """Nothing is captured yet."""
        self._model, self._config, self._runner = model, model.config, gpu.runner
        self._heads = _heads(model)
        rows, block = session.sizes.num_slots, self._config.block_size
        model.reserve(max(INGEST_ROWS, rows * block))  # before anything is captured that would keep smaller ones
        self._ingests = StepGraphs("ingest", gpu.runner, [Geometry(count, 1) for count in tiers(INGEST_ROWS)])
        self._blocks = {
            size: StepGraphs(f"block of {size}", gpu.runner, [Geometry(size * count, count) for count in powers(rows)])
            for size in self._config.elastic_block_sizes
        }
        self._features = Staging(
            {
                "ring_rows": Field((INGEST_ROWS,), np.int64),
                "positions": Field((INGEST_ROWS,)),
                "slots": Field((INGEST_ROWS,)),
            },
            gpu.device,
        )
        self._inputs = Staging(
            {
                "anchor_ids": Field((rows,), np.int64),
                "anchors": Field((rows,)),
                "slots": Field((rows,)),
                "rounds": Field((rows,), np.int64),
                "regimes": Field((rows,)),
                "temperatures": Field((rows,), np.float32),
                "top_k": Field((rows,)),
                "top_p": Field((rows,), np.float64),
                "min_p": Field((rows,), np.float32),
                "keys": Field((rows,), np.int64),
            },
            gpu.device,
        )
        self._outputs = Staging(
            {
                "token_ids": Field((rows, block)),
                "confidences": Field((rows, block), np.float32),
                "draft_probs": Field((rows, block), np.float32),
            },
            gpu.device,
        )
        self._published = DeviceBlocks(calibration, self._inputs, self._outputs, gpu)
        self._page_table: Tensor | None = None  # [num_slots, max_pages] int32
        self._arena_names: tuple[str, ...] = ()
        """Of what the graphs read and write."""

    def require(self, session: Session) -> None:
        """Captures every call, unless that was done over the arenas that the session has now."""
        if session.arena_names == self._arena_names:
            return
        self._page_table = session.page_table.to(self._model.like.device, copy=True)
        self._blank_features()
        self._features.upload()
        self._blank_rows()
        self._inputs.upload()
        self._ingests.capture(partial(self._ingest_work, session))
        for size, graphs in self._blocks.items():
            graphs.capture(partial(self._block_work, session, size))
        self._published.capture(session.device_blocks)
        self._arena_names = session.arena_names

    def _ingest_work(self, session: Session, geometry: Geometry) -> partial[None]:
        given = {name: values[: geometry.tokens] for name, values in self._features.device.items()}
        return partial(self._run_ingest, session, session.device_ring, given)

    def _run_ingest(self, session: Session, ring: Tensor, given: dict[str, Tensor]) -> None:
        assert self._page_table is not None
        features = ring.index_select(0, given["ring_rows"])
        self._model.ingest(features, given["positions"], given["slots"], self._page_table, session.cache)

    def _block_work(self, session: Session, size: int, geometry: Geometry) -> partial[None]:
        given = {name: values[: geometry.rows] for name, values in self._inputs.device.items()}
        out = {name: values[: geometry.rows, :size] for name, values in self._outputs.device.items()}
        return partial(self._run_block, session, session.device_draft_probs, size, given, out)

    def _run_block(
        self, session: Session, probs: Tensor, size: int, given: dict[str, Tensor], out: dict[str, Tensor]
    ) -> None:
        assert self._page_table is not None
        forward = self._model.forward_block(
            given["anchor_ids"], given["anchors"], given["slots"], size, self._page_table, session.cache
        )
        blocks = Blocks(out["token_ids"], out["confidences"], probs, given["slots"])
        heads = self._heads
        sample_blocks(
            forward.base_logits,
            forward.hidden,
            heads.markov,
            heads.confidence,
            given["anchor_ids"].to(torch.int32),
            SamplingRows(*(given[name] for name in SamplingRows._fields)),
            given["anchors"].to(torch.int64),
            given["rounds"],
            heads.draft_to_target,
            blocks,
        )
        ids = out["token_ids"].to(torch.int64)
        columns = ids if heads.draft_index is None else heads.draft_index[ids]
        slots = given["slots"].to(torch.int64).clamp(min=0)[:, None]
        places = torch.arange(size, device=ids.device)[None]
        out["draft_probs"].copy_(probs[slots, places, columns])

    def _blank_features(self) -> None:
        host = self._features.host
        host["ring_rows"].fill(0)
        host["positions"].fill(0)
        host["slots"].fill(-1)

    def _blank_rows(self) -> None:
        """Inputs of blocks that are all nobody's."""
        host = self._inputs.host
        for values in host.values():
            values.fill(0)
        host["slots"].fill(-1)
        host["regimes"].fill(NOBODY)
        host["temperatures"].fill(1)

    def ingest(self, session: Session, read: FeatureRows) -> None:
        """Writes the K/V of context rows whose stamps were found right."""
        self._update_pages(session)
        host = self._features.host
        for start in range(0, len(read.positions), INGEST_ROWS):
            part = slice(start, start + INGEST_ROWS)
            count = len(read.positions[part])
            self._blank_features()
            host["ring_rows"][:count], host["positions"][:count] = read.ring_rows[part], read.positions[part]
            host["slots"][:count] = read.slots[part]
            self._features.upload()
            self._ingests.replay(self._ingests.fit(count, 1))
            self._runner.synchronize()  # the host may fill the inputs again

    def draft(
        self, session: Session, rows: DraftRows, num_drafts: int, odds: npt.NDArray[np.float64] | None
    ) -> tuple[BlockDraft, npt.NDArray[np.float32]]:
        """Drafts, and their probabilities as in `DraftResult`; publishes the blocks unless `odds` are None."""
        count, size = len(rows.slots), self._config.block_len_for(num_drafts)
        self._update_pages(session)
        self._blank_rows()
        host = self._inputs.host
        host["anchor_ids"][:count], host["anchors"][:count] = rows.anchor_ids, rows.anchor_positions
        host["slots"][:count], host["rounds"][:count] = rows.slots, rows.rounds
        is_rejection = np.zeros(count, np.bool_)
        for place, slot in enumerate(rows.slots.tolist()):
            sampling = session.slots.sampling[slot]
            assert sampling is not None  # the span check saw to it
            host["regimes"][place], host["keys"][place] = sampling.regime, as_signed(sampling.key)
            host["temperatures"][place] = 1 if sampling.regime == Regime.GREEDY else sampling.temperature
            host["top_p"][place] = 1
            is_rejection[place] = sampling.regime == Regime.REJECTION
            if is_rejection[place]:
                session.stamp_draft_probs(slot, int(rows.rounds[place]), int(rows.anchor_positions[place]) + 1)
        graphs = self._blocks[size]
        self._inputs.upload()
        graphs.replay(graphs.fit(size * count, count))
        if odds is not None:
            self._published.publish(odds)
        self._outputs.download()
        self._runner.synchronize()
        out = {name: values[:count, :num_drafts] for name, values in self._outputs.host.items()}
        block = BlockDraft(out["token_ids"].astype(np.uint32), out["confidences"].copy())
        if not is_rejection.any():
            return block, np.empty(0, np.float32)
        return block, np.where(is_rejection[:, None], out["draft_probs"], np.float32(np.nan))

    def _update_pages(self, session: Session) -> None:
        assert self._page_table is not None, "not captured"
        if changed := session.take_changed_slots():
            self._page_table[changed] = session.page_table[changed].to(self._page_table.device)


def _heads(model: DrafterModel) -> _Heads:
    weights, like = model.weights, model.like
    place = like.device, like.dtype
    mapping = weights.draft_to_target
    draft_index = None
    if mapping is not None:
        draft_index = torch.zeros(model.config.vocab_size, dtype=torch.int64)
        draft_index[torch.from_numpy(mapping.astype(np.int64))] = torch.arange(len(mapping))
    return _Heads(
        None if weights.markov is None else HeadTensors.of(weights.markov, *place),
        None
        if weights.confidence is None
        else ConfidenceTensors.of(weights.confidence, model.config.hidden_size, *place),
        None if mapping is None else torch.from_numpy(mapping.astype(np.int32)).to(like.device),
        None if draft_index is None else draft_index.to(like.device),
    )
