"""What clients may send. A field that is not here, or asks for what shoal has not, is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StrictBool, StrictInt, StrictStr, field_validator

from shoal.errors import printable
from shoal.llm import SamplingParams
from shoal.server.errors import ApiError, bad, unsupported
from shoal.server.options import ServerOptions

TokenId = Annotated[StrictInt, Field(ge=0, le=(1 << 31) - 1)]
ToolName = Annotated[StrictStr, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
Penalty = Annotated[FiniteFloat, Field(ge=-2, le=2)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def check_model(name: str | None, options: ServerOptions) -> None:
    if name is not None and name != options.name:
        message = f'there is no model "{printable(name)}", this server has "{options.name}"'
        raise ApiError(404, message, "model", "model_not_found")


def check_stops(name: str, stops: Sequence[str], options: ServerOptions) -> None:
    if len(stops) > options.max_stops:
        raise bad(name, f"{name} has {len(stops)} texts, expected at most {options.max_stops}")
    if "" in stops:
        raise bad(name, f"{name} has an empty text")
    if any(len(stop) > options.max_stop_length for stop in stops):
        raise bad(name, f"{name} has a text of more than {options.max_stop_length} characters")


# Of these a template's variables may be: enough for switches and names, and nothing that spells a control token.
_WORDS = re.compile(r"[\w .,-]{0,64}")
_RESERVED = frozenset(
    ["messages", "tools", "documents", "chat_template", "add_generation_prompt", "bos_token", "eos_token"]
)


def check_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in variables.items():
        if name in _RESERVED:
            raise bad("chat_template_kwargs", f"chat_template_kwargs has {name}, which is not the client's to set")
        is_word = isinstance(value, str) and _WORDS.fullmatch(value)
        if not is_word and not isinstance(value, (bool, int, float, type(None))):
            message = f"chat_template_kwargs has {printable(name)}, expected a number, a boolean or a word or two"
            raise bad("chat_template_kwargs", message)
    return dict(variables)


class StreamOptions(_Model):
    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False  # of OpenAI's; we never pad

    @field_validator("include_obfuscation")
    @classmethod
    def _none(cls, value: bool) -> bool:
        if value:
            raise ValueError("shoal does not pad its chunks")
        return value


class Sampling(_Model):
    """What all ways to ask for text have in common. Beside OpenAI's: top_k, min_p, repetition_penalty, ignore_eos and
    stop_token_ids."""

    model: StrictStr | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=100)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    n: Annotated[StrictInt, Field(ge=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: StrictBool = False
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[FiniteFloat, Field(ge=-100, le=100)]] | None = None
    user: StrictStr | None = None  # for the operator of OpenAI's; of no effect here, nor there
    metadata: dict[str, StrictStr] | None = None

    def check(self, options: ServerOptions, vocab_size: int) -> None:
        check_model(self.model, options)
        if self.n is not None and self.n > options.max_n:
            raise bad("n", f"n is {self.n}, expected at most {options.max_n}")
        check_stops("stop", self._stops(), options)
        for token in self.logit_bias or {}:
            if not token.isascii() or not token.isdigit() or not int(token[:20]) < vocab_size:
                raise bad("logit_bias", f"logit_bias has {token[:20]!r}, expected token ids below {vocab_size}")
        for token in self.stop_token_ids or ():
            if token >= vocab_size:
                raise bad("stop_token_ids", f"stop_token_ids has {token}, expected token ids below {vocab_size}")
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options", "stream_options is set, but stream is not")

    def _stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def sampling(self, logprobs: int | None, max_tokens: int | None) -> SamplingParams:
        def value(name: str) -> Any:
            given = getattr(self, name)
            return getattr(SamplingParams, name) if given is None else given

        return SamplingParams(
            max_tokens=max_tokens,
            temperature=value("temperature"),
            top_k=value("top_k"),
            top_p=value("top_p"),
            min_p=value("min_p"),
            seed=self.seed,
            stop=self._stops(),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            logit_bias={int(i): bias for i, bias in (self.logit_bias or {}).items()},
            repetition_penalty=value("repetition_penalty"),
            presence_penalty=value("presence_penalty"),
            frequency_penalty=value("frequency_penalty"),
            n=value("n"),
        )

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Sampling):
    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool = False
    best_of: StrictInt | None = None
    suffix: StrictStr | None = None

    def check(self, options: ServerOptions, vocab_size: int) -> None:
        super().check(options, vocab_size)
        if self.suffix:
            raise unsupported("suffix", "suffix is not supported: text is continued, never filled in")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "best_of other than n is not supported")
        if self.echo and self.logprobs is not None:
            raise unsupported("logprobs", "logprobs of an echoed prompt are not supported")

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return list(self.prompt)


class ContentPart(_Model):
    type: StrictStr
    text: StrictStr | None = None

    model_config = ConfigDict(extra="allow")  # a picture has its own fields, and is refused by its type


class FunctionCall(_Model):
    name: StrictStr
    arguments: StrictStr = ""


class ToolCall(_Model):
    id: StrictStr | None = None
    type: Literal["function"] = "function"
    index: StrictInt | None = None
    function: FunctionCall


class Message(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[ContentPart] | None = None
    name: StrictStr | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    refusal: StrictStr | None = None  # an answer of OpenAI's sent back as it came has these two, empty
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(_Model):
    name: ToolName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(_Model):
    type: Literal["function"]
    function: Function


class ResponseFormat(_Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


@dataclass
class Bound:
    """What the whole of an answer must be, and the parameter that says so."""

    name: str
    schema: dict[str, Any] | None = None
    calls: frozenset[str] = frozenset()  # of these tools
    single: bool = False  # one call


def schema_of(kind: str, schema: Any) -> dict[str, Any]:
    if kind == "json_object":
        return {"type": "object"}
    if not isinstance(schema, dict):
        raise bad("response_format", "response_format has no schema")
    return schema


def forced_tools(choice: str | dict[str, Any] | None, names: Sequence[str]) -> frozenset[str]:
    """The tools of which one must be called. A choice is one of OpenAI's words, or names one tool in either form."""
    if choice == "required":
        return frozenset(names)
    if not isinstance(choice, dict):
        return frozenset()
    inner = choice.get("function")
    name = inner.get("name") if isinstance(inner, dict) else choice.get("name")
    if choice.get("type") != "function" or name not in names:
        raise bad("tool_choice", "tool_choice names none of the tools")
    return frozenset([name])


def check_calls(bound: Bound | None, tools: Sequence[Any], any_strict: bool) -> None:
    """What the forms have in common: an answer cannot be bound to a schema and free to call tools."""
    if any_strict and (bound is None or not bound.calls):
        raise unsupported("tools", "strict tools need a tool_choice that demands a call: a free answer is not bound")
    if bound is not None and not bound.calls and tools:
        raise unsupported(bound.name, f"{bound.name} together with tools is not supported")


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None  # prefixes are found by their tokens

    def check(self, options: ServerOptions, vocab_size: int) -> None:
        super().check(options, vocab_size)
        if len(self.messages) > options.max_messages:
            raise bad("messages", f"{len(self.messages)} messages, expected at most {options.max_messages}")
        if len(self.tools or ()) > options.max_tools:
            raise bad("tools", f"{len(self.tools or ())} tools, expected at most {options.max_tools}")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("top_logprobs", "top_logprobs is set, but logprobs is not")
        if self.tool_choice is not None and self.tool_choice != "none" and not self.tools:
            raise bad("tool_choice", "tool_choice is set, but tools is not")
        check_calls(self.bound(), self.tools or (), any(tool.function.strict for tool in self.tools or ()))
        if self.parallel_tool_calls is False and self.offered_tools and not self._forced:
            raise unsupported(
                "parallel_tool_calls", "parallel_tool_calls false needs a tool_choice that demands a call"
            )

    @property
    def _forced(self) -> frozenset[str]:
        return forced_tools(self.tool_choice, [tool.function.name for tool in self.tools or ()])

    def bound(self) -> Bound | None:
        """What the answer is bound to."""
        form = self.response_format
        if self._forced:
            return Bound("tool_choice", calls=self._forced, single=self.parallel_tool_calls is False)
        if form is None or form.type == "text":
            return None
        return Bound("response_format", schema=schema_of(form.type, (form.json_schema or {}).get("schema")))

    @property
    def max_answer(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]


class TokenizeRequest(_Model):
    content: StrictStr
    add_special: StrictBool = False
    parse_special: StrictBool = False


class DetokenizeRequest(_Model):
    tokens: list[TokenId]


class TemplateRequest(_Model):
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    add_generation_prompt: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None
