"""Which target and drafter are served, decided and checked before anything is loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from launcher.embedded import NAME, embedded_dir, ensure_embedded
from launcher.settings import LauncherSettings
from service_kit.checkpoint import resolve_directory
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings

_EMBEDDED_DRAFTER = Path(__file__).resolve().parent.parent / "models" / "smollm2-135m-dspark"
_CHECKER = Path(__file__).resolve().parent.parent / "drafter_service"


class ModelPair(NamedTuple):
    """What is served. Speculation is off without a drafter; `note` then says why."""

    target: Path
    served_name: str
    drafter: Path | None
    note: str


def choose_models(
    model: str | None, drafter: str | None, common: CommonSettings, settings: LauncherSettings
) -> ModelPair:
    """Resolves --model and --drafter (directory or hub id; the drafter may be "none").

    Raises ConfigurationError if one cannot be had or the drafter does not fit the target.
    """
    is_embedded = model is None or (
        Path(model).expanduser().resolve() == embedded_dir(common.cache_dir).resolve() or model == NAME
    )
    target = (
        ensure_embedded(common.cache_dir, settings.embedded_wheel) if is_embedded else resolve_directory(str(model))
    )
    served_name = NAME if is_embedded else _served_name(str(model))
    if drafter == "none":
        return ModelPair(target, served_name, None, "speculation off: --drafter none")
    if drafter is None:
        if not is_embedded:
            return ModelPair(target, served_name, None, "speculation off: no --drafter for this target")
        if not _EMBEDDED_DRAFTER.is_dir():
            note = (
                f"speculation off: the embedded target's drafter is part of the repository (not found at "
                f"{_EMBEDDED_DRAFTER}); give its directory with --drafter"
            )
            return ModelPair(target, served_name, None, note)
    drafter_dir = _EMBEDDED_DRAFTER if drafter is None else resolve_directory(drafter)
    _check_once(drafter_dir, target, common.cache_dir / "checked-pair")
    return ModelPair(target, served_name, drafter_dir, "")


def _check_once(drafter: Path, target: Path, record: Path) -> None:
    """Checks that the drafter fits, unless these very files passed last time: the check's imports take seconds.

    Skipping is safe, as the drafter service checks again when it loads. Raises ConfigurationError.
    """
    files = [file for folder in (drafter, target, _CHECKER) for file in sorted(folder.iterdir()) if file.is_file()]
    state = "".join(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}\n" for file in files)
    signature = hashlib.sha256(state.encode()).hexdigest()
    if record.is_file() and record.read_text() == signature:
        return
    from drafter_service.pair import check_pair

    try:
        check_pair(drafter, target)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error.message} (drafter {drafter}): choose another --drafter, or --drafter none", field="drafter"
        ) from error
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(signature)


def _served_name(model: str) -> str:
    """Name clients ask for: the hub id, or the last part of a directory."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model
