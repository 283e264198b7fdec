"""The file of measured costs: read back as written, refused on any other engine and when it cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler_service.admission import Limits
from scheduler_service.cost_model import CostModel
from scheduler_service.cost_model_file import StoredCosts, cost_file_path, fingerprint_of, load_costs, save_costs
from scheduler_service.executor_types import DrafterInfo, VerifierInfo
from scheduler_service.prefill_limit import PrefillCosts
from service_kit.errors import ConfigurationError

TARGET = VerifierInfo(
    1, "target", 100, 32, 8, 512, 1000, 16, frozenset({2}), (), fingerprint="f0", device="cpu, 2 threads"
)
DRAFTER = DrafterInfo(1, "drafter", 7, 100, 32, (1, 6), 8, 600, 16, (3, 7), "d0", "fp16", "cpu, 2 threads")
LIMITS = Limits(4, 64, 24, 40, 16, 100, frozenset(), 7, 16)
COSTS = StoredCosts(
    CostModel(1e6, 2e5, 3.5, np.array([0, 0, 1e5]), {3: np.array([0, 1e6]), 7: np.array([0, 2e6])}),
    PrefillCosts(2e6, {8: 3e6, 32: 9e6}, 4.0),
)


def _fingerprint(target: VerifierInfo = TARGET, drafter: DrafterInfo | None = DRAFTER, **limits: Any) -> dict[str, str]:
    return fingerprint_of(target, drafter, replace(LIMITS, **limits), is_one_process=False)


@pytest.mark.parametrize("model", [COSTS.model, None])
def test_read_back_as_written(tmp_path: Path, model: CostModel | None) -> None:
    path = cost_file_path(tmp_path, _fingerprint())
    save_costs(path, _fingerprint(), COSTS._replace(model=model))
    loaded = load_costs(path, _fingerprint())
    assert loaded.prefill == COSTS.prefill
    assert str(loaded.model) == str(model)
    if model is not None and loaded.model is not None:
        assert loaded.model.token_ns.tolist() == model.token_ns.tolist()
        assert list(loaded.model.block_draft_ns) == [3, 7]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (_fingerprint(replace(TARGET, model="other")), "target is 'target f0' there and 'other f0' here"),
        (_fingerprint(replace(TARGET, fingerprint="f1")), "target is 'target f0' there and 'target f1' here"),
        (_fingerprint(replace(TARGET, weight_format="q4")), "target weight format is '' there and 'q4' here"),
        (_fingerprint(replace(TARGET, device="cpu, 4 threads")), "device and threads is 'cpu, 2 threads' there"),
        (
            _fingerprint(drafter=replace(DRAFTER, fingerprint="d1")),
            "drafter is 'drafter d0' there and 'drafter d1' here",
        ),
        (_fingerprint(drafter=replace(DRAFTER, elastic_block_sizes=())), "block sizes is '3, 7' there and '7' here"),
        (_fingerprint(drafter=None), "drafter is 'drafter d0' there and 'none' here"),
        (_fingerprint(max_batch_tokens=48), "max_batch_tokens is '24' there and '48' here"),
        ({**_fingerprint(), "libraries": "torch 1.0"}, "libraries is 'llvmlite .* there and 'torch 1.0' here"),
    ],
)
def test_another_engine_is_refused_naming_the_difference(tmp_path: Path, other: dict[str, str], named: str) -> None:
    path = tmp_path / "costs.json"
    save_costs(path, _fingerprint(), COSTS)
    with pytest.raises(ConfigurationError, match=named) as error:
        load_costs(path, other)
    assert str(path) in str(error.value)
    assert cost_file_path(tmp_path, other) != cost_file_path(tmp_path, _fingerprint())


def _damage(content: dict[str, Any], *keys: str, value: object) -> None:
    for key in keys[:-1]:
        content = content[key]
    content[keys[-1]] = value


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("model", "token_ns"), [0, 9, 8], "token_ns falls from 9 at 1 to 8 at 2"),
        (("model", "bias_ns"), -5, "bias_ns is -5"),
        (("model", "row_ns"), float("nan"), "NaN is no time"),
        (("model", "block_draft_ns", "7"), [0, 10], "7 must have .* none that is less"),
        (("model", "token_ns"), "many", "damaged"),
        (("model",), {"bias_ns": 1}, r"damaged \(KeyError: 'row_ns'\)"),
        (("prefill", "decode_ns"), 0, "prefill costs that cannot be"),
        (("prefill", "chunk_ns"), {}, "prefill costs that cannot be"),
        (("format",), 0, "not measured costs of format 1"),
        (("fingerprint",), None, "target is 'not given' there"),
    ],
)
def test_costs_that_cannot_be_are_refused(tmp_path: Path, keys: tuple[str, ...], value: object, message: str) -> None:
    path = tmp_path / "costs.json"
    save_costs(path, _fingerprint(), COSTS)
    content = json.loads(path.read_text())
    _damage(content, *keys, value=value)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=message):
        load_costs(path, _fingerprint())


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"costs\.json"):
        load_costs(path, _fingerprint())
    with pytest.raises(ConfigurationError, match="No such file"):
        load_costs(tmp_path / "none", _fingerprint())
