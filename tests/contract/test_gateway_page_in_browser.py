"""The page in headless Chromium, over a scripted scheduler: keyboard, errors, keys, figures, what assistive technology
sees, dark and light, narrow screens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser, Page, announce, find_chromium
from gateway_harness import EOS_ID, GatewayHarness, encode, wait_until, write_model

from service_kit.errors import QueueFullError

ANSWER = 'First, a sentence. Then <img src="x" onerror="document.title=1"> markup &amp; more!!'
QUESTION_IDS = encode("user\nHello\nthere")
_NAMED_ROLES = {"button", "textbox", "checkbox", "spinbutton", "link", "DisclosureTriangle", "image", "log", "region"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(model_dir: Path) -> Iterator[GatewayHarness]:
    harness = GatewayHarness(model_dir)
    harness.scheduler.max_model_len = 2000
    with harness:
        yield harness.wait_ready()


@pytest.fixture
def gateway(running: GatewayHarness) -> GatewayHarness:
    fresh = type(running.scheduler)()
    running.scheduler.__dict__.update({**fresh.__dict__, "answers": [ANSWER]})
    return running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if (binary := find_chromium()) is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with Browser(binary, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(gateway: GatewayHarness, browser: Browser) -> Iterator[Page]:
    with browser.open(gateway.url + "/") as page:
        page.resize(1280, 900)
        page.wait("document.getElementById('served').textContent.startsWith('tiny')")
        yield page
    assert page.problems == []


def text_of(page: Page, selector: str) -> str:
    return str(page.value(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))


def texts_of(page: Page, selector: str) -> list[str]:
    return list(page.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)"))


def focused(page: Page) -> str:
    return str(page.value("document.activeElement.id || document.activeElement.className"))


def ask(page: Page, text: str = "Hello", *, num_answers: int = 1) -> None:
    """Sends a message and waits until it is answered."""
    page.value("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.note').length === {num_answers}")


def table_of(page: Page, figure: str) -> list[list[str]]:
    """Rows of a figure's table, unfolded for that."""
    page.value(f"document.querySelector('#{figure} details').open = true")
    page.wait(f"document.querySelector('#{figure} tbody tr') !== null")
    rows = f"[...document.querySelectorAll('#{figure} tbody tr')]"
    return list(page.value(f"{rows}.map((row) => [...row.cells].map((cell) => cell.textContent))"))


def test_a_chat_by_keyboard_alone(page: Page, gateway: GatewayHarness) -> None:
    gateway.scheduler.step_s = 0.03
    page.press("Tab")
    assert focused(page) == "skip"
    page.press("Enter")
    assert focused(page) == "prompt"
    page.type("Hello")
    page.press("Enter", shift=True)
    page.type("there")
    page.press("Enter")
    length = "(document.querySelector('.assistant .text')?.textContent.length ?? 0)"
    early = page.wait(length)
    assert 0 < early < len(ANSWER)  # it streams
    assert page.value("document.querySelector('.assistant').getAttribute('aria-busy')") == "true"
    page.wait("document.querySelector('.note') !== null")
    assert text_of(page, ".assistant .text") == ANSWER
    assert (
        page.value("document.title + document.querySelectorAll('#turns img').length") == "DSpark0"
    )  # text, not markup
    assert text_of(page, ".user .text") == "Hello\nthere"
    sent = list(gateway.scheduler.requests[-1].prompt_token_ids)
    assert any(sent[at : at + len(QUESTION_IDS)] == QUESTION_IDS for at in range(len(sent)))
    assert focused(page) == "prompt"
    assert page.value("document.getElementById('prompt').value") == ""
    assert page.value("document.querySelector('.assistant').hasAttribute('aria-busy')") is False
    spoken = texts_of(page, "#announcer p")
    assert spoken[-1].startswith("End of the answer. ")
    # On: every control, in the order in which it is seen, and out again.
    order = []
    while not order or focused(page) not in ("skip", "BODY", ""):
        page.press("Tab")
        order.append(focused(page))
        assert len(order) < 40
    assert order[:2] == ["send", "new-chat"]  # Stop is disabled


def test_accepted_words_are_marked_by_more_than_colour(page: Page) -> None:
    ask(page)
    tokens = [*ANSWER]  # a token a character; of three tokens a step, two are accepted drafts
    expected = "".join(text for index, text in enumerate(tokens) if index % 3 < 2)
    assert "".join(texts_of(page, ".assistant .accepted")) == expected
    style = "getComputedStyle(document.querySelector('.assistant .{}')).{}"
    assert page.value(style.format("accepted", "textDecorationLine")) == "underline"
    assert page.value(style.format("own", "textDecorationLine")) == "none"
    assert page.value(style.format("accepted", "color")) != page.value(style.format("own", "color"))
    assert text_of(page, ".step") == "Fir"
    assert page.value("document.querySelector('.step').title") == "Step 1: 4 drafted, 4 verified, 2 accepted"
    assert "accepted drafts" in text_of(page, ".legend")
    page.value("document.getElementById('settings').open = true; document.getElementById('mark').focus()")
    page.press("Space")
    assert page.value(style.format("accepted", "textDecorationLine")) == "none"


def test_figures_and_tables_say_what_the_steps_said(page: Page) -> None:
    ask(page)
    num_steps = len(ANSWER) // 3 + 1
    last = (len(ANSWER) + 1) % 3 or 3  # tokens of the last step, the end of the sequence included
    accepted = [2] * (num_steps - 1) + [last - 1]
    windows = table_of(page, "windows")
    assert [row[:4] for row in windows] == [[str(k + 1), "4", "4", str(n)] for k, n in enumerate(accepted)]
    assert windows[0][4] == "0.88 0.75 0.50 ?"
    assert text_of(page, ".note").startswith(f"{len(ANSWER) + 1} tokens, {sum(accepted)} from accepted drafts, ")
    # Judged are the accepted drafts and the one behind them; the last confidence is none.
    judged = {row[0]: row[1:] for row in table_of(page, "reliability") if row[1] != "0"}
    assert list(judged) == ["50 % to 60 %", "70 % to 80 %", "80 % to 90 %"]
    assert judged["50 % to 60 %"] == [str(accepted.count(2)), "50 %", "0 %"]
    assert judged["80 % to 90 %"][:2] == [str(num_steps), "88 %"]
    assert table_of(page, "budget") == [["2", str(num_steps), "6.0", "3.0"]]
    assert text_of(page, "#per-step") == f"{(len(ANSWER) + 1 - 3) / (num_steps - 1):.2f}"
    assert text_of(page, "#rate") == f"{100 * sum(accepted) / (4 * num_steps):.0f} %"
    assert re.fullmatch(r"\d+ ms", text_of(page, "#first"))
    assert float(text_of(page, "#speed")) > 0
    ask(page, num_answers=2)
    assert len(table_of(page, "windows")) == num_steps  # of the last answer
    assert table_of(page, "budget") == [["2", str(2 * num_steps), "6.0", "3.0"]]  # of all


@pytest.mark.parametrize("how", ["Escape", "Stop", "New chat"])
def test_stopping_ends_the_generation(page: Page, gateway: GatewayHarness, how: str) -> None:
    gateway.scheduler.is_endless, gateway.scheduler.step_s = True, 0.02
    page.value("document.getElementById('prompt').focus()")
    page.type("Go on for ever")
    page.press("Enter")
    page.wait("document.querySelector('.assistant .step') !== null")
    assert page.value("[document.getElementById('send').disabled, document.getElementById('stop').disabled]") == [
        True,
        False,
    ]
    if how == "Escape":
        page.press("Escape")
    else:
        page.value(f"document.getElementById('{how.lower().replace(' ', '-')}').click()")
    assert wait_until(lambda: not gateway.scheduler.live)
    page.wait("document.getElementById('stop').disabled && !document.getElementById('send').disabled")
    assert focused(page) == "prompt"
    if how == "New chat":
        assert text_of(page, "#turns") == ""
        assert not any(map(str.isdigit, text_of(page, "#speed")))
    else:
        page.wait("document.querySelector('.note') !== null")
        assert text_of(page, ".note").endswith(", stopped")
    gateway.scheduler.is_endless = False
    ask(page, "Once more", num_answers=1 if how == "New chat" else 2)


def test_settings_and_history_go_with_the_request(page: Page, gateway: GatewayHarness) -> None:
    ask(page, "One")
    page.value(
        "const fields = {system: 'Be brief', temperature: '0.5', seed: '7', 'max-tokens': '5'};"
        "for (const [id, value] of Object.entries(fields)) document.getElementById(id).value = value;"
        "document.getElementById('settings').open = true;"
        "document.getElementById('speculate').click()"
    )
    ask(page, "Two", num_answers=2)
    request = gateway.scheduler.requests[-1]
    assert (request.sampling.temperature, request.sampling.seed, request.max_tokens) == (0.5, 7, 5)
    assert request.speculation.max_draft_tokens == 0
    turns = [("system", "Be brief"), ("user", "One"), ("assistant", ANSWER), ("user", "Two")]
    expected = [token for role, text in turns for token in (256, *encode(f"{role}\n{text}"), EOS_ID, *encode("\n"))]
    assert list(request.prompt_token_ids)[: len(expected)] == expected
    assert "cut at the limit of tokens" in texts_of(page, ".note")[1]
    page.value("document.getElementById('temperature').value = '3'")
    page.value("document.getElementById('prompt').focus()")
    page.type("Three")
    page.press("Enter")
    assert focused(page) == "temperature"  # the browser says what is wrong with it
    assert len(gateway.scheduler.requests) == 2
    page.problems.clear()


def test_a_refusal_is_told_and_the_question_kept(page: Page, gateway: GatewayHarness) -> None:
    gateway.scheduler.refusal = QueueFullError("the queue is full")
    ask(page, "Please")
    assert text_of(page, "#error") == "the queue is full"
    assert page.value("document.getElementById('error').getAttribute('role')") == "alert"
    assert page.value("document.getElementById('prompt').value") == "Please"
    gateway.scheduler.refusal = None
    gateway.scheduler.error = "out of luck"
    page.press("Enter")
    page.wait("document.querySelectorAll('.note').length === 2")
    assert "out of luck" in text_of(page, "#error")
    gateway.scheduler.error = ""
    ask(page, "Again", num_answers=3)
    assert page.value("document.getElementById('error').hidden") is True
    refused = page.problems.pop(0)
    assert "429" in refused


def test_a_key_is_asked_for_and_kept_in_the_tab(model_dir: Path, browser: Browser) -> None:
    is_served = "document.getElementById('served').textContent.startsWith('tiny')"
    with GatewayHarness(model_dir, api_keys="secret") as closed:
        with browser.open(closed.url + "/") as page:
            for key, then in (
                ("wrong", "document.getElementById('error').textContent.includes('wrong')"),
                ("secret", is_served),
            ):
                page.wait("!document.getElementById('key-row').hidden")
                page.value("document.getElementById('api-key').value = ''; document.getElementById('api-key').focus()")
                page.type(key)
                page.press("Tab")
                page.wait(then)
            ask(page)
            assert text_of(page, ".assistant .text") == "Hello, world"
            page.goto(closed.url + "/")
            page.wait(is_served)  # still known
            assert page.value("document.cookie + JSON.stringify(localStorage)") == "{}"
        with browser.open(closed.url + "/") as other:
            other.wait("!document.getElementById('key-row').hidden")  # each tab has its own


def test_everything_that_can_be_used_has_a_name(page: Page) -> None:
    ask(page)
    page.value("document.querySelectorAll('details').forEach((details) => (details.open = true))")
    page.wait("document.querySelectorAll('tbody tr').length > 20")
    nodes = page.accessibility()
    assert [node for node in nodes if node["role"] in _NAMED_ROLES and not node["name"]] == []
    assert [node for node in nodes if node.get("focusable") and not node["name"]] == []
    names = {node["name"] for node in nodes if node["role"] in _NAMED_ROLES}
    assert {
        *("Message", "Send", "Stop", "New chat", "System prompt", "Temperature", "Seed", "Most tokens"),
        *("Speculate", "Mark accepted drafts", "Settings", "As a table"),
    } <= names
    images = [node["name"] for node in nodes if node["role"] == "image"]
    assert len(images) == 3
    assert all(re.search(r"\d", name) for name in images)  # they say what is drawn
    headings = [node["name"] for node in nodes if node["role"] == "heading"]
    assert headings[0] == "DSpark"
    assert not any(node["role"] == "graphics-symbol" for node in nodes)


_CONTRAST = """(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const luminance = (colour) => channels(colour)
    .map((value) => value / 255)
    .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const groundOf = (node) => {
    const colour = getComputedStyle(node).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? groundOf(node.parentElement) : colour;
  };
  return [...document.querySelectorAll("h1, h2, h3, p, label, dt, dd, summary, td, li, button, .accepted, .own, .note")]
    .filter((node) => node.getClientRects().length && !node.disabled)
    .map((node) => {
      const [a, b] = [luminance(getComputedStyle(node).color), luminance(groundOf(node))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.outerHTML.slice(0, 80)];
    })
    .sort(([a], [b]) => a - b)[0];
})()"""


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_dark_and_narrow(page: Page, scheme: str, width: int, keep: Callable[[str], Path]) -> None:
    page.prefer(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    page.resize(width, 800)
    ask(page)
    page.value("document.querySelectorAll('details').forEach((details) => (details.open = true))")
    page.wait("document.querySelectorAll('tbody tr').length > 20")
    assert page.value("document.scrollingElement.scrollWidth") <= width
    contrast, where = page.value(_CONTRAST)
    assert contrast >= 4.5, where
    is_dark = page.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every((value) => value < 64)")
    assert is_dark == (scheme == "dark")
    assert page.value("getComputedStyle(document.querySelector('.skip')).transitionDuration") == "0s"
    page.screenshot(keep(f"page-{scheme}-{width}.png"))


@pytest.fixture(scope="module")
def keep(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Callable[[str], Any]:
    """Paths of screenshots, which are kept for whoever wants to look."""
    directory = tmp_path_factory.mktemp("screenshots")
    announce(pytestconfig, directory)
    return lambda name: directory / name
