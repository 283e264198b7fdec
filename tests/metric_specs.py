"""Every metric that the services export."""

from __future__ import annotations

import drafter_service.metrics
import gateway.metrics
import scheduler_service.metrics
import verifier_service.metrics
from service_kit.metrics import PROCESS_SPECS, VLLM_PREFIX, MetricSpec

SPECS_BY_SERVICE: dict[str, tuple[MetricSpec, ...]] = {
    "gateway": gateway.metrics.SPECS,
    "scheduler": scheduler_service.metrics.SPECS,
    "drafter": drafter_service.metrics.SPECS,
    "verifier": verifier_service.metrics.SPECS,
    "every process": PROCESS_SPECS,
}
SPECS = {spec.name: spec for specs in SPECS_BY_SERVICE.values() for spec in specs}


def labels_of(spec: MetricSpec) -> frozenset[str]:
    """Labels at the gateway."""
    return frozenset(spec.labels) | ({"engine", "model_name"} if spec.name.startswith(VLLM_PREFIX) else frozenset())


def sample_names(spec: MetricSpec) -> frozenset[str]:
    """Names of its samples, which queries use."""
    if spec.kind == "histogram":
        return frozenset({f"{spec.name}_bucket", f"{spec.name}_count", f"{spec.name}_sum"})
    return frozenset({spec.name})
