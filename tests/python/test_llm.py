"""The API: against a scripted engine for what Python does, against the default model for the whole."""

from __future__ import annotations

import json
import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import byte_level_metadata
from shoal.llm import Run, _finish_all

from shoal import LLM, InvalidArgument, SamplingParams, ShoalError, Tokenizer, Unsupported

TINY = Tokenizer.from_gguf(byte_level_metadata())


class ScriptedEngine:
    """Gives each request the same tokens, `step` of them at a time."""

    def __init__(self, ids: list[int], step: int = 1, end: str = "length") -> None:
        self._ids, self._step, self._end = ids, step, end
        self._requests: dict[int, list[int]] = {}
        self.cancelled: list[int] = []
        self.submitted: list[SimpleNamespace] = []

    def info(self) -> dict:
        return {"vocab_size": 262}

    def submit(self, prompt: list[int], sampling: object, **options: object) -> int:
        self.submitted.append(SimpleNamespace(prompt=prompt, sampling=sampling, **options))
        self._requests[len(self.submitted)] = list(self._ids)
        return len(self.submitted)

    def wait(self, request: int, timeout_ms: int) -> SimpleNamespace:
        left = self._requests[request]
        now, self._requests[request] = left[: self._step], left[self._step :]
        reason = "cancelled" if request in self.cancelled else None if self._requests[request] else self._end
        if reason:
            del self._requests[request]
        tokens = [SimpleNamespace(id=i, logprob=-1.0, top=[]) for i in now]
        return SimpleNamespace(
            tokens=tokens, num_prompt_done=1, num_prefix_hit=0, finish_reason=reason, error="went wrong"
        )

    def cancel(self, request: int) -> None:
        self.cancelled.append(request)


def run_script(ids: list[int], params: SamplingParams, step: int = 1, end: str = "length", tokenizer: object = TINY):
    engine = ScriptedEngine(ids, step, end)
    run = Run(engine, tokenizer, [1], params, 100, 0, 0)
    chunks = []
    while not run.finished:
        chunk = run.step(0)
        chunks += [] if chunk is None else [chunk]
    return engine, run.completion(), chunks


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_stop_string_across_tokens(step: int) -> None:
    engine, completion, chunks = run_script(
        list(b"say END and more"), SamplingParams(stop=[" END", "more"], logprobs=0), step
    )
    assert completion.text == "say" == "".join(c.text for c in chunks)
    assert completion.finish_reason == "stop" and completion.stop == " END"
    assert completion.token_ids == list(b"say END")  # up to the token that completed it
    assert len(completion.logprobs) == 7
    assert engine.cancelled == ([] if step == 100 else [1])  # all at once: it had ended already
    assert chunks[-1].completion == completion


@pytest.mark.parametrize("step", [1, 4])
def test_text_held_back_comes_at_the_end(step: int) -> None:
    _, completion, chunks = run_script([*"aé E".encode(), 0xF0, 0x9F], SamplingParams(stop="END"), step)
    assert completion.text == "aé E�" == "".join(c.text for c in chunks)
    assert completion.finish_reason == "length"
    for chunk in chunks:
        assert chunk.text.startswith("".join(chunk.token_texts))


def test_end_token_has_no_text() -> None:
    engine, completion, _ = run_script([*b"ab", 260], SamplingParams(), end="stop")
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("ab", [97, 98, 260], "stop")
    assert engine.submitted[0].stop_ids == [258, 260]
    engine, _, _ = run_script(list(b"ab"), SamplingParams(ignore_eos=True, stop_token_ids=[5, 9999]))
    assert engine.submitted[0].stop_ids == [5]


@pytest.mark.parametrize("reason", ["error", "non_finite"])
def test_engine_failures_are_raised(reason: str) -> None:
    with pytest.raises(ShoalError, match="went wrong") as caught:
        run_script([1], SamplingParams(), end=reason)
    assert caught.value.code == reason


def test_without_tokenizer() -> None:
    _, completion, _ = run_script([1, 2, 3], SamplingParams(), tokenizer=None)
    assert (completion.text, completion.token_ids) == ("", [1, 2, 3])
    with pytest.raises(Unsupported, match="no tokenizer"):
        run_script([1], SamplingParams(stop="x"), tokenizer=None)


def test_interrupt_cancels() -> None:
    engine = ScriptedEngine([1, 2, 3])
    runs = [Run(engine, TINY, [1], SamplingParams(), 9, 0, i) for i in range(3)]
    runs[1].step = lambda timeout: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        _finish_all(runs)
    for run in runs:
        run.cancel()
    assert engine.cancelled == [1, 2, 3]
    assert engine._requests == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"n": 0}, "n is 0"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": True}, "seed"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is hot"),
        ({"top_k": -2}, "top_k is -2"),
        ({"stop": ""}, "a stop string is empty"),
        ({"stop": ["a", ""]}, "a stop string is empty"),
    ],
)
def test_bad_params(changes: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SamplingParams(**changes).check()


# The default model


GREEDY = SamplingParams(max_tokens=12, temperature=0)


def test_generates_sense(llm: LLM) -> None:
    (completion,) = llm.generate("The capital of France is", GREEDY)
    assert "Paris" in completion.text
    assert completion.prompt_tokens == len(llm.tokenizer.encode("The capital of France is"))
    assert completion.completion_tokens == len(completion.token_ids) == 12
    assert completion.finish_reason == "length" and completion.ttft_s > 0


def test_prompts_of_ids_and_texts_are_alike(llm: LLM) -> None:
    text = "One, two, three,"
    ids = llm.tokenizer.encode(text)
    results = llm.generate([text, ids, np.array(ids)], GREEDY)
    assert len({tuple(r.token_ids) for r in results}) == 1
    assert llm.generate(ids, GREEDY)[0].token_ids == results[0].token_ids


def test_batch_equals_single(llm: LLM) -> None:
    prompts = ["The sea is", "def add(a, b):\n", "1 2 3 4"]
    together = llm.generate(prompts, [GREEDY] * 3)
    assert [c.token_ids for c in together] == [llm.generate(p, GREEDY)[0].token_ids for p in prompts]


def test_stream_joins_to_generate(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=7, stop=["."])
    (whole,) = llm.generate("Once upon a time", params)
    chunks = list(llm.stream("Once upon a time", params))
    assert "".join(c.text for c in chunks) == whole.text
    assert [i for c in chunks for i in c.token_ids] == whole.token_ids
    assert chunks[-1].finish_reason == whole.finish_reason
    assert "." not in whole.text


def test_seeds(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=3, n=3)
    first, again = llm.generate("A", params), llm.generate("A", params)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) == 3 and [c.index for c in first] == [0, 1, 2]
    free = SamplingParams(max_tokens=16, temperature=1.5)
    assert llm.generate("A", free)[0].token_ids != llm.generate("A", free)[0].token_ids


def test_logprobs_agree_with_logits(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The capital of France is")
    (completion,) = llm.generate(ids, SamplingParams(max_tokens=2, temperature=0, logprobs=3))
    (logits,) = llm.logits([ids])
    assert logits.shape == (len(ids), llm.info["vocab_size"]) and logits.dtype == np.float32
    row = logits[-1].astype(np.float64)
    wanted = row - row.max() - np.log(np.exp(row - row.max()).sum())
    first = completion.logprobs[0]
    assert first.token_id == completion.token_ids[0] == int(row.argmax())
    assert [i for i, _ in first.top] == np.argsort(-row, kind="stable")[:3].tolist()
    assert first.logprob == pytest.approx(wanted[first.token_id], abs=1e-4)


def test_logit_bias(llm: LLM) -> None:
    token = llm.tokenizer.encode(" cheese")[0]
    (completion,) = llm.generate(
        "The capital of France is", SamplingParams(max_tokens=3, temperature=0, logit_bias={token: 100})
    )
    assert completion.token_ids == [token] * 3


def test_chat(smollm2_path) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(max_tokens=24, temperature=0)
    with LLM(smollm2_path, max_context=256, exact=True, threads=1) as llm:
        completion = llm.chat(messages, params)
        assert completion.text == "The capital of France is Paris."
        assert completion.finish_reason == "stop" and completion.token_ids[-1] == llm.tokenizer.eos_id
        assert "".join(c.text for c in llm.stream_chat(messages, params)) == completion.text


def test_length_of_the_context(llm: LLM) -> None:
    ids = llm.tokenizer.encode("word " * 2000)
    with pytest.raises(InvalidArgument, match="leaves no room for an answer in a context of 256"):
        llm.generate(ids[:256], GREEDY)
    (completion,) = llm.generate(ids[:254], SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))
    assert completion.completion_tokens == 2 and completion.finish_reason == "length"


def test_without_a_number_of_tokens_the_memory_counts_too(smollm2_path) -> None:
    params = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    with LLM(smollm2_path, max_context=512, kv_bytes=5 * 737_280, threads=1) as llm:
        capacity = llm.info["num_pages"] * llm.info["page_size"]
        assert capacity < 512
        (completion,) = llm.generate([[1, 2, 3]], params)
        assert completion.completion_tokens == capacity - 3 + 1 and completion.finish_reason == "length"
        with pytest.raises(InvalidArgument, match="do not fit the memory"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=500))


@pytest.mark.parametrize("prompt", ["", [], [-1], [10**6], [1.5], [True], b"x", None])
def test_bad_prompts(llm: LLM, prompt: object) -> None:
    with pytest.raises((InvalidArgument, TypeError)):
        llm.generate([prompt], GREEDY)


def test_bad_sampling_values_are_refused_by_the_engine(llm: LLM) -> None:
    for changes in ({"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 2.0}, {"repetition_penalty": 0.0}):
        with pytest.raises(InvalidArgument, match=next(iter(changes))):
            llm.generate("x", SamplingParams(**changes))
    with pytest.raises(InvalidArgument, match="2 params for 1 prompts"):
        llm.generate(["x"], [GREEDY, GREEDY])
    with pytest.raises(InvalidArgument, match="n is 2"):
        llm.stream("x", SamplingParams(n=2))


def test_an_abandoned_stream_is_cancelled(llm: LLM) -> None:
    stream = llm.stream("Tell me a long story", SamplingParams(max_tokens=900, temperature=0, ignore_eos=True))
    next(stream)
    stream.close()
    stats = llm.stats()
    assert stats["num_running"] == 0 and stats["num_waiting"] == 0


def test_a_stream_that_was_never_asked_is_cancelled(llm: LLM) -> None:
    streams = [llm.stream(f"one {i}", SamplingParams(max_tokens=500, ignore_eos=True)) for i in range(5)]
    del streams
    assert llm.stats()["num_running"] + llm.stats()["num_waiting"] == 0


def test_a_forked_child_is_told_and_can_end(llm: LLM) -> None:
    import os

    child = os.fork()
    if child == 0:
        try:
            llm.generate("x")
        except InvalidArgument as error:
            os._exit(7 if "another process" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_wrong_types_are_named(llm: LLM) -> None:
    for call, name in (
        (lambda: llm.generate(None), "prompts"),
        (lambda: llm.generate("x", 3), "params"),
        (lambda: llm.generate(["x"], [{}]), "params"),
        (lambda: llm.logits(3), "prompts"),
        (lambda: llm.logits("The sea"), "list of lists of token ids"),
        (lambda: llm.logits([1, 2, 3]), "list of lists of token ids"),
        (lambda: llm.generate("x", SamplingParams(stop=3)), "stop"),
        (lambda: llm.generate("x", SamplingParams(stop_token_ids=["a"])), "stop_token_ids"),
        (lambda: llm.generate("x", SamplingParams(logprobs=2**70)), "logprobs"),
        (lambda: llm.generate("x", SamplingParams(logit_bias=[1])), "logit_bias"),
        (lambda: llm.generate("x", SamplingParams(logit_bias={2**70: 1})), "logit_bias"),
    ):
        with pytest.raises(InvalidArgument, match=name):
            call()
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=1)
    assert len(llm.generate("x", params)[0].token_ids) == 1


def test_threads_share_an_engine(llm: LLM) -> None:
    wanted = llm.generate("The sea is", GREEDY)[0].token_ids
    results: list[list[int]] = []

    def work() -> None:
        results.append(llm.generate("The sea is", GREEDY)[0].token_ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [wanted] * 4


def test_the_lock_is_free_while_waiting(llm: LLM) -> None:
    ticks = 0
    done = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    llm.logits([list(range(100, 200))])
    done.set()
    thread.join()
    assert ticks > 3


def test_closed_engine(smollm2_path) -> None:
    with LLM(smollm2_path, max_context=64) as llm:
        pass
    with pytest.raises(InvalidArgument, match="closed"):
        llm.generate("x", GREEDY)


def test_bad_options(smollm2_path, tmp_path) -> None:
    with pytest.raises(ShoalError, match="nonsense"):
        LLM(smollm2_path, kv_dtype="nonsense")
    with pytest.raises(ShoalError, match="tpu"):
        LLM(smollm2_path, device="tpu")
    with pytest.raises(ShoalError, match="no model at"):
        LLM(tmp_path / "none.gguf")


def test_loading_can_be_interrupted(smollm2_path) -> None:
    def interrupt(fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LLM(smollm2_path, max_context=64, load_progress=interrupt)


def test_progress_of_loading(smollm2_path) -> None:
    seen: list[float] = []
    LLM(smollm2_path, max_context=64, load_progress=seen.append).close()
    assert seen and seen == sorted(seen) and seen[0] >= 0 and seen[-1] == pytest.approx(1.0)


def test_completions_can_be_stored(llm: LLM) -> None:
    from dataclasses import asdict

    json.dumps(asdict(llm.generate("x", SamplingParams(max_tokens=1, logprobs=1))[0]))


def test_synthetic_models_need_no_file() -> None:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM("synthetic:qwen3-tiny", device="cpu", max_context=64) as llm:
        assert not llm.has_tokenizer and llm.info["vocab_size"] == 512
        first, second = (llm.generate([3, 1, 4], params)[0] for _ in range(2))
        assert len(first.token_ids) == 4 and first.token_ids == second.token_ids
    with pytest.raises(
        InvalidArgument, match='no synthetic model "x"; there are qwen3-30b-a3b, gpt-oss-120b, qwen3-tiny'
    ):
        LLM("synthetic:x", device="cpu")
