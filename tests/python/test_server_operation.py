"""The life of a server: starting, draining, ending, and what it says of itself."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from conftest import shoal_here
from serving import FakeEngine, chunks_of, error_of, fake_llm, running, until
from shoal.server import request_log
from shoal.server.request_log import open_folder

CHAT = {"messages": [{"role": "user", "content": "x"}]}


def test_draining() -> None:
    engine = FakeEngine()
    engine.held = True
    with running(fake_llm(engine)) as server:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.chat, stream=True)
            until(lambda: len(engine.live) == 1)
            server.on_loop(server.server.drain)
            until(lambda: server.service.draining)
            refused = server.chat()
            assert error_of(refused, 503)["code"] == "draining" and refused.headers["connection"] == "close"
            assert server.client.get("/ready").status_code == 503
            assert server.client.get("/health").status_code == 200
            engine.held = False
            assert len(chunks_of(answer.result().text)) == 7
        until(lambda: server.status is not None)
    assert server.status == 0 and "draining: 1 answers run" in server.said


def test_a_second_signal_stops() -> None:
    engine = FakeEngine()
    engine.held = True
    with running(fake_llm(engine), keep_alive=0.02) as server:
        with server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines) == ": waiting"
            server.on_loop(server.server.drain)
            server.on_loop(server.server.drain)
            (data,) = [line for line in lines if line.startswith("data: ")]
            assert json.loads(data.removeprefix("data: "))["error"]["code"] == "stopped"
        until(lambda: server.status is not None)
    assert server.status == 1 and engine.live == {}


def test_answers_that_do_not_end_in_time() -> None:
    engine = FakeEngine()
    engine.held = True
    with running(fake_llm(engine), drain_timeout=0.1) as server:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.chat)
            until(lambda: len(engine.live) == 1)
            server.on_loop(server.server.drain)
            assert error_of(answer.result(), 503)["code"] == "stopped"
        until(lambda: server.status is not None)
    assert server.status == 1 and engine.live == {}


@pytest.mark.parametrize("where", ["running", "idle"])
def test_an_engine_that_dies_ends_the_server(where: str) -> None:
    engine = FakeEngine()
    engine.held = True
    with running(fake_llm(engine), keep_alive=0.02) as server:
        if where == "running":
            with server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
                lines = response.iter_lines()
                assert next(lines) == ": waiting"
                engine.dead = True
                (data,) = [line for line in lines if line.startswith("data: ")]
                assert "it broke" in json.loads(data.removeprefix("data: "))["error"]["message"]
        else:
            engine.dead = True
            assert "stopped" in error_of(server.chat(), 500)["message"]
        until(lambda: server.status is not None)
    assert server.status == 1
    assert any("the engine has stopped" in line for line in server.said)


def test_readiness() -> None:
    engine = FakeEngine()
    with running(fake_llm(engine), ready_window=1000) as server:
        assert server.client.get("/ready").status_code == 200
        assert [r.max_tokens for r in engine.submitted] == [1]  # a probe
        server.chat()
        assert server.client.get("/ready").status_code == 200
        assert len(engine.submitted) == 2  # no second one: a token came not long ago
    engine = FakeEngine()
    engine.held = True
    with running(fake_llm(engine), ready_window=0.1) as server:
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/health").status_code == 200
        until(lambda: engine.live == {})  # the probe is not left behind


def test_metrics() -> None:
    with running(fake_llm(FakeEngine())) as server:
        server.chat(n=2)
        server.chat(max_tokens=0)
        text = server.client.get("/metrics").text
    for line in (
        'shoal:generation_tokens_total{model_name="test"} 12.0',
        'shoal:request_success_total{finished_reason="stop",model_name="test"} 2.0',
        'shoal:num_requests_running{model_name="test"} 0.0',
        'shoal:num_requests_waiting{model_name="test"} 0.0',
        'shoal:kv_cache_usage_perc{model_name="test"} 0.0',
        'shoal:time_to_first_token_seconds_count{model_name="test"} 2.0',
        'shoal:e2e_request_latency_seconds_count{model_name="test"} 2.0',
        'shoal:http_responses_total{route="/v1/chat/completions",status="200"} 1.0',
        'shoal:http_responses_total{route="/v1/chat/completions",status="400"} 1.0',
    ):
        assert line in text, text


# The command


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--host", "0.0.0.0"], 2, "give --api-key or --api-key-file, or say --allow-no-key"),
        (["--api-key", ""], 2, "an API key is empty"),
        (["--api-key-file", "nowhere"], 1, 'cannot read "nowhere"'),
        (["--tool-parser", "magic"], 2, "--tool-parser is magic"),
        (["--host", "no.such.host.invalid"], 1, "cannot listen on"),
        (["--port", "70000"], 2, "port"),
    ],
)
def test_refusals(home: Path, arguments: list[str], status: int, message: str) -> None:
    result = shoal_here("serve", "none.gguf", "--port", "0", *arguments)
    assert result.returncode == status and message in result.stderr


def test_a_port_that_is_taken(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = shoal_here("serve", "none.gguf", "--port", str(other.getsockname()[1]))
    assert result.returncode == 1 and "cannot listen on" in result.stderr


def test_keys_are_read_and_not_shown(home: Path) -> None:
    from shoal.command_serve import read_keys

    file = home / "keys"
    file.write_text("# ours\nfirst\n\n second \n")
    assert read_keys(["third", "first"], str(file)) == ("third", "first", "second")
    shown = shoal_here("serve", "--print-config", env={"SHOAL_API_KEY": "geheim"})
    assert shown.returncode == 0 and "geheim" not in shown.stdout and "kept secret" in shown.stdout


def test_a_process_from_start_to_signal(smollm2_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.cli", "serve", str(smollm2_path), "--port", "0", "--ctx", "512"],
        env={**os.environ, "SHOAL_THREADS": "1", "SHOAL_API_KEY": "k", "SHOAL_SERVED_MODEL_NAME": "small"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = process.stderr.readline()
        url = re.search(r"^small on (http://127\.0\.0\.1:\d+) ", first).group(1)
        body = {"prompt": "Once upon a time, in secret,", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        headers = {"authorization": "Bearer k"}
        asked = {"url": url + "/v1/completions", "headers": headers, "json": {**body, "stream": True}, "timeout": 60}
        with httpx.stream("POST", **asked) as response:
            text = response.iter_text()
            got = next(text)
            process.send_signal(signal.SIGTERM)
            got += "".join(text)
        assert len(chunks_of(got)) >= 2
        assert process.wait(60) == 0
        log = process.stderr.read()
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        assert lines[0]["path"] == "/v1/completions" and lines[0]["completion_tokens"] == 60
        assert "secret" not in log and "draining" in log
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


def test_the_chat_page_needs_nothing_from_elsewhere() -> None:
    with running(fake_llm(FakeEngine()), keys=("k",)) as server:
        response = server.client.get("/")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"https?:|(?:src|href)=\"(?!data:)|@import|url\(", response.text)
    script = response.text.split("<script>")[1].split("</script>")[0]
    ids = set(re.findall(r'\bid="(\w+)"', response.text))
    assert set(re.findall(r'\$\("(\w+)"\)', script)) <= ids


# The request log


def test_a_request_that_fails_is_written_for_a_report(tmp_path: Path) -> None:
    engine = FakeEngine()
    folder = open_folder(str(tmp_path / "new" / "failed"))
    asked = {"messages": [{"role": "user", "content": "a secret"}], "temperature": 0.5}

    def written(count: int) -> list[dict]:  # just after the answer
        until(lambda: len(list(folder.glob("*.json"))) == count)
        return [json.loads(path.read_text()) for path in folder.glob("*.json")]

    with running(fake_llm(engine), keys=("geheim",), request_log=folder, keep_alive=0.02) as server:
        key = {"authorization": "Bearer geheim"}
        assert server.post("/v1/chat/completions", asked, **key).status_code == 200
        error_of(server.post("/v1/chat/completions", {**asked, "n": -1}, **key), 400)
        assert written(0) == []  # neither of them is a fault
        engine.broken = True
        response = server.post("/v1/chat/completions", asked, **key)
        error = error_of(response, 500)
        (report,) = written(1)
        assert report["request"] == asked and report["error"] == error and report["path"] == "/v1/chat/completions"
        assert report["id"] == response.headers["x-request-id"] and report["engine"]["vocab_size"] == 262
        (prompt,) = report["prompts"]
        assert prompt["text"] == "<|im_start|>user\na secret<|im_end|>\n<|im_start|>assistant\n"
        assert prompt["token_ids"] == engine.submitted[1].prompt
        engine.broken, engine.held = False, True
        body = {"prompt": [[104], [105]], "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body, headers=key) as stream:
            lines = stream.iter_lines()
            assert next(lines) == ": waiting"
            engine.broken, engine.held = True, False
            list(lines)
        reports = {report["path"]: report for report in written(2)}
        assert [p["text"] for p in reports["/v1/completions"]["prompts"]] == ["h", "i"]
        assert reports["/v1/completions"]["request"] == body
        engine.broken = False
        engine.stats = lambda: 1 // 0
        error_of(server.client.get("/metrics", headers=key), 500)
        (fault,) = (report for report in written(3) if report["path"] == "/metrics")
        assert "ZeroDivisionError" in fault["traceback"][-1] and fault["request"] == ""
    files = list(folder.iterdir())
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files) and folder.stat().st_mode & 0o777 == 0o700
    assert not any("geheim" in path.read_text() for path in files)


def test_the_request_log_is_bounded_and_bears_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    engine = FakeEngine()
    engine.broken = True
    monkeypatch.setattr(request_log, "_MAX_FILES", 3)
    with running(fake_llm(engine), request_log=tmp_path) as server:
        for _ in range(5):
            error_of(server.chat(), 500)
    assert len(list(tmp_path.iterdir())) == 3
    with running(fake_llm(engine), request_log=tmp_path / "gone") as server:
        error_of(server.chat(), 500)
    assert "could not be written" in capfd.readouterr().err


def test_without_the_option_nothing_is_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    engine = FakeEngine()
    engine.broken = True
    with running(fake_llm(engine)) as server:
        error_of(server.chat(), 500)
    assert list(home.rglob("*")) == []
    (home / "file").touch()
    refused = shoal_here("serve", "none.gguf", "--port", "0", "--request-log", str(home / "file"))
    assert refused.returncode == 1 and "--request-log: cannot write to" in refused.stderr
