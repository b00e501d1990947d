"""Reasoning and calls of tools: taken out of the text, in chunks as in the whole, and put into the next prompt."""

from __future__ import annotations

import json

import pytest
from serving import FakeEngine, error_of, fake_llm, running
from shoal.server.deltas import HermesCalls, JsonCalls, Reasoning, Splitter, join, parser_of

HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> "
    'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% if tools %}{{ tools | tojson }}"
    + '{"name": function name, "parameters": dictionary}'
    + "{% endif %}"
    + HERMES[-60:]
)
NAMES = frozenset(["weather", "time"])
TOOLS = [
    {"type": "function", "function": {"name": n, "parameters": {"type": "object", "properties": {}}}}
    for n in ("weather", "time")
]


def split(text: str, size: int, reasoning: Reasoning | None, calls: HermesCalls | JsonCalls | None) -> dict:
    """The message that the deltas of a text in pieces of `size` characters make."""
    splitter, message = Splitter(reasoning, calls), {}
    for at in range(0, len(text), size):
        join(message, splitter.push(text[at : at + size], False))
    join(message, splitter.push("", True))
    if "tool_calls" in message:
        message["tool_calls"] = [
            (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]
        ]
    return message


SIZES = [1, 2, 3, 7, 1000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("text", "open", "thought", "content"),
    [
        ("<think>\nhm</think>\n\nyes", False, "\nhm", "yes"),
        ("hm</think>yes", True, "hm", "yes"),
        ("<think>never ends</thin", False, "never ends</thin", None),
        ("no reasoning < here", False, None, "no reasoning < here"),
        ("  <th", False, None, "  <th"),
        ("yes <think>late</think>", False, None, "yes <think>late</think>"),
        ("<think></think>", False, None, None),
        ("", False, None, None),
    ],
)
def test_reasoning(size: int, text: str, open: bool, thought: str | None, content: str | None) -> None:
    message = split(text, size, Reasoning(open), None)
    assert (message.get("reasoning_content"), message.get("content")) == (thought, content)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"at": "é</x>"}}\n</tool_call>', None, [("weather", {"at": "é</x>"})]),
        (
            'Look:\n<tool_call>{"name": "time", "arguments": {}}</tool_call>\n<tool_call>{"name": "weather"}</tool_call>',
            "Look:\n",
            [("time", {}), ("weather", {})],
        ),
        ('<tool_call>{"name": "time", "arguments": {"a": 1}}', None, [("time", {"a": 1})]),  # cut by a stop string
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', []),
        ("<tool_call>not json</tool_call> after", "<tool_call>not json</tool_call> after", []),
        ("a < b <tool", "a < b <tool", []),
        ('<tool_call>{"name": "time", "arguments": [1]}</tool_call>', '<tool_call>{"name": "time", "arguments": [1]}</tool_call>', []),
        ("plain", "plain", []),
    ],
)  # fmt: skip
def test_hermes_calls(size: int, text: str, content: str | None, calls: list) -> None:
    message = split(text, size, None, HermesCalls(NAMES))
    assert (message.get("content"), message.get("tool_calls", [])) == (content, calls)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "weather", "parameters": {"at": "x"}}', None, [("weather", {"at": "x"})]),
        (
            ' {"name": "time", "parameters": {}}; {"name": "weather", "parameters": {}}',
            None,
            [("time", {}), ("weather", {})],
        ),
        ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
        ('{"answer": 42', '{"answer": 42', []),
        ('say {"name": "time", "parameters": {}}', 'say {"name": "time", "parameters": {}}', []),
    ],
)
def test_llama_calls(size: int, text: str, content: str | None, calls: list) -> None:
    message = split(text, size, None, JsonCalls(NAMES))
    assert (message.get("content"), message.get("tool_calls", [])) == (content, calls)


def test_reasoning_before_a_call() -> None:
    text = '<think>which?</think>\n<tool_call>{"name": "time"}</tool_call>'
    for size in SIZES:
        message = split(text, size, Reasoning(False), HermesCalls(NAMES))
        assert message == {"reasoning_content": "which?", "tool_calls": [("time", {})]}


def test_the_form_is_told_by_the_template() -> None:
    assert parser_of(HERMES) == "hermes" and parser_of(LLAMA) == "llama_json"
    assert parser_of("{{ messages }}") is None and parser_of("{{ tools }}<tool_call><function=x></tool_call>") is None


def tool_server(template: str, answer: bytes, **options: object):
    engine = FakeEngine(answer, step=3)
    llm = fake_llm(engine, **{"tokenizer.chat_template": template})
    return engine, running(llm, **options)


def test_a_loop_of_calls_with_the_openai_client() -> None:
    import openai

    engine, server = tool_server(
        HERMES, b'<tool_call>\n{"name": "weather", "arguments": {"at": "Paris"}}\n</tool_call>'
    )
    with server as running_server:
        client = openai.OpenAI(base_url=running_server.url + "/v1", api_key="none", max_retries=0)
        messages: list = [{"role": "user", "content": "How is the weather?"}]
        options = {"model": "test", "messages": messages, "tools": TOOLS}
        answer = client.chat.completions.create(**options)
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
        assert call.function.name == "weather" and json.loads(call.function.arguments) == {"at": "Paris"}

        chunks = list(client.chat.completions.create(**options, stream=True))
        calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
        assert [c.function.arguments for c in calls] == [call.function.arguments] and calls[0].index == 0
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

        messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        engine.answer = b"It is sunny."
        answer = client.chat.completions.create(**options)
        assert answer.choices[0].message.content == "It is sunny." and answer.choices[0].finish_reason == "stop"
        prompt = running_server.service.llm.tokenizer.decode(engine.submitted[-1].prompt)
        assert '<tool_call>weather {"at": "Paris"}</tool_call>' in prompt and "<|im_start|>tool\nsunny" in prompt
        assert client.chat.completions.create(**options, tool_choice="none").choices[0].message.content
        assert "<tools>" not in running_server.service.llm.tokenizer.decode(engine.submitted[-1].prompt)


def test_reasoning_of_a_model() -> None:
    template = HERMES + "{# </think> #}"
    _, server = tool_server(template, b"<think>so</think>\n\nyes")
    with server as fake:
        message = fake.chat().json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", "yes")
        deltas = [
            c["choices"][0]["delta"]
            for c in fake.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        ]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "so"
        assert "".join(d.get("content", "") for d in deltas) == "yes"
    _, server = tool_server(template.replace("assistant\n", "assistant\n<think>\n"), b"so</think>yes")
    with server as fake:
        message = fake.chat().json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", "yes")
    _, server = tool_server(template, b"<think>so</think>yes", reasoning="none")
    with server as fake:
        assert fake.chat().json()["choices"][0]["message"]["content"] == "<think>so</think>yes"


def test_what_cannot_be_promised_is_refused() -> None:
    _, server = tool_server(HERMES, b"x")
    strict = [{"type": "function", "function": {"name": "f", "strict": True}}]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    with server as fake:
        for param, body in (
            ("tools", {"tools": strict}),
            ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": False}),
            ("response_format", {"tools": TOOLS, "response_format": schema}),
        ):
            error = error_of(fake.chat(**body), 400)
            assert (error["param"], error["code"]) == (param, "unsupported")
        for param, body in (
            ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
            ("tools[0].type", {"tools": [{"type": "magic", "function": {"name": "f"}}]}),
            ("tools", {"tools": TOOLS * 65}),
            ("tool_choice", {"tool_choice": "required"}),
            ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
        ):
            assert error_of(fake.chat(**body), 400)["param"] == param
    _, server = tool_server(HERMES.replace("assistant\n", "assistant\n<think>\n"), b"x")
    with server as fake:
        for param, body in (
            ("response_format", {"response_format": schema}),
            ("tool_choice", {"tools": TOOLS, "tool_choice": "required"}),
        ):
            error = error_of(fake.chat(**body), 400)
            assert (error["param"], error["code"]) == (param, "unsupported")


def test_tools_switched_off() -> None:
    _, server = tool_server(HERMES, b"x", tool_parser="none")
    with server as fake:
        assert error_of(fake.chat(tools=TOOLS), 400)["param"] == "tools"
