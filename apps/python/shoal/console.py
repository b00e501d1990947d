"""What people see beside the answer: on stderr, and moving only at a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.llm import LLM, Completion


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def bar(label: str, shown: bool = True) -> Iterator[Callable[[float], None]]:
    """A progress bar that disappears when done; nothing unless stderr is a terminal. Takes fractions from 0 to 1."""
    if not shown or not sys.stderr.isatty():
        yield lambda fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=1.0)
        yield lambda fraction: progress.update(task, completed=fraction)


def fetch(model: str) -> Path:
    """The model's file or folder, with progress while it is fetched."""
    from shoal import models

    with bar(f"fetching {model}", not models.is_here(model)) as progress:
        return models.resolve(model, say, progress)


def load(model: str, **options: Any) -> LLM:
    """The model, with progress while it is fetched and while it loads."""
    path = fetch(model)
    with bar(f"loading {path.name}") as progress:
        return LLM(path, load_progress=progress, **options)


def summary(completion: Completion) -> str:
    return (
        f"{completion.prompt_tokens} prompt tokens"
        + (f" ({completion.cached_tokens} cached)" if completion.cached_tokens else "")
        + f", {completion.completion_tokens} tokens, first token {completion.ttft_s:.2f} s, "
        f"prefill {completion.prefill_tok_s:.1f} tok/s, decode {completion.decode_tok_s:.1f} tok/s"
        f" [{completion.finish_reason}]"
    )


def size_text(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text
