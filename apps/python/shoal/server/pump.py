"""News of all running requests, from one thread.

The engine's `wait` is for one request and blocks. A thread for each would be woken in every step only to queue for the
interpreter; one thread waits for a request that moved in the last step, and when it moves again asks the others, which
have moved in the same step. A request that is new or was held up is noticed after a tick.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal.llm import Chunk, Run

_TICK_MS = 20  # how long news of the others can wait when the one that is waited for stands still


class Job:
    """A run and who wants to hear of it. `tell` is called on the pump's thread: a chunk, or what the run failed of.
    While it is held nobody asks for its news, and the engine pauses it before long."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.is_held = False
        self.tell: Callable[[Chunk | Exception], None] = lambda news: None


class Pump:
    def __init__(self, flush: Callable[[], None]) -> None:
        """`flush` is called after each round in which there was news."""
        self._flush = flush
        self._jobs: list[Job] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="shoal-pump", daemon=True)
        self._thread.start()

    def add(self, jobs: list[Job]) -> None:
        with self._changed:
            self._jobs += jobs
            self._changed.notify()

    def hold(self, jobs: list[Job], is_held: bool) -> None:
        with self._changed:
            for job in jobs:
                job.is_held = is_held
            self._changed.notify()

    def close(self) -> None:
        """Ends what still runs and the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()
        for job in self._jobs:
            job.run.cancel()
        self._jobs.clear()

    def _loop(self) -> None:
        front: Job | None = None  # had news last
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or not all(job.is_held for job in self._jobs))
                if self._stopping:
                    return
                jobs = [job for job in self._jobs if not job.is_held]
            if front in jobs:
                jobs.remove(front)
                jobs.insert(0, front)
            front = None
            gone: list[Job] = []
            had_news = False
            for i, job in enumerate(jobs):
                news = self._ask(job, _TICK_MS if i == 0 else 0)
                if job.run.released or isinstance(news, Exception):
                    gone.append(job)
                elif news is not None:
                    front = job
                if news is not None:
                    had_news = True
                    job.tell(news)
            if had_news:
                self._flush()
            if gone:
                with self._changed:
                    self._jobs = [job for job in self._jobs if job not in gone]

    @staticmethod
    def _ask(job: Job, timeout_ms: int) -> Chunk | Exception | None:
        try:
            return job.run.step(timeout_ms)
        except Exception as error:  # the engine's; and a fault of ours must not end everybody's answers
            if not job.run.released:
                job.run.cancel()
            return error
