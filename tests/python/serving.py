"""Servers for tests: the real application on a free port, over a real model or over an engine that says what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
from conftest import byte_level_metadata
from shoal.server.options import ServerOptions
from shoal.server.serve import Server, listen, serve_async

from shoal import LLM, ShoalError, Tokenizer

END = 260  # <|im_end|>


class FakeEngine:
    """Answers each prompt with the bytes of `answer`, `step` tokens at a time, then the end token."""

    def __init__(self, answer: bytes = b"hello", step: int = 1) -> None:
        self.answer, self.step = answer, step
        self.held = False  # nothing moves
        self.slow = 0.0  # seconds of each step
        self.dead = False
        self.broken = False  # what runs fails, what comes is taken
        self.live: dict[int, SimpleNamespace] = {}
        self.submitted: list[SimpleNamespace] = []
        self.cancelled: list[int] = []

    def info(self) -> dict:
        return {"vocab_size": 262, "max_context": 4096, "num_pages": 256, "page_size": 16}

    def stats(self) -> dict:
        pages = 100 - len(self.live)
        return {
            "num_waiting": 0, "num_running": len(self.live), "num_paused": 0, "num_pages": 100, "num_free_pages": pages,
            "num_cached_pages": 0, "num_preemptions": 0, "num_steps": 0, "num_tokens": 0,
        }  # fmt: skip

    def submit(self, prompt: list[int], sampling: object, **options: object) -> int:
        if self.dead:
            raise ShoalError("the engine has stopped", "internal")
        request = SimpleNamespace(prompt=prompt, sampling=sampling, **options)
        request.left = [*self.answer, END][: request.max_tokens]
        self.submitted.append(request)
        self.live[len(self.submitted)] = request
        return len(self.submitted)

    def wait(self, request: int, timeout_ms: int) -> SimpleNamespace:
        update = SimpleNamespace(tokens=[], num_prompt_done=0, num_prefix_hit=0, finish_reason=None, error="it broke")
        if self.dead or self.broken:
            update.finish_reason = "error"
        elif request in self.cancelled:
            update.finish_reason = "cancelled"
        elif self.held:
            time.sleep(timeout_ms / 1000)
            return update
        else:
            time.sleep(self.slow)
            state = self.live[request]
            update.num_prompt_done = len(state.prompt)
            now, state.left = state.left[: self.step], state.left[self.step :]
            with_top = max(state.sampling.num_logprobs, 0)
            top = [(i, -float(i)) for i in range(with_top)]
            update.tokens = [SimpleNamespace(id=i, logprob=-i / 10, top=top) for i in now]
            if not state.left:
                update.finish_reason = "stop" if now[-1:] == [END] else "length"
        if update.finish_reason is not None:
            del self.live[request]
        return update

    def cancel(self, request: int) -> None:
        if request in self.live:
            self.cancelled.append(request)

    def close(self) -> None:
        pass


def fake_llm(engine: FakeEngine, **metadata: object) -> LLM:
    llm = LLM.__new__(LLM)
    llm.path = Path("fake.gguf")
    llm._engine = engine
    llm._tokenizer = Tokenizer.from_gguf(byte_level_metadata(**metadata))
    llm.info = engine.info()
    llm._grammars = None
    return llm


class Running:
    """A server that runs in a thread of this process."""

    def __init__(self, server: Server, port: int, said: list[str]) -> None:
        self.server, self.port, self.said = server, port, said
        self.url = f"http://127.0.0.1:{port}"
        self.loop: asyncio.AbstractEventLoop
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self.status: int | None = None

    @property
    def service(self):
        return self.server._service

    def on_loop(self, work: Callable[[], None]) -> None:
        self.loop.call_soon_threadsafe(work)

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def chat(self, **body: object) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **body})

    def stream(self, path: str, body: dict) -> list[dict]:
        """The chunks of a stream, which must end as streams do."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return chunks_of(response.text)


def chunks_of(text: str) -> list[dict]:
    events = [e for e in text.split("\n\n") if e and not e.startswith(":")]
    assert events[-1] == "data: [DONE]", events[-1]
    return [json.loads(e.removeprefix("data: ")) for e in events[:-1]]


@contextlib.contextmanager
def running(llm: LLM, **options: object) -> Iterator[Running]:
    listener = listen("127.0.0.1", 0)
    listener.listen(1024)
    said: list[str] = []
    ready = threading.Event()
    holder: list[Running] = []
    settings = ServerOptions(**{"name": "test", "access_log": False, **options})

    def started(server: Server) -> None:
        holder.append(Running(server, listener.getsockname()[1], said))
        holder[0].loop = asyncio.get_running_loop()
        ready.set()

    async def main() -> None:
        status = await serve_async(llm, settings, listener, said.append, started)
        holder[0].status = status

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(30)
    try:
        yield holder[0]
    finally:
        holder[0].client.close()
        holder[0].server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Waits for what must come true; how long that takes decides nothing."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error
