"""docs/examples/nginx.conf in a real nginx before the gateway: TLS, streams as they come, aborts, gRPC."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from dspark.v1 import gateway_pb2, gateway_pb2_grpc
from gateway_harness import GatewayHarness, free_port, wait_until, write_model

CONFIG = Path(__file__).parents[2] / "docs" / "examples" / "nginx.conf"
NGINX, OPENSSL = shutil.which("nginx", path="/usr/sbin:/usr/bin"), shutil.which("openssl")
HOST = "llm.example.com"

pytestmark = pytest.mark.skipif(not (NGINX and OPENSSL), reason="needs nginx and openssl: apt install nginx-light")


class Proxy:
    """nginx with the example's configuration; only ports and files of its own are put in."""

    def __init__(self, directory: Path, gateway: GatewayHarness) -> None:
        self.https, self.grpcs = free_port(), free_port()
        self.certificate = directory / "certificate.pem"
        names = ["-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST},DNS:localhost"]
        files = ["-keyout", str(directory / "key.pem"), "-out", str(self.certificate)]
        command = [str(OPENSSL), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files]
        subprocess.run(command, check=True, capture_output=True)
        text = CONFIG.read_text()
        for old, new in {
            "listen 443 ssl": f"listen 127.0.0.1:{self.https} ssl",
            "listen 8443 ssl": f"listen 127.0.0.1:{self.grpcs} ssl",
            "127.0.0.1:8000": f"127.0.0.1:{gateway.settings.port}",
            "127.0.0.1:8001": f"127.0.0.1:{gateway.settings.grpc_port}",
            f"/etc/ssl/{HOST}.pem": str(self.certificate),
            f"/etc/ssl/{HOST}.key": str(directory / "key.pem"),
        }.items():
            assert old in text, old
            text = text.replace(old, new)
        (directory / "dspark.conf").write_text(text)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{kind}_temp_path {directory}/{kind};\n" for kind in kinds)
        (directory / "nginx.conf").write_text(
            f"pid {directory}/pid;\nerror_log {directory}/error.log;\nevents {{}}\n"
            f"http {{\naccess_log off;\n{temporary}include {directory}/dspark.conf;\n}}\n"
        )
        command = [
            str(NGINX),
            "-e",
            str(directory / "error.log"),
            "-c",
            str(directory / "nginx.conf"),
            "-g",
            "daemon off;",
        ]
        self.process = subprocess.Popen(command)
        trust = ssl.create_default_context(cafile=str(self.certificate))
        self.http = httpx.Client(base_url=f"https://localhost:{self.https}", verify=trust, trust_env=False, timeout=10)

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(10)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    with GatewayHarness(write_model(tmp_path_factory.mktemp("model"))) as harness:
        yield harness.wait_ready()


@pytest.fixture(scope="module")
def proxy(gateway: GatewayHarness, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    proxy = Proxy(tmp_path_factory.mktemp("nginx"), gateway)
    try:
        assert wait_until(lambda: _answers(proxy)), "nginx did not start"
        yield proxy
    finally:
        proxy.close()


def _answers(proxy: Proxy) -> bool:
    try:
        return proxy.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], **fields}


def test_requests_pass_and_metrics_stay_inside(proxy: Proxy) -> None:
    reply = proxy.http.post("/v1/chat/completions", json=_chat())
    assert reply.json()["choices"][0]["message"]["content"] == "Hello, world"
    assert reply.headers["x-request-id"]
    assert proxy.http.get("/metrics").status_code == 404
    too_large = proxy.http.post("/v1/chat/completions", content=b" " * (4 * 2**20 + 1))
    assert too_large.status_code == 413


def test_tokens_come_as_they_are_made_and_leaving_aborts(proxy: Proxy, gateway: GatewayHarness) -> None:
    gateway.scheduler.step_s = 3600.0  # one step, then nothing that would push it out of a buffer
    with proxy.http.stream("POST", "/v1/chat/completions", json=_chat(stream=True)) as stream:
        lines = stream.iter_lines()  # kept: it would close the stream when it goes
        while '"content":"H' not in next(lines):
            pass
        assert gateway.scheduler.live
    assert wait_until(lambda: not gateway.scheduler.live)


def test_grpc_passes(proxy: Proxy, gateway: GatewayHarness) -> None:
    gateway.scheduler.step_s = 0.0
    credentials = grpc.ssl_channel_credentials(proxy.certificate.read_bytes())
    with grpc.secure_channel(f"localhost:{proxy.grpcs}", credentials) as channel:
        stub = gateway_pb2_grpc.TextServiceStub(channel)
        request = gateway_pb2.GenerateTextRequest(prompt="Hi")
        responses = list(stub.GenerateText(request, timeout=10))
    text = "".join(piece.text for response in responses for piece in response.chunk.pieces)
    assert text == "Hello, world"
