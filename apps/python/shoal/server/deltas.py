"""An answer's text, taken apart as it grows: reasoning, content, calls of tools.

A plain answer is what its deltas make when joined, so that the two cannot differ.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Delta = dict[str, Any]  # content, reasoning_content: text; tool_calls: a list of whole calls

THINK_BEGIN, THINK_END = "<think>", "</think>"
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"


def _held(text: str, mark: str) -> int:
    """How many characters at the end of `text` can be the beginning of `mark`."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)


class Reasoning:
    """Text before </think> apart from what follows. `open`: the prompt has begun the reasoning already."""

    def __init__(self, open: bool) -> None:
        self._state = "inside" if open else "before"
        self._text = ""

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """What is sure to be reasoning, and what is sure to be content."""
        self._text += text
        reasoning = ""
        if self._state == "before":
            begin = self._text.lstrip()
            if begin.startswith(THINK_BEGIN):
                self._state, self._text = "inside", begin[len(THINK_BEGIN) :]
            elif not last and THINK_BEGIN.startswith(begin):
                return "", ""
            else:
                self._state = "done"
        if self._state == "inside":
            inner, mark, after = self._text.partition(THINK_END)
            if mark:
                self._state, self._text, reasoning = "after", after, inner
            else:
                keep = 0 if last else _held(self._text, THINK_END)
                cut = len(self._text) - keep
                reasoning, self._text = self._text[:cut], self._text[cut:]
                return reasoning, ""
        if self._state == "after":  # the blank lines between reasoning and answer are neither's
            self._text = self._text.lstrip()
            if not self._text:
                return reasoning, ""
            self._state = "done"
        content, self._text = self._text, ""
        return reasoning, content


def _call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": text}}


def read_call(text: str, names: frozenset[str], argument_keys: tuple[str, ...]) -> dict[str, Any] | None:
    """A call of one of the tools offered, None if the text is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = next((value[key] for key in argument_keys if key in value), {})
    return _call(value["name"], arguments) if isinstance(arguments, dict) else None


class HermesCalls:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, as Qwen and Hermes write them, between and after text. What
    is in the marks and is no call stays text."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._text = ""
        self._after_call = False

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        self._text += text
        content, calls = "", []
        while True:
            if self._after_call:  # line breaks between calls are no text
                self._text = self._text.lstrip()
            before, mark, rest = self._text.partition(CALL_BEGIN)
            if not mark:
                keep = 0 if last else _held(self._text, CALL_BEGIN)
                cut = len(self._text) - keep
                content += self._text[:cut]
                self._after_call &= cut == 0
                self._text = self._text[cut:]
                break
            inner, end, after = rest.partition(CALL_END)
            if not end and not last:
                content += before
                self._after_call &= before == ""
                self._text = mark + rest
                break
            # A stop string or the end of the answer may stand for the closing mark.
            call = read_call(inner, self._names, ("arguments", "parameters"))
            content += before if call is not None else before + mark + inner + end
            calls += [] if call is None else [call]
            self._after_call = call is not None
            self._text = after
        return content, calls


class JsonCalls:
    """An answer that is one object {"name": …, "parameters": {…}}, or several with semicolons or line breaks between,
    as Llama 3 writes them. Anything else is text."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._text = ""
        self._is_text = False

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        self._text += text
        begin = self._text.lstrip()
        if not self._is_text and begin and not begin.startswith("{"):
            self._is_text = True
        if self._is_text:
            content, self._text = self._text, ""
            return content, []
        if not last:
            return "", []
        calls = self._read(begin)
        return ("", calls) if calls else (self._text, [])

    def _read(self, text: str) -> list[dict[str, Any]]:
        decoder, calls, at = json.JSONDecoder(), [], 0
        while at < len(text):
            try:
                _, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                return []
            call = read_call(text[at:end], self._names, ("parameters", "arguments"))
            if call is None:
                return []
            calls.append(call)
            at = end + len(text[end:]) - len(text[end:].lstrip("; \n\t"))
        return calls


PARSERS: dict[str, Callable[[frozenset[str]], HermesCalls | JsonCalls]] = {
    "hermes": HermesCalls,
    "llama_json": JsonCalls,
}


def call_grammar(form: str, tools: Sequence[Mapping[str, Any]], single: bool) -> str:
    """An answer that is nothing but calls of these tools, for llguidance."""
    key = "arguments" if form == "hermes" else "parameters"
    calls = []
    for tool in tools:
        function = tool["function"]
        schema = {"type": "object", **function.get("parameters", {})}
        properties = {"name": {"const": function["name"]}, key: schema}
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        )
    lines = [f"call: %json {json.dumps({'anyOf': calls})}"]
    if form == "hermes":
        lines.append(f'one: "{CALL_BEGIN}\\n" call "\\n{CALL_END}"')
    else:
        lines.append("one: call")
    # Llama's calls are one object; Hermes' can follow one another.
    return "\n".join(["start: one" if single or form != "hermes" else 'start: one ("\\n" one)*', *lines])


def parser_of(template: str) -> str | None:
    """The form of calls that a chat template teaches its model, None if it is none that is read."""
    if "tools" not in template:
        return None
    if CALL_BEGIN in template and "<function=" not in template:
        return "hermes"
    if '"parameters"' in template and '{"name": ' in template:
        return "llama_json"
    return None


class Splitter:
    """One answer: its text in, deltas out."""

    def __init__(self, reasoning: Reasoning | None, calls: HermesCalls | JsonCalls | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self.num_calls = 0

    def push(self, text: str, last: bool) -> Delta:
        thought, content = ("", text) if self._reasoning is None else self._reasoning.push(text, last)
        calls: list[dict[str, Any]] = []
        if self._calls is not None:
            content, calls = self._calls.push(content, last)
        delta: Delta = {}
        if thought:
            delta["reasoning_content"] = thought
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = [{"index": self.num_calls + i, **call} for i, call in enumerate(calls)]
            self.num_calls += len(calls)
        return delta


def join(message: dict[str, Any], delta: Delta) -> None:
    """What a client does with a delta."""
    for key in ("content", "reasoning_content"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    for call in delta.get("tool_calls", ()):
        message.setdefault("tool_calls", []).append({k: v for k, v in call.items() if k != "index"})
