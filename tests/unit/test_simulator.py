"""The simulator: what it replays, what it counts, what it refuses, and that it tells good scheduling from bad."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from scheduler_service.cost_model import CostModel
from scheduler_service.cost_model_online import OnlineCosts
from scheduler_service.draft_gate import OpenGate
from scheduler_service.policy import create_policy
from service_kit.errors import ConfigurationError
from simulator.command import SimulateOptions, run_simulate
from simulator.cost_table import load_table, shipped_tables
from simulator.engine import Scheduling, SimulatedEngine
from simulator.gpu_like import gpu_like_table
from simulator.modes import MODES, Mode
from simulator.replay import TracePopulation
from simulator.sweep import SweepOptions, run, sweep
from simulator.synthetic import TRAFFIC, SyntheticPopulation

TABLE = load_table("gpu-like")
PUBLISHED = SyntheticPopulation(TRAFFIC["published"])
QUICK = SweepOptions(concurrencies=(4,), min_steps=60, max_steps=120, num_seeds=1)


def _round(request: int, accepted: int, **changes: object) -> dict[str, object]:
    made = {"request": request, "regime": "greedy", "position": 10, "confidences": [0.9, 0.5, 0.2], "verify_len": 3}
    return (
        made | {"commit_len": 3, "num_accepted": accepted, "num_committed": accepted + 1, "is_audit": False} | changes
    )


def _line(step_id: int, *rounds: dict[str, object]) -> dict[str, object]:
    sizes = {"num_rows": 2, "num_tokens": 8, "num_context": 90.0, "num_drafted": 2, "block_len": 3, "num_prefill": 0}
    return {"step_id": step_id, **sizes, "step_ns": 5_000_000 + step_id, "draft_ns": 1000, "rounds": list(rounds)}


def _trace(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_static_replays_recorded_lengths_in_order(tmp_path: Path) -> None:
    lens = {0: [3, 0, 1, 2], 1: [1, 1, 0, 3]}
    path = _trace(
        tmp_path / "a.jsonl",
        *(_line(n, _round(0, a), _round(1, b)) for n, (a, b) in enumerate(zip(*lens.values(), strict=True))),
    )
    population = TracePopulation([path])
    stream = population.stream(1, seed=0)
    for _ in lens:
        sizes = stream.start(np.array([0]))
        own = [int(stream.draft(np.array([0])).num_accepted[0]) for _ in range(4)]
        assert own in lens.values()
        assert sizes.answer_lens[0] == sum(own) + len(own)
        lens = {key: each for key, each in lens.items() if each != own}
    assert lens == {}
    scheduling = Scheduling(OpenGate(3), create_policy("static", None))  # type: ignore[arg-type]
    engine = SimulatedEngine(TABLE.model, population, 1, 0, scheduling)
    for _ in range(400):
        engine.step()
    # All but the last round of an answer count as recorded; there the rest of the answer is the limit.
    assert engine.totals.num_accepted / engine.totals.num_rounds == pytest.approx(11 / 8, rel=0.25)


@pytest.mark.parametrize("mode", ["off", "fixed-2", "static", "threshold", "compact", "compact-lagged"])
def test_every_token_is_an_accepted_draft_or_the_one_of_its_round(mode: str) -> None:
    totals = run(MODES[mode], TABLE, PUBLISHED, 4, 0, QUICK)
    assert totals.num_tokens == totals.num_accepted + totals.num_rounds
    assert totals.num_accepted <= totals.num_verified <= totals.num_slots
    assert totals.class_tokens.sum() == totals.num_tokens
    assert (totals.num_slots > 0) == (mode != "off")


def test_made_up_requests_have_the_lengths_and_confidences_they_were_asked_for() -> None:
    stream = PUBLISHED.stream(400, seed=1)
    wanted = np.array(list(TRAFFIC["published"].values()))
    sums, confidences, hits = np.zeros(4), [], []
    for _ in range(30):
        ids = stream.start(np.arange(400)).class_ids
        blocks = stream.draft(np.arange(400))
        sums += np.bincount(ids, blocks.num_accepted + 1.0)
        confidences.append(blocks.confidences[:, 0])
        hits.append(blocks.num_accepted > 0)
    assert sums / 3000 == pytest.approx(wanted, rel=0.04)
    assert np.mean(confidences) == pytest.approx(np.mean(hits), abs=0.01)  # calibrated
    sure = SyntheticPopulation(TRAFFIC["published"], temperature=0.5).stream(400, seed=1)
    sure.start(np.arange(400))
    assert sure.draft(np.arange(400)).confidences[:, 0].std() > np.std(confidences[0])


def test_a_shorter_block_accepts_no_more_than_it_has() -> None:
    totals = run(MODES["fixed-1"], TABLE, PUBLISHED, 4, 0, QUICK)
    assert totals.num_accepted <= totals.num_drafted_rows == totals.num_slots


class _FreeTokens(CostModel):
    """Believes that verifying costs nothing."""

    def step_ns(self, work: object, contexts: np.ndarray) -> np.ndarray:  # type: ignore[override, type-arg]
        return np.full(contexts.size + 1, 1e6)


def test_a_policy_that_ignores_costs_is_slower() -> None:
    model = TABLE.model
    blind = OnlineCosts(_FreeTokens(1e6, 0.0, 0.0, np.zeros(9), {7: np.zeros(9)}))

    class Blind(Mode):
        def scheduling(self, *_: object) -> Scheduling:  # type: ignore[override]
            policy = create_policy("compact", blind)
            assert policy is not None
            return Scheduling(OpenGate(7), policy)

    options = SweepOptions(min_steps=60, num_seeds=1)
    told = run(MODES["compact"], TABLE, PUBLISHED, 256, 0, options)
    ignoring = run(Blind("blind", "compact"), TABLE, PUBLISHED, 256, 0, options)
    assert told.num_tokens / told.ns > 1.2 * ignoring.num_tokens / ignoring.ns
    assert model.draft_ns(256, 7) > 0


def test_the_budget_falls_with_the_concurrency_and_off_is_reached() -> None:
    options = SweepOptions(concurrencies=(1, 32, 400), min_steps=50, max_steps=200, num_seeds=1)
    rows = [*sweep([MODES["off"], MODES["compact-lagged"]], TABLE, PUBLISHED, options)][1::2]
    budgets = [row.budget for row in rows]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > 3
    assert rows[0].gain_off > 2
    assert all(row.gain_off > 0.95 for row in rows)


def test_the_shipped_tables_load_and_the_made_up_one_is_what_its_maker_makes() -> None:
    assert shipped_tables() == ["cpu", "gpu-like"]
    path = Path(__file__).parents[2] / "simulator" / "tables" / "gpu-like.json"
    assert json.loads(path.read_text()) == gpu_like_table()
    assert load_table("cpu").model.block_draft_ns.keys() >= {7}


def _table(**changes: object) -> dict[str, object]:
    model = {"bias_ns": 1e6, "row_ns": 10.0, "context_ns": 0.1, "token_ns": [0, 1, 2], "block_draft_ns": {"7": [0, 9]}}
    return {"model": model | changes}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "no 'model'"),
        (_table(token_ns=[0, 2, 1]), "token_ns falls"),
        (_table(bias_ns=-1), "bias_ns is -1"),
        (_table(token_ns={"at": [0, 4, 2], "ns": [0, 1, 2]}), '"at" must rise'),
    ],
)
def test_a_bad_table_is_refused_in_words(content: object, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=words) as caught:
        load_table(str(path))
    assert str(path) in str(caught.value)


def test_a_table_that_is_no_json_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{\n "model": \n')
    with pytest.raises(ConfigurationError, match=r"bad\.json, line 3"):
        load_table(str(path))
    with pytest.raises(ConfigurationError, match="one of cpu, gpu-like"):
        load_table("nothing-like-it")


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (_line(2, _round(0, 1, verify_len=1)), "line 2: 1 of 3 drafts were verified.*--verify-mode static"),
        (_line(2, _round(0, 7)), "line 2: num_accepted is 7 of 3"),
        ({"step_id": 1}, "line 2: no 'block_len'"),
        (_line(2, _round(0, 1)) | {"step_ns": -5}, "line 2: step_ns is -5"),
        ("no step", "line 2"),
    ],
)
def test_a_bad_trace_is_refused_naming_the_line(second: object, words: str, tmp_path: Path) -> None:
    path = _trace(tmp_path / "bad.jsonl", _line(1, _round(0, 1)), second)
    with pytest.raises(ConfigurationError, match=words) as caught:
        TracePopulation([path])
    assert str(path) in str(caught.value)


def test_the_command_writes_its_files(tmp_path: Path) -> None:
    trace = _trace(tmp_path / "mine.jsonl", *(_line(n, _round(0, n % 4), _round(1, 1)) for n in range(20)))
    options = SimulateOptions(["gpu-like"], ["off", "static", "compact"], [trace], out=tmp_path / "out", sweep=QUICK)
    console = Console(record=True, width=200)
    rows = run_simulate(options, console)
    assert [row.mode for row in rows] == ["off", "static", "compact"]
    assert "20 recorded steps took" in console.export_text()
    records = json.loads((tmp_path / "out" / "simulated-gpu-like.json").read_text())
    assert [record["tokens_s"] for record in records] == pytest.approx([row.tokens_s for row in rows])
    assert (tmp_path / "out" / "simulated-gpu-like.csv").read_text().count("\n") == 4
    assert (tmp_path / "out" / "simulated-gpu-like.png").stat().st_size > 10_000
