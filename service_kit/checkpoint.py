"""Safetensors checkpoints of executors: a local directory or a hub id, sharded or not, checked before anything is used.

Nothing here unpickles. Import only where tensors are loaded: reading needs torch, which the scheduler does without.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, safe_open

from service_kit.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DOWNLOAD_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MAX_HEADER_BYTES = 100 * 2**20
_DTYPES = {"float": ("F32", "F16", "BF16"), "int": ("I64", "I32")}
_MAX_NAMES_SHOWN = 8


def resolve_directory(name: str) -> Path:
    """Directory of a checkpoint: `name` itself if it is one, else the local snapshot of that hub id (downloaded once).

    Raises ConfigurationError if there is neither.
    """
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    if not _HUB_ID.fullmatch(name):
        raise ConfigurationError(f"{name} is not a directory (nor a hub id such as org/model)", field="model")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_DOWNLOAD_PATTERNS)))
    except Exception as error:  # the hub client raises many kinds; each one means: not available
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"{name} is not a local directory and could not be fetched from the hub ({type(error).__name__}: {reason})",
            field="model",
        ) from error


class Checkpoint:
    """An opened checkpoint. Tensors are read one at a time, so a converted model never needs its weights twice."""

    def __init__(self, name: str) -> None:
        """Opens directory or hub id `name`. Raises ConfigurationError for anything missing, pickled or corrupt."""
        self.name = name
        self.directory = resolve_directory(name)
        config_path = self.directory / "config.json"
        if not config_path.is_file():
            raise ConfigurationError(f"{self.directory} has no config.json", field="model")
        paths = self._weight_files()
        digest = hashlib.sha256(config_path.read_bytes())
        shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        for path in paths:
            header = _read_header(path)
            digest.update(header)
            try:
                file = safe_open(path, framework="pt")  # checks the offsets against the file's length
            except (SafetensorError, OSError) as error:
                raise ConfigurationError(f"{path} is corrupt or incomplete: {error}", field="model") from error
            for tensor, entry in json.loads(header).items():
                if tensor == "__metadata__":
                    continue
                if tensor in shapes:
                    raise ConfigurationError(f"{self.directory}: tensor {tensor} is in two files", field="model")
                shapes[tensor], self._dtypes[tensor] = tuple(entry["shape"]), entry["dtype"]
                self._files[tensor], self._paths[tensor] = file, path
        self.shapes: Mapping[str, tuple[int, ...]] = shapes
        """Shape of every tensor."""
        self.fingerprint = digest.hexdigest()[:32]
        """Hash over config.json and the headers of the weight files."""
        self.config: dict[str, Any] = self.read_json("config.json")
        """config.json as it is."""
        self.num_values = sum(math.prod(shape) for shape in shapes.values())
        """Of all tensors."""

    def _weight_files(self) -> list[Path]:
        if (self.directory / _SINGLE).is_file():
            return [self.directory / _SINGLE]
        if (self.directory / _INDEX).is_file():
            weight_map = self.read_json(_INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ConfigurationError(f"{self.directory / _INDEX} has no weight_map", field="model")
            paths = [self.directory / str(shard) for shard in sorted(set(weight_map.values()))]
            for path in paths:
                if path.parent != self.directory or path.suffix != ".safetensors" or not path.is_file():
                    raise ConfigurationError(f"{_INDEX} names {path.name}, which is not there", field="model")
            return paths
        if any(path for pattern in _PICKLE_PATTERNS for path in self.directory.glob(pattern)):
            raise ConfigurationError(
                f"{self.directory} has pickled weights only, which may run code when read: convert them to {_SINGLE}",
                field="model",
            )
        raise ConfigurationError(f"{self.directory} has neither {_SINGLE} nor {_INDEX}", field="model")

    def read_json(self, filename: str) -> dict[str, Any]:
        """A JSON object beside the weights; empty if the file does not exist. Raises ConfigurationError if broken."""
        path = self.directory / filename
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(f"{path} is not JSON: {error}", field="model") from error
        if not isinstance(content, dict):
            raise ConfigurationError(f"{path} is not a JSON object", field="model")
        return content

    def require_names(self, expected: Collection[str], *, ignored: re.Pattern[str] | None = None) -> None:
        """Raises ConfigurationError naming tensors that are missing, or present but neither expected nor `ignored`."""
        missing = sorted(set(expected) - self.shapes.keys())
        unexpected = sorted(
            name for name in self.shapes.keys() - set(expected) if not (ignored and ignored.fullmatch(name))
        )
        for words, names in (("lacks", missing), ("has unexpected", unexpected)):
            if names:
                more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
                shown = ", ".join(names[:_MAX_NAMES_SHOWN])
                raise ConfigurationError(f"{self.name} {words} tensors: {shown}{more}", field="model")

    def read(
        self, name: str, shape: tuple[int, ...], kind: Literal["float", "int"] = "float", out: Tensor | None = None
    ) -> Tensor:
        """A copy of a tensor as float32 (or int64 for `kind` "int"), in `out` if that is given.

        Raises ConfigurationError naming it if it is missing, has another shape or kind, or holds NaN or infinity.
        """
        import torch

        if name not in self.shapes:
            raise ConfigurationError(f"{self.name} lacks tensor {name}", field="model")
        if self.shapes[name] != tuple(shape):
            raise ConfigurationError(
                f"{self.name}: tensor {name} is {list(self.shapes[name])}, its configuration asks for {list(shape)}",
                field="model",
            )
        if self._dtypes[name] not in _DTYPES[kind]:
            allowed = ", ".join(_DTYPES[kind])
            raise ConfigurationError(
                f"{self.name}: tensor {name} is {self._dtypes[name]}, not {allowed}", field="model"
            )
        # A copy of our own: the file may be replaced while we serve.
        tensor = torch.empty(shape, dtype=torch.float32 if kind == "float" else torch.int64) if out is None else out
        tensor.copy_(self._files[name].get_tensor(name))
        if kind == "float" and tensor.numel() and not all(edge.isfinite() for edge in torch.aminmax(tensor)):
            raise ConfigurationError(f"{self._paths[name]}: tensor {name} holds NaN or infinity", field="model")
        return tensor


def _read_header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(8)
        size = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        header = file.read(size) if 2 <= size <= _MAX_HEADER_BYTES else b""
    if len(header) != size or not size:
        raise ConfigurationError(f"{path} is not a complete safetensors file", field="model")
    return header
