"""Answers bound to a schema or a grammar: right in form always, and drawn as masking would draw them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from serving import Running, error_of, running

from shoal import LLM, InvalidArgument, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Describe a person as JSON."}]
GREEDY = SamplingParams(max_tokens=60, temperature=0)


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age", "tags"} and len(person["name"]) <= 12
    assert isinstance(person["age"], int) and 0 <= person["age"] <= 150
    assert set(person["tags"]) <= {"a", "b"} and 1 <= len(person["tags"]) <= 2


def test_answers_keep_to_a_schema(llm: LLM) -> None:
    params = SamplingParams(max_tokens=150, temperature=1.2, seed=1, json_schema=PERSON, n=2)
    completions = llm.generate([llm.tokenizer.encode_chat(MESSAGES)], params)
    for completion in completions:
        assert completion.finish_reason == "stop"
        check_person(completion.text)
    assert completions[0].text != completions[1].text
    again = llm.generate([llm.tokenizer.encode_chat(MESSAGES)], params)
    assert [c.token_ids for c in again] == [c.token_ids for c in completions]
    stats = llm.stats()
    assert stats["num_running"] == stats["num_waiting"] == 0


def test_greedy_tokens_are_those_of_masking(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=0, grammar='start: "Sure" /[a-z ]+/ "." ')
    ids = llm.tokenizer.encode("The capital of France is")
    (completion,) = llm.generate([ids], params)
    matcher = llm.matcher(params)
    for token in completion.token_ids:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        (logits,) = llm.logits([ids])
        allowed = np.where(bits[: len(logits[-1])] == 1, logits[-1], -np.inf)
        assert token == int(allowed.argmax())
        ids = [*ids, token]
        assert matcher.consume_token(token)
    assert len(completion.token_ids) == len(completion.logprobs) == 8 or completion.text.endswith(".")


def test_what_is_forced_is_not_drawn(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=0, grammar='start: "one two three four five six seven " /[ab]/')
    before = llm.stats()["num_steps"]
    (completion,) = llm.generate("x", params)
    assert completion.text in ("one two three four five six seven a", "one two three four five six seven b")
    assert completion.finish_reason == "stop"
    assert llm.stats()["num_steps"] - before < completion.completion_tokens


def test_an_answer_that_is_forced_to_its_end(llm: LLM) -> None:
    for end in ('"x"', '"x" /[0-9]/ " and then the end"'):
        (completion,) = llm.generate("x", SamplingParams(max_tokens=40, temperature=1, seed=1, grammar=f"start: {end}"))
        assert completion.finish_reason == "stop" and completion.text.startswith("x")
        assert completion.text == "x" or completion.text.endswith(" and then the end")


def test_ends(llm: LLM) -> None:
    (short,) = llm.generate("x", SamplingParams(max_tokens=3, temperature=0, json_schema=PERSON))
    assert (short.finish_reason, short.completion_tokens) == ("length", 3)
    stream = llm.stream("x", SamplingParams(max_tokens=200, temperature=0, json_schema={"type": "string"}))
    next(stream)
    stream.close()
    stopped = SamplingParams(max_tokens=200, temperature=0, json_schema=PERSON, stop='"age"')
    (completion,) = llm.generate("x", stopped)
    assert completion.stop == '"age"' and completion.text.startswith("{")
    stats = llm.stats()
    assert stats["num_running"] == stats["num_waiting"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"json_schema": {"type": "nonsense"}}, "json_schema is not supported"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema is not supported"),
        ({"json_schema": {"type": "integer", "multipleOf": 10_001}}, "multipleOf"),
        ({"json_schema": {"allOf": [{"multipleOf": 101}, {"multipleOf": 0.5}, {"multipleOf": 0.03}]}}, "multipleOf"),
        ({"json_schema": {"x": object()}}, "json_schema is no JSON schema"),
        ({"json_schema": "x"}, "json_schema is str"),
        ({"grammar": "start: nonsense"}, "grammar is not supported"),
        ({"grammar": 3}, "grammar is to be a str"),
        ({"grammar": "start: /a/", "json_schema": {}}, "grammar is to be a str"),
        ({"json_schema": {}, "presence_penalty": 1.0}, "presence_penalty"),
    ],
)
def test_refusals(llm: LLM, changes: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        llm.generate("x", SamplingParams(**changes))


# Through the server


@pytest.fixture(scope="module")
def server(llm: LLM):
    with running(llm, tool_parser="hermes") as server:
        yield server


def test_response_formats(server: Running) -> None:
    import openai

    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    options = {"model": "test", "messages": MESSAGES, "max_tokens": 150, "seed": 1, "response_format": schema}
    answer = client.chat.completions.create(**options)
    check_person(answer.choices[0].message.content)
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content
    form = {"type": "json_schema", "name": "person", "schema": PERSON}
    response = client.responses.create(
        model="test", input="A person as JSON.", max_output_tokens=150, text={"format": form}
    )
    check_person(response.output_text)
    penalty = server.chat(presence_penalty=1, response_format={"type": "json_object"})
    assert error_of(penalty, 400)["param"] == "presence_penalty"
    anything = server.chat(max_tokens=5, temperature=0, response_format={"type": "json_object"}).json()
    assert anything["choices"][0]["message"]["content"].startswith("{")


def test_calls_that_are_demanded(server: Running) -> None:
    parameters = {
        "type": "object",
        "properties": {"at": {"enum": ["Paris", "Rome"]}},
        "required": ["at"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("weather", "time")]
    body = {"tools": tools, "temperature": 1.0, "seed": 3, "max_tokens": 120, "parallel_tool_calls": False}
    # The template of this model has no place for tools, so that it does not even know of them.
    for choice, names in (
        ("required", {"weather", "time"}),
        ({"type": "function", "function": {"name": "time"}}, {"time"}),
    ):
        answer = server.chat(**body, tool_choice=choice).json()["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] in names and answer["finish_reason"] == "tool_calls"
        assert json.loads(call["function"]["arguments"])["at"] in ("Paris", "Rome")


def test_schemas_that_would_take_minutes(server: Running) -> None:
    slow = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 999_999}}}
    form = {"type": "json_schema", "json_schema": {"name": "slow", "schema": slow}}
    error = error_of(server.chat(response_format=form), 400)
    assert error["param"] == "response_format" and "multipleOf" in error["message"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": slow}}]
    error = error_of(server.chat(tools=tools, tool_choice="required"), 400)
    assert error["param"] == "tool_choice" and "multipleOf" in error["message"]
