"""OpenAI's objects of answers, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from shoal.llm import Chunk, TokenLogprob
from shoal.server.deltas import Splitter, join
from shoal.server.events import DONE, event
from shoal.server.generation import Generation
from shoal.tokenizer import Tokenizer

_REASONS = {"stop": "stop", "length": "length"}


def _token_text(tokenizer: Tokenizer | None, token_id: int) -> tuple[str, list[int]]:
    data = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
    return data.decode("utf-8", "replace"), list(data)


class Answers(ABC):
    """What the two routes share. `tokenizer` None: a model of ids alone."""

    object = ""
    prefix = ""

    def __init__(self, name: str, tokenizer: Tokenizer | None, wants_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    def _without_end(self, chunk: Chunk) -> Sequence[TokenLogprob]:
        """Log-probabilities of a chunk's tokens; the token that ended the answer is no part of it."""
        entries = chunk.logprobs or []
        ends = self._tokenizer is not None and chunk.finish_reason == "stop" and entries
        return entries[:-1] if ends and entries[-1].token_id in self._tokenizer.eos_ids else entries

    def chunk_of(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head, "object": self.object + ".chunk", "choices": choices, **more})

    # One for each route

    @abstractmethod
    def first(self, index: int) -> dict[str, Any] | None:
        """What opens an answer, if anything does."""

    @abstractmethod
    def choice(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """What a chunk adds to an answer: text, log-probabilities, at the end the reason."""

    @abstractmethod
    def whole(self, index: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """All choices of one answer joined."""

    # Both ways

    async def plain(self, generation: Generation) -> dict[str, Any]:
        parts: dict[int, list[dict[str, Any]]] = {}
        while pieces := await generation.next():
            for piece in pieces:
                parts.setdefault(piece.index, []).append(self.choice(piece.index, piece.chunk))
        choices = [self.whole(i, parts[i]) for i in sorted(parts)]
        return {**self._head, "object": self.object, "choices": choices, "usage": generation.usage()}

    async def stream(self, generation: Generation, wants_usage: bool) -> AsyncGenerator[bytes, None]:
        # With usage asked for, every chunk has the field.
        empty = {"usage": None} if wants_usage else {}
        begun: set[int] = set()
        while pieces := await generation.next():
            for piece in pieces:
                if not piece.chunk.token_ids and piece.chunk.completion is None:
                    continue  # the prompt is being read
                choice = self.choice(piece.index, piece.chunk)
                if piece.index not in begun:
                    begun.add(piece.index)
                    first = self.first(piece.index)
                    if first is not None:
                        yield self.chunk_of([first], **empty)
                if self.says_something(choice):
                    yield self.chunk_of([choice], **empty)
        if wants_usage:
            yield self.chunk_of([], usage=generation.usage())
        yield DONE

    @abstractmethod
    def says_something(self, choice: dict[str, Any]) -> bool:
        """Whether a choice is worth a chunk."""


class ChatAnswers(Answers):
    object = "chat.completion"
    prefix = "chatcmpl"

    def __init__(self, name: str, tokenizer: Tokenizer | None, wants_logprobs: bool, splitters: list[Splitter]) -> None:
        super().__init__(name, tokenizer, wants_logprobs)
        self._splitters = splitters

    def first(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, chunk: Chunk) -> dict[str, Any]:
        splitter = self._splitters[index]
        delta = splitter.push(chunk.text, chunk.completion is not None)
        logprobs = None
        if self._wants_logprobs:
            logprobs = {"content": [self._logprob(t) for t in self._without_end(chunk)], "refusal": None}
        reason = _REASONS.get(chunk.finish_reason or "")
        if reason == "stop" and splitter.num_calls:
            reason = "tool_calls"
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def says_something(self, choice: dict[str, Any]) -> bool:
        has_logprobs = choice["logprobs"] is not None and choice["logprobs"]["content"]
        return bool(choice["delta"] or choice["finish_reason"] or has_logprobs)

    def whole(self, index: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        for choice in choices:
            join(message, choice["delta"])
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        logprobs = None
        if self._wants_logprobs:
            logprobs = {"content": [t for c in choices for t in c["logprobs"]["content"]], "refusal": None}
        reason = choices[-1]["finish_reason"]
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        def one(token_id: int, logprob: float) -> dict[str, Any]:
            text, data = _token_text(self._tokenizer, token_id)
            return {"token": text, "logprob": max(logprob, -9999.0), "bytes": data}

        top = [one(i, p) for i, p in entry.top]
        return {**one(entry.token_id, entry.logprob), "top_logprobs": top}


class TextAnswers(Answers):
    object = "text_completion"
    prefix = "cmpl"

    def __init__(self, name: str, tokenizer: Tokenizer | None, wants_logprobs: bool, echoes: list[str]) -> None:
        """`echoes`: what stands before each answer, empty without `echo`."""
        super().__init__(name, tokenizer, wants_logprobs)
        self._echoes = echoes
        self._offsets = [0] * len(echoes)

    def chunk_of(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head, "object": self.object, "choices": choices, **more})

    def first(self, index: int) -> dict[str, Any] | None:
        return None

    def choice(self, index: int, chunk: Chunk) -> dict[str, Any]:
        text = self._echoes[index] + chunk.text
        self._echoes[index] = ""
        logprobs = None
        if self._wants_logprobs:
            logprobs = self._logprobs(index, chunk)
        reason = _REASONS.get(chunk.finish_reason or "")
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def says_something(self, choice: dict[str, Any]) -> bool:
        has_logprobs = choice["logprobs"] is not None and choice["logprobs"]["tokens"]
        return bool(choice["text"] or choice["finish_reason"] or has_logprobs)

    def whole(self, index: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
        logprobs = None
        if self._wants_logprobs:
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            logprobs = {name: [v for c in choices for v in c["logprobs"][name]] for name in names}
        text = "".join(c["text"] for c in choices)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choices[-1]["finish_reason"]}

    def _logprobs(self, index: int, chunk: Chunk) -> dict[str, Any]:
        entries = self._without_end(chunk)
        offsets = []
        for _, text in zip(entries, chunk.token_texts, strict=False):
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": [self._spelling(e.token_id) for e in entries],
            "token_logprobs": [max(e.logprob, -9999.0) for e in entries],
            "top_logprobs": [{self._spelling(i): max(p, -9999.0) for i, p in e.top} for e in entries],
            "text_offset": offsets,
        }

    def _spelling(self, token_id: int) -> str:
        """The token's text; a part of a character as OpenAI writes it: bytes:\\xe2\\x80."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data)
