"""Tool calls in the shape of chat completions."""

from __future__ import annotations

from typing import Any

from gateway.tools.parser import CallStart, Part, TextPart, ToolCallParser


class ChatCalls:
    """The message of one choice that may call tools."""

    def __init__(self) -> None:
        self._parser = ToolCallParser()

    def add(self, text: str, finish_reason: str | None) -> tuple[list[dict[str, Any]], str | None]:
        """Deltas for more of the answer, and the finish reason once there is one.

        A call's name comes alone and its arguments after it, each in a delta of its own: clients rely on it.
        """
        parts = self._parser.push(text, is_last=finish_reason is not None)
        return list(map(_delta, parts)), self._reason(finish_reason)

    def message(self, text: str, finish_reason: str | None) -> tuple[dict[str, Any], str | None]:
        """The message of a whole answer, and its finish reason."""
        content = ""
        calls: list[dict[str, Any]] = []
        for part in self._parser.push(text, is_last=True):
            if isinstance(part, TextPart):
                content += part.text
            elif isinstance(part, CallStart):
                calls.append(_call(part))
            else:
                calls[part.call]["function"]["arguments"] += part.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return message, self._reason(finish_reason)

    def _reason(self, finish_reason: str | None) -> str | None:
        return "tool_calls" if finish_reason == "stop" and self._parser.has_called else finish_reason


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"content": part.text}
    call = _call(part) if isinstance(part, CallStart) else {"function": {"arguments": part.text}}
    return {"tool_calls": [{"index": part.call, **call}]}


def _call(start: CallStart) -> dict[str, Any]:
    return {"id": start.call_id, "type": "function", "function": {"name": start.name, "arguments": ""}}
