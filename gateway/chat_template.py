"""The model's chat template, rendered the way `transformers` does it, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.tools.form import CALL_OPEN
from service_kit.errors import ConfigurationError, InvalidRequestError

RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template"})
"""Template variables that a request may not set."""


class ChatTemplate:
    """A compiled template. Its text comes from the model's files or the operator, never from a request."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables` are the tokenizer's special tokens (bos_token, ...). Raises ConfigurationError for bad syntax."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._variables = dict(variables)
        self._knows_developer = "developer" in source
        # The answer's calls are read in one form, so only a template that writes calls in that form may show them.
        self.has_tools = (
            all(part in source for part in ("tools", "tool_calls", "arguments", CALL_OPEN))
            and "<function=" not in source  # the same tag around another form
        )
        """Whether the template shows tools and calls itself."""
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigurationError(f"the chat template does not compile: {error}") from error

    @cached_property
    def has_system_role(self) -> bool:
        """Whether a chat may begin with a system turn."""
        try:
            self.render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
        except InvalidRequestError:
            return False
        return True

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt, ending where the assistant's answer starts, or without `add_generation_prompt` behind the last
        turn. `tools` only if the template `has_tools`.

        `developer` turns become `system` turns for templates that do not know them. Raises InvalidRequestError when
        the template refuses the messages.
        """
        if not self._knows_developer:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        try:
            return self._template.render(
                **self._variables,
                **(variables or {}),
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}", field="messages") from error


def load_chat_template(model_dir: Path, override: Path | None = None) -> ChatTemplate | None:
    """The template of `override`, chat_template.jinja or tokenizer_config.json; None for a model without one."""
    config = _read_json(model_dir / "tokenizer_config.json")
    variables = _special_variables(_read_json(model_dir / "special_tokens_map.json") | config)
    path = override or model_dir / "chat_template.jinja"
    if override is not None or path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), variables)
        except OSError as error:
            raise ConfigurationError(f"DSPARK_GATEWAY_CHAT_TEMPLATE: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return ChatTemplate(source, variables) if isinstance(source, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _special_variables(config: Mapping[str, Any]) -> dict[str, str]:
    variables = {}
    for key, value in config.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                variables[key] = text
    return variables


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
