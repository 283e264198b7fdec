"""Settings and sizes: what cannot be served is refused before anything runs, with a value that works."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fakes.executors import fake_pair
from fakes.rig import running

from scheduler_service.executor_types import DrafterInfo, VerifierInfo
from scheduler_service.settings import SchedulerSettings, parse_bytes
from scheduler_service.startup import build_scheduler, check_compatibility, compute_limits
from scheduler_service.transport import InProcessTransport
from service_kit.errors import ConfigurationError
from service_kit.settings import load_settings

TARGET = VerifierInfo(
    contract_version=1,
    model="target",
    vocab_size=100,
    hidden_size=32,
    num_layers=8,
    max_position=512,
    page_bytes=1000,
    page_size=16,
    eos_token_ids=frozenset({2}),
)
DRAFTER = DrafterInfo(
    contract_version=1,
    model="drafter",
    block_size=7,
    target_vocab_size=100,
    target_hidden_size=32,
    target_layer_ids=(1, 6),
    num_target_layers=8,
    page_bytes=600,
    page_size=16,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1GiB", 2**30), ("512 MiB", 2**29), ("1.5kb", 1500), ("4096", 4096), (4096, 4096), ("2 GB", 2 * 10**9)],
)
def test_sizes_with_units(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_SCHEDULER_KV_MEMORY", "2GiB")
    monkeypatch.setenv("DSPARK_SCHEDULER_VERIFY_MODE", "static")
    settings = load_settings(SchedulerSettings)
    assert (settings.kv_memory, settings.verify_mode) == (2**31, "static")
    monkeypatch.setenv("DSPARK_SCHEDULER_KV_MEMORY", "much")
    with pytest.raises(ConfigurationError, match=r"DSPARK_SCHEDULER_KV_MEMORY: .*e\.g\. .1GiB"):
        load_settings(SchedulerSettings)


def test_a_drafter_that_fits() -> None:
    check_compatibility(TARGET, DRAFTER)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_vocab_size": 90}, "expects a vocabulary of 90, the target has 100"),
        ({"target_hidden_size": 64}, "expects a hidden size of 64, the target has 32"),
        ({"num_target_layers": 9}, "expects a layer count of 9, the target has 8"),
        ({"page_size": 32}, "expects a page size of 32, the target has 16"),
        ({"target_layer_ids": (1, 7)}, r"reads target layers \[1, 7\]; they must be among 0 \.\.\. 6"),
        ({"target_layer_ids": ()}, r"reads target layers \[\]"),
        ({"block_size": 0}, "block size 0"),
    ],
)
def test_a_drafter_that_does_not_fit(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_compatibility(TARGET, replace(DRAFTER, **change))  # type: ignore[arg-type]


def test_the_context_defaults_to_what_memory_holds() -> None:
    roomy = compute_limits(SchedulerSettings(kv_memory=10**9, prefix_cache="off"), TARGET, DRAFTER)
    assert (roomy.max_model_len, roomy.num_pages) == (512, 16 * 32)
    caching = compute_limits(SchedulerSettings(kv_memory=10**9), TARGET, DRAFTER)
    assert caching.num_pages == 10**9 // 1600  # what no slot needs holds prefixes
    tight = compute_limits(SchedulerSettings(kv_memory=20 * 1600 + 5), TARGET, DRAFTER)
    assert (tight.max_model_len, tight.num_pages, tight.block_size, tight.feature_ring_rows) == (320, 20, 7, 256)
    off = compute_limits(SchedulerSettings(kv_memory=20 * 1600), TARGET, None)
    assert (off.num_pages, off.block_size, off.feature_ring_rows) == (32, 0, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_memory": 15 * 1600},
        {"max_num_seqs": 16, "max_batch_tokens": 15},
        {"feature_ring_rows": 7},
        {"max_model_len": 513},
        {"max_model_len": 400, "kv_memory": 20 * 1600},
    ],
)
def test_sizes_that_do_not_fit_name_a_setting_and_a_value_that_works(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        compute_limits(SchedulerSettings(**settings), TARGET, DRAFTER)  # type: ignore[arg-type]
    message = raised.value.message
    advice = re.findall(r"DSPARK_SCHEDULER_(\w+?) to (?:at least )?(\d+)", message)
    assert advice, message
    for name, value in advice:
        compute_limits(SchedulerSettings(**{**settings, name.lower(): int(value)}), TARGET, DRAFTER)  # type: ignore[arg-type]


def test_executors_of_another_contract_are_refused() -> None:
    verifier, drafter = fake_pair()
    verifier.contract_version = 1
    with pytest.raises(ConfigurationError, match="the verifier speaks contract version 1, this scheduler 2"):
        build_scheduler(SchedulerSettings(verify_mode="off"), InProcessTransport(verifier), None)
    verifier.contract_version, drafter.contract_version = 2, 3
    with (
        pytest.raises(ConfigurationError, match="the drafter speaks contract version 3"),
        running("static", (verifier, drafter)),
    ):
        pass
    with pytest.raises(ConfigurationError, match="needs a drafter"):
        build_scheduler(SchedulerSettings(verify_mode="static"), InProcessTransport(verifier), None)
