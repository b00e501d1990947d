"""`shoal serve`: the HTTP server, after its options have been checked."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal import console
from shoal.errors import InvalidArgument, ShoalError, printable
from shoal.server.options import ServerOptions
from shoal.server.serve import is_loopback, listen
from shoal.server.serve import serve as serve_http


def read_keys(keys: Sequence[str], file: str | None) -> tuple[str, ...]:
    """Keys of the option or variable and of a file, one a line; lines with # are comments."""
    found = [key.strip() for key in keys]
    if file is not None:
        try:
            lines = Path(file).read_text("utf-8").splitlines()
        except OSError as error:
            raise ShoalError(f'cannot read "{printable(file)}": {error.strerror}', "io") from None
        except UnicodeDecodeError:
            raise InvalidArgument(f'"{printable(file)}" is no UTF-8 text') from None
        in_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not in_file:
            raise InvalidArgument(f'"{printable(file)}" has no key')
        found += in_file
    if not all(found):
        raise InvalidArgument("an API key is empty")
    return tuple(dict.fromkeys(found))


def serve(
    model: str,
    host: str,
    port: int,
    allow_no_key: bool,
    options: ServerOptions,
    engine: dict[str, Any],
    num_replicas: int,
) -> int:
    try:
        listener = listen(host, port)
    except OSError as error:
        raise ShoalError(
            f'cannot listen on "{printable(host)}", port {port}: {error.strerror or error}', "io"
        ) from None
    with listener:
        if not is_loopback(listener) and not options.keys and not allow_no_key:
            raise InvalidArgument(
                f"{host} can be reached from other machines: give --api-key or --api-key-file, or say --allow-no-key"
            )
        options = replace(options, any_host=bool(options.keys) or allow_no_key)
        own_host, own_port = listener.getsockname()[:2]
        shown = f"[{own_host}]" if ":" in own_host else own_host

        def listening() -> None:
            listener.listen(1024)
            console.say(f"{options.name} on http://{shown}:{own_port} (Ctrl-C ends)")

        if num_replicas > 1:
            from shoal.deploy.front import serve_front_async

            _raise_file_limit(2 * options.max_connections + 64)  # a client's, and one to its replica
            path = console.fetch(model)
            num_threads = engine["threads"] or len(os.sched_getaffinity(0))
            engine = engine | {"threads": max(num_threads // num_replicas, 1)}
            front = serve_front_async(path, num_replicas, options, engine, listener, console.say, listening)
            return asyncio.run(front)
        _raise_file_limit(options.max_connections + 64)
        with console.load(model, **engine) as llm:
            listening()
            return serve_http(llm, options, listener, console.say)


def _raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
