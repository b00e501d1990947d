"""`shoal bench --server`: what it counts, on our server and on ones that know less."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import shoal_here
from serving import FakeEngine, fake_llm, running
from shoal.command_bench_server import Answer, Load, percentile, row

KNOWN = {"model", "prompt", "max_tokens", "temperature", "stream"}


class Foreign(BaseHTTPRequestHandler):
    """A server of the completions API that is not ours: a token a word, and no usage in streams."""

    protocol_version = "HTTP/1.1"
    refused: frozenset[str] = frozenset()  # parameters; a server that knows them not
    broken = ""  # what goes wrong in a stream of more than two tokens
    bodies: list[dict]

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "foreign"}]} if self.path == "/base/v1/models" else {"data": []})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body | {"key": self.headers["authorization"]})
        for name in self.refused & set(body):
            self.reply(422, {"error": {"message": f"{name} is unknown"}})
            return
        num_words = len(body["prompt"].split())
        if not body["stream"]:
            usage = {"prompt_tokens": 2 * num_words, "completion_tokens": 1}
            self.reply(200, {"choices": [{"text": "x", "finish_reason": "length"}], "usage": usage})
            return
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        for i in range(body["max_tokens"]):
            if self.broken and i == 2:
                self.wfile.write(self.broken.encode())
                return
            self.event({"text": "x", "finish_reason": None})
        self.event({"text": "", "finish_reason": "length"})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, choice: dict) -> None:
        self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


@contextlib.contextmanager
def foreign(**settings: object) -> Iterator[tuple[str, list[dict]]]:
    handler = type("Handler", (Foreign,), {"bodies": [], **settings})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/base/", handler.bodies
        finally:
            server.shutdown()
            thread.join()


def bench(url: str, *arguments: str) -> dict:
    result = shoal_here("bench", "--server", url, "-o", "json", *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_our_server(home: Path) -> None:
    with running(fake_llm(FakeEngine(b"hello world")), keys=("k",)) as server:
        # The fake tokenizer has about four tokens a word; its model ends by itself.
        result = bench(server.url, "--api-key", "k", "--context", "100,400", "--concurrency", "1,3", "-n", "40")
        assert [(r["context"], r["concurrency"]) for r in result["results"]] == [(100, 1), (100, 3), (400, 1), (400, 3)]
        for each in result["results"]:
            assert each["requests"] == 4 * each["concurrency"] and each["errors"] == 0
            assert each["prompt_tokens"] == pytest.approx(each["context"], rel=0.2)
            assert each["completion_tokens"] == 12 * each["requests"]  # with the end, which is no text
            assert 0 < each["ttft_p50_s"] <= each["ttft_p90_s"] <= each["ttft_p99_s"]
            assert 0 <= each["itl_p50_s"] <= each["itl_p99_s"] and each["goodput_s"] <= each["requests_s"]
        setting = result["setting"]
        assert setting["model"] == "test" and setting["ignore_eos"] and setting["tokens_are"] == "the server's usage"
        failed = shoal_here("bench", "--server", server.url, "--api-key", "wrong")
        assert failed.returncode == 1 and "a valid API key is needed" in failed.stderr
        wrong = shoal_here("bench", "other", "--server", server.url, "--api-key", "k")
        assert wrong.returncode == 1 and "other" in wrong.stderr


def test_requests_that_fail_are_counted(home: Path) -> None:
    engine = FakeEngine()
    with running(fake_llm(engine)) as server:
        result = shoal_here(
            "bench", "--server", server.url, "-o", "json", "--context", "100,9000", "--concurrency", "1"
        )
    assert result.returncode == 1 and "4 requests failed, the first: status 400" in result.stderr
    first, second = json.loads(result.stdout)["results"]
    assert first["errors"] == 0 and second["errors"] == 4 and second["ttft_p50_s"] is None and second["tok_s"] == 0


@pytest.mark.parametrize("refused", [(), ("ignore_eos",), ("ignore_eos", "stream_options")])
def test_foreign_servers(home: Path, refused: tuple[str, ...]) -> None:
    with foreign(refused=frozenset(refused)) as (url, bodies):
        result = bench(url, "--context", "50", "--concurrency", "2", "-n", "7", "--requests", "5", "--api-key", "k")
    (only,) = result["results"]
    assert (only["requests"], only["errors"], only["completion_tokens"]) == (5, 0, 35)
    assert only["prompt_tokens"] is None  # it does not say; what it said once gives the number of words
    assert len(bodies[-1]["prompt"].split()) == 25 and bodies[-1]["key"] == "Bearer k"
    assert len({body["prompt"] for body in bodies[-5:]}) == 5  # no cache has seen them
    setting = result["setting"]
    assert setting["model"] == "foreign" and setting["tokens_are"] == "pieces of text in the stream"
    assert setting["ignore_eos"] == ("ignore_eos" not in refused)
    assert set(bodies[-1]) - KNOWN - {"key"} == {"ignore_eos", "stream_options"} - set(refused)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (" ", "the stream broke off"),
        ("data: {nonsense\n\n", "an event is no JSON"),
        ('data: {"error": {"message": "it \\u001b broke"}}\n\n', "it \\x1b broke"),
    ],
)
def test_streams_that_break(home: Path, broken: str, message: str) -> None:
    with foreign(broken=broken) as (url, _):
        result = shoal_here("bench", "--server", url, "-n", "4", "--context", "9", "--concurrency", "1")
    assert result.returncode == 1 and message in result.stderr
    assert "| 9 | 1 | 4 | 4 | - | 0 | - |" in result.stdout


def test_what_cannot_be_measured(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    for arguments, status, message in (
        (["--server", address], 1, "Connection refused"),
        (["--server", "ftp://x"], 2, "expected an address"),
        (["--server", "http://x:y"], 2, "expected an address"),
        (["--server", address, "--concurrency", "0"], 2, "--concurrency is"),
        (["--server", address, "--concurrency", "many"], 2, "--concurrency is"),
        (["--server", address, "--threads", "2"], 2, "--threads has no effect with --server"),
        (["--requests", "2"], 2, "--requests has no effect without --server"),
    ):
        result = shoal_here("bench", *arguments)
        assert result.returncode == status and message in result.stderr, result.stderr
    with foreign() as (url, _):
        result = shoal_here("bench", "--server", url.replace("base", "elsewhere"))
        assert result.returncode == 1 and "give one as MODEL" in result.stderr


def test_csv_and_plot(home: Path) -> None:
    with foreign() as (url, _):
        arguments = ("--context", "8,16", "--concurrency", "1,2", "-n", "3", "--plot", str(home / "load.svg"))
        rows = list(csv.DictReader(io.StringIO(shoal_here("bench", "--server", url, "-o", "csv", *arguments).stdout)))
    assert [(r["context"], r["concurrency"]) for r in rows] == [("8", "1"), ("8", "2"), ("16", "1"), ("16", "2")]
    text = (home / "load.svg").read_text()
    shown = " ".join(ElementTree.fromstring(text).itertext())
    for label in ("foreign: throughput", "8 tokens: tok/s", "16 tokens: first token p99, s", "clients"):
        assert label in shown, label
    assert "<script xlink" not in text and "kozea.github.io" not in text


def test_a_duration_bounds_a_level(home: Path) -> None:
    with foreign() as (url, bodies):
        result = bench(url, "--duration", "0.3", "--concurrency", "2", "--context", "8", "-n", "2")
    (only,) = result["results"]
    assert only["requests"] == len(bodies) - 2 >= 2  # without the probe and the question how long a prompt is


def test_percentiles_and_goodput() -> None:
    assert [percentile(range(1, 101), p) for p in (50, 90, 99)] == [50, 90, 99]
    assert percentile([3.0], 99) == percentile([3.0], 50) == 3.0 and percentile([], 50) is None
    load = Load((2,), (8,), 4, ttft_limit=1.0, itl_limit=0.1)
    answers = [
        Answer(0.0, [1.0, 1.1, 1.2]),  # keeps both limits
        Answer(0.0, [1.5, 1.5, 1.5]),  # begins late
        Answer(0.0, [0.5, 0.5, 0.9]),  # is slow
        Answer(0.0, [0.5], num_prompt=8, num_tokens=2),  # one piece has no gaps
        Answer(0.0, [0.5], error="it broke"),
    ]
    figures = row(8, 2, answers, 2.0, load)
    assert (figures["requests"], figures["errors"], figures["completion_tokens"]) == (5, 1, 11)
    assert (figures["goodput_s"], figures["requests_s"], figures["tok_s"]) == (1.0, 2.0, 5.5)
    assert (figures["ttft_p50_s"], figures["ttft_p99_s"], figures["prompt_tokens"]) == (0.5, 1.5, 8)
    assert figures["itl_p50_s"] == pytest.approx(0.0) and figures["itl_p99_s"] == pytest.approx(0.4)
