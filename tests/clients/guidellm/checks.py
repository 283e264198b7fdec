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
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "huggingface")}
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
    assert len(requests) == REQUESTS * len(STREAMS)
    assert not any(each["requests"][kind] for each in benchmarks for kind in ("errored", "incomplete"))
    counted = [sum(request[name] for request in requests) for name in ("prompt_tokens", "output_tokens")]
    assert counted == grown
    assert {request["output_tokens"] for request in requests} == {OUTPUT_TOKENS}
