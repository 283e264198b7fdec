"""The table of `dspark bench equality`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench.equality_matrix import REFERENCE
from bench.equality_record import Row, has_passed

_FILE_WIDTH = 160


def print_rows(console: Console, rows: Sequence[Row], title: str) -> None:
    """A line for each row, then what is wrong."""
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    table = Table(title=title)
    columns = ("format", "sampling", "factor", "value", "answers", "tokens", "different", "preempted")
    for column in (*columns, "tokens/step", "accepted", "long: steps", "s"):
        table.add_column(column, justify="left" if column in columns[:4] else "right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], rows[-1]], strict=True):
        table.add_row(
            *row.key,
            *map(str, (row.num_answers, row.num_tokens, row.num_different, row.num_preemptions)),
            f"{row.mean_committed:.1f}",
            "" if row.mean_accepted is None else f"{row.mean_accepted:.2f}",
            "" if row.longest_prompt_steps is None else str(row.longest_prompt_steps),
            f"{row.duration_s:.0f}",
            style="bold red" if row.fault else None,
            end_section=row.key[:2] != following.key[:2],
        )
    console.print(table)
    for row in rows:
        if row.fault:
            console.print(f"{' '.join(row.key)}: {row.fault}", style="red", soft_wrap=True, markup=False)
    compared = [row for row in rows if row.factor != REFERENCE.factor]
    console.print(
        f"{sum(row.num_different for row in compared)} of {sum(row.num_answers for row in compared)} answers differ: "
        + ("passed" if has_passed(rows) else "failed")
    )
