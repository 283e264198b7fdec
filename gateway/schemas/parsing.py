"""Bodies to requests: refusals that name the field, and what an endpoint lacks."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from gateway.settings import GatewaySettings
from service_kit.errors import InvalidRequestError

_log = logging.getLogger(__name__)

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Parameters that an endpoint may lack, with the values that ask for nothing; null always does."""

_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "include_obfuscation"}
)
"""Parameters for the provider's books: accepted and without effect anywhere."""


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


RequestT = TypeVar("RequestT", bound=BaseModel)


def parse_request(request_class: type[RequestT], body: Any, settings: GatewaySettings) -> RequestT:
    """Validates a decoded body. Raises InvalidRequestError naming the first field at fault."""
    if not isinstance(body, dict):
        raise InvalidRequestError("the request body must be a JSON object")
    path = next(_paths_of(body, "chat_template", settings.max_json_depth), None)
    if path is not None:
        raise InvalidRequestError("chat templates in requests are refused: they run on the server", field=path)
    for name, neutral in NEUTRAL_VALUES.items():
        value = None if name in request_class.model_fields else body.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in neutral):
            remedy = f"send {orjson.dumps(neutral[0]).decode()} or leave it out" if neutral else "leave it out"
            raise InvalidRequestError(f"{name} is not supported here: {remedy}", field=name)
    try:
        return request_class.model_validate(body, context=settings)
    except ValidationError as error:
        raise _from_validation(error) from error


def _paths_of(body: dict[str, Any], name: str, max_depth: int) -> Iterator[str]:
    """Paths, at any depth, of keys `name` whose value is not null. Raises InvalidRequestError for a body too deep."""
    todo: list[tuple[str, Any, int]] = [("", body, 1)]
    while todo:
        path, value, depth = todo.pop()
        if depth > max_depth:
            field = re.split(r"[.\[]", path, maxsplit=1)[0]
            raise InvalidRequestError(f"{field} is nested more than {max_depth} levels deep", field=field)
        if isinstance(value, dict):
            for key, item in value.items():
                here = f"{path}.{key}" if path else str(key)
                if key == name and item is not None:
                    yield here
                if isinstance(item, (dict, list)):
                    todo.append((here, item, depth + 1))
        elif isinstance(value, list):
            items = [(f"{path}[{i}]", item) for i, item in enumerate(value) if isinstance(item, (dict, list))]
            todo += [(here, item, depth + 1) for here, item in items]


def _from_validation(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False)[0]
    field = ""
    for part in first["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else part
    if first["type"] == "missing":
        return InvalidRequestError(f"{field} is required", field=field)
    message = first["msg"].removeprefix("Value error, ")
    value = first["input"]
    shown = f" (got {value!r})" if isinstance(value, (str, int, float)) and len(repr(value)) <= 60 else ""
    return InvalidRequestError(f"{field}: {message[:1].lower()}{message[1:]}{shown}", field=field)


_logged_unknown: set[str] = set()


def unknown_parameters(request: BaseModel) -> list[str]:
    """Names of the fields nobody knows, which are ignored; null is as good as left out. Each is logged once."""
    extra: Mapping[str, Any] = request.model_extra or {}
    asked = (name for name, value in extra.items() if value is not None)
    names = sorted(name for name in asked if name not in NEUTRAL_VALUES and name not in _IGNORED)
    for field in ("stream_options", "text", "reasoning"):
        inner = getattr(request, field, None)
        if isinstance(inner, BaseModel):
            names += sorted(f"{field}.{name}" for name in inner.model_extra or {} if name not in _IGNORED)
    for name in names:
        if name not in _logged_unknown and len(_logged_unknown) < 1000:
            _logged_unknown.add(name)
            _log.warning("ignoring unknown request parameter %r", name[:100])
    return names
