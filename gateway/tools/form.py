r"""The text form of tool calls: what the prompt explains, the grammar allows and the parser reads.

A call is `<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>`, several calls stand a line feed apart. Most
open models that know tools were trained on it, many with tokens of their own for the tags; the others get it explained.
"""

from __future__ import annotations

from typing import Any, NamedTuple

CALL_OPEN = "<tool_call>"
CALL_END = "</tool_call>"
CALL_TAGS = (CALL_OPEN, CALL_END)
NAME_OPEN = '\n{"name": "'
"""Between CALL_OPEN and the tool's name."""
ARGUMENTS_OPEN = '", "arguments": '
"""Between the name and the arguments, which are a JSON object."""
ARGUMENTS_CLOSE = "}\n"
CALL_CLOSE = ARGUMENTS_CLOSE + CALL_END
CALL_SEPARATOR = "\n"
RESULT_OPEN = "<tool_response>\n"
RESULT_CLOSE = "\n</tool_response>"
MAX_NAME_LEN = 64
"""Characters of a tool's name, which are letters, digits, _ and -."""


class Tool(NamedTuple):
    """A function that the model may ask the client to call."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""

    def described(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        about = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.parameters}}


def call_text(name: str, arguments: str) -> str:
    """A call with `arguments` in JSON."""
    return f"{CALL_OPEN}{NAME_OPEN}{name}{ARGUMENTS_OPEN}{arguments}{CALL_CLOSE}"
