"""What the tests share: a tokenizer small enough to write down, and the real models of the user's cache."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from shoal.tokenizer import _BYTE_OF_CHARACTER, Tokenizer

from shoal import models

# A background job of a shell ignores Ctrl-C; so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = Path(__file__).parents[1] / "golden"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_metadata(**changes: object) -> dict[str, object]:
    """GGUF metadata of a byte-level tokenizer: ids 0 to 255 are the bytes, then two merges and some control tokens."""
    alphabet = sorted(_BYTE_OF_CHARACTER, key=_BYTE_OF_CHARACTER.__getitem__)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*alphabet, "he", "llo", *special],
        "tokenizer.ggml.token_type": [1] * 258 + [3, 3, 3, 4],
        "tokenizer.ggml.merges": ["h e", "l lo", "l o"],
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 260,
        "tokenizer.chat_template": CHATML,
    }
    metadata.update(changes)
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata())
    assert tokenizer is not None
    return tokenizer


def _model(name: str, fetch: bool) -> Path:
    model = models.NAMED_MODELS[name]
    path = models.cached(model)
    if path is None and fetch:
        return models.fetch(model)  # a fetch that fails is a failure, not a skip: most of these tests need the model
    if path is None:
        pytest.skip(f"{name} is not in the cache ({models.cache_folder()})")
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return _model("smollm2", fetch=True)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return _model("gemma3-270m", fetch=False)  # under terms of its own: only if the user has it


@pytest.fixture(scope="session")
def llm(smollm2_path: Path):
    from shoal import LLM

    with LLM(smollm2_path, max_context=256, max_batch_tokens=128, threads=1) as llm:
        yield llm


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of its own, without settings or models."""
    for name in list(os.environ):
        if name.startswith(("SHOAL_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def shoal(
    *arguments: str, stdin: str = "", env: dict[str, str] | None = None, **options
) -> subprocess.CompletedProcess:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "shoal.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={
            **os.environ,
            "SHOAL_THREADS": "1",
            **(env or {}),
        },  # one thread does not wait for another on a busy machine
        timeout=120,
        **options,
    )


def shoal_here(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """The command line in this process: for what ends before a model is loaded, since a process costs half a second."""
    from shoal.cli import main

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        status = main(list(arguments))
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())
