"""GGUF files: what is read equals the format's own library, and damage is named."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from tiny_gguf import ALL_QUANTISED, ONE_QUANTISED, write_gguf

from service_kit.errors import ConfigurationError
from service_kit.gguf_file import GgufFile


@pytest.mark.parametrize("kinds", [ONE_QUANTISED, ALL_QUANTISED, {"blk.0.ffn_up.weight": Kind.F16}])
def test_tensors_are_those_that_were_stored(tmp_path: Path, kinds: dict[str, Kind]) -> None:
    stored = write_gguf(tmp_path / "tiny.gguf", kinds=kinds)
    file = GgufFile(tmp_path / "tiny.gguf")
    assert file.tensors.keys() == stored.keys()
    for name, values in stored.items():
        np.testing.assert_array_equal(file.floats(name), values)
        levels = file.levels(name)
        assert (levels is not None) == (kinds.get(name) in (Kind.Q4_1, Kind.Q8_0))
        if levels is not None:
            np.testing.assert_array_equal(levels.floats(), values)
            assert (levels.minimums is not None) == (levels.levels.dtype == np.uint8) == (kinds[name] == Kind.Q4_1)
            assert levels.minimums is None or 0 <= levels.levels.min() < levels.levels.max() <= 15


def test_metadata_is_what_the_library_reads(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    metadata = GgufFile(tmp_path / "tiny.gguf").metadata
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert metadata == expected


def test_damage_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", kinds=ALL_QUANTISED)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    for content, message in (
        (b"", "cut off or damaged"),
        (b"GGML" + whole[4:], "not a GGUF file"),
        (whole[:1000], "cut off or damaged"),
        (whole[:30] + b"\xff" * 8 + whole[38:], "cut off or damaged"),
    ):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ConfigurationError, match=message):
            GgufFile(tmp_path / "bad.gguf")
    (tmp_path / "bad.gguf").write_bytes(whole[:-600])
    with pytest.raises(ConfigurationError, match=r"damaged at tensor blk\.0\.ffn_down\.weight"):
        GgufFile(tmp_path / "bad.gguf").floats("blk.0.ffn_down.weight")


def test_other_quantisations_are_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", kinds={"blk.0.ffn_up.weight": Kind.Q5_0})
    with pytest.raises(ConfigurationError, match=r"blk\.0\.ffn_up\.weight is stored as number 6, only F32"):
        GgufFile(tmp_path / "tiny.gguf").levels("blk.0.ffn_up.weight")
