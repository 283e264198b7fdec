"""Vercel's AI SDK against the gateway: chat, streams, tools, structured output, errors, abort."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from clients.node_client import install, missing_tool, run
from form_scheduler import FormScheduler
from gateway_harness import GatewayHarness, wait_until, write_model

from gateway.scheduler_client import LocalScheduler
from service_kit.settings import CommonSettings


def test_ai_sdk(tmp_path: Path) -> None:
    if reason := missing_tool():
        pytest.skip(reason)
    cache_dir = CommonSettings().cache_dir
    try:
        install("ai_sdk", cache_dir)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"npm cannot fetch the AI SDK: {getattr(error, 'stderr', '') or error}")
    scheduler = FormScheduler()
    scheduler.answers = ["many words " * 100]
    scheduler.max_model_len = 8000
    scheduler.step_s = 0.001
    with GatewayHarness(write_model(tmp_path / "model"), scheduler=lambda: LocalScheduler(scheduler)) as gateway:
        gateway.wait_ready()
        result = run("ai_sdk", cache_dir, f"{gateway.url}/v1", "tiny")
        assert result.returncode == 0, result.stdout + result.stderr
        assert "# pass 7" in result.stdout
        assert wait_until(lambda: not scheduler.live)
