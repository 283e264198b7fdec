"""GuideLLM at concurrency 1 and 8: no errors, and the tokens it counts are those that the server counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_options import Server

STREAMS = (1, 8)
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 48, 24
"""Of each concurrency."""


def run(server: Server, directory: Path, request_format: str) -> list[dict[str, Any]]:
    """The report's benchmarks, one a concurrency."""
    backend = {"kind": "openai_http", "target": server.url, "api_key": server.api_key, "request_format": request_format}
    tokenizer = {"kind": "huggingface_auto", "model": str(server.model_dir)}
    data = {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    report = directory / "report.json"
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--backend", json.dumps(backend)]
    command += ["--profile", json.dumps({"kind": "concurrent", "streams": STREAMS})]
    command += ["--constraint", json.dumps({"kind": "max_requests", "count": REQUESTS})]
    command += ["--tokenizer", json.dumps(tokenizer), "--data", json.dumps(data), "--disable-console-interactive"]
    command += ["--output", json.dumps({"kind": "json", "path": str(report)}), "--output", "kind=console"]
    environment = {
        "PATH": "/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(directory / "huggingface"),
        "GUIDELLM__MAX_WORKER_PROCESSES": "1",  # each imports torch
    }
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    return list(json.loads(report.read_text())["benchmarks"])


@pytest.mark.parametrize("request_format", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_counts_agree(server: Server, tmp_path: Path, request_format: str) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    server.wait_idle()
    before = [server.metric(name) for name in names]
    benchmarks = run(server, tmp_path, request_format)
    server.wait_idle()
    grown = [server.metric(name) - start for name, start in zip(names, before, strict=True)]
    assert len(benchmarks) == len(STREAMS)
    requests = [request for each in benchmarks for request in each["requests"]["successful"]]
    missing = REQUESTS * len(STREAMS) - len(requests)
    assert 0 <= missing <= 2  # on a busy machine its report may lack one, answered all the same
    assert not any(each["requests"][kind] for each in benchmarks for kind in ("errored", "incomplete"))
    assert {request["output_tokens"] for request in requests} == {OUTPUT_TOKENS}
    prompt_tokens, output_tokens = (sum(each[name] for each in requests) for name in ("prompt_tokens", "output_tokens"))
    assert output_tokens + missing * OUTPUT_TOKENS == grown[1]
    assert prompt_tokens < grown[0] if missing else prompt_tokens == grown[0]
