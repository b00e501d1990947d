"""What a server must bear: each abuse with its answer, and afterwards nothing is lost."""

from __future__ import annotations

import json
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

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
    class Breaking(FakeEngine):
        def wait(self, request: int, timeout_ms: int) -> object:
            update = super().wait(request, timeout_ms)
            if self.broken and request in self.live:
                del self.live[request]
                update.tokens, update.finish_reason = [], "error"
            return update

    engine = Breaking()
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


def test_a_reader_that_stalls_is_lost() -> None:
    engine = FakeEngine(b"x" * 4000, step=1)
    with running(fake_llm(engine), stall_timeout=0.3) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        body = json.dumps({**CHAT, "stream": True, "n": 8}).encode()
        connection.sendall(head(content_length=len(body)) + body)
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


def test_resets(llm: LLM) -> None:
    """In the queue, while the prompt is read, and while tokens come: a hundred clients, eight at once."""
    prompt = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    with running(llm) as server:
        right = server.post("/v1/completions", prompt).json()["choices"]

        def reset(i: int) -> None:
            body = {
                "prompt": f"{i} " * (5 + i % 25),
                "max_tokens": 20,
                "ignore_eos": True,
                "stream": i % 4 != 0,
                "n": 1 + i % 2,
            }
            data = json.dumps(body).encode()
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(head("/v1/completions", content_length=len(data)) + data[: None if i % 10 else 9])
                connection.settimeout(60)
                if i % 4:
                    time.sleep(i % 3 * 0.01)
                if i % 4 > 1 and i % 10:
                    connection.recv(1000)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(reset, range(100)))
        until(lambda: server.service.num_active == 0 and llm.stats()["num_running"] + llm.stats()["num_waiting"] == 0)
        stats = llm.stats()
        assert stats["num_free_pages"] + stats["num_cached_pages"] == stats["num_pages"]
        assert server.post("/v1/completions", prompt).json()["choices"] == right


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
