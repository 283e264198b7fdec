"""Headless Chromium over its DevTools protocol: as much of it as the page's tests need."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_START_S = 60.0
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "Space": (32, " ")}
"""Virtual key code and text of keys."""
_CODES = {"Space": " "}


def find_chromium() -> str | None:
    """Path of the browser; None where there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def announce(config: pytest.Config, screenshots: Path) -> None:
    """Says on the terminal where screenshots are kept: below pytest's temporary directory."""
    config.pluginmanager.getplugin("terminalreporter").write_line(f"screenshots in {screenshots}")


class Browser:
    """A browser with a profile of its own below `directory`. A context manager."""

    def __init__(self, binary: str, directory: Path) -> None:
        """Starts it; `directory` must exist."""
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root has none
        self._process = subprocess.Popen(
            [
                binary,
                "--headless=new",
                "--remote-debugging-port=0",
                f"--user-data-dir={directory / 'profile'}",
                *sandbox,
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-dev-shm-usage",
                "--disable-extensions",
                "--disable-gpu",
                "--force-color-profile=srgb",
                "--hide-scrollbars",
                "--no-first-run",
                "--no-proxy-server",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._http = httpx.Client(base_url=self._wait_for_port(directory / "profile"), trust_env=False, timeout=30)
        except BaseException:
            self._stop()
            raise

    def _wait_for_port(self, profile: Path) -> str:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, f"chromium ended with status {self._process.returncode}"
            try:
                port = (profile / "DevToolsActivePort").read_text().split("\n")[0]
            except FileNotFoundError:
                port = ""
            if port:
                return f"http://127.0.0.1:{port}"
            time.sleep(0.05)
        raise AssertionError("chromium did not start")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def open(self, url: str) -> Iterator[Page]:
        """A new tab with `url` loaded, closed at the end."""
        tab = self._http.put("/json/new?about:blank").json()
        with connect(tab["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
            page = Page(socket)
            page.goto(url)
            yield page
            page.call("Page.close")


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        """Use Browser.open."""
        self._socket = socket
        self._ids = itertools.count(1)
        self.problems: list[str] = []
        """Errors and warnings that the page logged, exceptions that it did not catch."""
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Result of a DevTools command."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(str([each.get("value", each.get("description")) for each in parameters["args"]]))

    def goto(self, url: str) -> None:
        """Loads `url` and waits until its scripts have run."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression; of a promise, what it resolves to."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, f"{expression}: {reply['exceptionDetails']}"
        return reply["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 60.0) -> Any:
        """Returns the expression's value once it is true."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}; problems: {self.problems}"
            time.sleep(0.02)
        return value

    def press(self, key: str, *, shift: bool = False) -> None:
        """Presses and releases a key of `_KEYS`."""
        code, text = _KEYS[key]
        common = {"key": _CODES.get(key, key), "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the viewport, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def prefer(self, **features: str) -> None:
        """Emulates media features, named with underscores."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def accessibility(self) -> list[dict[str, Any]]:
        """What assistive technology sees: nodes with role, name and properties; ignored ones left out."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            {
                "role": node["role"]["value"],
                "name": node.get("name", {}).get("value", ""),
                **{each["name"]: each["value"].get("value") for each in node.get("properties", ())},
            }
            for node in nodes
            if not node["ignored"]
        ]

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Writes a PNG of the page, below the fold too if `whole`."""
        reply = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(reply["data"]))
