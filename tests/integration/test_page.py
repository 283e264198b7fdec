"""The page in headless Chromium, on the embedded model: what it shows of speculation is what the API tells."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest
from chromium import Browser, announce, find_chromium

from bench.measure import Engine
from launcher.stack import RunningServer

pytestmark = pytest.mark.model

QUESTION = "Name three colours of the rainbow and say something about each of them."


def test_a_chat_on_the_embedded_model(
    server: RunningServer, engine: Engine, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    if (binary := find_chromium()) is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 96, "temperature": 0}
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    before = engine.load()
    with Browser(binary, tmp_path) as browser, browser.open(f"{server.url}/") as page:
        page.resize(1280, 1000)
        page.wait("document.getElementById('served').textContent.includes('tokens')")
        page.value("document.getElementById('max-tokens').value = '96'; document.getElementById('prompt').focus()")
        page.type(QUESTION)
        page.press("Enter")
        page.wait("document.querySelector('.note') !== null")
        assert (
            page.value("document.querySelector('.assistant .text').textContent")
            == whole["choices"][0]["message"]["content"]
        )
        page.value("document.querySelectorAll('details').forEach((details) => (details.open = true))")
        page.wait("document.querySelectorAll('#budget tbody tr').length > 0")
        rows = (
            "[...document.querySelectorAll('#windows tbody tr')].map((row) => [...row.cells].map((c) => c.textContent))"
        )
        steps = page.value(rows)
        drafted, verified, accepted = (sum(int(row[column]) for row in steps) for column in (1, 2, 3))
        after = engine.load()
        assert (drafted, verified, accepted) == (
            after.num_drafted - before.num_drafted,
            after.num_verified - before.num_verified,
            after.num_accepted - before.num_accepted,
        )
        num_tokens = whole["usage"]["completion_tokens"]
        note = page.value("document.querySelector('.note').textContent")
        assert re.match(rf"{num_tokens} tokens, {accepted} from accepted drafts, [\d.]+ tokens per second", note), note
        words = page.value(
            "[...document.querySelectorAll('#turns .accepted')].map((node) => node.textContent).join('')"
        )
        assert bool(words) == (accepted > 0)  # none where the guard finds that drafting does not pay just now
        page.wait("/^Load: 0 of \\d+ running, 0 waiting$/.test(document.getElementById('load').textContent)")
        page.screenshot(tmp_path / "page.png")
        announce(pytestconfig, tmp_path)

        page.value("document.getElementById('max-tokens').value = ''; document.getElementById('prompt').focus()")
        page.type("Write a very long story.")
        page.press("Enter")
        page.wait("document.querySelectorAll('.assistant')[1]?.querySelector('.step') != null")
        page.press("Escape")
        page.wait("document.querySelectorAll('.note').length === 2")
        deadline = time.monotonic() + 10
        while engine.load().num_running:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert page.problems == []
