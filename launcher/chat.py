"""`dspark chat`: a terminal chat that shows what speculation did."""

from __future__ import annotations

import contextlib
from typing import Any

from rich.console import Console
from rich.text import Text

from launcher.client import Answer, Client, Message, ServerError, new_answer

_ACCEPTED_STYLE = "green"
_HELP = "/reset forgets the conversation, /exit ends it; Ctrl-C stops an answer"


class ChatSession:
    """A conversation with its history."""

    def __init__(self, client: Client, console: Console, *, colour: bool, parameters: dict[str, Any]) -> None:
        """`parameters` go with every request; `colour` marks tokens that came from accepted drafts."""
        self._client, self._console, self._colour = client, console, colour
        self._parameters = {**parameters, **({"dspark": {"pieces": True}} if colour else {})}
        self._messages: list[Message] = []

    def reset(self, system: str | None) -> None:
        """Starts over, with an optional system turn."""
        self._messages = [{"role": "system", "content": system}] if system else []

    def ask(self, prompt: str) -> Answer:
        """Streams the answer to the console and remembers it. Ctrl-C ends it early. Raises ServerError."""
        self._messages.append({"role": "user", "content": prompt})
        answer = new_answer()
        stream = self._client.chat(self._messages, answer, **self._parameters)
        try:
            for piece in stream:
                style = _ACCEPTED_STYLE if self._colour and piece.is_accepted_draft else ""
                self._console.print(Text(piece.text, style), end="", soft_wrap=True)
        except KeyboardInterrupt:
            stream.close()  # closing the connection aborts the request
            answer.finish_reason = "stopped by you"
        except ServerError:
            self._messages.pop()
            raise
        self._console.print()
        self._messages.append({"role": "assistant", "content": answer.text})
        return answer


def summary(answer: Answer) -> str:
    """One line about an answer: tokens, speed, accepted length."""
    parts = [f"{answer.num_tokens} tokens"] if answer.num_tokens else []
    if answer.tpot_ms:
        parts.append(f"{1000 / answer.tpot_ms:.1f} tokens/s")
    parts.append(f"first after {answer.ttft_ms:.0f} ms")
    if answer.accepted_length is not None:
        parts.append(f"accepted length {answer.accepted_length:.2f}")
    if answer.finish_reason not in (None, "stop"):
        parts.append(str(answer.finish_reason))
    return " · ".join(parts)


def run_chat(
    url: str, api_key: str | None, *, prompt: str | None, system: str | None, colour: bool, parameters: dict[str, Any]
) -> None:
    """The chat loop, or one answer to `prompt`. Raises ServerError if the server cannot be used."""
    client, console = Client(url, api_key), Console(highlight=False)
    notes = Console(stderr=True, highlight=False)
    model = client.model()
    session = ChatSession(client, console, colour=colour, parameters={"model": model, **parameters})
    session.reset(system)
    if prompt is not None:
        notes.print(Text(summary(session.ask(prompt)), "dim"))
        return
    notes.print(Text(f"{model} at {url} · {_HELP}", "dim"))
    if colour:
        notes.print(Text("tokens in this colour were accepted drafts", _ACCEPTED_STYLE))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            line = console.input("[bold]> [/bold]").strip()
            if line == "/exit":
                break
            if line == "/reset":
                session.reset(system)
            elif line:
                try:
                    notes.print(Text(summary(session.ask(line)), "dim"))
                except ServerError as error:
                    notes.print(Text(f"error: {error}", "red"))
