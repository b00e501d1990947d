"""What all routes of conversations do, whatever their form: start an answer, and send it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shoal.errors import InvalidArgument, Unsupported
from shoal.llm import SamplingParams
from shoal.server.deltas import Splitter
from shoal.server.errors import ApiError, bad, to_json
from shoal.server.events import EventStream, error_event, while_listened
from shoal.server.generation import Generation, Service
from shoal.server.prompts import bind, encode_chat, splitter_for
from shoal.server.requests import Bound, Message


async def begin_chat(
    request: Request,
    service: Service,
    messages: Sequence[Message],
    tools: list[dict[str, Any]],
    variables: dict[str, Any],
    params: SamplingParams,
    name: str,
    bound: Bound | None,
) -> tuple[Generation, list[Splitter]]:
    """`params.n` answers to a conversation, running, each with what takes its text apart. `name`: the parameter that
    holds the conversation."""
    try:
        prompt = await while_listened(request, service.in_thread(encode_chat, service.llm, messages, tools, variables))
    except (InvalidArgument, Unsupported) as error:  # the template's objections
        raise ApiError(400, str(error), name, error.code) from None
    if bound is not None:
        try:
            params = bind(params, bound, service.llm, service.options, tools, prompt)
            await while_listened(request, service.in_thread(service.llm.matcher, params))  # here, as it can take long
        except InvalidArgument as error:
            raise bad(bound.name, str(error)) from None
    splitters = [splitter_for(service.llm, service.options, tools, prompt) for _ in range(params.n)]
    visit = request.scope["shoal"]
    visit.prompts = [prompt.ids]
    return service.start([prompt.ids], params, visit.key, name), splitters


async def whole(request: Request, generation: Generation, answer: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    request.scope["shoal"].generation = generation
    try:
        value = await while_listened(request, answer)
    finally:
        generation.cancel()
    return Response(to_json(value), media_type="application/json")


def streamed(
    request: Request,
    service: Service,
    generation: Generation,
    events: AsyncGenerator[bytes, None],
    on_error: Callable[[ApiError], bytes] = error_event,
) -> Response:
    request.scope["shoal"].generation = generation

    def progress() -> str:
        if generation.num_waiting:
            return "waiting"
        return f"prompt {generation.prompt_done}/{generation.num_prompt}"

    return EventStream(
        events,
        keep_alive=service.options.keep_alive,
        stall_timeout=service.options.stall_timeout,
        comment=progress,
        on_error=on_error,
        on_end=generation.cancel,
    )
