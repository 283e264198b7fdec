"""Nothing but the request decides its text: not speculation, load, chunk sizes, preemption or the number of processes.

A small part of `dspark bench equality`, on the embedded target.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from bench.equality_matrix import ServerSettings, Variation, choose, variations
from bench.equality_record import Row
from bench.equality_run import EqualityOptions, run_equality
from launcher.models import ModelPair
from launcher.settings import LauncherSettings
from launcher.supervisor import StopRequest
from service_kit.settings import CommonSettings

pytestmark = pytest.mark.model

NUM_PROMPTS, NUM_TOKENS = 5, 48  # and the long prompt
TOGETHER = choose(("together",))  # the reference, and compact with small chunks and preemption
ALONE = next(each for each in variations() if (each.factor, each.value) == ("concurrency", "1"))
ONE_PROCESS = Variation("process", "one, static", ServerSettings(verify_mode="static", in_process=True))
CHOSEN = {"q4": [*TOGETHER, ALONE, ONE_PROCESS], "fp16": TOGETHER}
"""Few servers, since each takes seconds to start; `dspark bench equality` varies every factor alone."""


@pytest.mark.parametrize("weight_format", CHOSEN)
def test_every_answer_equals_the_reference(
    weight_format: str, pair: ModelPair, common: CommonSettings, tmp_path: Path
) -> None:
    chosen = tuple(CHOSEN[weight_format])
    options = EqualityOptions(
        (weight_format,), ("greedy", "nucleus"), chosen, NUM_PROMPTS, NUM_TOKENS, tmp_path / "rows.json"
    )

    def run() -> list[Row]:
        return run_equality(options, pair, common, LauncherSettings(), StopRequest(), Console())

    rows = run()
    assert [row for row in rows if row.fault] == []
    assert len(rows) == 2 * len(chosen)
    assert {row.num_answers for row in rows} == {NUM_PROMPTS, NUM_PROMPTS + 1}  # the long one does not fit few pages
    assert sum(row.num_preemptions for row in rows) > 0
    assert run() == rows, "finished rows ran again"
