"""What a server must bear: each abuse with its answer, and afterwards nothing is lost."""

from __future__ import annotations

import json
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from serving import FakeEngine, Running, chunks_of, error_of, fake_llm, running, until

from shoal import LLM

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def fake_server():
    engine = FakeEngine()
    options = {"max_body": 100_000, "max_queue": 4, "max_json_depth": 16, "keep_alive": 0.02, "max_messages": 3}
    with running(fake_llm(engine), **options) as server:
        server.engine = engine
        yield server


@pytest.fixture
def fake(fake_server: Running) -> Running:
    until(lambda: fake_server.service.num_active == 0 and fake_server.engine.live == {})
    fake_server.engine.__init__()
    return fake_server


def raw(server: Running, *parts: bytes) -> bytes:
    """What comes back for these bytes until the connection is closed."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(60)
        try:
            for part in parts:
                connection.sendall(part)
        except OSError:
            pass  # closed while we were sending: the answer may be there
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
        return answer


def head(path: str = "/v1/chat/completions", **headers: object) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def error_in(answer: bytes, status: int) -> dict:
    first, _, body = answer.partition(b"\r\n\r\n")
    assert first.startswith(f"HTTP/1.1 {status} ".encode()), answer[:300]
    return json.loads(body)["error"]


def test_heads_without_end(fake: Running) -> None:
    blocks = [b"GET / HTTP/1.1\r\nx: ", *[b"a" * (1 << 20)] * 100]
    assert error_in(raw(fake, *blocks), 431)["code"] == "head_too_large"
    assert error_in(raw(fake, b"nonsense\r\n\r\n"), 400)["code"] == "invalid_http"
    assert error_in(raw(fake, b"\x16\x03\x01\x02\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n"), 400)
    assert fake.chat().status_code == 200


def test_bodies_over_the_limit(fake: Running) -> None:
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    answer = raw(fake, head(transfer_encoding="chunked"), *[chunk] * 30)
    assert error_in(answer, 413)["code"] == "body_too_large"
    assert error_of(fake.post("/v1/chat/completions", {"x": "y" * 100_000}), 413)["code"] == "body_too_large"
    assert error_in(raw(fake, head(content_length=1 << 40, expect="100-continue")), 413)
    assert error_in(raw(fake, head(content_length=1 << 40), *[b"x" * 65536] * 20), 413)
    assert fake.chat().status_code == 200


def test_json_that_is_none(fake: Running) -> None:
    def post(body: bytes, kind: str = "application/json") -> httpx.Response:
        return fake.client.post("/v1/chat/completions", content=body, headers={"content-type": kind})

    for body in (b"[" * 10_000, b'{"a":' * 10_000, b"[" * 17 + b"]" * 17, b'{"messages": [', b"\xff\xfe", b'"\\ud800"'):
        assert error_of(post(body), 400)["code"] == "invalid_json"
    nested = b'{"tools": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    assert error_of(post(nested), 400)["code"] == "invalid_json"
    for body in (b"", b"3", b"null", b"[]", b'"x"'):
        error_of(post(body), 400)
    assert error_of(post(b"{}", "text/plain"), 415)["code"] == "unsupported_media_type"
    messages = [{"role": "user", "content": "x"}] * 4
    assert error_of(fake.post("/v1/chat/completions", {"messages": messages}), 400)["param"] == "messages"
    assert fake.chat().status_code == 200


def test_a_full_queue(fake: Running) -> None:
    fake.engine.held = True
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(fake.chat, n=2) for _ in range(2)]
        until(lambda: len(fake.engine.live) == 4)
        refused = fake.chat()
        assert error_of(refused, 429)["code"] == "queue_full" and refused.headers["retry-after"]
        assert error_of(fake.chat(n=5), 400)["param"] == "messages"
        fake.engine.held = False
        assert [w.result().status_code for w in waiting] == [200, 200]
    assert fake.chat().status_code == 200


def test_who_waits_too_long() -> None:
    engine = FakeEngine()
    engine.held = True
    with running(fake_llm(engine), max_queue_age=0.05) as server:
        assert error_of(server.chat(), 503)["code"] == "queue_timeout"
        assert error_of(server.chat(stream=True), 503)["code"] == "queue_timeout"
        until(lambda: engine.live == {})
        engine.held = False
        until(lambda: server.chat().status_code == 200)


def test_a_silent_stream_shows_that_it_lives(fake: Running) -> None:
    fake.engine.held = True
    with fake.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        text = ""
        for piece in response.iter_text():
            text += piece
            if text.count(": waiting\n\n") == 2:
                fake.engine.held = False
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks_of(text)) == "hello"


def test_failures_before_and_in_a_stream(fake: Running) -> None:
    engine = FakeEngine()
    engine.broken = True
    with running(fake_llm(engine), keep_alive=1000) as server:
        for stream in (False, True):
            assert error_of(server.chat(stream=stream), 500)["message"] == "it broke"
    with running(fake_llm(engine), keep_alive=0.02) as server:
        engine.broken, engine.held = False, True
        with server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines) == ": waiting"
            engine.broken, engine.held = True, False
            last = [line for line in lines if line.startswith("data: ")][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "it broke"
        engine.broken = False
        assert server.chat().status_code == 200  # the engine lives: only those requests failed
        assert server.service.dead is None


def test_a_fault_of_ours_has_the_form_of_all_errors(capfd: pytest.CaptureFixture) -> None:
    engine = FakeEngine()
    engine.stats = lambda: 1 // 0
    with running(fake_llm(engine)) as server:
        error = error_of(server.client.get("/metrics"), 500)
        assert (error["type"], error["code"]) == ("server_error", "internal")
        assert server.chat().status_code == 200
    assert "ZeroDivisionError in" in capfd.readouterr().err


def test_objections_of_a_template() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with running(fake_llm(FakeEngine(), **{"tokenizer.chat_template": template})) as server:
        error = error_of(server.chat(), 400)
        assert error["param"] == "messages" and "roles must alternate" in error["message"]
    with running(fake_llm(FakeEngine(), **{"tokenizer.chat_template": None})) as server:
        assert error_of(server.chat(), 400)["code"] == "unsupported"
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_slow_senders_and_idle_connections() -> None:
    with running(fake_llm(FakeEngine()), receive_timeout=0.3, max_connections=1100) as server:
        assert error_in(raw(server), 408)["code"] == "request_timeout"
        assert error_in(raw(server, b"POST /v1/chat/completions HTTP/1.1\r\nx"), 408)
        assert error_in(raw(server, head(content_length=100), b"{"), 408)
    with running(fake_llm(FakeEngine()), max_connections=1010) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1000)]
        assert server.chat().status_code == 200
        more = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(9)]
        until(lambda: len(server.server.server_state.connections) == 1010)
        assert error_in(raw(server), 503)["code"] == "too_many_connections"
        for connection in (*idle, *more):
            connection.close()
        until(lambda: len(server.server.server_state.connections) <= 1)
        assert server.chat().status_code == 200


def stalling(server: Running, path: str, body: dict) -> socket.socket:
    """A connection whose answer nobody reads yet."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    data = json.dumps({**body, "stream": True}).encode()
    connection.sendall(head(path, content_length=len(data), connection="close") + data)
    return connection


def rest_of(connection: socket.socket) -> list[dict]:
    """The chunks of the stream, read to its end."""
    answer = b""
    while part := connection.recv(65536):
        answer += part
    encoded, text = answer.partition(b"\r\n\r\n")[2], b""
    while not encoded.startswith(b"0\r\n"):
        size, _, encoded = encoded.partition(b"\r\n")
        text += encoded[: int(size, 16)]
        encoded = encoded[int(size, 16) + 2 :]
    return chunks_of(text.decode())


def test_a_reader_that_stalls_pauses_its_request() -> None:
    engine = FakeEngine(b"x" * 4000, step=1)
    with running(fake_llm(engine)) as server:
        with stalling(server, "/v1/chat/completions", CHAT) as connection:
            until(lambda: any(g._is_held for g in server.service._generations))
            left = len(engine.live[1].left)
            assert left > 1000
            assert server.chat(max_tokens=3).status_code == 200  # the pump asks the others
            assert len(engine.live[1].left) == left
            chunks = rest_of(connection)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "x" * 4000


def test_the_engine_stops_for_a_reader_that_stalls(llm: LLM) -> None:
    body = {"prompt": "1, 2, 3,", "max_tokens": 240, "n": 4, "seed": 5, "ignore_eos": True}
    other = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    with running(llm) as server:
        whole = server.post("/v1/completions", body).json()["choices"]
        with stalling(server, "/v1/completions", body) as connection:
            until(lambda: llm.stats()["num_paused"] == 4)
            assert llm.stats()["num_running"] == 0
            assert "Paris" in server.post("/v1/completions", other).json()["choices"][0]["text"]
            assert llm.stats()["num_paused"] == 4
            texts = [""] * 4
            for chunk in rest_of(connection):
                texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == [choice["text"] for choice in whole]
        until(lambda: server.service.num_active == 0)


def test_a_reader_that_stalls_is_lost() -> None:
    engine = FakeEngine(b"x" * 4000, step=1)
    with running(fake_llm(engine), stall_timeout=0.3) as server:
        connection = stalling(server, "/v1/chat/completions", {**CHAT, "n": 8})
        until(lambda: server.service.num_active == 1)
        until(lambda: server.service.num_active == 0 and engine.live == {})
        until(lambda: len(server.server.server_state.connections) == 0)
        assert server.chat().status_code == 200
        connection.close()


def test_a_client_that_leaves_stops_its_work(fake: Running) -> None:
    for stream in (False, True):
        fake.engine.held = True
        body = json.dumps({**CHAT, "n": 2, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", fake.port)) as connection:
            connection.sendall(head(content_length=len(body)) + body)
            until(lambda: len(fake.engine.live) == 2)
        until(lambda: fake.engine.live == {} and fake.service.num_active == 0)
    fake.engine.held = False
    assert fake.engine.cancelled == [1, 2, 3, 4]


def test_resets(smollm2_path: Path) -> None:
    """In the queue, while the prompt is read, and while tokens come: 200 times, eight at once on two places."""
    prompt = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    signs = {"queue": b": waiting", "prefill": b": prompt", "decode": b"data: "}
    phases = list(signs)
    seen = dict.fromkeys(phases, 0)
    engine = {"max_context": 256, "max_batch_tokens": 8, "max_seqs": 2, "threads": 1}
    with LLM(smollm2_path, **engine) as llm, running(llm, keep_alive=0.005) as server:
        right = server.post("/v1/completions", prompt).json()["choices"]

        def reset(i: int) -> None:
            wanted = phases[i % 3]
            body = {"prompt": f"{i} " * 20, "max_tokens": 50, "ignore_eos": True, "stream": True, "n": 1 + i % 2}
            data = json.dumps(body).encode()
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(head("/v1/completions", content_length=len(data)) + data)
                connection.settimeout(60)
                answer = b""
                while signs[wanted] not in answer:
                    answer += connection.recv(4096)
                    if b"data: " in answer:
                        wanted = "decode"  # the other phase is over
                seen[wanted] += 1
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(reset, range(200)))
        assert sum(seen.values()) == 200 and min(seen.values()) > 10, seen

        def is_idle() -> bool:
            stats = llm.stats()
            return server.service.num_active == stats["num_running"] + stats["num_waiting"] + stats["num_paused"] == 0

        until(is_idle)
        stats = llm.stats()
        assert stats["num_free_pages"] + stats["num_cached_pages"] == stats["num_pages"]
        until(lambda: len(server.server.server_state.connections) <= 1)  # the client's own
        assert server.post("/v1/completions", prompt).json()["choices"] == right


def test_resets_without_a_stream(fake: Running) -> None:
    """Of answers that are sent whole, and of requests that have not come whole: eight at once."""
    fake.engine.held = True
    body = json.dumps(CHAT).encode()

    def reset(i: int) -> None:
        with socket.create_connection(("127.0.0.1", fake.port)) as connection:
            connection.sendall(head(content_length=len(body)) + (body if i % 2 else body[:9]))
            until(lambda: i % 2 == 0 or len(fake.engine.submitted) > i // 16)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(reset, range(64)))
    until(lambda: fake.engine.live == {} and fake.service.num_active == 0)
    until(lambda: len(fake.server.server_state.connections) <= 1)
    fake.engine.held = False
    assert fake.chat().status_code == 200


# Keys


def test_keys() -> None:
    engine = FakeEngine()
    with running(fake_llm(engine), keys=("first", "zweiter-schlüssel")) as server:
        for path in ("/v1/models", "/metrics", "/ready", "/openapi.json", "/nowhere"):
            assert error_of(server.client.get(path), 401)["code"] == "invalid_api_key"
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/apply-template"):
            assert error_of(server.post(path, {}), 401)["type"] == "authentication_error"
        assert server.client.get("/health").status_code == 200
        for given in ("Bearer wrong", "Bearer", "first", "Basic first", "Bearer firs", "Bearer first1"):
            assert error_of(server.post("/v1/chat/completions", CHAT, authorization=given), 401)
        assert error_in(raw(server, head(content_length=1 << 40), *[b"x" * 65536] * 600), 401)
        assert engine.submitted == []
        ask = lambda **headers: server.post("/v1/chat/completions", CHAT, **headers).status_code  # noqa: E731
        assert (
            ask(authorization="Bearer first")
            == ask(authorization="bearer first")
            == ask(**{"x-api-key": "first"})
            == 200
        )
        second = {"authorization": "Bearer zweiter-schlüssel".encode()}
        assert server.client.post("/v1/chat/completions", json=CHAT, headers=second).status_code == 200
        salts = [request.salt for request in engine.submitted]
        assert salts[0] == salts[1] == salts[2] != salts[3] and 0 not in salts


def test_names_of_other_machines() -> None:
    with running(fake_llm(FakeEngine()), any_host=False) as server:
        for host in ("localhost:8000", "127.0.0.1", "127.1.2.3:80", "[::1]:8000", "LOCALHOST"):
            assert server.client.get("/v1/models", headers={"host": host}).status_code == 200, host
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[::2]"):
            assert error_of(server.client.get("/v1/models", headers={"host": host}), 403)["code"] == "unknown_host"
