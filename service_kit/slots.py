"""Slot bookkeeping of an executor: sampling constants and page tables, as the scheduler last told them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from dspark.v1 import types_pb2

from kernels.sampling import LogitControls, Regime, SlotSampling, TargetOptions
from service_kit.errors import SessionMismatchError


class SlotTable:
    """State per slot. The scheduler owns it; this is the executor's copy."""

    def __init__(self, num_slots: int, num_pages: int, max_model_len: int, page_size: int) -> None:
        """A table of empty slots; `num_pages` bounds the page ids that are accepted."""
        self.page_size = page_size
        self.num_pages = num_pages
        max_pages = -(-max_model_len // page_size)
        self.page_table: npt.NDArray[np.int32] = np.full((num_slots, max_pages), -1, np.int32)
        """Physical page per (slot, position // page_size); -1 where none is given."""
        self.sampling: list[SlotSampling | None] = [None] * num_slots
        """None for a free slot."""
        self.target: list[TargetOptions | None] = [None] * num_slots
        """None where nothing is asked of the target alone."""

    def apply(self, updates: types_pb2.SlotUpdates) -> None:
        """Applies releases, admissions and page table entries, in this order.

        Raises SessionMismatchError, before changing anything, if an index is out of range.
        """
        num_slots, max_pages = self.page_table.shape
        slots = [*updates.releases, *updates.page_slots, *(a.slot for a in updates.admissions)]
        if not len(updates.page_slots) == len(updates.page_indices) == len(updates.page_ids):
            raise SessionMismatchError("page table entries: arrays of different lengths", field="slots")
        if (
            max(slots, default=0) >= num_slots
            or max(updates.page_indices, default=0) >= max_pages
            or max(updates.page_ids, default=0) >= self.num_pages
        ):
            raise SessionMismatchError("a slot, page index or page id is outside the session's sizes", field="slots")
        for slot in updates.releases:
            self.sampling[slot] = self.target[slot] = None
            self.page_table[slot] = -1
        for admission in updates.admissions:
            self.sampling[admission.slot] = _sampling_from_pb(admission)
            self.target[admission.slot] = _target_from_pb(admission.target) if admission.HasField("target") else None
            self.page_table[admission.slot] = -1
        if updates.page_slots:
            self.page_table[list(updates.page_slots), list(updates.page_indices)] = updates.page_ids

    def require_span(self, slot: int, start: int, count: int) -> None:
        """Raises SessionMismatchError unless `slot` is admitted and has pages for [start, start + count)."""
        if slot >= len(self.sampling) or self.sampling[slot] is None:
            raise SessionMismatchError(f"slot {slot} is not admitted")
        first, last = start // self.page_size, (start + count - 1) // self.page_size
        if last >= self.page_table.shape[1] or (self.page_table[slot, first : last + 1] < 0).any():
            raise SessionMismatchError(f"slot {slot} has no pages for positions {start} ... {start + count - 1}")


def _sampling_from_pb(admission: types_pb2.SlotAdmission) -> SlotSampling:
    if admission.regime == types_pb2.REGIME_UNSPECIFIED:
        raise SessionMismatchError(f"slot {admission.slot}: no regime", field="regime")
    return SlotSampling(
        regime=Regime(admission.regime),
        temperature=admission.temperature,
        top_k=admission.top_k,
        top_p=admission.top_p,
        min_p=admission.min_p,
        key=admission.key,
    )


def _target_from_pb(target: types_pb2.TargetOptions) -> TargetOptions:
    if len(target.bias_token_ids) != len(target.bias_values):
        raise SessionMismatchError("bias_token_ids and bias_values have different lengths", field="bias_values")
    controls = LogitControls(
        repetition_penalty=target.repetition_penalty if target.HasField("repetition_penalty") else 1.0,
        frequency_penalty=target.frequency_penalty,
        presence_penalty=target.presence_penalty,
        bias=tuple(zip(target.bias_token_ids, target.bias_values, strict=True)),
        banned_sequences=tuple(tuple(sequence.token_ids) for sequence in target.banned_sequences),
        min_tokens=target.min_tokens,
        stop_token_ids=tuple(target.stop_token_ids),
    )
    return TargetOptions(
        controls,
        tuple(target.text_token_ids),
        target.num_prompt_tokens,
        target.num_logprobs if target.HasField("num_logprobs") else None,
        target.num_prompt_logprobs if target.HasField("num_prompt_logprobs") else None,
    )
