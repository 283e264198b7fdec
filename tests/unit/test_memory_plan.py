"""Memory plans: what is told when they fit, and values that fit when they do not."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes.gpu import fake_gpu

import drafter_service.session_memory
import verifier_service.session_memory
from drafter_service.loading import load_drafter
from drafter_service.records import SessionSizes as DraftSizes
from drafter_service.settings import DrafterSettings
from scheduler_service.settings import parse_bytes
from service_kit.errors import ConfigurationError
from service_kit.memory_plan import MemoryPlan, Room
from verifier_service.loading import load_target
from verifier_service.session_memory import SessionSizes
from verifier_service.settings import VerifierSettings

GOLDEN = Path(__file__).parents[1] / "golden"
MIB = 2**20
PAGE_BYTES = 32768
"""Of both caches of the golden pair."""


def test_a_plan_that_fits_is_logged_as_a_table(caplog: pytest.LogCaptureFixture) -> None:
    parts = {"K/V pages": 1500 * MIB, "feature ring": 0, "logits": MIB // 2}
    plan = MemoryPlan("verifier", {"weights": 300 * MIB}, parts, Room("NVIDIA H100", 4000 * MIB, 81_000 * MIB), ())
    with caplog.at_level(logging.INFO):
        plan.settle()
    assert caplog.messages == [
        "memory of the verifier, NVIDIA H100, in MiB:\n"
        "        300  weights\n"
        "      1,500  K/V pages\n"
        "          1  logits\n"
        "      1,801  in all, 1,501 of it for the session\n"
        "      4,000  free before the session, of 81,000"
    ]


def verifier_plan(is_on_gpu: bool) -> Callable[..., MemoryPlan]:
    settings = VerifierSettings(model=str(GOLDEN / "target"), kernels="reference", weight_format="float32", threads=1)
    target = load_target(settings).model
    sizes = SessionSizes(1024, 8192, 400, 1024, 128, 7, (0, 2, 4), PAGE_BYTES)

    def plan(free_bytes: int, **changes: int) -> MemoryPlan:
        gpu = fake_gpu(free_bytes=free_bytes) if is_on_gpu else None
        return verifier_service.session_memory.plan_session(replace(sizes, **changes), target, gpu)

    return plan


def drafter_plan(is_on_gpu: bool) -> Callable[..., MemoryPlan]:
    settings = DrafterSettings(
        model=str(GOLDEN / "draft_vanilla"),
        target=str(GOLDEN / "target"),
        kernels="reference",
        weight_format="float32",
        threads=1,
    )
    drafter = load_drafter(settings).model
    sizes = DraftSizes(1024, 8192, 400, PAGE_BYTES)

    def plan(free_bytes: int, **changes: int) -> MemoryPlan:
        gpu = fake_gpu(free_bytes=free_bytes) if is_on_gpu else None
        return drafter_service.session_memory.plan_session(sizes._replace(**changes), drafter, gpu)

    return plan


def refusal(plan: MemoryPlan) -> tuple[str, str]:
    """The setting at fault and the value that is advised."""
    with pytest.raises(ConfigurationError) as caught:
        plan.settle()
    advised = re.search(r": lower (\w+) to (\w+)$", caught.value.message)
    assert advised, caught.value.message
    assert advised[1] == caught.value.field
    assert "\n" not in caught.value.message
    return advised[1], advised[2]


@pytest.mark.parametrize("kind", [verifier_plan, drafter_plan])
def test_the_plan_of_a_gpu_has_all_parts_and_the_value_that_is_advised_fits(kind: Any) -> None:
    pytest.importorskip("triton")
    plan = kind(True)
    whole = plan(2**40)
    names = {"K/V pages", "attention states", "graphs (estimated)"}
    names |= {"feature ring", "logits"} if kind is verifier_plan else {"draft distributions"}
    assert names <= {name for name, size in whole.parts.items() if size}
    assert set(whole.held) == {"CUDA context and libraries (estimated)", "weights"}

    free_bytes = whole.needed_bytes - 20 * MIB
    setting, value = refusal(plan(free_bytes))
    assert setting == "kv_memory"
    num_pages = parse_bytes(value) // PAGE_BYTES
    assert num_pages > 0.5 * 8192
    plan(free_bytes, num_pages=num_pages).settle()

    without_pages = sum(size for name, size in whole.parts.items() if name != "K/V pages")
    free_bytes = without_pages + plan(2**40, num_pages=1000).parts["K/V pages"]
    setting, value = refusal(plan(free_bytes, num_pages=1030))  # 1024 slots have a page each
    assert setting == "max_num_seqs"
    plan(free_bytes, num_pages=1030, num_slots=int(value)).settle()


def test_a_plan_that_no_setting_saves_says_so() -> None:
    plan = verifier_plan(True)(MIB)
    with pytest.raises(
        ConfigurationError, match=r"kv_memory, max_num_seqs and max_batch_tokens \(none is enough alone"
    ):
        plan.settle()


def test_a_service_on_the_cpu_plans_within_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    room = partial(Room, "this container (control group x)")
    for kind, module in ((verifier_plan, verifier_service), (drafter_plan, drafter_service)):
        plan = kind(False)
        whole = plan(0)
        assert whole.needed_bytes >= whole.parts["K/V pages"] > 0
        assert set(whole.held) == {"weights"}
        small = room(whole.needed_bytes - 8 * MIB, 2**40)
        monkeypatch.setattr(module.session_memory, "memory_room", lambda small=small: small)
        setting, value = refusal(plan(0))
        assert setting == "kv_memory"
        plan(0, num_pages=parse_bytes(value) // PAGE_BYTES).settle()


def test_memory_that_could_not_be_had_after_all_is_told_with_less() -> None:
    plan = verifier_plan(False)(0)
    error = plan.failure(MemoryError("Unable to allocate 1. MiB\nmore"))
    assert error.field == "kv_memory"
    assert re.search(r"did not give .* \(Unable to allocate 1\. MiB\) .*: lower kv_memory to \d+", error.message)
