"""From settings to a drafter that can run: a checked pair, weights in the chosen format, operations, threads."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from drafter_service.calibration import Calibration, load_calibration
from drafter_service.model import PAGE_SIZE, DrafterModel
from drafter_service.pair import Pair, check_pair
from drafter_service.settings import DrafterSettings
from drafter_service.weights import WeightFormat, default_format, load_weights
from kernels.cpu.features import describe
from kernels.kv_pages import page_type
from kernels.linear.dense import Placement
from kernels.registry import fit_head_dim, load_ops, use_threads
from kernels.sampling import Regime, SlotSampling
from kernels.sampling_ops import load_sampling_ops
from kernels.triton.check import interpreter_problem
from service_kit.cpu import choose_threads, cpu_name
from service_kit.errors import ConfigurationError
from service_kit.gpu import Gpu, choose_device, open_gpu

logger = logging.getLogger(__name__)


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
    gpu: Gpu | None = None
    """What it runs on; None for the CPU."""


def load_drafter(settings: DrafterSettings) -> LoadedDrafter:
    """Loads the drafter. Call it on the thread that will run it: torch's thread count belongs to the caller's thread.

    Raises ConfigurationError, in words, for anything that cannot be served.
    """
    pair = check_pair(settings.model, settings.target)
    threads = choose_threads(settings.threads, "DSPARK_DRAFTER_THREADS")
    use_threads(threads, settings.spin_us)
    facts = choose_device(settings.device, "DSPARK_DRAFTER_DEVICE", lambda: 2 * pair.num_values)
    if facts is not None:
        return load_on_device(settings, pair, open_gpu(facts))
    weight_format: WeightFormat = (
        default_format(pair.config) if settings.weight_format == "auto" else settings.weight_format
    )
    if settings.kernels == "triton" and (problem := interpreter_problem()):
        raise ConfigurationError(f"DSPARK_DRAFTER_KERNELS=triton: {problem}; or set it to auto", field="kernels")
    try:
        kernels = fit_head_dim(settings.kernels, pair.config.head_dim)
    except ValueError as error:
        raise ConfigurationError(f"drafter: {error}", field="kernels") from error
    weights = load_weights(pair, weight_format)
    sample_block, kv_dtype = load_sampling_ops(settings.kernels).sample_block, page_type(weight_format, kernels)
    return LoadedDrafter(
        model=DrafterModel(pair.config, weights, load_ops(kernels), sample_block, kv_dtype),
        name=settings.model,
        fingerprint=pair.drafter.fingerprint,
        weight_format=weight_format,
        calibration=load_calibration(settings.calibration, pair, weight_format),
        device=f"{cpu_name()}, {describe()}, {threads} threads",
    )


def load_on_device(settings: DrafterSettings, pair: Pair, gpu: Gpu) -> LoadedDrafter:
    """Puts the drafter on a device, in bfloat16 unless float32 is asked for, with Triton's kernels around it.

    Raises ConfigurationError for settings that only the CPU has.
    """
    if settings.weight_format not in ("auto", "bf16", "float32"):
        raise ConfigurationError(
            f"weight_format {settings.weight_format} is for the CPU: on a GPU set bf16 or float32",
            field="weight_format",
        )
    if settings.kernels not in ("auto", "triton"):
        raise ConfigurationError(
            f"kernels {settings.kernels} are for the CPU: on a GPU set auto or triton", field="kernels"
        )
    weight_format: WeightFormat = "float32" if settings.weight_format == "float32" else "bf16"
    dtype = torch.float32 if weight_format == "float32" else torch.bfloat16
    weights = load_weights(pair, weight_format, Placement(gpu.device, dtype))
    logger.info("%s on %s in %s; %.0f MiB are left", settings.model, gpu.words, weight_format, gpu.free_bytes() / 2**20)
    return LoadedDrafter(
        model=DrafterModel(pair.config, weights, load_ops("triton"), load_sampling_ops("cpu").sample_block),
        name=settings.model,
        fingerprint=pair.drafter.fingerprint,
        weight_format=weight_format,
        calibration=load_calibration(settings.calibration, pair, weight_format),
        device=gpu.words,
        gpu=gpu,
    )


@torch.inference_mode()
def warm_up(drafter: LoadedDrafter) -> None:
    """Runs every operation on a scratch page, so that no request waits for a compiler or a first touch of weights.

    On a GPU, Attach does so when it captures a session's calls.
    """
    if drafter.gpu is not None:
        return
    model, config = drafter.model, drafter.model.config
    cache = model.make_cache(num_pages=1, num_positions=PAGE_SIZE)
    page_table, slots = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    model.ingest(torch.zeros(1, config.feature_size), slots, slots, page_table, cache)
    ids, ones = np.zeros(1, np.int64), np.ones(1, np.int64)
    probs_out = np.empty((config.block_size, config.draft_vocab_size), np.float32)
    for num_drafts in config.elastic_block_sizes:
        forward = model.forward_block(slots.long(), slots + 1, slots, num_drafts, page_table, cache)
        for regime in Regime:
            model.sample(forward, ids, [SlotSampling(regime)], ones, ones, [probs_out])
