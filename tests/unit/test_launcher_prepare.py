"""`python -m launcher.prepare`: what a start without the launcher checks before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from drafter_harness import TARGET, VANILLA_DRAFTER, make_checkpoint

from launcher.prepare import main


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CACHE_DIR", str(tmp_path / "cache"))


def test_a_pair_that_fits_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(TARGET), str(VANILLA_DRAFTER)]) == 0
    assert capsys.readouterr().out == f"target {TARGET}\ndrafter {VANILLA_DRAFTER}\n"
    assert main([str(TARGET), "none"]) == 0
    assert capsys.readouterr().out == f"target {TARGET}\ndrafter none\n"


def test_a_drafter_of_another_target_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = make_checkpoint(tmp_path / "drafter", {"num_target_layers": 8})
    assert main([str(TARGET), str(drafter)]) == 1
    assert capsys.readouterr().err.startswith(
        "error: the drafter was made for another target: its num_target_layers is 8"
    )
    assert main([str(tmp_path / "missing")]) == 1
    assert "is not a directory" in capsys.readouterr().err
    assert main([]) == 2
