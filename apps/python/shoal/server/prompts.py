"""From what clients say to token ids. Nothing that a client says becomes a control token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import Unsupported
from shoal.llm import LLM, SamplingParams
from shoal.server.deltas import PARSERS, THINK_BEGIN, THINK_END, Reasoning, Splitter, call_grammar, parser_of
from shoal.server.errors import bad, unsupported
from shoal.server.options import ServerOptions
from shoal.server.requests import Bound, Message


def template_of(llm: LLM) -> str:
    template = llm.tokenizer.chat_template  # Unsupported without a tokenizer
    if template is None:
        raise Unsupported("the model has no chat template; /v1/completions continues plain text")
    return template


def template_messages(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """Messages as templates of Hugging Face know them."""
    out = []
    for i, message in enumerate(messages):
        role = message.role
        if role == "developer" and "developer" not in template:
            role = "system"  # OpenAI's new name of it
        entry: dict[str, Any] = {"role": role, "content": _text(message, i)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(message, name) is not None:
                entry[name] = getattr(message, name)
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        out.append(entry)
    return out


def _text(message: Message, index: int) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise bad(f"messages[{index}].content", f"messages[{index}].content is missing")
        return ""
    if isinstance(message.content, str):
        return message.content
    for k, part in enumerate(message.content):
        place = f"messages[{index}].content[{k}]"
        if part.type != "text":
            raise unsupported(place, f"{place} is {part.type[:40]!r}; the models that run here read text only")
        if part.text is None:
            raise bad(place, f"{place}.text is missing")
    return "\n".join(part.text or "" for part in message.content)


def _arguments(text: str) -> Any:
    """Templates write the arguments of a call as JSON themselves; what is no object stays the text it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


@dataclass
class ChatPrompt:
    ids: list[int]
    thinks: bool  # the prompt ends inside the reasoning


def encode_chat(
    llm: LLM, messages: Sequence[Message], tools: list[dict[str, Any]], variables: dict[str, Any]
) -> ChatPrompt:
    template = template_of(llm)
    entries = template_messages(messages, template)
    ids = llm.tokenizer.encode_chat(entries, tools=tools or None, **variables)
    ending = llm.tokenizer.decode(ids[-8:]).rstrip()
    return ChatPrompt(ids, ending.endswith(THINK_BEGIN))


def splitter_for(llm: LLM, options: ServerOptions, tools: list[dict[str, Any]], prompt: ChatPrompt) -> Splitter:
    template = template_of(llm)
    thinks = options.reasoning == "think" or (options.reasoning == "auto" and THINK_END in template)
    calls = None
    if tools:
        names = frozenset(tool["function"]["name"] for tool in tools)
        calls = PARSERS[tool_parser(options, template)](names)
    return Splitter(Reasoning(prompt.thinks) if thinks else None, calls)


def bind(
    params: SamplingParams,
    bound: Bound,
    llm: LLM,
    options: ServerOptions,
    tools: list[dict[str, Any]],
    prompt: ChatPrompt,
) -> SamplingParams:
    if prompt.thinks:
        raise unsupported(bound.name, f"{bound.name} cannot be kept while the model reasons before its answer")
    if bound.schema is not None:
        return replace(params, json_schema=bound.schema)
    from shoal.grammar import check_schema

    chosen = [tool for tool in tools if tool["function"]["name"] in bound.calls]
    for tool in chosen:
        check_schema(tool["function"].get("parameters", {}))
    return replace(params, grammar=call_grammar(tool_parser(options, template_of(llm)), chosen, bound.single))


def tool_parser(options: ServerOptions, template: str) -> str:
    """Unsupported, by name, where tools could be offered but their calls not be read."""
    if options.tool_parser == "none":
        raise unsupported("tools", "tools are switched off on this server")
    if options.tool_parser != "auto":
        return options.tool_parser
    found = parser_of(template)
    if found is None:
        raise unsupported(
            "tools", "the model's chat template has no place for tools, or a form of calls that is not read"
        )
    return found
