"""`shoal bench --server URL`: what a server of the OpenAI API does under load, ours or another.

A closed loop: so many clients, each of which asks again as soon as its answer has ended. The words of prompts are
random, lest a prefix cache answer. Clients are threads over http.client, which cost some microseconds an event.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import statistics
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.command_bench import print_results
from shoal.errors import InvalidArgument, ShoalError, Unsupported, printable

PERCENTILES = (50, 90, 99)
COLUMNS = (
    "context",
    "concurrency",
    "requests",
    "errors",
    "prompt_tokens",
    "completion_tokens",
    *(f"ttft_p{p}_s" for p in PERCENTILES),
    *(f"itl_p{p}_s" for p in PERCENTILES),
    "tok_s",
    "requests_s",
    "goodput_s",
)

_TIMEOUT = 600.0  # seconds without a byte, after which a request has failed
_PROBE_WORDS = 200
_WORDS = (  # one token each in most vocabularies
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about"
).split()


@dataclass(frozen=True)
class Load:
    """What is asked for. `duration` seconds bound a level in place of `num_requests`; 0: four for each client."""

    concurrency: tuple[int, ...]
    contexts: tuple[int, ...]  # tokens
    max_tokens: int
    num_requests: int = 0
    duration: float = 0.0
    ttft_limit: float = 2.0  # seconds; for the goodput
    itl_limit: float = 0.1  # seconds, an answer's mean


@dataclass
class Answer:
    """What one request came to. Times are those of time.perf_counter()."""

    started: float
    arrivals: list[float] = field(default_factory=list)  # of pieces of text
    num_prompt: int | None = None  # None: the server does not say
    num_tokens: int | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tokens(self) -> int:
        return len(self.arrivals) if self.num_tokens is None else self.num_tokens


class Refused(ShoalError):
    """An answer that is an error."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}: {_message_of(body)}", "http")
        self.status = status


class Target:
    """The server under load."""

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        try:
            self._port = parts.port
        except ValueError:
            parts = parts._replace(scheme="")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InvalidArgument(f'--server is "{printable(url)}", expected an address like http://127.0.0.1:8000')
        secure = parts.scheme == "https"
        self._connection = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._host = parts.hostname
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"
        self.model = model or self._only_model()
        self.options: dict[str, Any] = {}  # of a request, that this server takes
        self.words_per_token = 1.0
        self.reports_usage = False  # in streams
        self._probe()

    def _only_model(self) -> str:
        try:
            return json.loads(b"".join(self._lines("GET", "/models", None)))["data"][0]["id"]
        except (Refused, ValueError, LookupError, TypeError) as error:
            raise ShoalError(f"{self.url}/models does not name a model ({error}); give one as MODEL", "http") from None

    def _probe(self) -> None:
        """Which options the server takes, and how many tokens our words are. Foreign servers refuse or ignore what they
        do not know."""
        usage, until_length = {"stream_options": {"include_usage": True}}, {"ignore_eos": True}
        prompt = _prompt(_PROBE_WORDS)
        for options in ({**usage, **until_length}, usage, {}):
            self.options = options
            answer = Answer(time.perf_counter())
            try:
                self._stream(prompt, 2, answer)
                break
            except Refused as error:
                if error.status not in (400, 422) or not options:
                    raise ShoalError(f"{self.url}: {error}", "http") from None
        self.reports_usage = answer.num_tokens is not None
        num_prompt = answer.num_prompt
        if num_prompt is None:
            whole = json.loads(b"".join(self._lines("POST", "/completions", self._body(prompt, 2, False))))
            num_prompt = (whole.get("usage") or {}).get("prompt_tokens")
        if not num_prompt:
            raise Unsupported(f"{self.url} does not say how many tokens a prompt has (usage.prompt_tokens)")
        self.words_per_token = _PROBE_WORDS / num_prompt

    def ask(self, context: int, max_tokens: int) -> Answer:
        """One request from its connection to its end. A failure is told in the answer."""
        prompt = _prompt(max(round(context * self.words_per_token), 1))
        answer = Answer(time.perf_counter())
        try:
            self._stream(prompt, max_tokens, answer)
        except ShoalError as error:
            answer.error = str(error)
        return answer

    def _body(self, prompt: str, max_tokens: int, stream: bool) -> bytes:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
        return json.dumps({**body, **(self.options if stream else {})}).encode()

    def _stream(self, prompt: str, max_tokens: int, answer: Answer) -> None:
        finished = False
        for line in self._lines("POST", "/completions", self._body(prompt, max_tokens, True)):
            now = time.perf_counter()
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            try:
                chunk = json.loads(line[6:])
            except ValueError:
                raise ShoalError(f"an event is no JSON: {printable(line)}", "http") from None
            if chunk.get("error"):
                raise ShoalError(_message_of(line[6:]), "http")
            if usage := chunk.get("usage"):
                answer.num_prompt, answer.num_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
            for choice in chunk.get("choices") or ():
                if choice.get("text"):
                    answer.arrivals.append(now)
                finished = finished or bool(choice.get("finish_reason"))
        if not finished:
            raise ShoalError("the stream broke off", "http")

    def _lines(self, method: str, path: str, body: bytes | None) -> Iterator[bytes]:
        connection = self._connection(self._host, self._port, timeout=_TIMEOUT)
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise Refused(response.status, response.read(65536))
            while line := response.readline():
                yield line
        except (OSError, http.client.HTTPException) as error:
            raise ShoalError(f"{self.url}: {str(error) or type(error).__name__}", "io") from None
        finally:
            connection.close()


def _prompt(num_words: int) -> str:
    return " ".join(random.choices(_WORDS, k=num_words))


def _message_of(body: bytes) -> str:
    """What an error says, in OpenAI's form or as it is."""
    try:
        error = json.loads(body)["error"]
        return printable(error["message"] if isinstance(error, dict) else error, 200)
    except (ValueError, LookupError, TypeError):
        return printable(body.decode("utf-8", "replace"), 200)


# A level: so many clients at once


def run_level(target: Target, context: int, concurrency: int, load: Load) -> tuple[list[Answer], float]:
    """The answers, and the seconds from the first request to the last end."""
    answers: list[Answer] = []
    left = load.num_requests or 4 * concurrency
    lock = threading.Lock()
    started = time.perf_counter()

    def may_ask() -> bool:
        nonlocal left
        if load.duration:
            return time.perf_counter() - started < load.duration
        with lock:
            left -= 1
            return left >= 0

    def client() -> None:
        while may_ask():
            answer = target.ask(context, load.max_tokens)
            answers.append(answer)
            if answer.error:
                time.sleep(0.05)  # a server that refuses is not to be flooded

    clients = [threading.Thread(target=client, daemon=True) for _ in range(concurrency)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return answers, time.perf_counter() - started


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that `percent` of all do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1] if ordered else None


def row(context: int, concurrency: int, answers: Sequence[Answer], seconds: float, load: Load) -> dict[str, Any]:
    whole = [a for a in answers if a.error is None]
    told = [a for a in whole if a.arrivals]
    gaps = [gap for a in told for gap in a.gaps]

    def keeps_limits(answer: Answer) -> bool:
        return answer.ttft <= load.ttft_limit and (not answer.gaps or statistics.mean(answer.gaps) <= load.itl_limit)

    prompts = [a.num_prompt for a in whole if a.num_prompt is not None]
    return {
        "context": context,
        "concurrency": concurrency,
        "requests": len(answers),
        "errors": len(answers) - len(whole),
        "prompt_tokens": statistics.mean(prompts) if prompts else None,
        "completion_tokens": sum(a.tokens for a in whole),
        **{f"ttft_p{p}_s": percentile([a.ttft for a in told], p) for p in PERCENTILES},
        **{f"itl_p{p}_s": percentile(gaps, p) for p in PERCENTILES},
        "tok_s": sum(a.tokens for a in whole) / seconds,
        "requests_s": len(whole) / seconds,
        "goodput_s": sum(map(keeps_limits, told)) / seconds,
    }


def bench_server(url: str, model: str | None, key: str | None, load: Load, output: str, plot: str | None) -> int:
    """Exit status 1 if a request failed."""
    if plot is not None:
        _pygal()  # before anything is measured
    target = Target(url, model, key)
    rows: list[dict[str, Any]] = []
    first_error = None
    for context in load.contexts:
        for concurrency in load.concurrency:
            answers, seconds = run_level(target, context, concurrency, load)
            first_error = first_error or next((a.error for a in answers if a.error), None)
            rows.append(row(context, concurrency, answers, seconds, load))
    print_results(rows, _setting(target, load), output, COLUMNS)
    if plot is not None:
        write_plot(rows, target.model, plot)
    if first_error is not None:
        raise ShoalError(f"{sum(r['errors'] for r in rows)} requests failed, the first: {first_error}", "http")
    return 0


def _setting(target: Target, load: Load) -> dict[str, Any]:
    return {
        "server": target.url,
        "model": target.model,
        "version": __version__,
        "max_tokens": load.max_tokens,
        "duration_s": load.duration or None,
        "ignore_eos": "ignore_eos" in target.options,
        "tokens_are": "the server's usage" if target.reports_usage else "pieces of text in the stream",
        "ttft_limit_s": load.ttft_limit,
        "itl_limit_s": load.itl_limit,
    }


# The plot


def _pygal() -> Any:
    try:
        import pygal
    except ImportError:
        raise Unsupported("--plot needs the package pygal: pip install 'shoal[plot]'") from None
    return pygal


def write_plot(rows: Sequence[dict[str, Any]], model: str, path: str) -> None:
    """Throughput, and on the right axis the time to the first token, over the number of clients: an SVG."""
    levels = sorted({r["concurrency"] for r in rows})
    chart = _pygal().Line(
        title=f"{model}: throughput (left), first token (right)",
        x_title="clients",
        y_title="tokens a second",
        js=[],  # else the file would fetch scripts
        legend_at_bottom=True,
    )
    chart.x_labels = list(map(str, levels))
    for context in sorted({r["context"] for r in rows}):
        own = {r["concurrency"]: r for r in rows if r["context"] == context}

        def values(name: str, own: dict[int, dict[str, Any]] = own) -> list[float | None]:
            return [own[level][name] for level in levels]

        chart.add(f"{context} tokens: tok/s", values("tok_s"))
        for p in (50, 99):
            chart.add(f"{context} tokens: first token p{p}, s", values(f"ttft_p{p}_s"), secondary=True)
    Path(path).write_bytes(chart.render())
