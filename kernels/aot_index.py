"""Which 32-bit products a compiled kernel computes places in memory with, read from what Triton made of it.

A page id or a row times a stride may pass 2³¹ where a cache or the logits are large. Such a product must have 64 bits:
`row.to(tl.int64) * stride`. Products of small numbers (rows of a step times a few columns) may stay narrow.
"""

from __future__ import annotations

import re

_ARGUMENT = re.compile(r"%(\w+): ")
_DEFINITION = re.compile(r"\s*%(\w+)(?::\d+)? = \"?([\w.]+)\"? (.*)")
_NAME = re.compile(r"%(\w+)")
_TYPE = re.compile(r" : (?:tensor<[\dx]*)?(\w+)>?\s*(?:loc\(.*)?$")
_SAME_NUMBER = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape")
PAGE_TABLE = "page_table_ptr"


def narrow_factors(ttir: str) -> frozenset[str]:
    """Arguments that a 32-bit product has as a factor; and PAGE_TABLE if a page id is one."""
    arguments: set[str] = set()
    definitions: dict[str, tuple[str, list[str]]] = {}
    products: list[list[str]] = []
    for line in ttir.splitlines():
        if "tt.func" in line:
            arguments |= set(_ARGUMENT.findall(line))
        elif found := _DEFINITION.match(line):
            name, operation, rest = found.groups()
            operands = _NAME.findall(rest)
            definitions[name] = operation, operands
            if operation == "arith.muli" and (kind := _TYPE.search(rest)) and kind[1] == "i32":
                products.append(operands)
    factors = {_root(operand, definitions) for operands in products for operand in operands}
    pages = any(_is_page(operand, definitions) for operands in products for operand in operands)
    return frozenset((factors & arguments) | ({PAGE_TABLE} if pages else set()))


def _root(name: str, definitions: dict[str, tuple[str, list[str]]]) -> str:
    """What `name` is a copy of."""
    while name in definitions and definitions[name][0] in _SAME_NUMBER:
        name = definitions[name][1][0]
    return name


def _is_page(name: str, definitions: dict[str, tuple[str, list[str]]]) -> bool:
    """Whether a number is computed from what was loaded from the page table."""
    seen, found = set(), [name]
    while found:
        name = found.pop()
        if name in seen or name not in definitions:
            continue
        seen.add(name)
        operation, operands = definitions[name]
        if operation != "tt.load":
            found += operands
        elif _pointer(operands[0], definitions) == PAGE_TABLE:
            return True
    return False


def _pointer(name: str, definitions: dict[str, tuple[str, list[str]]]) -> str:
    """The argument that a pointer is an offset from."""
    while name in definitions:
        name = definitions[name][1][0]
    return name
