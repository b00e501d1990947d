"""Chat templates: from messages to the model's text, and to token ids in which users' words stay words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jinja2
from jinja2.sandbox import SecurityError

from shoal.errors import InvalidArgument, OutOfMemory, ShoalError
from shoal.sandbox import MAX_LENGTH, Sandbox

_KNOWN_ROLES = frozenset(
    ["system", "user", "assistant", "tool", "developer", "function", "ipython", "model", "context"]
)
_WORD = re.compile(r"[\w .$/-]+")
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
)


class ChatTemplate:
    """A parsed template. ModelFormatError with line and column if it cannot be parsed."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self.source = source
        self._variables = dict(variables)
        self._sandbox = Sandbox()
        self._template = self._sandbox.parse_template(source)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """InvalidArgument for what the template refuses or cannot do with these messages."""
        _check_messages(messages)
        values = {**self._variables, **variables, "messages": [dict(m) for m in messages]}
        self._sandbox.begin()
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(**values):
                parts.append(part)
                size += len(part)
                if size > MAX_LENGTH:
                    raise SecurityError(f"it renders more than {MAX_LENGTH} characters")
        except ShoalError:
            raise
        except SecurityError as error:
            raise InvalidArgument(f"the chat template does what it may not: {error}") from None
        except _FAILURES as error:
            raise InvalidArgument(f"the chat template failed{_line_of(error)}: {error}") from None
        except RecursionError:
            raise InvalidArgument("the chat template failed: too much recursion") from None
        except MemoryError:
            raise OutOfMemory("the chat template used too much memory") from None
        return "".join(parts)


def _line_of(error: BaseException) -> str:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f" in line {line}"


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidArgument("messages must be a list of objects with a role and a content")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidArgument(
                f"message {i} is {type(message).__name__}, expected an object with a role and a content"
            )
        if not isinstance(message.get("role"), str):
            raise InvalidArgument(f"message {i} has no role")


# Words of users are no control tokens
#
# What a template makes of a message is its own affair: it trims, splits, looks for words, joins. So the conversation is
# rendered with a marker, a private-use character, inside whatever in a message could be read as a control token or as a
# part of one; then the text is cut at control tokens, which a marker breaks, and the markers are taken out. A template
# whose output shows that it noticed the markers is rendered again with as few of them as are needed.


class ControlTokens(Protocol):
    """How the tokenizer finds control tokens in a text."""

    texts: Sequence[str]

    def find(self, text: str) -> list[tuple[int, int]]:
        """Position and id of each, in order."""


def render_for_ids(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    control: ControlTokens,
) -> tuple[str, str]:
    """The rendered text with markers, and the marker: cut the text at control tokens, then take the markers out of what
    lies between. The marker is empty if the text can be read as it stands."""
    plain = template.render(messages, **variables)
    marker = _unused_character(plain + template.source)
    best = None
    for mark in (_mark_firsts(control.texts, marker), _mark_occurrences(control.texts, marker)):
        changed = [_map_message(m, mark) for m in messages]
        others = {k: _map_texts(v, mark) if k in ("tools", "documents") else v for k, v in variables.items()}
        try:
            marked = template.render(changed, **others)
        except InvalidArgument:
            continue  # the template tests what a message says; fewer markers may pass
        best = marked
        if marked.replace(marker, "") == plain:
            break
    if best is None:
        raise InvalidArgument("a message spells a control token where the chat template depends on it")
    clean = best.replace(marker, "")
    found = [(start - best.count(marker, 0, start), token) for start, token in control.find(best)]
    return (clean, "") if control.find(clean) == found else (best, marker)


def _unused_character(text: str) -> str:
    for code in range(0xF8FF, 0xDFFF, -1):
        if chr(code) not in text:
            return chr(code)
    raise InvalidArgument("the conversation uses every private-use character")


def _map_message(message: Mapping[str, Any], mark: Callable[[str], str]) -> dict[str, Any]:
    # Templates make control tokens of roles: "<|user|>". Only of these.
    return {k: v if k == "role" and v in _KNOWN_ROLES else _map_texts(v, mark) for k, v in message.items()}


def _map_texts(value: Any, mark: Callable[[str], str]) -> Any:
    """Marks every text inside. Names by which templates ask for things keep their spelling: types, keys of one word."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {
            k if not isinstance(k, str) or _WORD.fullmatch(k) else mark(k): v
            if k == "type" and isinstance(v, str) and _WORD.fullmatch(v)
            else _map_texts(v, mark)
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_texts(v, mark) for v in value]
    return value


def _mark_firsts(tokens: Sequence[str], marker: str) -> Callable[[str], str]:
    """A marker after each character that can begin a control token, and before a text that can continue one: no part of
    the text can then be part of a control token, whatever the template joins to it."""
    firsts = {t[0] for t in tokens}
    inner = {c for t in tokens for c in t[1:].lower() + t[1:].upper()}
    table = {ord(c): c + marker for first in firsts for c in {first, *first.lower(), *first.upper()}}

    def mark(text: str) -> str:
        word = text.lstrip()
        before = text[: len(text) - len(word)]
        return before + (marker if word and word[0] in inner else "") + word.translate(table)

    return mark


def _mark_occurrences(tokens: Sequence[str], marker: str) -> Callable[[str], str]:
    """A marker inside each whole control token, inside a beginning of one at the end of the text, before an end of one
    at its start."""

    def mark(text: str) -> str:
        lower = text.lower()
        start = len(text) - len(text.lstrip())
        word = lower.strip()
        end = start + len(word)
        cuts: set[int] = set()
        for token in map(str.lower, tokens):
            at = lower.find(token)
            while at >= 0:
                cuts.add(at + 1)
                at = lower.find(token, at + 1)
            for size in range(1, len(token)):
                if word.endswith(token[:size]):
                    cuts.add(end - size + 1)
                if word.startswith(token[size:]) or (word and token[size:].startswith(word)):
                    cuts.add(start)
        edges = [0, *sorted(cuts), len(text)]
        return marker.join(text[a:b] for a, b in itertools.pairwise(edges))

    return mark
