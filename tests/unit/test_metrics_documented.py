"""docs/metrics.md names every metric, and no other."""

from __future__ import annotations

from pathlib import Path

from metric_specs import SPECS_BY_SERVICE, labels_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
_BEGIN, _END = "<!-- table: generated -->\n", "<!-- end of table -->\n"


def table() -> str:
    """All metrics, in the document's words."""
    lines = []
    for service, specs in SPECS_BY_SERVICE.items():
        lines += [
            f"### {service[0].upper()}{service[1:]}",
            "",
            "| metric | type | meaning | labels |",
            "|---|---|---|---|",
        ]
        for spec in specs:
            shown = sorted(labels_of(spec) - {"engine", "model_name"})
            labels = ", ".join(f"`{label}`" for label in shown)
            lines.append(f"| `{spec.name}` | {spec.kind} | {spec.help} | {labels} |")
        lines.append("")
    return "\n".join(lines)


def test_the_table_is_that_of_the_code() -> None:
    text = DOCUMENT.read_text()
    found = text[text.index(_BEGIN) + len(_BEGIN) : text.index(_END)]
    assert found.strip() == table().strip(), f"put this between the marks in docs/metrics.md:\n{table()}"
