"""Output items of /v1/responses, as they grow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from gateway.tools.parser import CallStart, TextPart, ToolCallParser

Event: TypeAlias = tuple[str, dict[str, Any]]
"""Type of an event and its fields."""


class MessageItem:
    """A message with one text."""

    def __init__(self, item_id: str, index: int) -> None:
        """`index`: of the item in the output."""
        self._id = item_id
        self._index = index
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    def opening(self) -> Iterator[Event]:
        """Events before the first text."""
        yield "response.output_item.added", {"output_index": self._index, "item": self._body("in_progress", [])}
        yield "response.content_part.added", {**self._place(), "part": self._part()}

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Takes more text."""
        self._text += text
        self._logprobs += logprobs
        yield "response.output_text.delta", {**self._place(), "delta": text, "logprobs": logprobs}

    def closing(self, status: str) -> Iterator[Event]:
        """Events behind the last text."""
        place = self._place()
        yield "response.output_text.done", {**place, "text": self._text, "logprobs": self._logprobs}
        yield "response.content_part.done", {**place, "part": self._part()}
        yield "response.output_item.done", {"output_index": self._index, "item": self.body(status)}

    def body(self, status: str) -> dict[str, Any]:
        """The item."""
        return self._body(status, [self._part()])

    def _body(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index, "content_index": 0}


class CallItem:
    """A call of a tool."""

    def __init__(self, item_id: str, index: int, start: CallStart) -> None:
        """`index`: of the item in the output."""
        self._id = item_id
        self._index = index
        self._start = start
        self._arguments = ""

    def opening(self) -> Iterator[Event]:
        """Events before the first arguments."""
        yield "response.output_item.added", {"output_index": self._index, "item": self.body("in_progress")}

    def add(self, arguments: str) -> Iterator[Event]:
        """Takes more arguments."""
        self._arguments += arguments
        yield "response.function_call_arguments.delta", {**self._place(), "delta": arguments}

    def closing(self, status: str) -> Iterator[Event]:
        """Events behind the last arguments."""
        done = {**self._place(), "name": self._start.name, "arguments": self._arguments}
        yield "response.function_call_arguments.done", done
        yield "response.output_item.done", {"output_index": self._index, "item": self.body(status)}

    def body(self, status: str) -> dict[str, Any]:
        """The item."""
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._start.call_id,
            "name": self._start.name,
            "arguments": self._arguments,
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self._index}


class Output:
    """The items of one answer: a message, or messages and calls as the text has them."""

    def __init__(self, response_id: str, *, has_tools: bool) -> None:
        """`response_id` goes into the ids of the items."""
        self._response_id = response_id
        self._parser = ToolCallParser() if has_tools else None
        self._items: list[MessageItem | CallItem] = []

    def opening(self) -> Iterator[Event]:
        """Events before the first text."""
        if self._parser is None:
            yield from self._open(self._new_message())

    def add(self, text: str, logprobs: list[dict[str, Any]], *, is_last: bool) -> Iterator[Event]:
        """Takes the text and the scores of a step."""
        if self._parser is None:
            if text or logprobs:
                yield from self._message().add(text, logprobs)
            return
        for part in self._parser.push(text, is_last=is_last):
            if isinstance(part, CallStart):
                yield from self._open(CallItem(f"fc_{self._response_id}_{part.call}", len(self._items), part))
            elif isinstance(part, TextPart):
                if not self._items or isinstance(self._items[-1], CallItem):
                    yield from self._open(self._new_message())
                yield from self._message().add(part.text, [])
            else:
                call = self._items[-1]
                assert isinstance(call, CallItem)  # arguments follow their call
                yield from call.add(part.text)

    def closing(self, status: str) -> Iterator[Event]:
        """Events behind the last text. An empty answer is an empty message."""
        if not self._items:
            yield from self._open(self._new_message())
        yield from self._items[-1].closing(status)

    def bodies(self, status: str) -> list[dict[str, Any]]:
        """The items; the last one has the response's `status`, those before it are complete."""
        return [*(item.body("completed") for item in self._items[:-1]), *(i.body(status) for i in self._items[-1:])]

    def _new_message(self) -> MessageItem:
        suffix = f"_{len(self._items)}" if self._items else ""
        return MessageItem(f"msg_{self._response_id}{suffix}", len(self._items))

    def _message(self) -> MessageItem:
        message = self._items[-1]
        assert isinstance(message, MessageItem)
        return message

    def _open(self, item: MessageItem | CallItem) -> Iterator[Event]:
        if self._items:
            yield from self._items[-1].closing("completed")
        self._items.append(item)
        yield from item.opening()
