"""Several replicas behind one port: which gets a request, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conftest import GOLDEN
from serving import Running, chunks_of, error_of, until
from shoal.deploy.front import merged_metrics, serve_front_async
from shoal.deploy.prefix_routing import BLOCK_BYTES, REQUEST_BLOCKS, Candidate, PrefixMap, choose, prefix_blocks
from shoal.server.options import ServerOptions
from shoal.server.serve import Server, listen

TINY = GOLDEN / "models" / "llama"
ENGINE = {"threads": 1, "max_batch_tokens": 128}

# Which replica


def test_the_replica_with_the_prefix_is_chosen_until_its_load_outweighs_it() -> None:
    def chosen(cached: int, load: int) -> int:
        return choose([Candidate(0, 0, 0), Candidate(1, cached, load)], 100)

    assert chosen(40, 0) == 1 and chosen(40, 2) == 1
    assert chosen(40, 3) == 0  # 3 requests count as 48 blocks
    assert chosen(REQUEST_BLOCKS, 1) == 0  # of equals the one with the lower load


def test_without_a_prefix_load_decides_then_turns() -> None:
    assert choose([Candidate(0, 0, 2), Candidate(1, 0, 1)], 0) == 1
    assert choose([Candidate(0, 0, 0, num_sent=3), Candidate(1, 0, 0, num_sent=2)], 5) == 1
    assert choose([Candidate(2, 0, 0), Candidate(1, 0, 0)], 5) == 1


def test_blocks_say_the_whole_prefix() -> None:
    a, b = b"a" * BLOCK_BYTES, b"b" * BLOCK_BYTES
    assert prefix_blocks(a + b"rest", b"") == prefix_blocks(a, b"") and len(prefix_blocks(a, b"")) == 1
    assert prefix_blocks(a + b, b"")[0] == prefix_blocks(a + a, b"")[0]
    assert prefix_blocks(a + b, b"")[1] != prefix_blocks(b + b, b"")[1]  # the same block after another
    assert prefix_blocks(a[1:], b"") == []
    assert not set(prefix_blocks(a + b, b"1")) & set(prefix_blocks(a + b, b"2"))


def test_conversations_share_as_far_as_their_prompts_do() -> None:
    known = PrefixMap()
    begin = [{"role": "system", "content": "s" * 2000}, {"role": "user", "content": "first"}]
    more = [*begin, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y" * 600}]
    blocks = known.blocks({"messages": begin, "temperature": 0}, "key")
    known.add(blocks, 1)
    later = known.blocks({"temperature": 1, "messages": more}, "key")
    assert len(blocks) == 8 and known.num_cached(later, 1) >= 7 and known.num_cached(later, 0) == 0
    assert known.num_cached(known.blocks({"messages": more}, "other key"), 1) == 0
    assert known.num_cached(known.blocks({"messages": more}, None), 1) == 0
    assert known.num_cached(known.blocks({"messages": more, "tools": [{"type": "function"}]}, "key"), 1) == 0
    known.forget(1)
    assert known.num_cached(later, 1) == 0 and len(known) == 0


@pytest.mark.parametrize("body", [None, [], 3, {}, {"messages": None}, {"prompt": 7}])
def test_what_is_no_request_has_no_blocks(body: object) -> None:
    assert PrefixMap().blocks(body, None) == []


def test_the_map_is_bounded_and_forgets_ends_first() -> None:
    known = PrefixMap(max_blocks=10)
    first, second = (known.blocks({"prompt": c * (8 * BLOCK_BYTES)}, None) for c in "ab")
    known.add(first, 0)
    known.add(second, 1)
    assert len(known) == 10 and known.num_cached(second, 1) == 8 and known.num_cached(first, 0) == 2


def test_figures_are_told_apart_by_replica() -> None:
    text = '# HELP shoal:x_total X.\n# TYPE shoal:x_total counter\nshoal:x_total{m="n"} 1.0\n'
    merged = merged_metrics({"0": text, "1": text.replace("1.0", "2.0")}, iter(())).decode()
    assert merged.count("# TYPE") == 1
    assert 'shoal:x_total{m="n",replica="0"} 1.0' in merged and 'shoal:x_total{m="n",replica="1"} 2.0' in merged


# Processes


@contextlib.contextmanager
def fronted(model: Path, **options: object) -> Iterator[Running]:
    """A front in a thread of this process, before two replicas that are processes."""
    listener = listen("127.0.0.1", 0)
    said: list[str] = []
    holder: list[Running] = []
    ready = threading.Event()
    settings = ServerOptions(**{"name": "test", "access_log": False, "health_interval": 0.2, **options})

    def started(server: Server) -> None:
        holder.append(Running(server, listener.getsockname()[1], said))
        ready.set()

    front = serve_front_async(model, 2, settings, ENGINE, listener, said.append, lambda: listener.listen(1024), started)
    thread = threading.Thread(target=lambda: asyncio.run(front))
    thread.start()
    try:
        until(lambda: ready.is_set() or not thread.is_alive(), 120)
        yield holder[0]
    finally:
        if holder:
            holder[0].client.close()
            holder[0].server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def replicas_of(server: Running) -> list:
    return server.service._replicas.all


def kill(server: Running, index: int) -> None:
    os.kill(replicas_of(server)[index].process.pid, signal.SIGKILL)


def came_back(server: Running, index: int) -> bool:
    replica = replicas_of(server)[index]
    return replica.is_up and replica.num_starts == 2


def ask(server: Running, first: int, **body: object) -> httpx.Response:
    """A prompt of ids long enough to be told by its prefix."""
    prompt = [first] * 110
    asked = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0, **body}
    return server.post("/v1/completions", asked)


def test_a_replica_killed_under_load(capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody's answer fails: what the lost one had not answered, the other does, and nothing is answered twice."""
    with fronted(TINY, access_log=True) as server:
        tokens = {k: ask(server, k).json()["choices"][0]["logprobs"]["tokens"] for k in range(8)}
        done = threading.Event()

        def client(k: int) -> list[str]:
            ids = []
            while not done.is_set() or len(ids) < 5:
                answer = ask(server, k)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["logprobs"]["tokens"] == tokens[k]
                ids.append(answer.headers["x-request-id"])
            return ids

        with ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(client, k) for k in range(8)]
            try:
                until(lambda: replicas_of(server)[0].load > 0)
                kill(server, 0)
                until(lambda: came_back(server, 0), 60)
                until(lambda: replicas_of(server)[0].load > 0)  # and has work again
            finally:
                done.set()
            ids = [i for each in clients for i in each.result()]
        assert replicas_of(server)[1].num_starts == 1
    assert len(set(ids)) == len(ids)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    answered = [line["id"] for line in lines if line["path"] == "/v1/completions"][len(tokens) :]
    assert len(set(answered)) == len(answered) and set(answered) <= set(ids)


def test_a_stream_that_loses_its_replica_ends_with_an_error(smollm2_path: Path) -> None:
    with fronted(smollm2_path) as server:
        body = {"prompt": "Once", "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            text = response.iter_text()
            got = next(text)
            (busy,) = [r.index for r in replicas_of(server) if r.load]
            kill(server, busy)
            got += "".join(text)
        events = [e for e in got.split("\n\n") if e]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "replica_lost"
        assert "[DONE]" not in got and got.count('"error"') == 1
        until(lambda: came_back(server, busy), 120)

        # A client that leaves ends its request in the replica.
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_text())
        until(lambda: server.service.num_active == 0)

        def running() -> list[str]:
            return re.findall(r"shoal:num_requests_running\{.*\} (.*)", server.client.get("/metrics").text)

        until(lambda: running() == ["0.0", "0.0"])


def test_a_replica_that_does_not_answer_is_replaced() -> None:
    with fronted(TINY, health_timeout=5.0) as server:
        expected = ask(server, 3).json()["choices"][0]["logprobs"]["tokens"]
        (holder,) = [r for r in replicas_of(server) if r.num_sent]
        os.kill(holder.process.pid, signal.SIGSTOP)
        answer = ask(server, 3)  # goes there, since its prefix is there
        assert answer.json()["choices"][0]["logprobs"]["tokens"] == expected
        assert holder.num_sent == 2
        until(lambda: came_back(server, holder.index), 60)
        assert any("does not answer" in line for line in server.said)


def test_prefixes_keys_and_pages() -> None:
    with fronted(TINY, keys=("a", "b")) as server:
        error_of(ask(server, 1), 401)
        server.client.headers["authorization"] = "Bearer a"
        for _ in range(4):
            assert ask(server, 1).status_code == 200
        assert sorted(r.num_sent for r in replicas_of(server)) == [0, 4]
        server.client.headers["authorization"] = "Bearer b"
        assert ask(server, 1).status_code == 200  # another key's prefix is another, so it is the other one's turn
        assert sorted(r.num_sent for r in replicas_of(server)) == [1, 4]
        assert error_of(server.post("/v1/completions", {"prompt": []}), 400)["param"] == "prompt"
        assert error_of(server.client.get("/nowhere"), 404)
        assert server.client.get("/ready").json() == {"status": "ready"}
        assert server.client.get("/v1/models").json()["data"][0]["id"] == "test"
        assert "/v1/chat/completions" in server.client.get("/openapi.json").json()["paths"]
        text = server.client.get("/metrics").text
        assert 'shoal:replica_up{replica="1"} 1.0' in text
        assert len(re.findall(r'shoal:kv_cache_usage_perc\{model_name="test",replica="[01]"\}', text)) == 2
        chunks = chunks_of(ask(server, 1, stream=True).text)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_the_command_with_replicas(smollm2_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.cli", "serve", str(smollm2_path), "--port", "0", "--replicas", "2"],
        env={**os.environ, "SHOAL_THREADS": "1", "SHOAL_CTX": "512"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = re.search(r" on (http://127\.0\.0\.1:\d+) ", process.stderr.readline()).group(1)
        body = {"prompt": "Once", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as response:
            text = response.iter_text()
            got = next(text)
            process.send_signal(signal.SIGTERM)
            got += "".join(text)
        assert len(chunks_of(got)) >= 2
        assert process.wait(60) == 0
        log = process.stderr.read()
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        assert [(line["client"], line["completion_tokens"]) for line in lines] == [("127.0.0.1", 60)]
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


def test_a_model_that_does_not_load_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "none.gguf").write_bytes(b"GGUF")
    result = subprocess.run(
        [sys.executable, "-m", "shoal.cli", "serve", str(tmp_path / "none.gguf"), "--port", "0", "--replicas", "2"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1 and "a replica did not start" in result.stderr
