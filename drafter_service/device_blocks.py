"""Blocks that a captured Draft call hands to the verifier on the same GPU: ids and survivals, written by a graph.

The arithmetic is that of `kernels/survivals`, on calibrated confidences.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter_service.calibration import Calibration
from service_kit.gpu import Gpu
from service_kit.graphs import Geometry, StepGraphs
from service_kit.staging import Field, Staging

_WHOLE = Geometry(1, 1)
"""There is one graph, for every row that a call may have."""


class DeviceBlocks:
    """Publishes what a call has drafted. Used on the engine thread only."""

    def __init__(self, calibration: Calibration, inputs: Staging, outputs: Staging, gpu: Gpu) -> None:
        """`inputs` and `outputs` are the calls'; nothing is captured yet."""
        self._slots, self._regimes = inputs.device["slots"], inputs.device["regimes"]
        self._token_ids, self._logits = outputs.device["token_ids"], outputs.device["confidences"]
        self._temperatures = torch.from_numpy(calibration.temperatures).to(gpu.device)
        self._shifts = torch.from_numpy(calibration.shifts).to(gpu.device)
        self._inputs = Staging({"odds": Field(tuple(self._logits.shape), np.float64)}, gpu.device)
        self._graphs = StepGraphs("published blocks", gpu.runner, [_WHOLE])

    def capture(self, rows: Tensor) -> None:
        """`rows`: those of the blocks arena on the device, [2 * num_slots + 1, block size] float64, the last spare."""
        self._graphs.capture(lambda _: lambda: self._run(rows))

    def publish(self, odds: npt.NDArray[np.float64]) -> None:
        """Starts publishing the blocks of the call that was started last, behind it. `odds`: [rows, drafts], see
        DraftWork."""
        host = self._inputs.host["odds"]
        host.fill(np.nan)  # no draft: what is made of it is no probability, so that it survives with 0
        host[: odds.shape[0], : odds.shape[1]] = odds
        self._inputs.upload()
        self._graphs.replay(_WHOLE)

    def _run(self, rows: Tensor) -> None:
        length, regimes = self._logits.shape[1], self._regimes.to(torch.int64)
        scaled = self._logits / self._temperatures[regimes, :length] + self._shifts[regimes, :length]
        confidences = torch.sigmoid(scaled).to(torch.float64)
        weighted = confidences * self._inputs.device["odds"]
        corrected = (weighted / (1.0 - confidences + weighted)).to(torch.float32).to(torch.float64)
        is_usable = ((corrected >= 0) & (corrected <= 1)).to(torch.int32).cumprod(1).to(torch.bool)
        survivals = torch.where(is_usable, corrected, 0.0).cumprod(1)
        slots = self._slots.to(torch.int64)
        spare = len(rows) - 1
        rows.index_copy_(0, torch.where(slots >= 0, 2 * slots, spare), self._token_ids.to(torch.float64))
        rows.index_copy_(0, torch.where(slots >= 0, 2 * slots + 1, spare), survivals)
