"""From settings to a drafter that can run: a checked pair, weights in the chosen format, operations, threads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from drafter_service.calibration import Calibration, load_calibration
from drafter_service.model import PAGE_SIZE, DraftCache, DrafterModel
from drafter_service.pair import check_pair
from drafter_service.settings import DrafterSettings
from drafter_service.weights import WeightFormat, default_format, load_weights
from kernels.cpu.features import describe
from kernels.markov_sample import cpu as compiled_head
from kernels.markov_sample import reference as reference_head
from kernels.registry import fit_head_dim, load_ops, use_threads
from kernels.sampling import Regime, SlotSampling
from service_kit.cpu import choose_threads, cpu_name
from service_kit.errors import ConfigurationError


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter and what there is to say about it."""

    model: DrafterModel
    name: str
    """As the settings gave it."""
    fingerprint: str
    weight_format: WeightFormat
    calibration: Calibration
    device: str
    """In words, with CPU capability and threads."""


def load_drafter(settings: DrafterSettings) -> LoadedDrafter:
    """Loads the drafter. Call it on the thread that will run it: torch's thread count belongs to the caller's thread.

    Raises ConfigurationError, in words, for anything that cannot be served.
    """
    pair = check_pair(settings.model, settings.target)
    threads = choose_threads(settings.threads, "DSPARK_DRAFTER_THREADS")
    use_threads(threads, settings.spin_us)
    weight_format: WeightFormat = (
        default_format(pair.config) if settings.weight_format == "auto" else settings.weight_format
    )
    try:
        kernels = fit_head_dim(settings.kernels, pair.config.head_dim)
    except ValueError as error:
        raise ConfigurationError(f"drafter: {error}", field="kernels") from error
    head = reference_head if settings.kernels == "reference" else compiled_head
    return LoadedDrafter(
        model=DrafterModel(pair.config, load_weights(pair, weight_format), load_ops(kernels), head.sample_block),
        name=settings.model,
        fingerprint=pair.drafter.fingerprint,
        weight_format=weight_format,
        calibration=load_calibration(settings.calibration, pair, weight_format),
        device=f"{cpu_name()}, {describe()}, {threads} threads",
    )


@torch.inference_mode()
def warm_up(model: DrafterModel) -> None:
    """Runs every operation on a scratch page, so that no request waits for a compiler or a first touch of weights."""
    config = model.config
    cache = DraftCache(config, num_pages=1, num_positions=PAGE_SIZE)
    page_table, slots = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    model.ingest(torch.zeros(1, config.feature_size), slots, slots, page_table, cache)
    ids, ones = np.zeros(1, np.int64), np.ones(1, np.int64)
    probs_out = np.empty((config.block_size, config.draft_vocab_size), np.float32)
    for num_drafts in config.elastic_block_sizes:
        forward = model.forward_block(slots.long(), slots + 1, slots, num_drafts, page_table, cache)
        for regime in Regime:
            model.sample(forward, ids, [SlotSampling(regime)], ones, ones, [probs_out])
