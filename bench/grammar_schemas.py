"""Random JSON schemas, of the parts that people use: objects, arrays, strings, numbers, choices, nesting."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "city", "age", "title", "tags", "price", "items", "address", "email", "count", "notes", "active")
_PATTERNS = ("^[a-z]{2,8}$", "^[A-Z][a-z]+( [A-Z][a-z]+)?$", "^[0-9]{3}-[0-9]{4}$", "^(red|green|blue)-[0-9]+$")
_MAX_DEPTH = 3


def random_schema(seed: int) -> Schema:
    """An object with one to four properties; the same for the same seed. Every answer of it ends."""
    return _object(random.Random(f"schema {seed}"), 0)


def _any(draw: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [_string, _number, _integer, _enum, _boolean]
    if depth < _MAX_DEPTH:
        kinds += [_object, _array, _either]
    return draw.choice(kinds)(draw, depth)


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_WORDS, draw.randint(1, 4 - depth))
    properties = {name: _any(draw, depth + 1) for name in names}
    required = [name for name in names if draw.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(draw: random.Random, depth: int) -> Schema:
    fewest, items = draw.randint(0, 2), _any(draw, depth + 1)
    return {"type": "array", "items": items, "minItems": fewest, "maxItems": fewest + draw.randint(1, 2)}


def _either(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth + 1), {"type": "null"}]}


def _string(draw: random.Random, depth: int) -> Schema:
    if draw.random() < 0.3:
        return {"type": "string", "pattern": draw.choice(_PATTERNS), "maxLength": 24}
    return {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(4, 40)}


def _number(draw: random.Random, depth: int) -> Schema:
    return {"type": "number", "minimum": -10, "maximum": draw.choice((0.5, 10, 1000))}


def _integer(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(-20, 20)
    return {"type": "integer", "minimum": least, "maximum": least + draw.choice((0, 7, 500))}


def _enum(draw: random.Random, depth: int) -> Schema:
    return {"enum": draw.sample(["small", "medium", "large", 1, 2.5, None, True, "très grand"], draw.randint(1, 4))}


def _boolean(draw: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}
