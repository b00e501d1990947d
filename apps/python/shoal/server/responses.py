"""OpenAI's responses: what may be asked, and the answer's form.

Nothing is stored; a conversation comes whole each time.
"""

from __future__ import annotations

import time
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
    check_calls,
    check_model,
    forced_tools,
    schema_of,
)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextPart(_Model):
    type: Literal["input_text", "output_text"]
    text: StrictStr
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(_Model):
    type: Literal["message"] = "message"
    id: StrictStr | None = None
    status: StrictStr | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | list[TextPart]
    phase: StrictStr | None = None


class CallItem(_Model):
    type: Literal["function_call"]
    id: StrictStr | None = None
    status: StrictStr | None = None
    call_id: StrictStr
    name: StrictStr
    arguments: StrictStr


class OutputItem(_Model):
    type: Literal["function_call_output"]
    id: StrictStr | None = None
    status: StrictStr | None = None
    call_id: StrictStr
    output: StrictStr | list[TextPart]


class ReasoningText(_Model):
    type: Literal["reasoning_text"]
    text: StrictStr


class ReasoningItem(_Model):
    type: Literal["reasoning"]
    id: StrictStr | None = None
    status: StrictStr | None = None
    summary: list[Any] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: None = None


class ResponseTool(_Model):
    type: Literal["function"]
    name: ToolName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class TextFormat(_Model):
    type: Literal["text", "json_object", "json_schema"]
    name: StrictStr | None = None
    description: StrictStr | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool | None = None


class TextOptions(_Model):
    format: TextFormat | None = None


class ReasoningOptions(_Model):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: None = None


Item = MessageItem | CallItem | OutputItem | ReasoningItem


class ResponsesRequest(_Model):
    model: StrictStr | None = None
    input: StrictStr | Annotated[list[Item], Field(min_length=1)]
    instructions: StrictStr | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=100)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    stream: StrictBool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # there is none; reasoning comes in the open
    metadata: dict[str, StrictStr] | None = None
    store: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None

    def check(self, options: ServerOptions) -> None:
        check_model(self.model, options)
        if self.input == "":
            raise bad("input", "input is empty")
        if len(self.input) > options.max_messages and not isinstance(self.input, str):
            raise bad("input", f"{len(self.input)} items, expected at most {options.max_messages}")
        if len(self.tools or ()) > options.max_tools:
            raise bad("tools", f"{len(self.tools or ())} tools, expected at most {options.max_tools}")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise bad("tool_choice", "tool_choice is set, but tools is not")
        check_calls(self.bound(), self.tools or (), any(tool.strict for tool in self.tools or ()))
        if self.parallel_tool_calls is False and self.offered_tools() and not self._forced:
            raise unsupported(
                "parallel_tool_calls", "parallel_tool_calls false needs a tool_choice that demands a call"
            )

    @property
    def _forced(self) -> frozenset[str]:
        return forced_tools(self.tool_choice, [tool.name for tool in self.tools or ()])

    def bound(self) -> Bound | None:
        form = None if self.text is None else self.text.format
        if self._forced:
            return Bound("tool_choice", calls=self._forced, single=self.parallel_tool_calls is False)
        if form is None or form.type == "text":
            return None
        return Bound("text.format", schema=schema_of(form.type, form.json_schema))

    def conversation(self) -> list[Message]:
        out: list[Message] = []
        if self.instructions:
            out.append(Message(role="system", content=self.instructions))
        if isinstance(self.input, str):
            return [*out, Message(role="user", content=self.input)]
        thought: str | None = None
        for item in self.input:
            if isinstance(item, ReasoningItem):
                thought = "\n".join(part.text for part in item.content or ()) or None
                continue
            if isinstance(item, MessageItem):
                out.append(Message(role=item.role, content=_joined(item.content)))
            elif isinstance(item, OutputItem):
                out.append(Message(role="tool", tool_call_id=item.call_id, content=_joined(item.output)))
            else:
                call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
                if out and out[-1].role == "assistant":  # text and calls of one answer are one message
                    out[-1].tool_calls = [*(out[-1].tool_calls or ()), call]
                else:
                    out.append(Message(role="assistant", content="", tool_calls=[call]))
            if thought is not None and out[-1].role == "assistant":
                out[-1].reasoning_content = thought
            thought = None
        return out

    def offered_tools(self) -> list[dict[str, Any]]:
        if self.tool_choice == "none":
            return []
        return [
            Tool(
                type="function",
                function=Function(name=tool.name, description=tool.description, parameters=tool.parameters),
            ).model_dump(exclude_none=True)
            for tool in self.tools or ()
        ]

    def variables(self) -> dict[str, Any]:
        effort = None if self.reasoning is None else self.reasoning.effort
        return {} if effort is None else {"reasoning_effort": effort}

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_output_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
        )


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


_PART = {"text": "output_text", "reasoning": "reasoning_text"}


class ResponseAnswer:
    def __init__(self, name: str, body: ResponsesRequest, generation: Generation, splitter: Splitter) -> None:
        self._name = name
        self._body = body
        self._generation = generation
        self._splitter = splitter
        self._blocks = Blocks()
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._item_ids: list[str] = []
        self._num_events = 0

    async def plain(self) -> dict[str, Any]:
        completion: Completion | None = None
        async for news in block_events(self._generation, self._splitter, self._blocks):
            completion = news if isinstance(news, Completion) else completion
        return self._response(completion)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async for news in block_events(self._generation, self._splitter, self._blocks):
            if not begun:
                begun = True
                yield self._event("response.created", response=self._response(None, empty=True))
                yield self._event("response.in_progress", response=self._response(None, empty=True))
            if isinstance(news, Completion):
                response = self._response(news)
                yield self._event(f"response.{response['status']}", response=response)
            else:
                for each in news:
                    for data in self._of_block(each):
                        yield data

    def error(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _event(self, name: str, /, **values: Any) -> bytes:
        self._num_events += 1
        return event({"type": name, "sequence_number": self._num_events - 1, **values}, name)

    def _of_block(self, news: BlockEvent) -> list[bytes]:
        block, item_id = news.block, self._item_id(news.index)
        place = {"item_id": item_id, "output_index": news.index}
        item = self._item(news.index, block)
        is_call = block.kind == "call"
        name = "function_call_arguments" if is_call else _PART[block.kind]
        part = place if is_call else {**place, "content_index": 0}
        extra = {"logprobs": []} if block.kind == "text" else {}
        if news.what == "begin":
            begun = {**item, "status": "in_progress", **({"arguments": ""} if is_call else {"content": []})}
            events = [self._event("response.output_item.added", output_index=news.index, item=begun)]
            if not is_call:
                events.append(self._event("response.content_part.added", **part, part=self._part(block.kind, "")))
            return events
        if news.what == "more":
            return [self._event(f"response.{name}.delta", **part, delta=news.text, **extra)]
        events = []
        if is_call:
            arguments = {"name": block.call["name"], "arguments": block.call["arguments"]}
            events.append(self._event(f"response.{name}.done", **part, **arguments))
        else:
            events.append(self._event(f"response.{name}.done", **part, text=block.text, **extra))
            events.append(self._event("response.content_part.done", **part, part=self._part(block.kind, block.text)))
        return [*events, self._event("response.output_item.done", output_index=news.index, item=item)]

    def _item_id(self, index: int) -> str:
        while len(self._item_ids) <= index:
            self._item_ids.append(uuid.uuid4().hex)
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[self._blocks.blocks[index].kind]
        return f"{prefix}_{self._item_ids[index]}"

    @staticmethod
    def _part(kind: str, text: str) -> dict[str, Any]:
        extra = {"annotations": [], "logprobs": []} if kind == "text" else {}
        return {"type": _PART[kind], "text": text, **extra}

    def _item(self, index: int, block: Block) -> dict[str, Any]:
        head = {"id": self._item_id(index), "status": "completed"}
        if block.kind == "call":
            call = block.call
            own = {"call_id": call["id"], "name": call["name"], "arguments": call["arguments"]}
            return {**head, "type": "function_call", **own}
        content = [self._part(block.kind, block.text)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _response(self, completion: Completion | None, empty: bool = False) -> dict[str, Any]:
        body = self._body
        status, details = "in_progress", None
        if completion is not None:
            status = "completed"
            if completion.finish_reason == "length":
                status, details = "incomplete", {"reason": "max_output_tokens"}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._name,
            "output": [] if empty else [self._item(i, block) for i, block in enumerate(self._blocks.blocks)],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": self._format()},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if completion is None else self._usage(),
        }

    def _format(self) -> dict[str, Any]:
        form = None if self._body.text is None else self._body.text.format
        return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._blocks.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
