"""Anthropic's messages: what may be asked, and the answer's form."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StrictBool, StrictInt, StrictStr

from shoal.llm import Completion, SamplingParams
from shoal.server.blocks import Block, BlockEvent, Blocks, block_events
from shoal.server.deltas import Splitter
from shoal.server.errors import ApiError, bad, unsupported
from shoal.server.events import event
from shoal.server.generation import Generation
from shoal.server.options import ServerOptions
from shoal.server.requests import (
    Bound,
    Function,
    FunctionCall,
    Message,
    Tool,
    ToolCall,
    ToolName,
    check_model,
    check_stops,
    forced_tools,
)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Cached(_Model):
    cache_control: dict[str, Any] | None = None  # prefixes are found again without being told


class TextBlock(_Cached):
    type: Literal["text"]
    text: StrictStr
    citations: None = None


class ThinkingBlock(_Model):
    type: Literal["thinking"]
    thinking: StrictStr
    signature: StrictStr = ""


class ToolUseBlock(_Cached):
    type: Literal["tool_use"]
    id: StrictStr
    name: StrictStr
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class ToolResultBlock(_Cached):
    type: Literal["tool_result"]
    tool_use_id: StrictStr
    content: StrictStr | list[TextBlock] = ""
    is_error: StrictBool = False


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class AnthropicMessage(_Model):
    role: Literal["user", "assistant"]
    content: StrictStr | list[ContentBlock]


class AnthropicTool(_Cached):
    type: Literal["custom"] | None = None
    name: ToolName
    description: StrictStr | None = None
    input_schema: dict[str, Any]
    strict: Literal[False] | None = None


class ToolChoice(_Model):
    type: Literal["auto", "none", "any", "tool"]
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool | None = None


class Thinking(_Model):
    type: Literal["adaptive", "disabled", "enabled"]
    budget_tokens: StrictInt | None = None
    display: Literal["summarized"] | None = None


class CountRequest(_Model):
    model: StrictStr
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: StrictStr | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    def check(self, options: ServerOptions) -> None:
        check_model(self.model, options)
        if len(self.messages) > options.max_messages:
            raise bad("messages", f"{len(self.messages)} messages, expected at most {options.max_messages}")
        if len(self.tools or ()) > options.max_tools:
            raise bad("tools", f"{len(self.tools or ())} tools, expected at most {options.max_tools}")
        if self.messages[-1].role == "assistant":
            raise unsupported(
                "messages", "a last message of the assistant, which the answer continues, is not supported"
            )
        self.bound()
        if (
            self.tool_choice is not None
            and self.tool_choice.type == "auto"
            and self.tool_choice.disable_parallel_tool_use
        ):
            raise unsupported("tool_choice", "disable_parallel_tool_use needs a tool_choice that demands a call")
        if self.thinking is not None and self.thinking.type == "enabled":
            raise unsupported("thinking", "thinking can be adaptive or disabled: a budget for it cannot be kept")

    def conversation(self) -> list[Message]:
        out = []
        system = _joined(self.system)
        if system:
            out.append(Message(role="system", content=system))
        for message in self.messages:
            out += _converted(message)
        return out

    def offered_tools(self) -> list[dict[str, Any]]:
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return [
            Tool(
                type="function",
                function=Function(name=tool.name, description=tool.description, parameters=tool.input_schema),
            ).model_dump(exclude_none=True)
            for tool in self.tools or ()
        ]

    def bound(self) -> Bound | None:
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return None
        names = [tool.name for tool in self.tools or ()]
        if not names:
            raise bad("tool_choice", "tool_choice is set, but tools is not")
        own = "required" if choice.type == "any" else {"type": "function", "name": choice.name}
        return Bound("tool_choice", calls=forced_tools(own, names), single=bool(choice.disable_parallel_tool_use))

    def variables(self) -> dict[str, Any]:
        # The name by which templates of models that can do without reasoning are told.
        return {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}


class MessagesRequest(CountRequest):
    max_tokens: Annotated[StrictInt, Field(ge=1)]
    stream: StrictBool = False
    stop_sequences: list[StrictStr] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[StrictInt, Field(ge=0, lt=1 << 31)] = 0
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def check(self, options: ServerOptions) -> None:
        super().check(options)
        check_stops("stop_sequences", self.stop_sequences or (), options)

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences or (),
        )


def _joined(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _converted(message: AnthropicMessage) -> list[Message]:
    """Results of tools are messages of their own, before what the user says with them."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    results, texts, thoughts, calls = [], [], [], []
    for block in message.content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            call = FunctionCall(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
            calls.append(ToolCall(id=block.id, function=call))
        else:
            results.append(Message(role="tool", tool_call_id=block.tool_use_id, content=_joined(block.content)))
    if not texts and not thoughts and not calls:
        return results
    own = Message(
        role=message.role,
        content="\n".join(texts),
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) if thoughts else None,
    )
    return [*results, own]


_BEGINNINGS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessageAnswer:
    def __init__(self, name: str, generation: Generation, splitter: Splitter) -> None:
        self._generation = generation
        self._splitter = splitter
        self._blocks = Blocks()
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": name}

    async def plain(self) -> dict[str, Any]:
        completion: Completion | None = None
        async for news in block_events(self._generation, self._splitter, self._blocks):
            completion = news if isinstance(news, Completion) else completion
        assert completion is not None
        content = [self._block(block) for block in self._blocks.blocks]
        return {**self._head, "content": content, **self._end(completion), "usage": self._usage()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async for news in block_events(self._generation, self._splitter, self._blocks):
            if not begun:
                begun = True
                start = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
                yield self._event("message_start", message={**start, "usage": {**self._usage(), "output_tokens": 0}})
            if isinstance(news, Completion):
                yield self._event("message_delta", delta=self._end(news), usage=self._usage())
                yield self._event("message_stop")
            else:
                for each in news:
                    yield self._of_block(each)

    @staticmethod
    def _event(name: str, /, **values: Any) -> bytes:
        return event({"type": name, **values}, name)

    @classmethod
    def error(cls, error: ApiError) -> bytes:
        return event(error.anthropic_body(), "error")

    def _of_block(self, news: BlockEvent) -> bytes:
        kind = news.block.kind
        if news.what == "begin":
            begin = _BEGINNINGS.get(kind) or {**self._block(news.block), "input": {}}
            return self._event("content_block_start", index=news.index, content_block=begin)
        if news.what == "end":
            return self._event("content_block_stop", index=news.index)
        delta = {
            "text": {"type": "text_delta", "text": news.text},
            "reasoning": {"type": "thinking_delta", "thinking": news.text},
            "call": {"type": "input_json_delta", "partial_json": news.text},
        }[kind]
        return self._event("content_block_delta", index=news.index, delta=delta)

    @staticmethod
    def _block(block: Block) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        call = block.call
        return {"type": "tool_use", "id": call["id"], "name": call["name"], "input": json.loads(call["arguments"])}

    def _end(self, completion: Completion) -> dict[str, Any]:
        if self._blocks.has_calls and completion.finish_reason == "stop":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if completion.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop}
        return {
            "stop_reason": "max_tokens" if completion.finish_reason == "length" else "end_turn",
            "stop_sequence": None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }
