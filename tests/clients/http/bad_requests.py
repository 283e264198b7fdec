"""Bad requests without end, of every kind, always the same ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, NamedTuple

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 4},
    RESPONSES: {"input": "Hi", "max_output_tokens": 4},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}
"""What each path would answer."""
_WRONG_TYPES = ({"x": [{}]}, [[["x"]]], "\ud83d", -(10**30), 0.5)
_WRONG_VALUES: dict[str, Any] = {
    "temperature": -1,
    "top_p": 0,
    "min_p": 2,
    "seed": "x",
    "n": 1000,
    "stop": ["x"] * 99,
    "logit_bias": {"999999": 1},
    "stop_token_ids": [-1],
    "bad_words": [""] * 999,
    "frequency_penalty": 3,
    "repetition_penalty": 0,
    "truncate_prompt_tokens": 0,
    "prompt_logprobs": 99,
    "suffix": "x",
    "use_beam_search": True,
    "guided_json": {},
    "chat_template": "{{ 1 }}",
    "speculation": {"max_draft_tokens": -1},
    "dspark": {"steps": 3},
    "structured_outputs": {"regex": "("},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
    "tools": [{"type": "function", "function": {"name": "no such name!"}}],
    "messages": [{"role": "wizard", "content": "Hi"}],
    "prompt": [[-1]],
    "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
    "tokens": [10**9],
    "max_tokens": 0,
    "max_output_tokens": 0,
    "model": "nobody",
    "stream_options": [],
}


class Bad(NamedTuple):
    """A request that no server should answer with anything but a refusal."""

    kind: str
    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    is_authorized: bool = True


def bad_requests(api_key: str, num: int) -> Iterator[Bad | bytes]:
    """`num` of them; what is no request of HTTP at all comes as bytes for a connection of its own."""
    source = random.Random(0)
    makers: list[Callable[[random.Random, str], Bad | bytes]] = [
        _cut_body,
        _random_bytes,
        _wrong_type,
        _wrong_value,
        _wrong_value,
        _deep,
        _too_long,
        _stranger,
        _wrong_place,
        lambda source, key: _raw(source, key),
    ]
    for _, make in zip(range(num), cycle(makers), strict=False):
        yield make(source, api_key)


def _dump(body: Any) -> bytes:
    return json.dumps(body).encode()


def _post(kind: str, path: str, body: bytes, **more: Any) -> Bad:
    return Bad(kind, "POST", path, body, **more)


def _cut_body(source: random.Random, _key: str) -> Bad:
    path = source.choice(list(_BODIES))
    whole = _dump(_BODIES[path])
    return _post("cut JSON", path, whole[: source.randrange(len(whole))])


def _random_bytes(source: random.Random, _key: str) -> Bad:
    return _post("no JSON", source.choice(list(_BODIES)), b"\xff" + source.randbytes(source.randrange(400)))


def _wrong_type(source: random.Random, _key: str) -> Bad:
    path = source.choice(list(_BODIES))
    field = next(iter(_BODIES[path]))
    wrong = source.choice(_WRONG_TYPES[:2] if field in ("prompt", "input", "messages") else _WRONG_TYPES)
    return _post("wrong type", path, _dump({**_BODIES[path], field: wrong}))


def _wrong_value(source: random.Random, _key: str) -> Bad:
    field = source.choice(list(_WRONG_VALUES))
    of_one = {"messages": CHAT, "tools": CHAT, "prompt": COMPLETIONS, "input": RESPONSES, "tokens": "/detokenize"}
    of_one |= {"max_output_tokens": RESPONSES, "max_tokens": CHAT, "guided_json": CHAT, "suffix": COMPLETIONS}
    path = of_one.get(field) or source.choice((CHAT, COMPLETIONS))
    return _post(f"wrong {field}", path, _dump({**_BODIES[path], field: _WRONG_VALUES[field]}))


def _deep(source: random.Random, _key: str) -> Bad:
    path, depth = source.choice(list(_BODIES)), source.choice((150, 1000, 20_000))
    return _post("deep nesting", path, b'{"x":' * depth + b"1" + b"}" * depth)


def _too_long(source: random.Random, _key: str) -> Bad:
    if source.random() < 0.1:
        return _post("body too large", CHAT, b" " * (4 * 2**20 + 1))
    text = "word " * source.randrange(2500, 5000)
    messages = [{"role": "user", "content": text}]
    path, body = source.choice([(COMPLETIONS, {"prompt": text}), (CHAT, {"messages": messages})])
    return _post("prompt too long", path, _dump(body))


def _stranger(source: random.Random, key: str) -> Bad:
    token = source.choice(["", "Bearer", "Bearer x", f"Basic {key}", f"Bearer {key}x", f"Bearer {key[:-1]}"])
    headers = (("authorization", token),) if token else ()
    path = source.choice(list(_BODIES))
    return _post("no key", path, _dump(_BODIES[path]), headers=headers, is_authorized=False)


def _wrong_place(source: random.Random, _key: str) -> Bad:
    paths = ["/v1", "/v2/chat/completions", "/v1/models/x/y", "/%00", "/..%2f..%2fetc/passwd", "/static/../app.py"]
    method = source.choice(["DELETE", "PUT", "PATCH", "GET"])
    return Bad("wrong place", method, source.choice([*paths, CHAT, "/tokenize"]))


def _raw(source: random.Random, key: str) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    body = _dump({**_BODIES[CHAT], "stream": True, "max_tokens": 500})
    return source.choice(
        [
            source.randbytes(200),
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            f"{head}Content-Length: -5\r\n\r\n".encode(),
            f"{head}Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello".encode(),
            f"{head}Transfer-Encoding: chunked\r\n\r\nZZ\r\nhello".encode(),
            f"{head}Content-Length: 1000\r\n\r\nhello".encode(),
            f"{head}X: {'y' * 200_000}\r\n\r\n".encode(),
            f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body,  # right, but nobody waits for the answer
        ]
    )
