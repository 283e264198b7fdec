"""What the commands share: options of the same meaning, lists in one option, errors in words."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, TypeVar

import typer

T = TypeVar("T")

Model = Annotated[str | None, typer.Option(help="Target: directory or hub id. Default: the embedded one.")]
Drafter = Annotated[str | None, typer.Option(help='Drafter: directory, hub id or "none".')]


@contextlib.contextmanager
def errors_in_words() -> Iterator[None]:
    """Expected errors become one line and exit code 1; anything else keeps its traceback."""
    from launcher.client import ServerError
    from launcher.supervisor import ServiceDiedError
    from service_kit.errors import ServiceError

    try:
        yield
    except (ServiceError, ServerError, ServiceDiedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def integers(text: str, option: str) -> list[int]:
    """Comma-separated numbers of at least 1."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(f"{text!r}: give positive numbers, e.g. 1,8", param_hint=option)
    return values


def parsed(parse: Callable[[str], T], text: str, option: str) -> T:
    """What `parse` makes of an option; its ConfigurationError becomes a usage error."""
    from service_kit.errors import ConfigurationError

    try:
        return parse(text)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def names(text: str, known: Collection[str], option: str) -> list[str]:
    """Comma-separated names, each once, in the order given."""
    values = [part.strip() for part in text.split(",")]
    if unknown := [value for value in values if value not in known]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}", param_hint=option)
    return list(dict.fromkeys(values))
