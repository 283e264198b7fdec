"""Chats with tools as chat templates take them: those that know tools, and those that do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.tools.form import CALL_SEPARATOR, RESULT_CLOSE, RESULT_OPEN, Tool, call_text

SYSTEM_TEXT = """You have these functions, each described by a JSON schema:
{tools}

To call one, write nothing but its name and its arguments as JSON between tags, like this:
{example}

Its result comes back between <tool_response> tags. Answer in words when no function helps."""
"""What such a model is told; `{tools}` has one function a line."""


def as_tool_turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat for a template that knows tools: arguments of calls as objects, where they are JSON."""
    turns = []
    for message in messages:
        calls = [{**c, "function": _with_object(c["function"])} for c in message.get("tool_calls", ())]
        turns.append({**message, "tool_calls": calls} if calls else dict(message))
    return turns


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
        orjson.dumps(arguments)  # refuses what is nested too deeply for templates
    except (ValueError, TypeError):
        return dict(function)  # as it is: a call that was cut short, for example
    return {**function, "arguments": arguments}


def as_plain_turns(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, has_system_role: bool
) -> list[dict[str, Any]]:
    """The chat with tools told in a system turn (in the first user turn where the template has no such role), calls
    written out as the model writes them, and results as user turns."""
    turns: list[dict[str, Any]] = []
    is_behind_result = False
    for message in messages:
        turn = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        is_result = message["role"] == "tool"
        if is_result:
            result = f"{RESULT_OPEN}{message['content']}{RESULT_CLOSE}"
            if is_behind_result:  # results of calls made together share a turn: many templates want turns to alternate
                turns[-1]["content"] += f"\n{result}"
                continue
            turn = {"role": "user", "content": result}
        elif calls := message.get("tool_calls"):
            # As the model wrote it, to the character: such a prompt finds the answer's pages in the prefix cache.
            texts = [call_text(call["function"]["name"], call["function"]["arguments"] or "{}") for call in calls]
            turn["content"] += CALL_SEPARATOR.join(texts)
        turns.append(turn)
        is_behind_result = is_result
    return _with_tools(turns, tools, has_system_role) if tools else turns


def _with_tools(turns: list[dict[str, Any]], tools: Sequence[Tool], has_system_role: bool) -> list[dict[str, Any]]:
    described = "\n".join(orjson.dumps(tool.described()["function"]).decode() for tool in tools)
    text = SYSTEM_TEXT.format(tools=described, example=call_text("NAME", "{ARGUMENTS}"))
    if has_system_role and turns[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *turns]
    at = 0 if has_system_role else next((i for i, turn in enumerate(turns) if turn["role"] == "user"), 0)
    pieces = [turns[at]["content"], text] if has_system_role else [text, turns[at]["content"]]
    turns[at]["content"] = "\n\n".join(filter(None, pieces))
    return turns
