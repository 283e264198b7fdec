"""`/metrics`: what every service exports, merged into one page that Prometheus can read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fakes.executors import fake_pair
from fakes.rig import Rig, running
from gateway_harness import GatewayHarness, write_model
from metric_specs import SPECS, labels_of
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from drafter_service.metrics import DraftCounts, drafter_metrics
from gateway.metrics_page import MetricsSource, merged
from scheduler_service.metrics import scheduler_metrics
from service_kit import rpc
from service_kit.metrics import Histogram, MetricSpec, exposition, new_registry
from service_kit.metrics_rpc import add_metrics_service
from verifier_service.metrics import StepCounts, verifier_metrics

Families = dict[str, Metric]


def parse(page: str) -> Families:
    """Families by their name in queries. Fails if one comes twice."""
    families: Families = {}
    for family in text_string_to_metric_families(page):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name not in families
        families[name] = family
    return families


def values(family: Metric, suffix: str = "") -> dict[tuple[tuple[str, str], ...], float]:
    """By labels, engine and model_name left out."""
    name = f"{family.name}_total" if family.type == "counter" else family.name + suffix
    return {
        tuple((key, value) for key, value in sorted(sample.labels.items()) if key not in ("engine", "model_name")): (
            sample.value
        )
        for sample in family.samples
        if sample.name == name
    }


def value(families: Families, name: str, suffix: str = "", **labels: str) -> float:
    return values(families[name], suffix)[tuple(sorted(labels.items()))]


@contextmanager
def metrics_server(directory: Path, name: str, collect: object) -> Iterator[MetricsSource]:
    """A service that has nothing but metrics."""
    address = rpc.socket_address(directory, name)
    registry = new_registry(name, collect)  # type: ignore[arg-type]
    server, _ = rpc.sync_server(
        name, address, lambda server: add_metrics_service(server, registry), max_message_bytes=2**20
    )
    server.start()
    try:
        yield MetricsSource(name, address)
    finally:
        server.stop(0).wait()


def verifier_families() -> Iterable[Metric]:
    return verifier_metrics(StepCounts(phase_ns={"forward": 5}), {"features": 10}, 20)


def drafter_families() -> Iterable[Metric]:
    return drafter_metrics(DraftCounts(phase_ns={"head": 5}), {"draft_probs": 10}, 20)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with running("static", fake_pair(confidence=0.7, quality=0.7)) as rig:
        yield rig


@pytest.fixture(scope="module")
def stack(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    """A gateway, the metrics of a scheduler that has served, and those of two executors."""
    directory = tmp_path_factory.mktemp("run")
    with ExitStack() as stack:
        sources = [
            stack.enter_context(metrics_server(directory, name, collect))
            for name, collect in (
                ("scheduler", lambda: scheduler_metrics(rig.scheduler)),
                ("verifier", verifier_families),
                ("drafter", drafter_families),
            )
        ]
        streams = rig.submit_all([[1, 2, 3], [4, 5]], 20)
        assert all(stream.wait() for stream in streams)
        rig.submit([1, 2], 5, max_draft_tokens=0).wait()
        rig.wait_until_idle()
        model = write_model(directory / "model")
        harness = stack.enter_context(GatewayHarness(model, served_model_names='a"b,tiny', sources=sources))
        harness.wait_ready()
        assert harness.chat(model="tiny").status_code == 200
        yield harness


def scrape(harness: GatewayHarness) -> Families:
    response = harness.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parse(response.text)


def test_the_page_has_every_metric_with_its_type_and_labels(stack: GatewayHarness) -> None:
    families = scrape(stack)
    assert set(families) == set(SPECS)
    for name, family in families.items():
        assert (family.type, family.documentation) == (SPECS[name].kind, SPECS[name].help)
        assert family.samples, name
        for sample in family.samples:
            assert frozenset(sample.labels) - {"le"} == labels_of(SPECS[name]), name
            if "engine" in sample.labels:
                assert (sample.labels["engine"], sample.labels["model_name"]) == ("0", 'a"b')


def test_help_and_type_come_once_and_shared_families_are_told_apart(stack: GatewayHarness) -> None:
    page = stack.get("/metrics").text
    headers = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(headers) == len(set(headers)) == len(SPECS)
    services = {("service", name) for name in ("gateway", "scheduler", "verifier", "drafter")}
    families = parse(page)
    assert {labels[0] for labels in values(families["process_cpu_seconds_total"])} == services
    assert values(families["dspark_service_up"]) == {(service,): 1.0 for service in services}


def test_a_scrape_counts_nothing(stack: GatewayHarness) -> None:
    first, second = scrape(stack), scrape(stack)
    for name, family in first.items():
        if not name.startswith("process_"):
            assert family.samples == second[name].samples


def test_counters_are_those_of_the_scheduler(stack: GatewayHarness, rig: Rig) -> None:
    families, load = scrape(stack), rig.scheduler.load()
    ledger = load.ledger
    drafts, accepted = ledger.num_drafted_rows, ledger.num_accepted
    assert value(families, "vllm:generation_tokens_total") == ledger.num_committed == 45
    assert value(families, "vllm:prompt_tokens_total") == 7
    assert value(families, "vllm:spec_decode_num_drafts_total") == drafts > 0
    assert value(families, "vllm:spec_decode_num_draft_tokens_total") == 5 * drafts
    assert value(families, "vllm:spec_decode_num_accepted_tokens_total") == accepted > 0
    assert value(families, "vllm:request_success_total", finished_reason="length") == 3
    assert value(families, "dspark_undrafted_requests_total", reason="request") == 1
    assert value(families, "vllm:request_generation_tokens", "_sum") == 45
    for name in ("queue", "prefill", "decode", "inference"):
        assert value(families, f"vllm:request_{name}_time_seconds", "_count") == 3
    assert value(families, "dspark_verify_window_drafts", "_count") == drafts
    assert value(families, "dspark_verify_window_drafts", "_sum") == ledger.num_verified
    assert value(families, "dspark_verify_budget_drafts", "_sum") == ledger.num_verified
    assert value(families, "dspark_verify_budget_drafts", "_count") == ledger.num_drafted_steps


def test_positions_count_unconditionally(stack: GatewayHarness, rig: Rig) -> None:
    family = scrape(stack)["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    counts = {int(labels[0][1]): count for labels, count in values(family).items()}
    histogram = rig.scheduler.choice_counts.accepted_lens
    assert counts == {position: sum(histogram[position + 1 :]) for position in range(5)}
    assert counts[0] > counts[4] >= 0
    # Summed over positions every accepted draft counts once: no position stands for those that reached it alone.
    assert sum(counts.values()) == rig.scheduler.load().ledger.num_accepted


def test_times_between_tokens_count_tokens_not_chunks(stack: GatewayHarness) -> None:
    before = scrape(stack)
    assert stack.chat(model="tiny", n=2, max_tokens=7).status_code == 200  # 3 + 3 + 1 tokens each
    after = scrape(stack)

    def added(name: str) -> float:
        return value(after, name, "_count") - value(before, name, "_count")

    assert added("vllm:time_to_first_token_seconds") == 2
    assert added("vllm:inter_token_latency_seconds") == 2 * (7 - 3)
    assert added("vllm:request_time_per_output_token_seconds") == 2
    assert added("vllm:e2e_request_latency_seconds") == 1


def test_http_counts_routes_and_not_what_clients_make_up(stack: GatewayHarness) -> None:
    stack.get("/v1/models/tiny")
    stack.get("/nowhere/at/all")
    stack.post("/v1/chat/completions", {"messages": []})
    stack.get("/health")
    found = {dict(labels)["handler"]: labels for labels in values(scrape(stack)["http_requests_total"])}
    assert {"/v1/models/{name:path}", "/v1/chat/completions", "none"} == set(found)
    assert value(scrape(stack), "http_requests_total", handler="none", method="GET", status="4xx") >= 1


def test_a_dead_service_is_told_and_the_rest_is_there(rig: Rig, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    dead = [MetricsSource(name, rpc.socket_address(tmp_path, name)) for name in ("drafter", "verifier")]
    with (
        metrics_server(tmp_path, "scheduler", lambda: scheduler_metrics(rig.scheduler)) as alive,
        GatewayHarness(model, sources=[alive, *dead]) as harness,
    ):
        up = values(scrape(harness.wait_ready())["dspark_service_up"])
    expected = {"gateway": 1.0, "scheduler": 1.0, "drafter": 0.0, "verifier": 0.0}
    assert up == {(("service", name),): state for name, state in expected.items()}


def test_a_service_that_hangs_does_not_hold_a_scrape(tmp_path: Path) -> None:
    goes_on = threading.Event()

    def hang() -> Iterable[Metric]:
        goes_on.wait(30)
        return ()

    with (
        metrics_server(tmp_path, "verifier", hang) as source,
        GatewayHarness(write_model(tmp_path / "model"), sources=[source]) as harness,
    ):
        assert value(scrape(harness), "dspark_service_up", service="verifier") == 0
        assert not goes_on.is_set()
        goes_on.set()


@pytest.mark.parametrize(("is_open", "status"), [(False, 401), (True, 200)])
def test_the_page_needs_a_key_unless_it_is_opened(is_open: bool, status: int, tmp_path: Path) -> None:
    with GatewayHarness(write_model(tmp_path), api_keys="secret", metrics_open=is_open) as harness:
        assert harness.get("/metrics").status_code == status
        assert harness.get("/metrics", headers={"authorization": "Bearer secret"}).status_code == 200
        assert harness.get("/v1/models").status_code == 401


def test_pages_merge_by_family() -> None:
    pages = [
        '# HELP a x\n# TYPE a gauge\na{s="1"} 1\n# TYPE vllm:b gauge\nvllm:b 2\n',
        '# TYPE a counter\na{s="2"} 3\n',
    ]
    assert merged(pages, 'm="t"') == (
        '# HELP a x\n# TYPE a gauge\na{s="1"} 1\na{s="2"} 3\n# TYPE vllm:b gauge\nvllm:b{m="t"} 2\n'
    )


def test_a_histogram_counts_equal_values_at_once() -> None:
    histogram = Histogram((1, 2.5))
    histogram.observe(1.0)
    histogram.observe(2.0, 3)
    histogram.observe(9.0)
    assert histogram.snapshot() == ([("1.0", 1), ("2.5", 4), ("+Inf", 5)], 16.0)


def test_registries_of_one_process_do_not_clash() -> None:
    spec = MetricSpec("a_total", "counter", "One.")
    with ThreadPoolExecutor(2) as threads:
        pages = list(threads.map(lambda _: exposition(new_registry("x", lambda: [spec.of(1)])), range(2)))
    assert all("\na_total 1.0\n" in page for page in pages)
