"""Names of what `dspark bench serve --modes` runs: a verify mode, and what is changed of it for study."""

from __future__ import annotations

from dataclasses import dataclass

from service_kit.errors import ConfigurationError

_AGAIN = "again"
_UNDRAFTED = "undrafted"
_PREFIX = "DSPARK_SCHEDULER_"
_VARIANTS = {
    "causal": ("LOSSLESS_RULE", "causal"),
    "lagged": ("LOSSLESS_RULE", "lagged"),
    "fixed-blocks": ("ELASTIC_BLOCKS", "false"),
    "no-guard": ("GUARD", "false"),
}
"""What a scheduled mode may be followed by, and the setting that it stands for."""
_SCHEDULED = ("compact", "cap-accept")
_SIZED = {"fixed": ("FIXED_WINDOW", "2"), "threshold": ("CONFIDENCE_THRESHOLD", "0.5")}
"""Modes that need a number: their setting, and a number that works."""
_PLAIN = ("off", "static")


@dataclass(frozen=True)
class ModeSpec:
    """One server of a run."""

    name: str
    """As it was asked for."""
    verify_mode: str
    changes: tuple[tuple[str, str], ...] = ()
    """Variables of settings, and their values."""
    repeats: str = ""
    """The mode that it runs a second time, to show what equal servers differ by; else empty."""
    shares: str = ""
    """The mode whose server it uses, by requests that ask for no drafts; empty: it has a server of its own."""

    @property
    def is_scheduled(self) -> bool:
        """Whether the server decides by what steps cost."""
        return self.verify_mode in _SCHEDULED and not self.shares


def parse_modes(text: str) -> tuple[ModeSpec, ...]:
    """Modes of a comma-separated list: `off`, `static`, `fixed:2`, `threshold:0.5`, `compact`, `cap-accept`.

    The last two may be followed by `:causal`, `:lagged`, `:fixed-blocks` (no elastic ones) and `:no-guard`, every mode
    that drafts by `:undrafted` for plain decoding on that very server, which no luck of another one's memory disturbs,
    and every mode by `:again` for a second server of it. Raises ConfigurationError naming the part that is wrong.
    """
    specs = [_parse(part.strip()) for part in text.split(",")]
    names = [spec.name for spec in specs]
    for spec in specs:
        if names.count(spec.name) > 1:
            raise _error(f"{spec.name} is given twice: name a second server of it {spec.name}:{_AGAIN}")
        for other in (spec.repeats, spec.shares):
            if other and other not in names:
                raise _error(f"{spec.name} has nothing to compare with: add {other}")
    return tuple(specs)


def _parse(name: str) -> ModeSpec:
    own, _, last = name.rpartition(":")
    if last == _AGAIN:
        spec = _parse(own)
        if spec.repeats:
            raise _error(f"{name} is one server too many: use {own}")
        return ModeSpec(name, spec.verify_mode, spec.changes, repeats=own, shares=spec.shares)
    if last == _UNDRAFTED:
        spec = _parse(own)
        if spec.verify_mode == "off" or spec.repeats or spec.shares:
            raise _error(f"{name}: {own} is no server that drafts")
        return ModeSpec(name, spec.verify_mode, spec.changes, shares=own)
    mode, *parts = name.split(":")
    if mode in _SIZED:
        setting, example = _SIZED[mode]
        if len(parts) != 1 or not _is_number(parts[0], whole=mode == "fixed"):
            raise _error(f"{name!r} needs a number, e.g. {mode}:{example}")
        return ModeSpec(name, mode, ((_PREFIX + setting, parts[0]),))
    if mode not in (*_PLAIN, *_SCHEDULED):
        known = [*_PLAIN, *(f"{each}:{example}" for each, (_, example) in _SIZED.items()), *_SCHEDULED]
        raise _error(f"{name!r} is no mode: use some of {', '.join(known)}")
    allowed = _VARIANTS if mode in _SCHEDULED else {}
    for part in parts:
        if part not in allowed:
            variants = ", ".join([*allowed, _UNDRAFTED, _AGAIN])
            raise _error(f"{name!r}: {mode} may be followed by {variants}, not by {part!r}")
    return ModeSpec(name, mode, tuple((_PREFIX + allowed[part][0], allowed[part][1]) for part in parts))


def _is_number(text: str, *, whole: bool) -> bool:
    try:
        return int(text) >= 1 if whole else 0.0 <= float(text) <= 1.0
    except ValueError:
        return False


def _error(message: str) -> ConfigurationError:
    return ConfigurationError(message, field="--modes")
