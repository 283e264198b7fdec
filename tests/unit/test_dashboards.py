"""Every query of the dashboard, the alerts and docs/metrics.md asks for metrics and labels that the services export."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from metric_specs import SPECS, labels_of, sample_names

ROOT = Path(__file__).parents[2]
OBSERVABILITY = ROOT / "docker" / "observability"
DASHBOARD = json.loads((OBSERVABILITY / "grafana" / "dashboards" / "dspark.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = yaml.safe_load((OBSERVABILITY / "prometheus" / "rules" / "dspark.yml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]

TARGET_LABELS = {"instance", "job"}
LABELS = {name: labels_of(spec) | {"le"} for spec in SPECS.values() for name in sample_names(spec)} | {"up": {"job"}}
KINDS = {name: spec.kind for spec in SPECS.values() for name in sample_names(spec)}


def queries() -> Iterator[Any]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for rule in ALERTS:
        yield pytest.param(rule["expr"], id=rule["alert"])
    document = (ROOT / "docs" / "metrics.md").read_text().split("### Useful queries")[1].split("###")[0]
    for question, query in re.findall(r"^\| ([^|`]+) \| `([^`]+)` \|$", document, re.MULTILINE):
        yield pytest.param(query, id=question)


QUERIES = list(queries())


def nodes(node: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    """Every node of a query, behind those above it."""
    yield (*above, node)
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        below = getattr(node, name, None)
        if below is not None and not isinstance(below, str):
            yield from nodes(below, *above, node)
    for argument in getattr(node, "args", ()):
        yield from nodes(argument, *above, node)


def parse(query: str) -> Any:
    return promql_parser.parse(query.replace("$__rate_interval", "5m"))


def selectors(query: str) -> list[tuple[Any, ...]]:
    return [path for path in nodes(parse(query)) if isinstance(path[-1], promql_parser.VectorSelector)]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_is_exported(query: str) -> None:
    found = selectors(query)
    assert found
    for *above, selector in found:
        assert selector.name in LABELS, f"{selector.name} is not exported"
        known = LABELS[selector.name] | TARGET_LABELS
        used = {matcher.name for matcher in selector.matchers.matchers}
        used |= {
            label
            for node in above
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
            for label in node.modifier.labels
        }
        assert used <= known, f"{selector.name} has no label {used - known}"


@pytest.mark.parametrize("query", QUERIES)
def test_counters_are_never_shown_bare_and_gauges_never_as_counters(query: str) -> None:
    for *above, selector in selectors(query):
        functions = {node.func.name for node in above if isinstance(node, promql_parser.Call)}
        is_counter = KINDS.get(selector.name, "gauge") != "gauge"
        assert bool(functions & {"rate", "increase"}) == is_counter, f"{selector.name} in {sorted(functions)}"


def test_legends_and_annotations_use_labels_that_are_there() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert wanted <= set().union(*(LABELS[path[-1].name] for path in selectors(target["expr"]))), panel["title"]
    for rule in ALERTS:
        wanted = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        found = set().union(*(LABELS[path[-1].name] for path in selectors(rule["expr"])))
        assert wanted <= found | TARGET_LABELS, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_panels_ask_the_chosen_data_source_and_server() -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "instance"}
    metric = re.fullmatch(r"label_values\((\w+), instance\)", variables["instance"]["query"]["query"])
    assert metric is not None
    assert metric[1] in SPECS
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["description"]
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            for path in selectors(target["expr"]):
                matchers = [(matcher.name, matcher.value) for matcher in path[-1].matchers.matchers]
                assert ("instance", "$instance") in matchers, panel["title"]


def test_a_metric_that_is_not_exported_would_be_found() -> None:
    with pytest.raises(AssertionError, match="nonsense_total is not exported"):
        test_a_query_asks_for_what_is_exported('sum(rate(nonsense_total{instance="x"}[$__rate_interval]))')
    with pytest.raises(AssertionError, match="has no label"):
        test_a_query_asks_for_what_is_exported("sum by (colour) (rate(dspark_steps_total[5m]))")
