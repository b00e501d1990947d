"""Conversations in other forms: /v1/messages (Anthropic), /v1/responses (OpenAI)."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shoal.server.chat import begin_chat, streamed, whole
from shoal.server.events import while_listened
from shoal.server.messages import CountRequest, MessageAnswer, MessagesRequest
from shoal.server.prompts import encode_chat
from shoal.server.responses import ResponseAnswer, ResponsesRequest
from shoal.server.routing import STREAM_OR_JSON, JsonRoute, TheService

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/messages", responses=STREAM_OR_JSON)
async def messages(body: MessagesRequest, request: Request, service: TheService) -> Response:
    body.check(service.options)
    conversation, tools = body.conversation(), body.offered_tools()
    generation, (splitter,) = await begin_chat(
        request, service, conversation, tools, body.variables(), body.sampling(), "messages", body.bound()
    )
    answer = MessageAnswer(service.options.name, generation, splitter)
    if body.stream:
        return streamed(request, service, generation, answer.stream(), answer.error)
    return await whole(request, generation, answer.plain())


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request, service: TheService) -> dict[str, int]:
    body.check(service.options)
    asked = (service.llm, body.conversation(), body.offered_tools(), body.variables())
    prompt = await while_listened(request, service.in_thread(encode_chat, *asked))
    return {"input_tokens": len(prompt.ids)}


@router.post("/v1/responses", responses=STREAM_OR_JSON)
async def responses(body: ResponsesRequest, request: Request, service: TheService) -> Response:
    body.check(service.options)
    conversation, tools = body.conversation(), body.offered_tools()
    generation, (splitter,) = await begin_chat(
        request, service, conversation, tools, body.variables(), body.sampling(), "input", body.bound()
    )
    answer = ResponseAnswer(service.options.name, body, generation, splitter)
    if body.stream:
        return streamed(request, service, generation, answer.stream(), answer.error)
    return await whole(request, generation, answer.plain())
