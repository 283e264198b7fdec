"""GGUF files: metadata, and tensors as floats or as the levels they are stored in. numpy only.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A quantised tensor's rows are groups of 32 inputs:
Q4_1 is a float16 scale d, a float16 minimum m and 16 bytes, whose low halves are the levels of inputs 0 to 15 and whose
high halves those of 16 to 31: weight = d · level + m. Q8_0 is d and 32 signed bytes: weight = d · level.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from service_kit.errors import ConfigurationError

GROUP = 32
"""Inputs that share a scale."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_TENSOR_KINDS = {0: "F32", 1: "F16", 3: "Q4_1", 8: "Q8_0"}
_ROW_BYTES = {"F32": (1, 4), "F16": (1, 2), "Q4_1": (GROUP, 20), "Q8_0": (GROUP, 34)}  # elements and their bytes


class Levels(NamedTuple):
    """A quantised weight [N, K] as stored."""

    levels: npt.NDArray[Any]  # [N, K] uint8 0 … 15 with minimums, else int8
    scales: npt.NDArray[np.float16]  # [N, K / GROUP]
    minimums: npt.NDArray[np.float16] | None  # [N, K / GROUP]

    def floats(self) -> npt.NDArray[np.float32]:
        """scale · level + minimum, [N, K]."""
        num_rows, num_columns = self.levels.shape
        values = self.scales.astype(np.float32)[..., None] * self.levels.reshape(num_rows, -1, GROUP)
        if self.minimums is not None:
            values += self.minimums.astype(np.float32)[..., None]
        whole: npt.NDArray[np.float32] = values.reshape(num_rows, num_columns)
        return whole

    def of_rows(self, rows: Any) -> Levels:
        """Some of the outputs, or all of them in another order."""
        return Levels(self.levels[rows], self.scales[rows], None if self.minimums is None else self.minimums[rows])


class GgufTensor(NamedTuple):
    """Where a tensor is and how it is stored."""

    kind: str  # a key of _ROW_BYTES, or the number of a kind we do not read
    shape: tuple[int, ...]
    offset: int


class _Cursor:
    def __init__(self, data: memoryview) -> None:
        self._data, self.position = data, 0

    def scalar(self, kind: str) -> Any:
        return self.scalars(kind, 1)[0]

    def scalars(self, kind: str, count: int) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{kind}", self._data, self.position)
        self.position += struct.calcsize(f"<{count}{kind}")
        return values

    def string(self) -> str:
        start = self.position + _LENGTH.size  # no calls between: a tokenizer has a hundred thousand strings
        self.position = start + _LENGTH.unpack_from(self._data, self.position)[0]
        return str(self._data[start : self.position], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        element, count = self.scalar("I"), self.scalar("Q")
        if element in _SCALARS:
            return list(self.scalars(_SCALARS[element], count))
        if element == _STRING:
            return [self.string() for _ in range(count)]
        return [self.value(element) for _ in range(count)]


class GgufFile:
    """An opened GGUF file. Tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError for a file that is not GGUF, or cut off."""
        self.path = path
        try:
            self._bytes: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
            cursor = _Cursor(self._bytes.data)
            magic, version, num_tensors, num_keys = cursor.scalars("I", 2) + cursor.scalars("Q", 2)
            if magic != 0x46554747 or version not in (2, 3):
                raise ConfigurationError(f"{path} is not a GGUF file of version 2 or 3", field="model")
            metadata = {}
            for _ in range(num_keys):
                key = cursor.string()
                metadata[key] = cursor.value(cursor.scalar("I"))
            tensors = [self._tensor(cursor) for _ in range(num_tensors)]
        except (struct.error, KeyError, ValueError, OverflowError) as error:
            raise ConfigurationError(f"{path} is cut off or damaged: {error}", field="model") from error
        alignment = metadata.get("general.alignment", 32)
        start = -(-cursor.position // alignment) * alignment
        self.metadata: Mapping[str, Any] = metadata
        self.tensors: Mapping[str, GgufTensor] = {
            name: tensor._replace(offset=start + tensor.offset) for name, tensor in tensors
        }

    @staticmethod
    def _tensor(cursor: _Cursor) -> tuple[str, GgufTensor]:
        name = cursor.string()
        shape = cursor.scalars("Q", cursor.scalar("I"))
        kind, offset = cursor.scalar("I"), cursor.scalar("Q")
        return name, GgufTensor(_TENSOR_KINDS.get(kind, f"number {kind}"), shape[::-1], offset)

    def _rows(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes [N, row bytes], as stored."""
        kind, shape, offset = self.tensors[name]
        if kind not in _ROW_BYTES:
            raise ConfigurationError(
                f"{self.path}: tensor {name} is stored as {kind}, only {', '.join(_ROW_BYTES)} can be read",
                field="model",
            )
        elements, num_bytes = _ROW_BYTES[kind]
        row_bytes = shape[-1] // elements * num_bytes
        end = offset + int(np.prod(shape[:-1])) * row_bytes
        if shape[-1] % elements or end > len(self._bytes) or (elements > 1 and len(shape) != 2):
            raise ConfigurationError(f"{self.path} is cut off or damaged at tensor {name}", field="model")
        return self._bytes[offset:end].reshape(-1, row_bytes)

    def levels(self, name: str) -> Levels | None:
        """A quantised tensor as it is stored; None for one of floats."""
        kind, shape, _ = self.tensors[name]
        if kind not in ("Q4_1", "Q8_0"):
            self._rows(name)
            return None
        groups = self._rows(name).reshape(shape[0], shape[1] // GROUP, -1)
        scales = groups[..., :2].copy().view(np.float16)[..., 0]
        if kind == "Q8_0":
            return Levels(groups[..., 2:].reshape(shape).view(np.int8), scales, None)
        packed = groups[..., 4:]
        levels = np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(shape)
        return Levels(levels, scales, groups[..., 2:4].copy().view(np.float16)[..., 0])

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32, dequantised if it is quantised."""
        levels = self.levels(name)
        if levels is not None:
            return levels.floats()
        kind, shape, _ = self.tensors[name]
        stored = self._rows(name).reshape(-1).view(np.float32 if kind == "F32" else np.float16)
        return stored.reshape(shape).astype(np.float32)
