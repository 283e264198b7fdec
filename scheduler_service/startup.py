"""From two executors to a running scheduler: compatibility, sizes, the session's arenas, the cost table."""

from __future__ import annotations

import itertools
import logging
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from scheduler_service.admission import Limits
from scheduler_service.batch import Batch
from scheduler_service.calibration_monitor import CalibrationMonitor
from scheduler_service.cost_model import CostModel
from scheduler_service.cost_model_file import fingerprint_of
from scheduler_service.cost_model_online import OnlineCosts
from scheduler_service.cost_model_start import CostSource
from scheduler_service.draft_gate import DraftGate, OpenGate
from scheduler_service.executor_types import DrafterInfo, SessionSizes, VerifierInfo
from scheduler_service.executors import DrafterClient, VerifierClient
from scheduler_service.grammar.structure import create_masks, create_structure, structure_off_reason
from scheduler_service.grammar.token_masks import TokenMasks
from scheduler_service.guard import Guard, GuardOptions
from scheduler_service.policy import PolicyOptions, create_policy, needs_costs, trims_by_confidence
from scheduler_service.prefill_limit import PrefillLimit
from scheduler_service.round_trace import RoundTrace
from scheduler_service.service import ModelInfo, Scheduler
from scheduler_service.settings import SchedulerSettings
from scheduler_service.step_record import StepObserver
from scheduler_service.transport import InProcessTransport
from service_kit.errors import ConfigurationError
from service_kit.rpc import CONTRACT_VERSION

log = logging.getLogger(__name__)


class Engine(NamedTuple):
    """Both executors, attached to one session."""

    verifier: VerifierClient
    target: VerifierInfo
    drafter: DrafterClient | None
    """None when verify_mode is off."""
    drafter_info: DrafterInfo | None
    limits: Limits
    masks: TokenMasks | None = None
    """None where no answer can be given a form."""


def attach_engine(settings: SchedulerSettings, verifier_transport: Any, drafter_transport: Any | None) -> Engine:
    """Starts a session on both executors. Raises ConfigurationError as `build_scheduler` does."""
    verifier = VerifierClient(verifier_transport, settings.step_timeout_s)
    target = verifier.info()
    _check_contract("verifier", target.contract_version)
    drafter: DrafterClient | None = None
    drafter_info: DrafterInfo | None = None
    if settings.verify_mode != "off":
        if drafter_transport is None:
            raise ConfigurationError(f"verify_mode {settings.verify_mode} needs a drafter: give one or use off")
        drafter = DrafterClient(drafter_transport, settings.step_timeout_s)
        drafter_info = drafter.info()
        _check_contract("drafter", drafter_info.contract_version)
        check_compatibility(target, drafter_info)
    limits = compute_limits(settings, target, drafter_info)
    sizes = _session_sizes(limits, drafter_info)
    masks = None if structure_off_reason(settings.tokenizer, limits) else create_masks(sizes, limits.vocab_size)
    sizes = replace(sizes, masks_arena=masks.name if masks is not None else "")
    _attach(replace(sizes, kv_page_bytes=_page_bytes(target, drafter_info)), verifier, drafter)
    return Engine(verifier, target, drafter, drafter_info, limits, masks)


def build_scheduler(
    settings: SchedulerSettings,
    verifier_transport: Any,
    drafter_transport: Any | None,
    cache_dir: Path | None = None,
) -> Scheduler:
    """Attaches both executors, loads or measures what steps cost, and starts the step thread.

    `drafter_transport` is not touched when verify_mode is off. Measured costs are kept in `cache_dir`, if given. Raises
    ConfigurationError in words: executors of another contract, a drafter made for another target, sizes that do not
    fit, or a cost file of another engine.
    """
    engine = attach_engine(settings, verifier_transport, drafter_transport)
    verifier, target, drafter, drafter_info, limits, masks = engine
    batch = Batch(limits, settings.prefix_cache)
    step_ids = itertools.count(1)
    costs: OnlineCosts | None = None
    stored_model: CostModel | None = None
    has_schedule = drafter is not None and needs_costs(settings.verify_mode)
    if has_schedule or settings.max_prefill_decode_steps:
        source = CostSource(batch, verifier, target, step_ids)
        if has_schedule:
            source.drafter, source.drafter_info = drafter, drafter_info
        is_local = isinstance(verifier_transport, InProcessTransport)
        fingerprint = fingerprint_of(target, source.drafter_info, limits, is_one_process=is_local)
        stored = source.obtain(fingerprint, cache_dir, settings.cost_file if has_schedule else None)
        stored_model = stored.model
        costs = OnlineCosts(stored_model) if stored_model is not None else None
        if settings.max_prefill_decode_steps:
            batch.prefill_limit = PrefillLimit(stored.prefill, settings.max_prefill_decode_steps)
    off_reason = (settings.speculation_off_reason or "verify_mode is off") if drafter is None else ""
    info = ModelInfo(
        model=target.model,
        drafter=drafter_info.model if drafter_info is not None else "",
        verify_mode=settings.verify_mode,
        speculation_off_reason=off_reason,
        sampling_defaults=target.sampling_defaults,
        inexact_reason=target.inexact_reason,
        calibration=drafter_info.calibration if drafter_info is not None else "",
        structured_output_off_reason=structure_off_reason(settings.tokenizer, limits),
    )
    calibration: CalibrationMonitor | None = None
    if drafter_info is not None:
        trims = trims_by_confidence(settings.verify_mode)
        calibration = CalibrationMonitor(limits.block_size, observes_all=not trims, corrects=settings.recalibrate)
        batch.audit_share = settings.audit_share if trims else 0.0
        batch.draft_gate = _draft_gate(settings, drafter_info, stored_model)
        batch.costs = costs
    scheduler = Scheduler(settings, limits, info, batch)
    options = PolicyOptions(
        settings.lossless_rule,
        settings.budget_lag,
        settings.fixed_window,
        settings.confidence_threshold,
        settles_budget=drafter_info is not None and _sets_lens_on_device(settings, target, drafter_info),
    )
    policy = create_policy(settings.verify_mode, costs, options)
    structure = create_structure(settings, limits, masks) if masks is not None else None
    scheduler.start(verifier, drafter, policy, step_ids, costs, _observers(settings), calibration, structure)
    log.info(
        "serving %s: %s, %d slots, context %d, %d pages of %d positions",
        target.model,
        f"verify_mode {settings.verify_mode}"
        + (f", drafter {info.drafter}, calibration {info.calibration}" if info.drafter else ""),
        limits.max_num_seqs,
        limits.max_model_len,
        limits.num_pages,
        limits.page_size,
    )
    return scheduler


def _sets_lens_on_device(settings: SchedulerSettings, target: VerifierInfo, drafter: DrafterInfo) -> bool:
    """Whether the verifier chooses lengths. Raises ConfigurationError if it should and a service cannot."""
    if not settings.verify_lens_on_device or settings.verify_mode != "compact":
        return False
    for name, can in (("verifier", target.sets_verify_lens), ("drafter", drafter.publishes_blocks)):
        if not can:
            raise ConfigurationError(
                f"verify_lens_on_device: the {name} cannot take part on this machine: set "
                "DSPARK_SCHEDULER_VERIFY_LENS_ON_DEVICE to false",
                field="verify_lens_on_device",
            )
    return True


def _observers(settings: SchedulerSettings) -> list[StepObserver]:
    """Who learns from every step."""
    return [RoundTrace(settings.trace_rounds)] if settings.trace_rounds is not None else []


def _draft_gate(settings: SchedulerSettings, drafter: DrafterInfo, model: CostModel | None) -> DraftGate:
    """Who decides what is drafted."""
    if model is not None and settings.guard:
        elastic = drafter.elastic_block_sizes if settings.elastic_blocks else ()
        sizes = {*elastic, drafter.block_size}
        return Guard(model, sorted(sizes), GuardOptions(settings.guard_probe_share, settings.guard_margin))
    if settings.verify_mode == "fixed":
        if settings.fixed_window > drafter.block_size:
            raise ConfigurationError(
                f"fixed_window {settings.fixed_window} is more than the {drafter.block_size} drafts of a block: lower "
                f"DSPARK_SCHEDULER_FIXED_WINDOW to {drafter.block_size}",
                field="fixed_window",
            )
        return OpenGate(settings.fixed_window)
    return OpenGate(drafter.block_size)


def _check_contract(name: str, version: int) -> None:
    if version != CONTRACT_VERSION:
        raise ConfigurationError(
            f"the {name} speaks contract version {version}, this scheduler {CONTRACT_VERSION}: start services of one "
            "release together"
        )


def check_compatibility(target: VerifierInfo, drafter: DrafterInfo) -> None:
    """Raises ConfigurationError, naming both sides, unless the drafter was made for a target like this one."""
    pairs = (
        ("vocabulary", drafter.target_vocab_size, target.vocab_size),
        ("hidden size", drafter.target_hidden_size, target.hidden_size),
        ("layer count", drafter.num_target_layers, target.num_layers),
        ("page size", drafter.page_size, target.page_size),
    )
    for what, expected, actual in pairs:
        if expected != actual:
            raise ConfigurationError(
                f"drafter {drafter.model} does not fit target {target.model}: it expects a {what} of {expected}, the "
                f"target has {actual}: give a drafter trained for this target, or verify_mode off"
            )
    layer_ids = drafter.target_layer_ids
    # The last layer's output is only defined before or after the final norm by convention: refused, not guessed.
    if not layer_ids or max(layer_ids) >= target.num_layers - 1:
        raise ConfigurationError(
            f"drafter {drafter.model} reads target layers {list(layer_ids)}; they must be among "
            f"0 ... {target.num_layers - 2}"
        )
    if drafter.block_size < 1:
        raise ConfigurationError(f"drafter {drafter.model} has block size 0")


def _page_bytes(target: VerifierInfo, drafter: DrafterInfo | None) -> int:
    """Bytes of a page in every cache."""
    return target.page_bytes + (drafter.page_bytes if drafter is not None else 0)


def compute_limits(settings: SchedulerSettings, target: VerifierInfo, drafter: DrafterInfo | None) -> Limits:
    """Sizes of the session. Raises ConfigurationError naming the setting to change and a value that works."""
    page_bytes = _page_bytes(target, drafter)
    block_size = drafter.block_size if drafter is not None else 0
    num_pages = settings.kv_memory // page_bytes
    if num_pages < settings.max_num_seqs:
        raise ConfigurationError(
            f"kv_memory {settings.kv_memory} holds {num_pages} pages of {page_bytes} bytes, {settings.max_num_seqs} "
            f"slots need one each: raise DSPARK_SCHEDULER_KV_MEMORY to {settings.max_num_seqs * page_bytes} or lower "
            f"DSPARK_SCHEDULER_MAX_NUM_SEQS to {max(1, num_pages)}",
            field="kv_memory",
        )
    if settings.max_batch_tokens < settings.max_num_seqs:
        raise ConfigurationError(
            f"max_batch_tokens {settings.max_batch_tokens} is less than one token for each of {settings.max_num_seqs} "
            f"slots: raise DSPARK_SCHEDULER_MAX_BATCH_TOKENS to {settings.max_num_seqs * (block_size + 1)}",
            field="max_batch_tokens",
        )
    if block_size and settings.feature_ring_rows <= block_size:
        raise ConfigurationError(
            f"feature_ring_rows {settings.feature_ring_rows} is less than a block of {block_size} with its anchor: "
            f"raise DSPARK_SCHEDULER_FEATURE_RING_ROWS to at least {block_size + 1}",
            field="feature_ring_rows",
        )
    capacity = num_pages * target.page_size
    max_model_len = settings.max_model_len or min(target.max_position, capacity)
    if max_model_len > target.max_position:
        raise ConfigurationError(
            f"max_model_len {max_model_len} is more than the {target.max_position} the target supports: lower "
            f"DSPARK_SCHEDULER_MAX_MODEL_LEN to {target.max_position}",
            field="max_model_len",
        )
    if max_model_len > capacity:
        needed = -(-max_model_len // target.page_size) * page_bytes
        raise ConfigurationError(
            f"max_model_len {max_model_len} needs {needed} bytes of K/V pages, kv_memory is {settings.kv_memory}: "
            f"lower DSPARK_SCHEDULER_MAX_MODEL_LEN to {capacity} or raise DSPARK_SCHEDULER_KV_MEMORY",
            field="max_model_len",
        )
    if max_model_len < 2:
        raise ConfigurationError("max_model_len must hold at least 2 tokens", field="max_model_len")
    # No more than all slots can ever fill, the look-ahead of one block included, unless the rest can cache prefixes.
    slots_fill = settings.max_num_seqs * -(-max_model_len // target.page_size)
    return Limits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        max_batch_tokens=settings.max_batch_tokens,
        num_pages=num_pages if settings.prefix_cache != "off" else min(num_pages, slots_fill),
        page_size=target.page_size,
        vocab_size=target.vocab_size,
        eos_token_ids=target.eos_token_ids,
        block_size=block_size,
        feature_ring_rows=settings.feature_ring_rows if block_size else 0,
    )


def _session_sizes(limits: Limits, drafter: DrafterInfo | None) -> SessionSizes:
    return SessionSizes(
        session=secrets.randbits(63) + 1,  # never 0, the stamp of an unwritten row
        num_slots=limits.max_num_seqs,
        num_pages=limits.num_pages,
        max_model_len=limits.max_model_len,
        max_batch_tokens=limits.max_batch_tokens,
        feature_ring_rows=limits.feature_ring_rows,
        max_draft_tokens=limits.block_size,
        feature_layer_ids=drafter.target_layer_ids if drafter is not None else (),
    )


def _attach(sizes: SessionSizes, verifier: VerifierClient, drafter: DrafterClient | None) -> None:
    """Starts a session on both: the verifier's features first, then the drafter, then its arenas back."""
    features_arena = verifier.attach(sizes)
    if drafter is not None:
        verifier.attach(sizes, drafter.attach(sizes, features_arena))
