"""The measurements for a GPU, run whole where there is none, so that their own mistakes cost no minutes of a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """What a rehearsal wrote and printed, and where its picture is; the golden pair stands in for SmolLM2's."""
    directory = tmp_path_factory.mktemp("rehearsal")
    for name, checkpoint in (("smollm2-135m-instruct", "target"), ("smollm2-135m-dspark", "draft_vanilla")):
        (directory / name).symlink_to(GOLDEN / checkpoint)
    out = directory / "gpu.json"
    command = [sys.executable, "-m", "bench.gpu.run", "--rehearse", "--models", str(directory), "--out", str(out)]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return json.loads(out.read_text()), run.stdout, out.with_suffix(".png")


def test_every_part_runs_to_its_end(rehearsal: tuple[dict[str, Any], str, Path]) -> None:
    from bench.gpu.run import PARTS

    results, _, picture = rehearsal
    assert list(results["parts"]) == [part.name for part in PARTS]
    for name, part in results["parts"].items():
        assert part["rows"], name
        assert not part["note"], name
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_must_be_right_is_checked(rehearsal: tuple[dict[str, Any], str, Path]) -> None:
    parts = rehearsal[0]["parts"]
    assert all(row["ok"] for name in ("parity", "invariance") for row in parts[name]["rows"])
    modes = {row["mode"] for row in parts["throughput"]["rows"]}
    assert modes == {"off", "compact", "static"}
    assert all(row["tokens/step"] == 1 for row in parts["throughput"]["rows"] if row["mode"] == "off")
    assert all(row["tokens/step"] > 1 for row in parts["throughput"]["rows"] if row["mode"] == "static")


def test_a_rehearsal_tells_no_times(rehearsal: tuple[dict[str, Any], str, Path]) -> None:
    from bench.gpu.part import TIMED

    rows = [row for part in rehearsal[0]["parts"].values() for row in part["rows"]]
    timed = [(key, value) for row in rows for key, value in row.items() if key.endswith(TIMED)]
    assert timed
    assert all(value is None for key, value in timed if not key.startswith("floor"))


def test_a_part_that_fails_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.gpu.no_gpu import interpreted_gpu
    from bench.gpu.part import Bench, Part, SkippedError
    from bench.gpu.run import failures, measure
    from bench.gpu.scale import REHEARSAL

    def breaks(bench: Bench) -> Any:
        yield {"us": 1.0}
        raise ValueError("broken")

    def skips(bench: Bench) -> Any:
        raise SkippedError("no such model")
        yield {}

    def differs(bench: Bench) -> Any:
        yield {"ok": False}

    parts = [Part(run.__name__, run, 10.0) for run in (breaks, skips, differs)]
    parts += [Part("long", differs, 1000.0), Part("slow", lambda bench: iter([{"n": 1}, {"n": 2}]), -1.0)]
    results = measure(Bench(interpreted_gpu(), REHEARSAL, None), parts, 100.0, shows_times=True)
    assert list(failures(results)) == ["breaks", "differs"]
    assert results["breaks"]["rows"] == [{"us": 1.0}]
    assert "ValueError: broken" in capsys.readouterr().out
    assert results["skips"]["note"] == "skipped: no such model"
    assert results["long"]["note"].startswith("not started")
    assert results["slow"]["rows"] == [{"n": 1}]
    assert results["slow"]["note"].startswith("cut short")


def test_the_drafter_knows_the_set_share_of_what_the_target_says(tmp_path: Path) -> None:
    """By the weights alone: the target's next token is the cycle's, the head's where it is known and only there."""
    from bench.gpu.chain_models import write_pair
    from bench.gpu.scale import REHEARSAL

    vocab = REHEARSAL.chain.vocab
    target_dir, drafter_dir, chain = write_pair(tmp_path, REHEARSAL.chain, 0.75, torch.device("cpu"))
    target, drafter = (load_file(directory / "model.safetensors") for directory in (target_dir, drafter_dir))
    after = torch.empty(vocab, dtype=torch.int64)
    after[chain.before] = torch.arange(vocab)
    said = (target["model.embed_tokens.weight"] @ target["lm_head.weight"].T).argmax(1)
    assert torch.equal(said, after)
    assert chain.text(3, vocab)[1:] == [int(after[token]) for token in chain.text(3, vocab)[:-1]]
    w1, w2 = (drafter[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
    assert torch.equal((w1 @ w2.T).argmax(1) == after, chain.is_known)
    assert int(chain.is_known.sum()) == round(0.75 * vocab)
    assert torch.sigmoid(drafter["confidence_head.proj.bias"]).item() == pytest.approx(0.75)
