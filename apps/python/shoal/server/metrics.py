"""Figures for Prometheus, under vLLM's names with our prefix, so that its dashboards need a word replaced."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shoal.llm import LLM, Completion

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class _EngineState:
    """What the engine says when it is asked."""

    def __init__(self, llm: LLM, name: str) -> None:
        self._llm, self._name = llm, name

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.stats()
        in_use = stats["num_pages"] - stats["num_free_pages"]
        for name, text, value in (
            ("num_requests_running", "Requests in the engine's steps.", stats["num_running"]),
            ("num_requests_waiting", "Requests that wait for pages or a place.", stats["num_waiting"]),
            ("num_requests_paused", "Requests whose readers stall.", stats["num_paused"]),
            (
                "kv_cache_usage_perc",
                "Share of the KV pages in use, cached prefixes included.",
                in_use / max(stats["num_pages"], 1),
            ),
        ):
            gauge = GaugeMetricFamily(f"shoal:{name}", text, labels=["model_name"])
            gauge.add_metric([self._name], value)
            yield gauge
        for name, text, value in (
            ("num_preemptions", "Requests that gave up their pages for a time.", stats["num_preemptions"]),
            ("iterations", "Steps of the engine.", stats["num_steps"]),
        ):
            counter = CounterMetricFamily(f"shoal:{name}", text, labels=["model_name"])
            counter.add_metric([self._name], value)
            yield counter


class Metrics:
    def __init__(self, llm: LLM, name: str) -> None:
        self._name = name
        self._registry = CollectorRegistry()
        self._registry.register(_EngineState(llm, name))
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Tokens of prompts found in the prefix cache.")
        self._success = Counter(
            "shoal:request_success", "Requests that ended.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._responses = Counter(
            "shoal:http_responses", "Answers by route and status.", ["route", "status"], registry=self._registry
        )
        self.queue_time = self._histogram("request_queue_time_seconds", "Until the engine began.", _SECONDS)
        self._first = self._histogram("time_to_first_token_seconds", "Until the first token.", _SECONDS)
        self._between = self._histogram("inter_token_latency_seconds", "Between tokens.", _SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "Until the last token.", _SECONDS)
        self._prompt_size = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answer_size = self._histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"shoal:{name}", text, ["model_name"], registry=self._registry).labels(self._name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"shoal:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
        return histogram.labels(self._name)

    def tokens(self, count: int, now: float, started: float, last: float) -> None:
        """`count` tokens of one answer came together; `last` is when one came before, 0 if none did."""
        self._generation_tokens.inc(count)
        if last:
            for _ in range(count):
                self._between.observe((now - last) / count)
        else:
            self._first.observe(now - started)

    def completed(self, completion: Completion, seconds: float) -> None:
        self._whole.observe(seconds)
        self._prompt_tokens.inc(completion.prompt_tokens)
        self._prefix_queries.inc(completion.prompt_tokens)
        self._prefix_hits.inc(completion.cached_tokens)
        self._prompt_size.observe(completion.prompt_tokens)
        self._answer_size.observe(completion.completion_tokens)
        self.finished(completion.finish_reason)

    def finished(self, reason: str) -> None:
        self._success.labels(self._name, reason).inc()

    def responded(self, route: str, status: int) -> None:
        self._responses.labels(route, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
