"""Requests that failed by a fault of ours, each in a file with all that a report of it needs.

Also what the client asked and the prompt that the model read: only where the operator named a folder for them.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from shoal import __version__
from shoal.errors import ShoalError, printable
from shoal.llm import LLM

if TYPE_CHECKING:
    from shoal.server.gate import Visit

_MAX_FILES = 100  # of one process: a server that fails all the time is not to fill the disk


def open_folder(path: str) -> Path:
    """The folder, made if it is not there, for nobody but its owner; ShoalError if nothing can be written to it."""
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(0, "not writable")
    except OSError as error:
        raise ShoalError(f'--request-log: cannot write to "{printable(path)}": {error.strerror}', "io") from None
    return folder


class RequestLog:
    def __init__(self, folder: Path, llm: LLM) -> None:
        self._folder = folder
        self._llm = llm
        self._num_left = _MAX_FILES

    def failed(self, scope: Scope, visit: Visit, body: bytes) -> None:
        """Writes the request if its failure is a fault (500); refusals and a server that is busy are none."""
        failure = visit.failure
        if failure is None or failure.status_code != 500 or self._num_left == 0:
            return
        self._num_left -= 1
        try:
            text = json.dumps(self._report(scope, visit, body), ensure_ascii=False, indent=1)
            path = self._folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{visit.id}.json"
            part = path.with_suffix(".part")  # who looks finds whole files
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(text.encode("utf-8", "replace"))
            part.rename(path)
        except OSError as error:
            print(f"shoal: a failed request could not be written: {error.strerror}", file=sys.stderr, flush=True)

    def _report(self, scope: Scope, visit: Visit, body: bytes) -> dict[str, Any]:
        failure = visit.failure
        assert failure is not None
        try:
            asked: Any = json.loads(body)
        except (ValueError, RecursionError):
            asked = body.decode("utf-8", "replace")
        decode = self._llm.tokenizer.decode if self._llm.has_tokenizer else None
        answers = [] if visit.generation is None else visit.generation.completions.values()
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": visit.id,
            "version": __version__,
            "model": self._llm.path.name,
            "engine": self._llm.info,
            "path": scope["path"],
            "error": failure.body()["error"],
            "traceback": None if failure.cause is None else traceback.format_exception(failure.cause),
            "request": asked,
            "prompts": [{"text": decode and decode(ids), "token_ids": list(ids)} for ids in visit.prompts],
            "answers": [{"text": a.text, "token_ids": a.token_ids, "finish_reason": a.finish_reason} for a in answers],
        }
