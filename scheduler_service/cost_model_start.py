"""Costs when a scheduler starts: from the file that is named, from an earlier start, or measured now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scheduler_service.batch import Batch
from scheduler_service.calibrate_cost import QUICK, Effort, Measurements, measure_costs
from scheduler_service.calibrate_prefill import measure_prefill
from scheduler_service.cost_model import CostModel
from scheduler_service.cost_model_file import (
    Fingerprint,
    StoredCosts,
    cost_file_path,
    load_costs,
    save_costs,
)
from scheduler_service.cost_model_fit import fit_costs
from scheduler_service.cost_progress import log_progress
from scheduler_service.executor_types import DrafterInfo, VerifierInfo
from scheduler_service.executors import DrafterClient, VerifierClient
from service_kit.errors import ConfigurationError

log = logging.getLogger(__name__)


@dataclass
class CostSource:
    """An idle engine, attached, whose costs are wanted."""

    batch: Batch
    verifier: VerifierClient
    target: VerifierInfo
    step_ids: Iterator[int]
    drafter: DrafterClient | None = None
    """Without one only prefill is measured."""
    drafter_info: DrafterInfo | None = None

    def obtain(self, fingerprint: Fingerprint, cache_dir: Path | None, cost_file: Path | None) -> StoredCosts:
        """Costs for this engine; what is measured is kept in `cache_dir` if that is given.

        Raises ConfigurationError if `cost_file` is given and is not this engine's.
        """
        if cost_file is not None:
            costs = load_costs(cost_file, fingerprint)
            log.info("costs from %s", cost_file)
            return costs
        path = cost_file_path(cache_dir, fingerprint) if cache_dir is not None else None
        if path is not None and path.exists():
            try:
                costs = load_costs(path, fingerprint)
                log.info("costs from %s", path)
                return costs
            except ConfigurationError as error:
                log.warning("measuring again: %s", error)
        costs, _ = self.measure(QUICK, log_progress())
        if path is not None:
            try:
                save_costs(path, fingerprint, costs)
            except OSError as error:
                log.warning("the next start measures again: %s", error)
        return costs

    def measure(self, effort: Effort, on_progress: Callable[[float], None]) -> tuple[StoredCosts, Measurements | None]:
        """Measures and fits; `on_progress` gets the share done. Raises ConfigurationError for too little room."""
        model: CostModel | None = None
        measured: Measurements | None = None
        limits = self.batch.limits
        if self.drafter is not None and self.drafter_info is not None:
            blocks = self.drafter_info.elastic_block_sizes or (limits.block_size,)
            measured = measure_costs(
                self.batch, self.verifier, self.drafter, self.step_ids, blocks, effort, on_progress
            )
            model = fit_costs(
                measured.steps,
                measured.drafts,
                max_tokens=limits.max_batch_tokens,
                max_drafted=limits.max_num_seqs,
                padded_rows=self.target.padded_rows,
            )
            log.info("step costs in %s (single measurements are off by %.0f %%)", model, 100 * measured.spread)
        prefill = measure_prefill(self.batch, self.verifier, self.step_ids)
        log.info("prefill costs: %s", prefill)
        return StoredCosts(model, prefill), measured
