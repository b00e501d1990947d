"""Text to token ids and back, in llama.cpp's words: /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from shoal.server.errors import bad
from shoal.server.events import while_listened
from shoal.server.prompts import template_messages, template_of
from shoal.server.requests import DetokenizeRequest, TemplateRequest, TokenizeRequest, check_variables
from shoal.server.routing import JsonRoute, TheService

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, service: TheService) -> dict[str, list[int]]:
    """`add_special`: with what the model expects around a text. `parse_special`: control tokens in it are found."""
    tokenizer = service.llm.tokenizer
    encode = tokenizer.encode if body.parse_special else tokenizer.encode_plain
    return {"tokens": await while_listened(request, service.in_thread(encode, body.content, body.add_special))}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, service: TheService) -> dict[str, str]:
    tokenizer, vocab_size = service.llm.tokenizer, service.llm.info["vocab_size"]
    outside = next((i for i in body.tokens if i >= vocab_size), None)
    if outside is not None:
        raise bad("tokens", f"tokens has {outside}, outside the vocabulary of {vocab_size}")
    return {"content": await while_listened(request, service.in_thread(tokenizer.decode, body.tokens))}


@router.post("/apply-template")
async def apply_template(body: TemplateRequest, request: Request, service: TheService) -> dict[str, str]:
    template = template_of(service.llm)
    variables: dict[str, Any] = check_variables(body.chat_template_kwargs or {})

    def render() -> str:
        variables.update(add_generation_prompt=body.add_generation_prompt)
        if body.tools:
            variables.update(tools=[tool.model_dump(exclude_none=True) for tool in body.tools])
        return service.llm.tokenizer.apply_chat_template(template_messages(body.messages, template), **variables)

    return {"prompt": await while_listened(request, service.in_thread(render))}
