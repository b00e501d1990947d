"""An answer as a row of blocks, each of one kind: reasoning, text, or a call.

Anthropic's messages and OpenAI's responses are made of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.llm import Completion
from shoal.server.deltas import Delta, Splitter
from shoal.server.generation import Generation


@dataclass
class Block:
    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: dict[str, Any] = field(default_factory=dict)  # id, name, arguments (JSON)


@dataclass
class BlockEvent:
    what: Literal["begin", "more", "end"]
    index: int
    block: Block  # as it is by then
    text: str = ""  # what is new


class Blocks:
    """Deltas in, events of blocks out; `blocks` is what they have made so far."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.num_reasoning_tokens = 0
        self._is_open = False

    def push(self, delta: Delta) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for key, kind in (("reasoning_content", "reasoning"), ("content", "text")):
            if delta.get(key):
                if not self._is_open or self.blocks[-1].kind != kind:
                    events += [*self.close(), self._begin(Block(kind))]  # type: ignore[arg-type]
                events.append(self._more(delta[key]))
        for call in delta.get("tool_calls", ()):
            block = Block("call", call={"id": call["id"], **call["function"]})
            events += [*self.close(), self._begin(block), self._more(block.call["arguments"]), *self.close()]
        return events

    def close(self) -> list[BlockEvent]:
        """Also to be called when the answer has ended."""
        if not self._is_open:
            return []
        self._is_open = False
        return [BlockEvent("end", len(self.blocks) - 1, self.blocks[-1])]

    def _begin(self, block: Block) -> BlockEvent:
        self.blocks.append(block)
        self._is_open = True
        return BlockEvent("begin", len(self.blocks) - 1, block)

    def _more(self, text: str) -> BlockEvent:
        block = self.blocks[-1]
        if block.kind != "call":
            block.text += text
        return BlockEvent("more", len(self.blocks) - 1, block, text)

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.blocks)


async def block_events(
    generation: Generation, splitter: Splitter, blocks: Blocks
) -> AsyncIterator[list[BlockEvent] | Completion]:
    """Events of the one answer as they come, and last the completion."""
    while pieces := await generation.next():
        for piece in pieces:
            if not piece.chunk.token_ids and piece.chunk.completion is None:
                continue
            delta = splitter.push(piece.chunk.text, piece.chunk.completion is not None)
            blocks.num_reasoning_tokens += len(piece.chunk.token_ids) if "reasoning_content" in delta else 0
            yield blocks.push(delta)
    yield blocks.close()
    yield generation.completions[0]
