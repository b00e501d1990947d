"""The same answers in other forms: Anthropic's messages, OpenAI's responses; with their own clients."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
from serving import FakeEngine, Running, error_of, fake_llm, running, until
from test_server_tools import HERMES

ANSWER = b'<think>so</think>\nLook: <tool_call>{"name": "weather", "arguments": {"at": "Paris"}}</tool_call>'
MESSAGE = {"role": "user", "content": "How is the weather?"}


@pytest.fixture(scope="module")
def fake_server():
    engine = FakeEngine()
    llm = fake_llm(engine, **{"tokenizer.chat_template": HERMES + "{# </think> #}"})
    with running(llm, keys=("k",), keep_alive=0.02) as server:
        server.client.headers["authorization"] = "Bearer k"
        server.engine = engine
        yield server


@pytest.fixture
def fake(fake_server: Running) -> Running:
    fake_server.engine.__init__(step=3)
    return fake_server


def prompt_of(fake: Running) -> str:
    return fake.service.llm.tokenizer.decode(fake.engine.submitted[-1].prompt)


# Anthropic

WEATHER = {"name": "weather", "description": "asks", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def claude(fake: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=fake.url, api_key="k", max_retries=0)


def test_messages(fake: Running, claude: anthropic.Anthropic) -> None:
    options = {"model": "test", "max_tokens": 50, "messages": [MESSAGE], "system": "be brief"}
    answer = claude.messages.create(**options)
    assert [(b.type, b.text) for b in answer.content] == [("text", "hello")]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 6)
    assert "system\nbe brief" in prompt_of(fake)
    assert answer.usage.input_tokens == len(fake.engine.submitted[-1].prompt)
    assert claude.messages.create(**{**options, "max_tokens": 2}).stop_reason == "max_tokens"
    stopped = claude.messages.create(
        **options, stop_sequences=["zz", "lo"], extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.5}
    )
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "lo", "hel")
    assert fake.engine.submitted[-1].sampling.top_k == 3
    with claude.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == "hello"
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason, final.usage) == ("hello", "end_turn", answer.usage)
    count = claude.messages.count_tokens(model="test", messages=[MESSAGE], system="be brief")
    assert count.input_tokens == answer.usage.input_tokens
    assert fake.engine.live == {}


def test_messages_with_tools(fake: Running, claude: anthropic.Anthropic) -> None:
    fake.engine.answer = ANSWER
    options = {"model": "test", "max_tokens": 200, "tools": [WEATHER]}
    answer = claude.messages.create(**options, messages=[MESSAGE])
    thinking, text, call = answer.content
    assert (thinking.thinking, text.text) == ("so", "Look: ")
    assert (call.name, call.input, answer.stop_reason) == ("weather", {"at": "Paris"}, "tool_use")
    with claude.messages.stream(**options, messages=[MESSAGE]) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    hidden = {"id", "parsed_output"}
    assert [b.model_dump(exclude=hidden) for b in final.content] == [
        b.model_dump(exclude=hidden) for b in answer.content
    ]
    fake.engine.answer = b"Sunny."
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [MESSAGE, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**options, messages=turns).content[0].text == "Sunny."
    prompt = prompt_of(fake)
    assert 'weather {"at": "Paris"}' in prompt and "<|im_start|>tool\nsunny<|im_end|>" in prompt


def test_refusals_of_messages(fake: Running, claude: anthropic.Anthropic) -> None:
    options = {"model": "test", "max_tokens": 50, "messages": [MESSAGE]}
    for param, changes in (
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"extra_body": {"temperature": -1}}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [MESSAGE, {"role": "assistant", "content": "It is"}]}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
        ("tools[0].name", {"tools": [{**WEATHER, "name": "a b"}]}),
        ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ("nonsense", {"extra_body": {"nonsense": 1}}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
    ):
        with pytest.raises(anthropic.BadRequestError) as caught:
            claude.messages.create(**{**options, **changes})
        body = caught.value.body
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert body["error"]["param"] == param, body
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(**options)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**{**options, "model": "other"})
    assert fake.engine.submitted == []


# OpenAI's responses

RESPONSE_TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}


@pytest.fixture
def client(fake: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=fake.url + "/v1", api_key="k", max_retries=0)


def without_ids(items: list) -> list[dict]:
    return [item.model_dump(exclude={"id", "call_id"}) for item in items]


def test_responses(fake: Running, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="test", input="hi", instructions="be brief")
    assert (answer.output_text, answer.status, answer.usage.output_tokens) == ("hello", "completed", 6)
    assert "system\nbe brief" in prompt_of(fake)
    short = client.responses.create(model="test", input="hi", max_output_tokens=2)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(client.responses.create(model="test", input="hi", stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "hello"
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert without_ids(events[-1].response.output) == without_ids(answer.output)
    with client.responses.stream(model="test", input="hi") as stream:
        assert stream.get_final_response().output_text == "hello"


def test_responses_with_tools(fake: Running, client: openai.OpenAI) -> None:
    fake.engine.answer = ANSWER
    turns: list = [MESSAGE]
    answer = client.responses.create(model="test", input=turns, tools=[RESPONSE_TOOL])
    reasoning, text, call = answer.output
    assert (reasoning.content[0].text, text.content[0].text) == ("so", "Look: ")
    assert (call.name, json.loads(call.arguments)) == ("weather", {"at": "Paris"})
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    with client.responses.stream(model="test", input=turns, tools=[RESPONSE_TOOL]) as stream:
        final = stream.get_final_response()
    assert [i.type for i in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].arguments == call.arguments
    fake.engine.answer = b"Sunny."
    turns += [i.model_dump(exclude_none=True) for i in answer.output]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    assert client.responses.create(model="test", input=turns, tools=[RESPONSE_TOOL]).output_text == "Sunny."
    prompt = prompt_of(fake)
    assert 'Look: <tool_call>weather {"at": "Paris"}' in prompt and "<|im_start|>tool\nsunny<|im_end|>" in prompt


def test_refusals_of_responses(fake: Running, client: openai.OpenAI) -> None:
    schema = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}
    for param, body in (
        ("input", {}),
        ("input", {"input": ""}),
        ("input", {"input": []}),
        ("max_output_tokens", {"input": "x", "max_output_tokens": 0}),
        ("text.format", {"input": "x", "text": schema}),
        ("tool_choice", {"input": "x", "tool_choice": "required"}),
        ("tool_choice", {"input": "x", "tools": [RESPONSE_TOOL], "tool_choice": {"type": "web_search"}}),
        ("tools[0].name", {"input": "x", "tools": [{**RESPONSE_TOOL, "name": ""}]}),
        ("tools[0].type", {"input": "x", "tools": [{"type": "web_search"}]}),
        ("previous_response_id", {"input": "x", "previous_response_id": "resp_1"}),
        ("store", {"input": "x", "store": True}),
    ):
        assert error_of(fake.post("/v1/responses", body), 400)["param"] == param, body
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="x")
    assert fake.engine.submitted == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_failures_in_a_stream(path: str) -> None:
    engine = FakeEngine()
    engine.held = True
    body = {
        "model": "test",
        "stream": True,
        **({"messages": [MESSAGE], "max_tokens": 9} if "mess" in path else {"input": "x"}),
    }
    with running(fake_llm(engine), keep_alive=0.02) as server:
        with server.client.stream("POST", path, json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == ": waiting"
            engine.dead = True
            names, data = zip(*[(x, json.loads(y[6:])) for x, y in _pairs(lines)], strict=True)
        assert names[-1] == "event: error" and data[-1]["type"] == "error"
        until(lambda: server.status is not None)


def _pairs(lines) -> list[tuple[str, str]]:
    kept = [line for line in lines if line.startswith(("event: ", "data: "))]
    return list(zip(kept[::2], kept[1::2], strict=True))
