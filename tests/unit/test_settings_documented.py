"""Every setting says what it means, and the documents name only settings that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = sorted(ROOT.glob("*/settings.py"))
_FAMILIES = {"DSPARK_GATEWAY"}  # stands for all with this prefix


def _settings(path: Path) -> dict[str, bool]:
    """Variables of a settings file, and whether each is followed by its docstring."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        prefix = re.search(r"env_prefix='(\w+)'", ast.unparse(node))
        if isinstance(node, ast.ClassDef) and prefix:
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    is_documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    found[prefix[1] + field.target.id.upper()] = is_documented
    return found


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.parent.name)
def test_every_setting_is_documented(path: Path) -> None:
    settings = _settings(path)
    assert len(settings) > 2
    assert [name for name, is_documented in settings.items() if not is_documented] == []


def test_documents_name_settings_that_exist() -> None:
    known = {name for path in SETTINGS for name in _settings(path)} | _FAMILIES
    named = {
        name
        for path in (ROOT / "README.md", ROOT / "docker" / "Dockerfile", *ROOT.glob("docs/*.md"))
        for name in re.findall(r"DSPARK_[A-Z_]*[A-Z]", path.read_text())
    }
    assert len(named) > 10
    assert named - known - {"DSPARK"} == set()
