"""The Jinja2 environment of chat templates: set up as transformers sets it up, and bounded.

A template comes with a model file and is not trusted. Jinja2's immutable sandbox keeps it from Python's objects; what
is added here keeps it from running for ever and from filling the memory: a budget of loop iterations, and a bound on
the length of every text it can build.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.lexer import Token
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from shoal.errors import InvalidArgument, ModelFormatError, printable

MAX_ITERATIONS = 1_000_000  # of all loops and macros of one rendering, ranges counted in full
MAX_SECONDS = 10.0  # of one rendering, looked at in loops and macros
MAX_LENGTH = 16 << 20  # characters of a text, items of a list

_WIDE_FORMAT = re.compile(r"\d{5,}|\*|\{[^{}]*\{")
# Filters that pad, and that no chat template has been seen to use.
_REMOVED_FILTERS = ("batch", "center", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")


def _bounded(length: int) -> None:
    if length > MAX_LENGTH:
        raise SecurityError(f"it builds a text or list of {length} items; at most {MAX_LENGTH}")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise SecurityError("it formats to a width of its own choice")


def _check_text_method(text: str, name: str, arguments: tuple[Any, ...]) -> None:
    if name == "replace" and len(arguments) >= 2:
        _bounded(len(text) + text.count(str(arguments[0])) * len(str(arguments[1])))
    elif name == "join" and arguments and isinstance(arguments[0], (list, tuple)):
        _bounded(sum(len(s) for s in arguments[0] if isinstance(s, str)) + len(text) * len(arguments[0]))
    elif name in ("center", "expandtabs", "ljust", "rjust", "zfill") and arguments and isinstance(arguments[0], int):
        _bounded(arguments[0] * (text.count("\t") if name == "expandtabs" else 1))
    elif name == "translate":
        raise SecurityError("translate is not available")


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's text for training; here it is only its contents."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock])
        self._rendering = threading.local()
        self.filters["tojson"] = _tojson
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name in ("format", "indent", "join", "replace"):
            self.filters[name] = _checked_filter(name, self.filters[name])
        self.globals.pop("lipsum", None)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, range=self._range)

    # Bounds

    def begin(self) -> None:
        """Starts the budget of a rendering on this thread."""
        self._rendering.left = MAX_ITERATIONS
        self._rendering.until = time.monotonic() + MAX_SECONDS

    def tick(self, count: int = 1) -> str:
        left = self._rendering.left - count
        self._rendering.left = left
        if left < 0:
            raise SecurityError(f"it loops more than {MAX_ITERATIONS} times")
        if left % 16 == 0 and time.monotonic() > self._rendering.until:
            raise SecurityError(f"it runs for more than {MAX_SECONDS:g} seconds")
        return ""

    def ticking(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.tick()
            yield value

    def _range(self, *arguments: int) -> range:
        values = range(*arguments)
        self.tick(len(values))
        return values

    def joined(self, *parts: Any) -> str:
        texts = [str(p) for p in parts]
        _bounded(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 1 << 16 and abs(right) <= 64):
            raise SecurityError("it raises a number to a huge power")
        if operator == "*":
            for sequence, factor in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(factor, int):
                    _bounded(len(sequence) * factor)
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
                raise SecurityError("it computes a huge number")
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _bounded(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_text_method(owner, getattr(__obj, "__name__", ""), args)
        return super().call(__context, __obj, *args, **kwargs)

    def format_string(self, s: str, args: Any, kwargs: Any, format_func: Any = None) -> str:
        _check_format(s)
        return super().format_string(s, args, kwargs, format_func)

    # Parsing

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            if isinstance(node, nodes.For):
                node.iter = _call("ticking", [node.iter], node.lineno)
            if not isinstance(node, nodes.For) or node.recursive:
                node.body.insert(0, nodes.ExprStmt(_call("tick", [], node.lineno)).set_lineno(node.lineno))
        _replace_concat(tree)
        tree.set_environment(self)
        return tree

    def parse_template(self, source: str) -> jinja2.Template:
        """ModelFormatError with line and column if the template cannot be parsed."""
        try:
            return self.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            line, column = _place(self, source, error)
            raise ModelFormatError(f"chat template, line {line}, column {column}: {error.message}") from None
        except RecursionError:
            raise ModelFormatError("chat template: nested too deeply") from None


def _call(method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    """A call of one of the sandbox's own methods, by a way that no variable of the template can hide."""
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None).set_lineno(line)


def _replace_concat(node: nodes.Node) -> None:
    """a ~ b becomes a call that looks at the length: doubling a text in a loop is the shortest way to fill a memory."""
    for name, value in list(node.iter_fields()):
        items = value if isinstance(value, list) else [value]
        replaced = []
        for item in items:
            if isinstance(item, nodes.Node):
                _replace_concat(item)
            if isinstance(item, nodes.Concat):
                item = _call("joined", item.nodes, item.lineno)
            replaced.append(item)
        setattr(node, name, replaced if isinstance(value, list) else replaced[0])


def _place(environment: jinja2.Environment, source: str, error: jinja2.TemplateSyntaxError) -> tuple[int, int]:
    """Line and column of a syntax error. Jinja2 knows the line only, so the template is parsed again with its tokens
    counted: the last one taken on that line is where it went wrong."""
    places: list[tuple[int, int]] = []  # line, column after the token's first character
    taken = 0

    def positions() -> Iterator[tuple[int, str, str]]:
        at = 0
        for line, kind, value in environment.lexer.tokeniter(source, None):
            found = source.find(value, at)
            start = at if found < 0 else found
            at = start + len(value)
            if kind not in ("whitespace", "data"):
                places.append((source.count("\n", 0, start) + 1, start - source.rfind("\n", 0, start)))
            yield line, kind, value

    def counted(tokens: Iterator[Token]) -> Iterator[Token]:
        nonlocal taken
        for token in tokens:
            taken = len(places)
            yield token

    try:
        parser = Parser(environment, source)
        parser.stream._iter = counted(environment.lexer.wrap(positions()))
        parser.stream.closed = False
        next(parser.stream)
        parser.parse()
    except jinja2.TemplateSyntaxError:
        pass
    line = error.lineno or 1
    columns = [column for place, column in places[: max(taken, 1)] if place == line]
    return line, columns[-1] if columns else 1


def _checked_filter(name: str, original: Any) -> Any:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        # Some of Jinja's filters take the environment or context first.
        values = args[1:] if getattr(original, "jinja_pass_arg", None) is not None else args
        text = str(values[0]) if values and not isinstance(values[0], (list, tuple)) else ""
        if name == "format":
            _check_format(text)
        elif name == "replace":
            _check_text_method(text, "replace", tuple(values[1:]))
        elif name == "join" and values and isinstance(values[0], (list, tuple)):
            separator = str(values[1]) if len(values) > 1 else str(kwargs.get("d", ""))
            _check_text_method(separator, "join", ([str(v) for v in values[0]],))
        elif name == "indent":
            width = values[1] if len(values) > 1 else kwargs.get("width", 4)
            _bounded((len(width) if isinstance(width, str) else int(width)) * (text.count("\n") + 1))
        return original(*args, **kwargs)

    if hasattr(original, "jinja_pass_arg"):
        guarded.jinja_pass_arg = original.jinja_pass_arg
    return guarded


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
    if (isinstance(indent, int) and indent > 64) or (isinstance(indent, str) and len(indent) > 64):
        raise SecurityError("it indents JSON too far")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise InvalidArgument(printable(message, 500))  # text of a file: no control characters reach a terminal


def _strftime_now(pattern: str) -> str:
    _check_format(pattern)
    return datetime.now().strftime(pattern)
