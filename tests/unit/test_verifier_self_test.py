"""The target's self-test at start: what it finds, what it remembers, and what it says."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.linear import Linear
from kernels.self_test import same_bits
from verifier_service import self_test
from verifier_service.loading import LoadedTarget, load_target
from verifier_service.settings import VerifierSettings

GOLDEN = Path(__file__).parents[1] / "golden" / "target"


def load(cache_dir: Path | None = None) -> LoadedTarget:
    settings = VerifierSettings(model=str(GOLDEN), weight_format="float32", kernels="cpu", threads=1)
    return load_target(settings, cache_dir)


def record_of(cache_dir: Path) -> Path:
    return next(cache_dir.glob("self-test-*.json"))


def make_inexact(monkeypatch: pytest.MonkeyPatch, is_off: Callable[[int], bool]) -> None:
    """Changes the last bit of every element of a layer's result where `is_off` says so of the row count."""
    exact = Linear._multiply

    def multiply(self: Linear, x: Tensor, out: Tensor) -> Tensor:
        result = exact(self, x, out)
        if is_off(len(x)):
            result.view(torch.int32)[:] ^= 1
        return result

    monkeypatch.setattr(Linear, "_multiply", multiply)


def test_an_exact_machine_is_tested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load(tmp_path)
    assert target.inexact_reason == ""
    assert target.model.weights.padded_rows(3) == 3
    monkeypatch.setattr(self_test, "_test", lambda target: pytest.fail("tested again"))
    assert load(tmp_path).inexact_reason == ""


def test_counts_that_are_not_exact_are_padded_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_inexact(monkeypatch, lambda count: count in (1, 2, 7))
    for _ in range(2):
        caplog.clear()
        target = load(tmp_path)
        assert target.inexact_reason == ""
        assert "padded" in caplog.text
        assert target.model.weights.padded_rows(1) == 3
        assert target.model.weights.padded_rows(7) == 8
        x = torch.randn(5, 64)
        layer = target.model.weights.layers[0].qkv
        assert same_bits(layer(x)[2:3], layer(x[2:3]))
        monkeypatch.setattr(self_test, "_test", lambda target: pytest.fail("tested again"))


def test_a_machine_without_an_exact_count_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = itertools.count()
    make_inexact(monkeypatch, lambda count: next(calls) % 2 == 0)  # another result each time, even for one row
    for _ in range(2):
        caplog.clear()
        target = load(tmp_path)
        assert "gives rows their own bits" in target.inexact_reason
        assert f"not bit-exact: {target.inexact_reason}" in caplog.text
        assert target.model.weights.padded_rows(3) == 3


def test_a_forward_whose_rows_depend_on_the_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make_inexact(monkeypatch, lambda count: count == 18)  # a count that the layers' own test does not try
    monkeypatch.setattr(self_test, "_NUM_OTHERS", 13)
    assert load().inexact_reason == "rows of a forward differ from the same rows computed alone"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": {}}', '{"key": {}, "counts": [], "inexact_reason": ""}'])
def test_a_damaged_record_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    load(tmp_path)
    record = record_of(tmp_path)
    whole = record.read_text()
    record.write_text(content)
    assert load(tmp_path).inexact_reason == ""
    assert f"{record} is not readable" in caplog.text
    assert record.read_text() == whole


@pytest.mark.parametrize(
    ("name", "words"),
    [("cpu", "another cpu (cpu was Z80, is "), ("threads", "another threads"), ("libraries", "another libraries")],
)
def test_a_record_of_another_machine_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, words: str
) -> None:
    load(tmp_path)
    record = json.loads(record_of(tmp_path).read_text())
    other = {**record, "key": {**record["key"], name: "Z80"}, "inexact_reason": "slow paper tape"}
    record_of(tmp_path).write_text(json.dumps(other))
    with caplog.at_level(logging.INFO):
        assert load(tmp_path).inexact_reason == ""
    assert words in caplog.text
    assert json.loads(record_of(tmp_path).read_text()) == record


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert load(tmp_path / "file").inexact_reason == ""
    assert "the next start tests anew" in caplog.text
