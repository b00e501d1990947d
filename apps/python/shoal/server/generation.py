"""The requests that a client's one request becomes, from their start to their last piece."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.errors import InvalidArgument, ShoalError
from shoal.llm import LLM, Chunk, Completion, SamplingParams
from shoal.server.errors import ApiError, bad, busy, from_exception
from shoal.server.metrics import Metrics
from shoal.server.options import ServerOptions
from shoal.server.pump import Job, Pump

T = TypeVar("T")


_MAX_NEWS = 64  # pieces that a reader has not taken; the engine is not asked for more then


@dataclass
class Piece:
    """What is new of one of a generation's answers."""

    index: int  # prompt_idx * n + candidate
    chunk: Chunk


class Generation:
    """The answers to one request of a client. It belongs to the event loop."""

    def __init__(self, service: Service, jobs: list[Job], num_prompt: int, n: int) -> None:
        self._service = service
        self._jobs = jobs
        self._n = n
        self._news: deque[Piece] = deque()
        self._is_held = False
        self._is_cancelled = False
        self._arrived = asyncio.Event()
        self._failure: ApiError | None = None
        self.num_prompt = num_prompt  # tokens of all prompts
        self.num_waiting = len(jobs)  # not begun by the engine
        self.num_open = len(jobs)
        self.prompt_done = 0
        self.completions: dict[int, Completion] = {}
        self._begun = [False] * len(jobs)
        self._started = time.perf_counter()
        self._last = [0.0] * len(jobs)
        self._expiry = service.loop.call_later(service.options.max_queue_age, self._expire)

    async def next(self) -> list[Piece]:
        """What came since the last time, waiting until there is something. Empty when all answers have ended. Raises
        what the first of them failed of; the others are cancelled then."""
        while True:
            if self._failure is not None:
                self.cancel()
                raise self._failure
            if self._news:
                pieces = list(self._news)
                self._news.clear()
                self._hold(False)
                return pieces
            if self.num_open == 0:
                return []
            self._arrived.clear()
            await self._arrived.wait()

    def cancel(self) -> None:
        """Ends what has not ended, within a step. To be called when nobody listens any more."""
        self._is_cancelled = True
        self._expiry.cancel()
        self._service.forget(self)
        for job in self._jobs:
            if not job.run.finished:
                job.run.stop()
        self._hold(False)

    def _hold(self, is_held: bool) -> None:
        is_held = is_held and not self._is_cancelled  # or nobody would hear of its end
        if self._is_held != is_held:
            self._is_held = is_held
            self._service.hold(self._jobs, is_held)

    def fail(self, error: ApiError) -> None:
        self._failure = self._failure or error
        self._arrived.set()

    def take(self, index: int, news: Chunk | Exception) -> None:
        if isinstance(news, Exception):
            self.num_open -= 1
            self._service.metrics.finished("error")
            self.fail(from_exception(news))
            self._service.check_engine(news)
            return
        now = time.perf_counter()
        if not self._begun[index] and (news.prompt_done > 0 or news.completion is not None):
            self._begun[index] = True
            self.num_waiting -= 1
            self._service.metrics.queue_time.observe(now - self._started)
            if self.num_waiting == 0:
                self._expiry.cancel()
        self.prompt_done = max(self.prompt_done, news.prompt_done)
        if news.token_ids:
            self._service.last_token = time.monotonic()
            self._service.metrics.tokens(len(news.token_ids), now, self._started, self._last[index])
            self._last[index] = now
        if news.completion is not None:
            self.num_open -= 1
            self.completions[index] = news.completion
            if news.finish_reason == "cancelled":  # not by us, or nobody would listen to this
                self.fail(ApiError(503, "the engine was closed", None, "stopped"))
            self._service.metrics.completed(news.completion, now - self._started)
        self._news.append(Piece(index, news))
        self._hold(len(self._news) >= _MAX_NEWS)
        self._arrived.set()

    def _expire(self) -> None:
        if self.num_waiting:
            limit = self._service.options.max_queue_age
            self.fail(busy(503, f"the request waited {limit:g} s in the queue without being begun", "queue_timeout"))

    def usage(self) -> dict[str, Any]:
        done = self.completions.values()
        num_answer = sum(c.completion_tokens for c in done)
        # A prompt counts once, and its other answers find it cached by the first.
        cached = sum(c.cached_tokens for i, c in self.completions.items() if i % self._n == 0)
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": self.num_prompt + num_answer,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class Service:
    """The model and everything that runs on it. Made on the event loop's thread."""

    def __init__(self, llm: LLM, options: ServerOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.llm = llm
        self.options = options
        self.loop = loop
        self.metrics = Metrics(llm, options.name)
        self.created = int(time.time())
        self.last_token = float("-inf")  # time.monotonic()
        self.draining = False
        self.dead: str | None = None  # why the engine takes nothing any more
        self.on_dead: Callable[[], None] = lambda: None
        self._probing: asyncio.Task[bool] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._generations: set[Generation] = set()
        self._news: deque[tuple[Generation, int, Chunk | Exception]] = deque()
        self._pump = Pump(self._flush)
        # Tokenizers and templates work on these, so that a long text does not hold up everybody's events.
        self._threads = ThreadPoolExecutor(2, "shoal-text")

    def close(self) -> None:
        for generation in list(self._generations):
            generation.cancel()
        self._pump.close()
        self._threads.shutdown(cancel_futures=True)

    @property
    def num_active(self) -> int:
        return len(self._generations)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self.loop.run_in_executor(self._threads, work, *arguments)

    def start(self, prompts: Sequence[list[int]], params: SamplingParams, key: str | None, name: str) -> Generation:
        """Runs `params.n` requests for each prompt. `name`: the parameter that holds the prompts."""
        self.require_engine()
        vocab_size = self.llm.info["vocab_size"]
        for ids in prompts:
            outside = next((i for i in ids if not 0 <= i < vocab_size), None)
            if outside is not None:
                raise bad(name, f"{name} has token id {outside}, outside the vocabulary of {vocab_size}")
        num_new = len(prompts) * params.n
        if num_new > self.options.max_queue:
            raise bad(
                name, f"{len(prompts)} prompts with n {params.n} are more than the queue of {self.options.max_queue}"
            )
        if sum(g.num_waiting for g in self._generations) + num_new > self.options.max_queue:
            raise busy(429, f"{self.options.max_queue} requests wait already", "queue_full")
        jobs: list[Job] = []
        try:
            for ids in prompts:
                jobs += [Job(run) for run in self.llm.start(ids, params, salt_of(key))]
        except ShoalError as error:
            for job in jobs:
                job.run.stop()
            self._pump.add(jobs)
            self.check_engine(error)
            if isinstance(error, InvalidArgument) and error.code == "context_length_exceeded":
                raise bad(name, str(error), error.code) from None
            raise
        generation = Generation(self, jobs, sum(map(len, prompts)), params.n)
        for i, job in enumerate(jobs):
            job.tell = lambda news, i=i: self._news.append((generation, i, news))
        self._generations.add(generation)
        self._pump.add(jobs)
        return generation

    def hold(self, jobs: list[Job], is_held: bool) -> None:
        self._pump.hold(jobs, is_held)

    def forget(self, generation: Generation) -> None:
        self._generations.discard(generation)

    def _flush(self) -> None:
        self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._news:
            generation, index, news = self._news.popleft()
            generation.take(index, news)

    # The engine's health

    def require_engine(self) -> None:
        if self.dead is not None:
            raise ApiError(500, f"the engine has stopped: {self.dead}", None, "engine_dead")

    def check_engine(self, error: Exception) -> None:
        """After a failure: was it the request's, or has the engine ended?"""
        if self.dead is None and not isinstance(error, InvalidArgument):
            self._checking = self.loop.create_task(self._check(str(error)))

    async def _check(self, message: str) -> None:
        # On a thread of its own: those for texts may be busy for long.
        if not await self.loop.run_in_executor(None, self.llm.is_alive) and self.dead is None:
            self.dead = message
            self.fail_all(ApiError(500, f"the engine has stopped: {message}", None, "engine_dead"))
            self.on_dead()

    def fail_all(self, error: ApiError) -> None:
        for generation in list(self._generations):
            generation.fail(error)

    async def is_ready(self) -> bool:
        """Whether a token was generated within the last seconds, or can be now."""
        if self.dead is not None or self.draining:
            return False
        if time.monotonic() - self.last_token < self.options.ready_window:
            return True
        if self._probing is None or self._probing.done():
            self._probing = self.loop.create_task(self._probe())
        return await asyncio.shield(self._probing)  # one probe for all who ask meanwhile

    async def _probe(self) -> bool:
        try:
            probe = self.start([[0]], SamplingParams(max_tokens=1, ignore_eos=True), "probe", "probe")
        except (ApiError, ShoalError):
            return False
        try:
            while await asyncio.wait_for(probe.next(), self.options.ready_window):
                pass
            return True
        except (ApiError, asyncio.TimeoutError):
            return False
        finally:
            probe.cancel()


def salt_of(key: str | None) -> int:
    """Keeps the prefix caches of keys apart: how fast an answer begins must not tell what another's prompts say."""
    return 0 if key is None else int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
