"""The API: what is asked comes back, whole or in chunks, and what cannot be asked is refused by name."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import GOLDEN
from serving import FakeEngine, Running, error_of, fake_llm, running

from shoal import LLM, SamplingParams

MESSAGES = [{"role": "user", "content": "Name three colours."}]
TEXT = "naïve 🚀 text STOP more"


@pytest.fixture(scope="module")
def server(llm: LLM):
    with running(llm) as server:
        yield server


@pytest.fixture(scope="module")
def fake_server():
    engine = FakeEngine()
    with running(fake_llm(engine)) as server:
        server.engine = engine
        yield server


@pytest.fixture
def fake(fake_server: Running) -> Running:
    fake_server.engine.__init__()
    return fake_server


def joined(chunks: list[dict], route: str) -> list[dict]:
    """The choices that a client makes of chunks."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            own = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "reasons": [], "calls": []})
            if route == "chat":
                own["text"] += choice["delta"].get("content") or ""
                own["calls"] += choice["delta"].get("tool_calls", [])
                own["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            else:
                own["text"] += choice["text"]
                own["logprobs"] += (choice["logprobs"] or {}).get("tokens", [])
            if choice["finish_reason"]:
                own["reasons"].append(choice["finish_reason"])
    return [choices[i] for i in sorted(choices)]


def whole(body: dict, route: str) -> list[dict]:
    out = []
    for choice in body["choices"]:
        logprobs = choice["logprobs"] or {}
        out.append(
            {
                "text": choice["message"]["content"] if route == "chat" else choice["text"],
                "logprobs": logprobs.get("content" if route == "chat" else "tokens", []),
                "reasons": [choice["finish_reason"]],
                "calls": [],
            }
        )
    return out


CASES = [
    {},
    {"n": 3},
    {"stop": "STOP"},
    {"stop": ["XT STO", " m", "zzz"]},
    {"stop": "more and"},  # held back, and given out at the end
    {"max_tokens": 5},
    {"max_tokens": 3},  # ends inside a character
    {"max_tokens": 9, "n": 2},
]


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_deltas_join_to_the_plain_answer(fake: Running, case: dict, step: int, with_logprobs: bool) -> None:
    fake.engine.answer, fake.engine.step = TEXT.encode(), step
    for route, path, prompt, logprobs in (
        ("chat", "/v1/chat/completions", {"messages": MESSAGES}, {"logprobs": True, "top_logprobs": 2}),
        ("text", "/v1/completions", {"prompt": "x"}, {"logprobs": 2}),
    ):
        body = {"max_tokens": 1000, **prompt, **case, **(logprobs if with_logprobs else {})}
        plain = fake.post(path, body).json()
        chunks = fake.stream(path, {**body, "stream_options": {"include_usage": True}})
        assert joined(chunks, route) == whole(plain, route)
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == plain["usage"]
        assert all(c["usage"] is None for c in chunks[:-1])
        assert len({c["id"] for c in chunks}) == 1
        if case == {}:
            assert whole(plain, route)[0]["text"] == TEXT
            assert plain["choices"][0]["finish_reason"] == "stop"
            if with_logprobs:  # without the token that ends the answer
                assert len(whole(plain, route)[0]["logprobs"]) == len(TEXT.encode())
    assert fake.engine.live == {}


def test_log_probabilities(fake: Running) -> None:
    fake.engine.answer = "é!".encode()
    choice = fake.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    first, second, third = choice["logprobs"]["content"]
    assert first["bytes"] + second["bytes"] == list("é".encode()) and third["token"] == "!"
    assert first["logprob"] == pytest.approx(-0xC3 / 10) and len(first["top_logprobs"]) == 2
    logprobs = fake.post("/v1/completions", {"prompt": "x", "logprobs": 1}).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"] and logprobs["text_offset"] == [0, 0, 1]
    assert [len(t) for t in logprobs["top_logprobs"]] == [1, 1, 1]


def test_sampling_reaches_the_engine(fake: Running) -> None:
    sent = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": 5, "presence_penalty": 1.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.25, "logit_bias": {"3": -100, "97": 2}, "n": 2,
        "stop_token_ids": [9], "max_completion_tokens": 4,
    }  # fmt: skip
    assert fake.chat(**sent).status_code == 200
    first, second = fake.engine.submitted
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"):
        assert getattr(first.sampling, name) == sent[name]
    assert first.sampling.repetition_penalty == 1.25 and first.sampling.logit_bias == [(3, -100.0), (97, 2.0)]
    assert first.max_tokens == 4 and first.stop_ids == [9, 258, 260]
    assert first.sampling.seed == 5 != second.sampling.seed
    fake.chat()  # all that the context holds
    assert fake.engine.submitted[2].max_tokens == 4096 - len(fake.engine.submitted[2].prompt)
    fake.post("/v1/completions", {"prompt": "x"})
    assert fake.engine.submitted[3].max_tokens == 16


def test_prompts(fake: Running) -> None:
    def ask(prompt: object, **more: object) -> list[str]:
        return [c["text"] for c in fake.post("/v1/completions", {"prompt": prompt, **more}).json()["choices"]]

    assert ask("ab", n=2, echo=True) == ["abhello"] * 2
    assert ask(["ab", "cd"], n=2, echo=True) == ["abhello"] * 2 + ["cdhello"] * 2
    assert ask([97, 98]) == ["hello"] and ask([[97], [98]], echo=True) == ["ahello", "bhello"]
    before = len(fake.engine.submitted)
    ask("<|im_end|>")
    assert END_TOKENS.isdisjoint(fake.engine.submitted[before].prompt)


END_TOKENS = {258, 259, 260}


def test_conversations(fake: Running) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "<|im_end|>"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert fake.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    prompt = fake.engine.submitted[0].prompt
    text = fake.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>") and "a\n<|im_end|>" in text
    assert prompt.count(260) == 2  # the template's own, not the user's
    assert fake.post("/detokenize", {"tokens": prompt}).json()["content"] == text


def test_tokens(fake: Running) -> None:
    def tokens(**body: object) -> list[int]:
        return fake.post("/tokenize", body).json()["tokens"]

    assert tokens(content="hello") == [256, 108, 108, 111]
    assert len(tokens(content="<|im_end|>")) > 1 and tokens(content="<|im_end|>", parse_special=True) == [260]
    assert fake.post("/detokenize", {"tokens": [256, 108, 257, 0x21]}).json() == {"content": "helllo!"}
    assert error_of(fake.post("/detokenize", {"tokens": [262]}), 400)["param"] == "tokens"


def test_models_and_document(fake: Running) -> None:
    (model,) = fake.client.get("/v1/models").json()["data"]
    assert model["id"] == "test" and model["max_model_len"] == 4096
    assert fake.client.get("/v1/models/test").json() == model
    assert error_of(fake.client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert fake.chat(model="test").status_code == 200
    assert error_of(fake.chat(model="gpt-4"), 404)["param"] == "model"
    document = fake.client.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/metrics", "/ready", "/tokenize"} <= set(document["paths"])
    assert error_of(fake.client.get("/nowhere"), 404) and error_of(fake.client.get("/tokenize"), 405)


def test_a_name_of_the_parameter_in_every_refusal(fake: Running) -> None:
    user = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "f"}}
    for param, body in (
        ("messages", {"messages": None}),
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"role": "king", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[1].content", {"messages": [user, {"role": "user", "content": 3}]}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": -1}),
        ("max_tokens", {"max_tokens": 1.5}),
        ("n", {"n": 0}),
        ("n", {"n": 10**6}),
        ("n", {"n": True}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": "hot"}),
        ("top_p", {"top_p": 0}),
        ("min_p", {"min_p": 2}),
        ("seed", {"seed": 2**64}),
        ("stop", {"stop": ""}),
        ("stop", {"stop": ["a", ""]}),
        ("stop", {"stop": ["x"] * 17}),
        ("stop", {"stop": "x" * 1025}),
        ("logit_bias", {"logit_bias": {"262": 1}}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("logit_bias", {"logit_bias": {"1" * 5000: 1}}),
        ("stop_token_ids", {"stop_token_ids": [262]}),
        ("presence_penalty", {"presence_penalty": 3}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("stream_options", {"stream_options": {}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("tools", {"tools": [tool]}),  # the template has no place for them
        ("tool_choice", {"tool_choice": "auto"}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"eos_token": "x"}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"style": "<|im_end|>"}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"style": ["x"]}}),
        ("store", {"store": True}),
        ("nonsense", {"nonsense": 1}),
    ):
        error = error_of(fake.post("/v1/chat/completions", {"messages": [user], **body}), 400)
        assert error["param"] == param, (body, error)
        assert error["type"] == "invalid_request_error"
    for param, body in (
        ("prompt", {}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ["a", ""]}),
        ("prompt", {"prompt": [[1], []]}),
        ("prompt", {"prompt": [262]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [10**30]}),
        ("prompt", {"prompt": {"a": 1}}),
        ("prompt", {"prompt": [1] * 4096}),
        ("prompt", {"prompt": ["a"] * 100, "n": 100}),
        ("suffix", {"prompt": "a", "suffix": "b"}),
        ("best_of", {"prompt": "a", "best_of": 2}),
        ("logprobs", {"prompt": "a", "logprobs": 1, "echo": True}),
    ):
        error = error_of(fake.post("/v1/completions", body), 400)
        assert error["param"] == param, (body, error)
    assert error_of(fake.post("/v1/completions", {"prompt": [1] * 5000}), 400)["code"] == "context_length_exceeded"
    assert fake.engine.submitted == [] and fake.chat().status_code == 200


def test_numbers_that_json_does_not_have(fake: Running) -> None:
    for number in ("NaN", "Infinity", "1e999", "-Infinity", "9" * 400):
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], "temperature": {number}}}'
        response = fake.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert error_of(response, 400)["param"] == "temperature", number


# The default model


def test_a_real_model_streams_what_it_answers(server: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 16, "temperature": 0.8, "seed": 7, "n": 2, "logprobs": True}
    plain = server.post("/v1/chat/completions", body).json()
    assert joined(server.stream("/v1/chat/completions", body), "chat") == whole(plain, "chat")
    texts = [c["message"]["content"] for c in plain["choices"]]
    assert texts[0] != texts[1] and all(texts)
    text = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    assert "Paris" in server.post("/v1/completions", text).json()["choices"][0]["text"]


def test_clients_do_not_mix(server: Running) -> None:
    prompts = [f"{i}, {i + 1}, {i + 2}," for i in range(12)]

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
        if hashlib.sha256(prompt.encode()).digest()[0] % 2:
            return "".join(c["choices"][0]["text"] for c in server.stream("/v1/completions", body))
        return server.post("/v1/completions", body).json()["choices"][0]["text"]

    alone = [ask(p) for p in prompts]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, prompts)) == alone


def test_the_openai_client(server: Running) -> None:
    import openai

    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["test"]
    options = {"model": "test", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    answer = client.chat.completions.create(**options)
    text = answer.choices[0].message.content
    assert text and answer.usage.completion_tokens <= 12
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == answer.usage or chunks[-1].usage.total_tokens == answer.usage.total_tokens
    top_p = server.chat(top_p=1e-60)  # zero, as the engine counts
    assert error_of(top_p, 400)["param"] == "top_p"
    legacy = client.completions.create(model="test", prompt="1, 2, 3,", max_tokens=4, temperature=0, logprobs=1)
    assert " 4" in legacy.choices[0].text and len(legacy.choices[0].logprobs.tokens) == 4
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**options, "temperature": 1000})
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**options, "model": "other"})


def test_a_model_without_tokenizer_takes_and_gives_ids() -> None:
    with LLM(GOLDEN / "models" / "llama", threads=1) as tiny, running(tiny) as server:
        body = {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0, "logprobs": 0}
        tokens = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["tokens"]
        (wanted,) = tiny.generate([[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0))
        assert tokens == [f"token_id:{i}" for i in wanted.token_ids]
        for path, asked in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"content": "x"})):
            assert error_of(server.post(path, asked), 400)["code"] == "unsupported"
        assert error_of(server.chat(), 400)["code"] == "unsupported"
