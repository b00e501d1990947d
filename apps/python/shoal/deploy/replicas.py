"""Replicas as processes: started, watched, started again."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from shoal.deploy.replica import settings_line
from shoal.errors import ShoalError
from shoal.server.options import ServerOptions

_FIRST_PAUSE, _LAST_PAUSE = 0.5, 30.0  # seconds before a start, doubled each time
_STEADY = 60.0  # seconds of life after which the pause is short again
_GRACE = 5.0  # seconds that a replica has to end


class Replica:
    """One place for a process. It belongs to the event loop."""

    def __init__(self, index: int, folder: Path) -> None:
        self.index = index
        self.socket = folder / f"{index}.sock"
        self.process: asyncio.subprocess.Process | None = None
        self.is_up = False
        self.load = 0  # requests in progress
        self.num_sent = 0
        self.num_starts = 0
        # A connection for each request: one that breaks before an answer then means that there will be none.
        self.client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=str(self.socket), limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
            ),
            base_url="http://replica",
            timeout=httpx.Timeout(None, connect=5.0),
        )

    def signal(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            if self.process is not None and self.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self.process.send_signal(number)


class Replicas:
    """`on_end` hears of each replica that has ended, before it is started anew."""

    def __init__(
        self, model: Path, num_replicas: int, options: ServerOptions, engine: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-"))  # for its owner alone
        self._model, self._engine, self._say = model, engine, say
        # The front's own requests come on top of those of its clients.
        self._options = replace(options, max_connections=options.max_connections + 64)
        self.all = [Replica(i, self._folder) for i in range(num_replicas)]
        self.on_end: Callable[[Replica], None] = lambda replica: None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    @property
    def up(self) -> list[Replica]:
        return [replica for replica in self.all if replica.is_up]

    async def start(self) -> None:
        """Returns when all listen; ShoalError if one ends before. Its own words are on stderr then."""
        begun = [asyncio.get_running_loop().create_future() for _ in self.all]
        self._tasks = [asyncio.create_task(self._keep(r, f)) for r, f in zip(self.all, begun, strict=True)]
        if not all(await asyncio.gather(*begun)):
            raise ShoalError("a replica did not start", "io")

    async def close(self) -> None:
        self._closing = True
        for replica in self.all:
            replica.signal(signal.SIGTERM)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_GRACE)
            for replica in self.all:
                replica.signal(signal.SIGKILL)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for replica in self.all:
            await replica.client.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep(self, replica: Replica, begun: asyncio.Future[bool]) -> None:
        pause = _FIRST_PAUSE
        while not self._closing:
            started = time.monotonic()
            try:
                await self._run(replica, begun)
            finally:
                replica.is_up = False
                replica.signal(signal.SIGKILL)
            if not begun.done():
                begun.set_result(False)
            if self._closing or not begun.result():
                return
            if time.monotonic() - started > _STEADY:
                pause = _FIRST_PAUSE
            self.on_end(replica)
            self._say(f"replica {replica.index} ended ({replica.process.returncode}); again in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    async def _run(self, replica: Replica, begun: asyncio.Future[bool]) -> None:
        """One process, from its start to its end."""
        replica.socket.unlink(missing_ok=True)
        replica.num_starts += 1
        process = replica.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "shoal.deploy.replica",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the front, which then drains
        )  # fmt: skip
        with contextlib.suppress(ConnectionError):
            process.stdin.write(settings_line(self._model, replica.socket, self._options, self._engine))
            await process.stdin.drain()
        if await process.stdout.readline() == b"listening\n":
            replica.is_up = True
            if not begun.done():
                begun.set_result(True)
            ended = asyncio.ensure_future(process.wait())
            while not ended.done() and await self._is_healthy(replica):
                await asyncio.wait((ended,), timeout=self._options.health_interval)
            if not ended.done():
                self._say(f"replica {replica.index} does not answer")
                replica.is_up = False
                replica.signal(signal.SIGKILL)
        await process.wait()

    async def _is_healthy(self, replica: Replica) -> bool:
        """Whether it answers in time. A dead engine is an answer: such a process ends itself, and tells its clients."""
        try:
            await replica.client.get("/health", headers={"host": "localhost"}, timeout=self._options.health_timeout)
        except httpx.HTTPError:
            return False
        return True
