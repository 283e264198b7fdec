"""Requests of the API: strict types, limits, and what is not supported yet."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from gateway.chat_template import RESERVED_VARIABLES
from gateway.control_fields import ControlFields, Integer, limits
from gateway.settings import GatewaySettings
from gateway.tokens import Sampling
from service_kit.errors import InvalidRequestError

_log = logging.getLogger(__name__)
_MAX_UINT64 = 2**64 - 1
_MAX_TEMPLATE_VARIABLES = 32

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
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
    "spaces_between_special_tokens": (True,),
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

_IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Parameters for the provider's books: accepted and without effect anywhere."""


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _none_if_false(value: Any) -> Any:
    return None if value is False else value


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    include_usage: bool | None = False
    """Send the usage in a last chunk without choices."""
    continuous_usage_stats: bool | None = False
    """Send the usage so far in every chunk."""


class Extension(BaseModel):
    """`dspark`: what no other API has."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    pieces: bool = False
    """Send the text of every token with whether it was an accepted draft."""


class Speculation(BaseModel):
    """`speculation`: changes no text, only the time."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    enabled: bool | None = None
    """False: no drafts are made."""
    max_draft_tokens: Integer | None = Field(None, ge=0, le=2**31 - 1)
    """Most drafts verified in a step; 0 makes none."""
    max_time_per_token_ms: float | None = Field(None, gt=0)
    """Time per token that drafts must not push this request beyond."""
    priority: float | None = Field(None, ge=1 / 64, le=64)
    """What its tokens count for where drafts compete for verification; 1 if unset."""

    @property
    def limit(self) -> int | None:
        """Most drafts verified in a step; None asks for nothing."""
        return 0 if self.enabled is False else self.max_draft_tokens


class GenerationRequest(ControlFields):
    """What chat and completion requests share. Validate with the GatewaySettings as context."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Integer | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Integer | None = Field(None, ge=-(2**63), le=_MAX_UINT64)
    max_tokens: Integer | None = Field(None, ge=1, le=2**53)
    max_completion_tokens: Integer | None = Field(None, ge=1, le=2**53)
    n: Integer | None = Field(None, ge=1, le=1024)
    stop: tuple[str, ...] = ()
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    speculation: Speculation | None = None
    dspark: Extension | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: Any, info: ValidationInfo) -> tuple[str, ...]:
        allowed = limits(info)
        stop = (value,) if isinstance(value, str) else value or ()
        if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) for text in stop):
            raise ValueError("must be a string, a list of strings or null")
        if len(stop) > allowed.max_stop_strings:
            raise ValueError(f"holds {len(stop)} strings, at most {allowed.max_stop_strings} are allowed")
        for text in stop:
            if not 1 <= len(text) <= allowed.max_stop_length:
                raise ValueError(f"every string must have 1 to {allowed.max_stop_length} characters")
        return tuple(stop)

    @field_validator("stop_token_ids")
    @classmethod
    def _check_stop_token_ids(cls, value: list[int] | None, info: ValidationInfo) -> list[int] | None:
        limit = limits(info).max_stop_token_ids
        if value is not None and len(value) > limit:
            raise ValueError(f"holds {len(value)} ids, at most {limit} are allowed")
        return value

    @property
    def token_limit(self) -> int | None:
        """Most tokens of the answer, whichever name it came under."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def sampling(self) -> Sampling:
        """The sampling fields as the scheduler takes them."""
        temperature = self.temperature
        if temperature is not None and temperature < 1e-5:
            temperature = 0.0  # logits divided by less overflow; the limit is greedy anyway
        return Sampling(
            temperature=temperature,
            top_k=None if self.top_k is None else max(0, self.top_k),  # -1 also means all
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed & _MAX_UINT64,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            min_tokens=self.min_tokens or 0,
        )

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens come with each token of the answer; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False


class ChatMessage(BaseModel):
    """One turn. Text only."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    name: str | None = None
    tool_calls: None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a string, a list of text parts or null")
        texts = []
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError('parts must be {"type": "text", "text": "..."}: this model reads text only')
            texts.append(part["text"])
        return "".join(texts)

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _no_tool_calls(cls, value: Any) -> None:
        if value:
            raise ValueError("tool calls are not supported yet")


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(None, ge=0, le=20)
    reasoning_effort: str | None = Field(None, max_length=32)
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("needs logprobs to be true")
        return value

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationRequest."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @field_validator("messages")
    @classmethod
    def _check_count(cls, value: list[ChatMessage], info: ValidationInfo) -> list[ChatMessage]:
        limit = limits(info).max_messages
        if len(value) > limit:
            raise ValueError(f"holds {len(value)} messages, at most {limit} are allowed")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in value or ():
            if name in RESERVED_VARIABLES or name.endswith("_token") or not name.isidentifier():
                raise ValueError(f"{name!r} cannot be set by a request")
        if value is not None and len(value) > _MAX_TEMPLATE_VARIABLES:
            raise ValueError(f"at most {_MAX_TEMPLATE_VARIABLES} variables are allowed")
        return value

    def template_messages(self) -> list[dict[str, Any]]:
        """The turns as a template sees them."""
        return [m.model_dump(include={"role", "content", "name"}, exclude_none=True) for m in self.messages]

    def template_variables(self) -> dict[str, Any]:
        """Variables for the template besides the messages."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: list[str | list[int]]
    """Prompts, each as text or as token ids."""
    logprobs: Annotated[Integer | None, BeforeValidator(_none_if_false)] = Field(None, ge=0, le=20)
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationRequest."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """See GenerationRequest."""
        return bool(self.echo)

    @field_validator("prompt", mode="before")
    @classmethod
    def _to_list(cls, value: Any, info: ValidationInfo) -> Any:
        prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
        if not isinstance(prompts, list) or not all(isinstance(p, str) or _is_token_ids(p) for p in prompts):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
        limit = limits(info).max_prompts
        if not 1 <= len(prompts) <= limit:
            raise ValueError(f"holds {len(prompts)} prompts, 1 to {limit} are allowed")
        if any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("a prompt must not be empty")
        return prompts


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int and item >= 0 for item in value)


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse_request(request_class: type[RequestT], body: Any, settings: GatewaySettings) -> RequestT:
    """Validates a decoded body. Raises InvalidRequestError naming the first field at fault."""
    if not isinstance(body, dict):
        raise InvalidRequestError("the request body must be a JSON object")
    path = next(_paths_of(body, "chat_template"), None)
    if path is not None:
        raise InvalidRequestError("chat templates in requests are refused: they run on the server", field=path)
    for name, neutral in NEUTRAL_VALUES.items():
        value = None if name in request_class.model_fields else body.get(name)
        if value is not None and not any(_same(value, allowed) for allowed in neutral):
            remedy = f"send {neutral[0]!r} or leave it out" if neutral else "leave it out"
            raise InvalidRequestError(f"{name} is not supported here yet: {remedy}", field=name)
    try:
        return request_class.model_validate(body, context=settings)
    except ValidationError as error:
        raise _from_validation(error) from error


def _paths_of(body: dict[str, Any], name: str) -> Iterator[str]:
    """Paths, at any depth, of keys `name` whose value is not null."""
    todo: list[tuple[str, Any]] = [("", body)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                here = f"{path}.{key}" if path else str(key)
                if key == name and item is not None:
                    yield here
                todo.append((here, item))
        elif isinstance(value, list):
            todo += [(f"{path}[{i}]", item) for i, item in enumerate(value) if isinstance(item, (dict, list))]


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


def unknown_parameters(request: GenerationRequest) -> list[str]:
    """Names of the fields nobody knows, which are ignored. Each is logged once."""
    extra: Mapping[str, Any] = request.model_extra or {}
    names = sorted(name for name in extra if name not in NEUTRAL_VALUES and name not in _IGNORED)
    for name in names:
        if name not in _logged_unknown and len(_logged_unknown) < 1000:
            _logged_unknown.add(name)
            _log.warning("ignoring unknown request parameter %r", name[:100])
    return names
