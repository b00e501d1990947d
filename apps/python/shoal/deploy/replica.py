"""The process of one replica: the server on a unix socket. It ends with the front that started it.

Its settings come as one line of JSON on stdin, so that no key stands on a command line; stdin then stays open as long
as the front lives. It writes a line to stdout when it listens.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal import console
from shoal.errors import ShoalError
from shoal.llm import LLM
from shoal.server.options import ServerOptions
from shoal.server.serve import serve


def settings_line(model: Path, path: Path, options: ServerOptions, engine: dict[str, Any]) -> bytes:
    values = {"model": str(model), "socket": str(path), "options": asdict(options), "engine": engine}
    return json.dumps(values, default=str).encode() + b"\n"


def _end_with_front() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    line = bytearray()
    while not line.endswith(b"\n"):  # unbuffered: the thread below reads what follows
        line += os.read(0, 1) or b"\n"
    settings = json.loads(line)
    threading.Thread(target=_end_with_front, daemon=True).start()
    options = settings["options"]
    options["keys"] = tuple(options["keys"])
    if options["request_log"] is not None:
        options["request_log"] = Path(options["request_log"])
    try:
        with (
            LLM(settings["model"], **settings["engine"]) as llm,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ):
            listener.bind(settings["socket"])
            listener.listen(1024)
            os.write(1, b"listening\n")
            return serve(llm, ServerOptions(**options), listener, console.say)
    except ShoalError as error:
        console.say(f"shoal: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
