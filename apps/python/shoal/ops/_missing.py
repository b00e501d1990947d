"""Operators of the contracts that this build does not have: their names are there and say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from shoal.errors import Unsupported

NAMES = (
    "packed_sparse_attention_indexer",
    "sparse_attention_indexer",
)


def missing(name: str) -> Callable[..., NoReturn]:
    def operator(**arguments: Any) -> NoReturn:
        raise Unsupported(f"{name}: this build has no such operator")

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = f"Not in this build: raises `Unsupported` naming {name}."
    return operator
