"""lm-eval over /v1/completions: scores, log-likelihoods and texts are the same with speculation off and on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from server_options import Server

HERE = Path(__file__).parent
TASKS = ("facts_choice", "facts_text")


def evaluate(server: Server, directory: Path, *, tokenized: bool) -> dict[str, Any]:
    """Results by task, and of each item what the model answered: log-likelihoods or text."""
    model = {
        "model": server.model,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(server.model_dir),
        "tokenized_requests": tokenized,
        "num_concurrent": 4,
        "max_retries": 1,
    }
    command = [str(Path(sys.executable).parent / "lm-eval"), "run", "--model", "local-completions", "--tasks"]
    command += [",".join(TASKS), "--include_path", str(HERE / "tasks"), "--log_samples"]
    command += ["--output_path", str(directory), "--model_args", json.dumps(model)]
    environment = {
        "PATH": "/usr/bin:/bin",
        "OPENAI_API_KEY": server.api_key,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory / "huggingface"),
    }
    result = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    (report,) = directory.rglob("results_*.json")
    results = json.loads(report.read_text())["results"]
    items: dict[str, Any] = {}
    for task in TASKS:
        (samples,) = directory.rglob(f"samples_{task}_*.jsonl")
        found = [json.loads(line) for line in samples.read_text().splitlines()]
        items[task] = [item["resps"] for item in sorted(found, key=lambda item: item["doc_id"])]
    return {"results": {task: results[task] for task in TASKS}, "items": items}


def test_the_same_with_speculation_off_and_on(servers: dict[str, Server], tmp_path: Path) -> None:
    off, on = servers["off"], servers["static"]
    plain = evaluate(off, tmp_path / "off", tokenized=True)
    assert off.metric("vllm:spec_decode_num_draft_tokens_total") == 0
    drafted = evaluate(on, tmp_path / "on", tokenized=True)
    assert on.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    print(json.dumps(plain["results"], indent=1))
    assert drafted == plain
    assert plain["results"]["facts_choice"]["acc,none"] >= 0.5
    assert len(plain["items"]["facts_choice"]) == len(plain["items"]["facts_text"]) == 20


def test_prompts_as_text_score_the_same(servers: dict[str, Server], tmp_path: Path) -> None:
    ids = evaluate(servers["static"], tmp_path / "ids", tokenized=True)
    text = evaluate(servers["static"], tmp_path / "text", tokenized=False)
    assert text == ids
