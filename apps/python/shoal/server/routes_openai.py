"""/v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from shoal.server.answers import Answers, ChatAnswers, TextAnswers
from shoal.server.chat import begin_chat, streamed, whole
from shoal.server.errors import ApiError, bad
from shoal.server.events import while_listened
from shoal.server.generation import Generation, Service
from shoal.server.requests import ChatRequest, CompletionRequest, Sampling, check_variables
from shoal.server.routing import STREAM_OR_JSON, JsonRoute, TheService

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses=STREAM_OR_JSON)
async def chat(body: ChatRequest, request: Request, service: TheService) -> Response:
    body.check(service.options, service.llm.info["vocab_size"])
    tools = body.offered_tools
    variables = check_variables(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = body.sampling(logprobs, body.max_answer)
    generation, splitters = await begin_chat(
        request, service, body.messages, tools, variables, params, "messages", body.bound()
    )
    answers = ChatAnswers(service.options.name, service.llm.tokenizer, logprobs is not None, splitters)
    return await respond(request, service, generation, answers, body)


@router.post("/v1/completions", responses=STREAM_OR_JSON)
async def completions(body: CompletionRequest, request: Request, service: TheService) -> Response:
    llm = service.llm
    body.check(service.options, llm.info["vocab_size"])
    prompts = body.prompts()
    if not prompts or not all(prompts):
        raise bad("prompt", "prompt is empty")

    def encode() -> tuple[list[list[int]], list[str]]:
        ids = [llm.tokenizer.encode_plain(p, add_special_tokens=True) if isinstance(p, str) else p for p in prompts]
        if not body.echo:
            return ids, [""] * len(ids)
        return ids, [p if isinstance(p, str) else llm.tokenizer.decode(p) for p in prompts]

    ids, echoes = await while_listened(request, service.in_thread(encode))
    # OpenAI's default of this route is 16.
    params = body.sampling(body.logprobs, 16 if body.max_tokens is None else body.max_tokens)
    visit = request.scope["shoal"]
    visit.prompts = ids
    generation = service.start(ids, params, visit.key, "prompt")
    tokenizer = llm.tokenizer if llm.has_tokenizer else None
    echoes = [echo for echo in echoes for _ in range(params.n)]
    answers = TextAnswers(service.options.name, tokenizer, body.logprobs is not None, echoes)
    return await respond(request, service, generation, answers, body)


async def respond(
    request: Request, service: Service, generation: Generation, answers: Answers, body: Sampling
) -> Response:
    if body.stream:
        return streamed(request, service, generation, answers.stream(generation, body.wants_usage))
    return await whole(request, generation, answers.plain(generation))


def model_object(service: Service) -> dict[str, Any]:
    return {
        "id": service.options.name,
        "object": "model",
        "created": service.created,
        "owned_by": "shoal",
        "max_model_len": service.llm.max_context,
    }


@router.get("/v1/models")
async def models(service: TheService) -> dict[str, Any]:
    return {"object": "list", "data": [model_object(service)]}


@router.get("/v1/models/{model}")
async def model(model: str, service: TheService) -> dict[str, Any]:
    if model != service.options.name:
        raise ApiError(404, f"there is no model {model[:80]!r}", "model", "model_not_found")
    return model_object(service)
