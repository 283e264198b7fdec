"""Items and tools of /v1/responses as a chat has them."""

from __future__ import annotations

import re
from typing import Any

from gateway.tools.form import MAX_NAME_LEN

TEXT_PARTS = ("input_text", "output_text", "text")
ROLES = ("user", "assistant", "system", "developer")
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_LEN}}}")
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": TEXT_PARTS}, "text": {"type": "string"}},
}
_TEXT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_STRING = {"type": "string"}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"type": {"const": "message"}, "role": {"enum": ROLES}, "content": _TEXT},
}
_CALL = {
    "type": "object",
    "required": ["type", "call_id", "name", "arguments"],
    "properties": {
        "type": {"const": "function_call"},
        "call_id": _STRING,
        "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
        "arguments": _STRING,
    },
}
_RESULT = {
    "type": "object",
    "required": ["type", "call_id", "output"],
    "properties": {"type": {"const": "function_call_output"}, "call_id": _STRING, "output": _TEXT},
}
INPUT_SCHEMA = {
    "anyOf": [_STRING, {"type": "array", "items": {"anyOf": [_MESSAGE, _CALL, _RESULT]}, "minItems": 1}],
}
TOOLS_SCHEMA = {
    "anyOf": [
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "name"],
                "properties": {
                    "type": {"const": "function"},
                    "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"]},
                },
            },
        },
        {"type": "null"},
    ],
}
TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "required": ["type", "name"],
            "properties": {"type": {"const": "function"}, "name": _STRING},
        },
    ],
}


def turns_of(items: list[Any]) -> list[dict[str, Any]]:
    """The turns that the items stand for: calls are part of the assistant's turn before them. Raises ValueError."""
    turns: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        turn = _turn(index, item)
        if "tool_calls" in turn and turns and turns[-1]["role"] == "assistant":
            turns[-1].setdefault("tool_calls", []).extend(turn["tool_calls"])
        else:
            turns.append(turn)
    return turns


def _turn(index: int, item: Any) -> dict[str, Any]:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "item_reference":
        raise ValueError(f"item {index} refers to a stored item, and this server stores none: send the item itself")
    if kind == "function_call":
        name, call_id, arguments = (item.get(key) for key in ("name", "call_id", "arguments"))
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ValueError(f"item {index} needs a name of 1 to {MAX_NAME_LEN} letters, digits, _ and -")
        if not (isinstance(call_id, str) and isinstance(arguments, str)):
            raise ValueError(f"item {index} needs a call_id and arguments, both strings")
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    if kind == "function_call_output":
        output = _text(index, item.get("output"))
        if output is None or not isinstance(item.get("call_id"), str):
            raise ValueError(f"item {index} needs a call_id and an output")
        return {"role": "tool", "tool_call_id": item["call_id"], "content": output}
    if not isinstance(item, dict) or kind not in (None, "message"):
        known = "message, function_call and function_call_output are"
        raise ValueError(f"item {index}: items of type {str(kind)[:40]!r} are not supported; {known}")
    content = _text(index, item.get("content"))
    if content is None or item.get("role") not in ROLES:
        raise ValueError(f"item {index} needs a role (user, assistant, system or developer) and a content")
    return {"role": item["role"], "content": content}


def _text(index: int, content: Any) -> str | None:
    """Text that comes as such or in parts; None for something else."""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        if not all(part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str) for part in parts):
            raise ValueError(f"item {index} must hold text parts only: this model reads text")
        return "".join(part["text"] for part in parts)
    return content if isinstance(content, str) else None


def chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools in the shape of a chat's. Raises ValueError."""
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise ValueError(
                f"tool {index} is of type {str(tool.get('type'))[:40]!r}: only functions can be called here"
            )
    return [{"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} for tool in tools]


def chat_tool_choice(choice: Any) -> Any:
    """The choice in the shape of a chat's. Raises ValueError."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise ValueError('must be "none", "auto", "required" or {"type": "function", "name": "..."}')
    return {"type": "function", "function": {"name": choice["name"]}}
