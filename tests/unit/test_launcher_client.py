"""The HTTP client of chat, doctor and bench, and the terminal chat on top of it."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from launcher.chat import ChatSession, summary
from launcher.client import Client, Piece, ServerError, new_answer


class _FakeServer(BaseHTTPRequestHandler):
    """Streams a fixed answer; the prompt says how it ends."""

    requests: list[dict[str, Any]]

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self._reply(200, json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        prompt = body["messages"][-1]["content"]
        if prompt == "refuse":
            self._reply(400, json.dumps({"error": {"message": "temperature: must be at least 0"}}))
            return
        chunks: list[dict[str, Any]] = [
            {"choices": [{"delta": {"role": "assistant"}}]},
            {
                "choices": [
                    {
                        "delta": {"content": "Hi there"},
                        "token_ids": [5, 6],
                        "dspark": {"pieces": [["Hi", True], [" there", False]]},
                    }
                ]
            },
        ]
        if prompt == "fail":
            chunks.append({"error": {"message": "the engine stopped"}})
        else:
            chunks.append({"choices": [{"delta": {"content": "!"}, "token_ids": [7], "finish_reason": "stop"}]})
            usage = {"prompt_tokens": 4, "completion_tokens": 3}
            metrics = {"speculative_decoding": {"mean_acceptance_length": 1.5}}
            chunks.append({"choices": [], "usage": usage, "metrics": metrics})
        lines = [": comment", *(f"data: {json.dumps(chunk)}" for chunk in chunks), "data: [DONE]"]
        self._reply(200, "\n\n".join(lines) + "\n\n", "text/event-stream")

    def _reply(self, status: int, body: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def client() -> Iterator[Client]:
    _FakeServer.requests = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _FakeServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        client = Client(f"http://127.0.0.1:{server.server_address[1]}")
        yield client
        client.close()
        server.shutdown()
        thread.join()


def test_an_answer_is_collected_from_its_stream(client: Client) -> None:
    answer = new_answer()
    pieces = list(client.chat([{"role": "user", "content": "hello"}], answer, temperature=0.0))
    assert pieces == [Piece("Hi", True), Piece(" there", False), Piece("!", False)]
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("Hi there!", [5, 6, 7], "stop")
    assert (answer.num_prompt_tokens, answer.num_tokens, answer.accepted_length) == (4, 3, 1.5)
    assert _FakeServer.requests[0]["stream_options"] == {"include_usage": True}
    assert _FakeServer.requests[0]["temperature"] == 0.0
    assert "accepted length 1.50" in summary(answer)


@pytest.mark.parametrize(
    ("prompt", "words"), [("refuse", r"temperature: must be at least 0 \(HTTP 400\)"), ("fail", "the engine stopped")]
)
def test_errors_carry_the_servers_words(prompt: str, words: str, client: Client) -> None:
    with pytest.raises(ServerError, match=words):
        list(client.chat([{"role": "user", "content": prompt}], new_answer()))


def test_no_server_says_how_to_start_one() -> None:
    client = Client("http://127.0.0.1:9")
    with pytest.raises(ServerError, match="dspark serve"):
        client.model()
    assert not client.is_ready()
    client.close()


def test_chat_keeps_history_and_asks_for_pieces_when_colouring(client: Client) -> None:
    console = Console(record=True, force_terminal=True, color_system="standard", file=io.StringIO())
    session = ChatSession(client, console, colour=True, parameters={"max_tokens": 9})
    session.reset("Be brief.")
    session.ask("hello")
    with pytest.raises(ServerError):
        session.ask("refuse")
    session.ask("again")
    roles = [message["role"] for message in _FakeServer.requests[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert _FakeServer.requests[-1]["dspark"] == {"pieces": True}
    assert _FakeServer.requests[-1]["max_tokens"] == 9
    assert "\x1b[32mHi\x1b[0m there" in console.export_text(styles=True)
