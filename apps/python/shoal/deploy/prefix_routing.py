"""Which replica a request goes to: the one for which the least is left to do.

A prompt is known by the hashes of its leading blocks, each hash over everything before it too, so that one number says
a whole prefix. The front does not render templates: a template writes tools, then messages in their order, so requests
that share these from the beginning share the beginning of the rendered prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLOCK_BYTES = 256  # some 64 tokens: about two pages
MAX_BLOCKS = 4096  # of one prompt; what lies beyond 1 MiB does not count
MAX_KNOWN_BLOCKS = 1 << 17  # of all replicas: 32 MiB of text, 18 MB of hashes
REQUEST_BLOCKS = 16  # what a request in progress counts as: 4 KiB of text to read


@dataclass(frozen=True)
class Candidate:
    """A replica as it stands. `num_cached`: leading blocks of the prompt that it has; `load`: requests in progress;
    `num_sent`: requests it ever got."""

    replica: int
    num_cached: int
    load: int
    num_sent: int = 0


def choose(candidates: Sequence[Candidate], num_blocks: int) -> int:
    """The replica with the least to do before it could begin the answer: blocks of the prompt that it lacks and
    REQUEST_BLOCKS for each request in progress. Of equals the one with the lower load, then the one that got fewer
    requests, then the lower number."""

    def cost(c: Candidate) -> tuple[int, int, int, int]:
        return num_blocks - c.num_cached + REQUEST_BLOCKS * c.load, c.load, c.num_sent, c.replica

    return min(candidates, key=cost).replica


def prompt_text(body: Any) -> bytes:
    """The parts of a request that become its prompt, in the order in which templates write them; empty if there are
    none. Not the prompt, but as long as two requests agree in it from the beginning, their prompts do."""
    if not isinstance(body, dict):
        return b""
    parts = []
    for name in ("tools", "system", "instructions", "messages", "input", "prompt"):
        value = body.get(name)
        if value is not None:
            parts.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True))
    return "\0".join(parts).encode("utf-8", "surrogatepass")


def prefix_blocks(text: bytes, salt: bytes) -> list[bytes]:
    """A hash for each leading whole block of the text. Other salts give other hashes: keys do not share prefixes."""
    blocks: list[bytes] = []
    last = hashlib.blake2b(salt, digest_size=16).digest()
    for begin in range(0, min(len(text) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        last = hashlib.blake2b(last + text[begin : begin + BLOCK_BYTES], digest_size=16).digest()
        blocks.append(last)
    return blocks


class PrefixMap:
    """Which replica was sent which blocks: bounded, the longest unused are forgotten first."""

    def __init__(self, max_blocks: int = MAX_KNOWN_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._replicas: OrderedDict[bytes, int] = OrderedDict()  # a bit for each replica
        self._secret = os.urandom(16)  # so that nobody can make prompts whose hashes collide

    def __len__(self) -> int:
        return len(self._replicas)

    def blocks(self, body: Any, key: str | None) -> list[bytes]:
        salt = hashlib.blake2b(b"" if key is None else key.encode(), key=self._secret).digest()
        return prefix_blocks(prompt_text(body), salt)

    def num_cached(self, blocks: Sequence[bytes], replica: int) -> int:
        """How many leading blocks the replica has, as far as is known."""
        bit = 1 << replica
        return next((i for i, b in enumerate(blocks) if not self._replicas.get(b, 0) & bit), len(blocks))

    def add(self, blocks: Sequence[bytes], replica: int) -> None:
        for block in reversed(blocks):  # so that the beginnings, which more prompts share, are forgotten last
            self._replicas[block] = self._replicas.get(block, 0) | 1 << replica
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._max_blocks:
            self._replicas.popitem(last=False)

    def forget(self, replica: int) -> None:
        """The replica has started anew, with nothing cached."""
        for block, replicas in list(self._replicas.items()):
            left = replicas & ~(1 << replica)
            if left:
                self._replicas[block] = left
            else:
                del self._replicas[block]
