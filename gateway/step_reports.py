"""What a step did, as the REST API tells it."""

from __future__ import annotations

from typing import Any

from gateway.tokens import StepReport


def step_body(report: StepReport) -> dict[str, Any]:
    """`dspark.step` of a chunk. A confidence that is none (NaN) becomes null."""
    return {
        "drafted": report.num_drafted,
        "verified": report.num_verified,
        "accepted": report.num_accepted,
        "uncut_accepted": report.num_uncut_accepted,
        "confidences": [round(confidence, 4) for confidence in report.confidences],
        "budget": report.budget,
        "rows": report.num_rows,
    }
