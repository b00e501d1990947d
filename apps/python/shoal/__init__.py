"""shoal: an inference engine for quantised language models.

import shoal
llm = shoal.LLM("smollm2")
print(llm.generate(["The sea is"], shoal.SamplingParams(max_tokens=32, temperature=0))[0].text)
"""

from __future__ import annotations

import importlib
from typing import Any

from shoal.errors import InvalidArgument, ModelFormatError, OutOfMemory, ShoalError, Unsupported

__version__ = "0.1.0"

# Where the rest is; loaded on first use, so that `shoal --version` does not wait for tokenizers.
_LAZY = {
    "LLM": "shoal.llm",
    "Chunk": "shoal.llm",
    "Completion": "shoal.llm",
    "SamplingParams": "shoal.llm",
    "TokenLogprob": "shoal.llm",
    "Tokenizer": "shoal.tokenizer",
}
_SUBMODULES = ("ops",)

__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "InvalidArgument",
    "ModelFormatError",
    "OutOfMemory",
    "SamplingParams",
    "ShoalError",
    "TokenLogprob",
    "Tokenizer",
    "Unsupported",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        try:
            return importlib.import_module(f"shoal.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"shoal.{name}":
                raise
    raise AttributeError(f"module 'shoal' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
