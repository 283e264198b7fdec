"""What the gateway measures: times as clients see them, and HTTP. Names: docs/metrics.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from service_kit.metrics import Histogram, MetricSpec

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_HTTP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Buckets, in seconds; those of other servers, and finer ones below."""

_FIRST_TOKEN = MetricSpec(
    "vllm:time_to_first_token_seconds", "histogram", "From the request's arrival to its first token, seconds."
)
_INTER_TOKEN = MetricSpec(
    "vllm:inter_token_latency_seconds",
    "histogram",
    "Time between tokens, seconds; n tokens of one step count n times, each with its share of the wait.",
)
_PER_TOKEN = MetricSpec(
    "vllm:request_time_per_output_token_seconds",
    "histogram",
    "Mean time between the tokens of a choice, from its first to its last, seconds.",
)
_REQUEST = MetricSpec(
    "vllm:e2e_request_latency_seconds",
    "histogram",
    "From arrival to the end of answers that were not cut short, seconds.",
)
_HTTP_REQUESTS = MetricSpec(
    "http_requests_total",
    "counter",
    "Requests by route and class of status; probes and scrapes are not counted.",
    ("handler", "method", "status"),
)
_HTTP_DURATION = MetricSpec(
    "http_request_duration_seconds",
    "histogram",
    "From the request's arrival to the end of its response, seconds.",
    ("handler", "method"),
)
UP = MetricSpec("dspark_service_up", "gauge", "1 if the service answered this scrape, 0 if not.", ("service",))

SPECS = (_FIRST_TOKEN, _INTER_TOKEN, _PER_TOKEN, _REQUEST, _HTTP_REQUESTS, _HTTP_DURATION, UP)
"""Every family of the gateway."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class GatewayMetrics:
    """Counters of one gateway. Used on its event loop alone."""

    def __init__(self) -> None:
        self.first_token_s, self.inter_token_s = Histogram(_FIRST_TOKEN_S), Histogram(_TOKEN_S)
        self.per_token_s, self.request_s = Histogram(_TOKEN_S), Histogram(_REQUEST_S)
        self._http_requests: Counter[tuple[str, ...]] = Counter()
        self._http_s: dict[tuple[str, ...], Histogram] = {}

    def count_http(self, handler: str, method: str, status: int, duration_s: float) -> None:
        """A response has ended. `handler` is a route's template, never a client's path."""
        method = method if method in _METHODS else "other"
        self._http_requests[handler, method, f"{status // 100}xx"] += 1
        self._http_s.setdefault((handler, method), Histogram(_HTTP_S)).observe(duration_s)

    def collect(self) -> Iterator[Metric]:
        """A snapshot."""
        yield _FIRST_TOKEN.distribution({(): self.first_token_s})
        yield _INTER_TOKEN.distribution({(): self.inter_token_s})
        yield _PER_TOKEN.distribution({(): self.per_token_s})
        yield _REQUEST.distribution({(): self.request_s})
        yield _HTTP_REQUESTS.by_label(self._http_requests)
        yield _HTTP_DURATION.distribution(self._http_s)
