"""The page at `/`: what is served, with which headers, to whom; and that it needs nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_harness import GatewayHarness, write_model

import gateway

STATIC = Path(gateway.__file__).parent / "static"
PATHS = ["/" if file.name == "index.html" else f"/static/{file.name}" for file in sorted(STATIC.iterdir())]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def closed(model_dir: Path) -> Iterator[GatewayHarness]:
    """Wants a key."""
    with GatewayHarness(model_dir, api_keys="secret") as harness:
        yield harness


@pytest.mark.parametrize("path", PATHS)
def test_files_are_open_and_come_with_a_strict_policy(closed: GatewayHarness, path: str) -> None:
    reply = closed.get(path)
    assert reply.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) <= {"'self'", "'none'"}
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-cache"
    head = closed.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) == len(reply.content)
    known = closed.get(path, headers={"if-none-match": f'"other", W/{reply.headers["etag"]}'})
    assert (known.status_code, known.content) == (304, b"")


def test_what_is_behind_the_page_stays_closed(closed: GatewayHarness) -> None:
    for path in ("/v1/models", "/static", "/static/", "/static/none.js", "/static/../auth.py", "//", "/index.html"):
        assert closed.http.request("GET", closed.url + path).status_code == 401, path
    assert closed.chat().status_code == 401
    assert closed.post("/", b"").status_code == 405


def test_the_page_can_be_switched_off(model_dir: Path) -> None:
    with GatewayHarness(model_dir, page=False) as harness:
        assert {harness.get(path).status_code for path in PATHS} == {404}
    with GatewayHarness(model_dir, page=False, api_keys="secret") as harness:
        assert {harness.get(path).status_code for path in PATHS} == {401}


def test_the_page_refers_to_its_own_files_only_and_has_nothing_inline() -> None:
    html = (STATIC / "index.html").read_text()
    linked = re.findall(r'(?:src|href)="([^"#]+)"', html)
    imported = [name for file in STATIC.glob("*.js") for name in re.findall(r'from "\./([^"]+)"', file.read_text())]
    assert {f"/{name}" for name in linked} | {f"/static/{name}" for name in imported} == set(PATHS) - {"/"}
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=|javascript:", html)
    for file in STATIC.iterdir():
        urls = re.findall(r"\w+://[^\"'\s]+|url\(|@import", file.read_text())
        assert [url for url in urls if url != "http://www.w3.org/2000/svg"] == [], file.name
    for file in STATIC.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", file.read_text())


@pytest.mark.parametrize("file", sorted(STATIC.glob("*.js")), ids=lambda file: file.name)
def test_scripts_parse(file: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("needs node")
    # As a module: of a file named .js, node would check too little.
    command = ["node", "--input-type=module", "--check"]
    checked = subprocess.run(command, input=file.read_text(), capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
