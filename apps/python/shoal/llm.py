"""The Python API: LLM, SamplingParams, Completion."""

from __future__ import annotations

import numbers
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import _core, models
from shoal.detokenizer import Detokenizer, StopStrings, check_stops
from shoal.errors import InvalidArgument, ShoalError, Unsupported, printable
from shoal.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy

    from shoal.grammar import Grammars

Prompt = str | Sequence[int]

_MAX_QUEUED_TOKENS = 64  # that nobody takes: the engine then pauses the request until somebody does
_TICK_MS = 50  # how long a wait lasts before Python looks for Ctrl-C


@dataclass
class SamplingParams:
    """How to choose tokens, and when to stop.

    temperature 0 takes the most likely token. top_k 0, top_p 1 and min_p 0 are off. seed None differs every time.
    stop: texts before which the answer ends; the text excludes them. logprobs: None, or how many alternatives to report
    beside the chosen token. logit_bias: added to the logits of token ids. max_tokens None: as many as the context
    holds; to ask for more ends there too, with finish_reason "length". json_schema: the answer is JSON that it allows,
    unless the tokens do not suffice; grammar: the same for a grammar in llguidance's form of Lark.
    """

    max_tokens: int | None = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    json_schema: Mapping[str, Any] | None = None
    grammar: str | None = None

    def stops(self) -> list[str]:
        if self.stop is not None and not isinstance(self.stop, Iterable):
            raise InvalidArgument(f"stop is {printable(repr(self.stop))}, expected a str or a list of them")
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        check_stops(stops)
        return stops

    def check(self) -> None:
        """InvalidArgument naming what is out of range. The engine checks the sampling values against the vocabulary."""
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            raise InvalidArgument(f"max_tokens is {self.max_tokens}, expected at least 1")
        if not _is_int(self.n) or not 1 <= self.n <= 1024:
            raise InvalidArgument(f"n is {self.n}, expected 1 to 1024")
        if self.seed is not None and (not _is_int(self.seed) or not -(1 << 63) <= self.seed < 1 << 64):
            raise InvalidArgument(f"seed is {self.seed}, expected an integer of 64 bits")
        if self.logprobs is not None and (not _is_int(self.logprobs) or self.logprobs < 0):
            raise InvalidArgument(f"logprobs is {self.logprobs}, expected at least 0")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not abs(value) < 3e38:
                raise InvalidArgument(f"{name} is {value}, expected a finite number (below 3e38)")
        if not _is_int(self.top_k) or not -1 <= self.top_k < 1 << 31:
            raise InvalidArgument(f"top_k is {self.top_k}, expected 0 to {(1 << 31) - 1}")
        if self.logprobs is not None and self.logprobs >= 1 << 31:
            raise InvalidArgument(f"logprobs is {self.logprobs}, expected 0 to {(1 << 31) - 1}")
        ids = self.stop_token_ids
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable) or not all(map(_is_token_id, ids)):
            raise InvalidArgument(f"stop_token_ids is {printable(repr(ids))}, expected token ids")
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping) or not all(
            _is_token_id(i) and isinstance(b, numbers.Real) and not isinstance(b, bool) for i, b in bias.items()
        ):
            raise InvalidArgument(f"logit_bias is {printable(repr(bias))}, expected numbers by token id")
        if self.json_schema is not None and not isinstance(self.json_schema, Mapping):
            raise InvalidArgument(f"json_schema is {type(self.json_schema).__name__}, expected a mapping")
        if self.grammar is not None and (not isinstance(self.grammar, str) or self.json_schema is not None):
            raise InvalidArgument("grammar is to be a str, without json_schema beside it")
        self.stops()


def _tokenizer_of(path: Path) -> Tokenizer | None:
    return None if models.is_synthetic(path) else load_tokenizer(path)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass
class TokenLogprob:
    """The natural logarithm of a token's probability, and the most likely tokens in its place, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class Completion:
    """An answer. finish_reason: "stop" (end of sequence or a stop string), "length" (max_tokens or the context)."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: str
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    index: int = 0  # of the n answers to one prompt
    ttft_s: float = 0.0  # from submission to the first token
    decode_s: float = 0.0  # from the first token to the last
    stop: str | None = None  # the stop string that ended it

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def prefill_tok_s(self) -> float:
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.ttft_s if self.ttft_s > 0 else 0.0

    @property
    def decode_tok_s(self) -> float:
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s > 0 and len(self.token_ids) > 1 else 0.0


@dataclass
class Chunk:
    """A piece of an answer. The last one has a finish_reason and the whole completion."""

    text: str
    token_ids: list[int]
    token_texts: list[str]  # what each token let out; characters and stop strings may hold text back to a later one
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    prompt_done: int = 0  # tokens of the prompt read so far
    completion: Completion | None = None


class LLM:
    """A loaded model.

    model: a GGUF file, a Hugging Face folder, or a name ("smollm2"). device: auto, cpu, cuda, cuda:N. kv_dtype: auto,
    f32, bf16, f16, int8. max_context: tokens of prompt and answer together, 0 for the model's (at most 8192).
    exact: activations in f32 whatever the checkpoint says. max_batch_tokens bounds a step, page_size is that of the KV
    cache, threads 0 means all cores.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        device: str = "auto",
        kv_dtype: str = "auto",
        max_context: int = 0,
        exact: bool = False,
        *,
        max_batch_tokens: int | None = None,
        max_seqs: int | None = None,
        page_size: int | None = None,
        kv_bytes: int = 0,
        threads: int = 0,
        prefix_cache: bool = True,
        load_progress: Callable[[float], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.path = models.resolve(model, say)
        options: dict[str, Any] = {"max_batch_tokens": max_batch_tokens, "max_seqs": max_seqs, "page_size": page_size}
        # The engine loads without the interpreter lock, so the tokenizer is made meanwhile.
        with ThreadPoolExecutor(1) as pool:
            tokenizer = pool.submit(_tokenizer_of, self.path)
            self._engine = _core.Engine(
                os.fspath(self.path),
                device=device,
                kv_dtype=kv_dtype,
                max_context=max_context,
                kv_bytes=kv_bytes,
                threads=threads,
                exact=exact,
                prefix_cache=prefix_cache,
                load_progress=load_progress,
                **{name: value for name, value in options.items() if value is not None},
            )
            self._tokenizer = tokenizer.result()
        self.info: dict[str, Any] = self._engine.info()
        self._grammars: Grammars | None = None  # made when first needed

    def close(self) -> None:
        """Ends the engine and frees its memory; running requests are cancelled."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise Unsupported(f"{self.path.name} has no tokenizer; give and take token ids instead of text")
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def max_context(self) -> int:
        return self.info["max_context"]

    def stats(self) -> dict[str, int]:
        return self._engine.stats()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """A completion for each prompt, in order; with n > 1, n of them after one another. A prompt is a text, in which
        control tokens are found, or a list of token ids. All run together. `params`: one for all or one for each."""
        if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, Mapping)):
            raise InvalidArgument(f"prompts is {type(prompts).__name__}, expected str, token ids, or a list of them")
        each = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        if params is not None and not isinstance(params, (SamplingParams, Sequence)):
            raise InvalidArgument(f"params is {type(params).__name__}, expected SamplingParams or a list of them")
        chosen = [params] * len(each) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(chosen) != len(each):
            raise InvalidArgument(f"{len(chosen)} params for {len(each)} prompts")
        runs: list[Run] = []
        try:
            for prompt, one in zip(each, chosen, strict=True):
                runs += self.start(self._ids(prompt), SamplingParams() if one is None else one)
            _finish_all(runs)
        finally:
            for run in runs:
                run.cancel()
        return [run.completion() for run in runs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Pieces of the answer as they come; joined, their texts are what `generate` gives. Closing the iterator
        cancels the request; one that is not asked for chunks pauses it."""
        return self._stream(self._ids(prompt), SamplingParams() if params is None else params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Completion:
        """The assistant's answer. What messages say never becomes control tokens."""
        return self.generate([self.tokenizer.encode_chat(messages, **template_options)], params)[0]

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Iterator[Chunk]:
        ids = self.tokenizer.encode_chat(messages, **template_options)
        return self._stream(ids, SamplingParams() if params is None else params)

    def start(self, ids: list[int], params: SamplingParams, salt: int = 0) -> list[Run]:
        """The n requests to one prompt, running already: what `generate`, `stream` and the server are made of. Each is
        to be stepped until the engine has released it. `salt`: prompts find cached prefixes only of their own salt."""
        if not isinstance(params, SamplingParams):
            raise InvalidArgument(f"params is {type(params).__name__}, expected SamplingParams")
        params.check()
        room = self.max_context - len(ids)
        if room < 1:
            raise InvalidArgument(
                f"the prompt has {len(ids)} tokens, "
                f"which leaves no room for an answer in a context of {self.max_context}",
                "context_length_exceeded",
            )
        # Without a number of tokens: what the context and the KV cache hold. The last token is never computed.
        capacity = self.info["num_pages"] * self.info["page_size"] - len(ids) + 1
        max_tokens = max(min(room, capacity), 1) if params.max_tokens is None else min(params.max_tokens, room)
        seed = random.getrandbits(64) if params.seed is None else params.seed % (1 << 64)
        seeds = [(seed + i * _SEED_STEP) % (1 << 64) for i in range(params.n)]
        runs: list[Run] = []
        try:
            for i, own in enumerate(seeds):
                runs.append(Run(self._engine_for(params), self._tokenizer, ids, params, max_tokens, own, i, salt))
        except BaseException:
            for run in runs:
                run.cancel()
            raise
        return runs

    def _engine_for(self, params: SamplingParams) -> Any:
        """The engine, or what binds one request of it to a grammar."""
        if params.json_schema is None and params.grammar is None:
            return self._engine
        from shoal.grammar import BoundEngine

        return BoundEngine(self._engine, self.matcher(params), self.info["vocab_size"], self.tokenizer.eos_ids)

    def matcher(self, params: SamplingParams) -> Any:
        """What tells which tokens may follow. Made once for a schema or grammar; the first takes a moment."""
        from shoal.grammar import Grammars

        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.info["vocab_size"])
        return self._grammars.matcher(params.json_schema, params.grammar)

    def is_alive(self) -> bool:
        """Whether the engine still takes requests: its loop ends for good when an invariant breaks."""
        try:
            request = self._engine.submit([0], _core.SamplingOptions(), max_tokens=0)
            while request is not None and self._engine.wait(request, _TICK_MS).finish_reason is None:
                self._engine.cancel(request)
        except ShoalError:
            return False
        return True

    def logits(self, prompts: Sequence[Sequence[int]]) -> list[numpy.ndarray]:
        """Logits after each token, float32 [num_tokens, vocab_size], for each list of ids."""
        if not isinstance(prompts, Iterable) or isinstance(prompts, str) or _is_one_list(prompts):
            raise InvalidArgument(f"prompts is {type(prompts).__name__}, expected a list of lists of token ids")
        return [self._engine.logits(_checked_ids(ids)) for ids in prompts]

    # Inside

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
            if not ids:
                raise InvalidArgument("the prompt is empty")
            return ids
        return _checked_ids(prompt)

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[Chunk]:
        if getattr(params, "n", 1) != 1:
            raise InvalidArgument(f"n is {params.n}, a stream has 1 answer")
        (run,) = self.start(ids, params)
        return _Stream(run)


_SEED_STEP = 0x9E3779B97F4A7C15  # far apart, so that the streams of neighbouring seeds do not meet


def _is_token_id(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _is_ids(prompt: object) -> bool:
    return hasattr(prompt, "dtype") or (
        isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(i, numbers.Integral) for i in prompt)
    )


def _is_one_list(prompts: object) -> bool:
    return _is_ids(prompts) and getattr(prompts, "ndim", 1) == 1


def _checked_ids(prompt: Sequence[int]) -> list[int]:
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        raise InvalidArgument(f"a prompt is {type(prompt).__name__}, expected str or a list of token ids")
    if not prompt:
        raise InvalidArgument("the prompt is empty")
    for i in prompt:
        if not _is_token_id(i):
            raise InvalidArgument(f"{printable(repr(i))} in a prompt is no token id")
    return [int(i) for i in prompt]


class Run:
    """One request: what came of it, as text. Made by `LLM.start`."""

    def __init__(
        self,
        engine: _core.Engine,
        tokenizer: Tokenizer | None,
        ids: list[int],
        params: SamplingParams,
        max_tokens: int,
        seed: int,
        index: int,
        salt: int = 0,
    ) -> None:
        if tokenizer is None and params.stops():
            raise Unsupported("the model has no tokenizer, so stop strings cannot be found; use stop_token_ids")
        self._engine = engine
        self._params = params
        self._num_prompt = len(ids)
        self._index = index
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(params.stops())
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._reason: str | None = None
        self._released = False  # the engine has forgotten the request
        self._cancelling = False
        self._cached = 0
        self._prompt_done = 0
        self._first = self._last = 0.0
        stop_ids = set(params.stop_token_ids)
        if tokenizer is not None and not params.ignore_eos:
            stop_ids |= tokenizer.eos_ids
        # A model may end with a token outside what its logits cover; the engine would refuse such an id.
        vocab_size = engine.info()["vocab_size"]
        self._started = time.perf_counter()
        self._id = engine.submit(
            ids,
            _options(params, seed),
            max_tokens=max_tokens,
            stop_ids=sorted(i for i in stop_ids if i < vocab_size),
            salt=salt,
            max_queued_tokens=_MAX_QUEUED_TOKENS,
        )
        if self._id is None:
            raise InvalidArgument(
                f"the prompt of {len(ids)} tokens and {max_tokens} more do not fit the memory of the KV cache",
                "context_length_exceeded",
            )

    @property
    def finished(self) -> bool:
        return self._reason is not None

    @property
    def released(self) -> bool:
        """Whether the engine has let go of the request too, which takes it a step after a stop string."""
        return self._released

    def step(self, timeout_ms: int) -> Chunk | None:
        """Waits for news. None: there is none."""
        update = self._engine.wait(self._id, timeout_ms)
        now = time.perf_counter()
        reason = update.finish_reason
        self._released = reason is not None
        if self.finished:
            return None  # what comes after a stop string never was
        self._reason = reason
        if reason in ("error", "non_finite"):
            raise ShoalError(update.error or "the engine failed", reason)
        moved = update.num_prompt_done != self._prompt_done
        self._prompt_done = update.num_prompt_done
        self._cached = max(self._cached, update.num_prefix_hit)
        ids, texts, logprobs = self._take(update.tokens, now)
        text = "".join(texts)
        if self._stops.stopped and self._reason is None:
            self.stop()
        if self._stops.stopped:
            self._reason = "stop"
        elif self._reason is not None:
            ending = "" if self._detokenizer is None else self._detokenizer.finish()
            text += self._stops.push(ending)
            if self._stops.stopped:
                self._reason = "stop"
            text += self._stops.finish()
        self._text.append(text)
        if not ids and not text and not moved and self._reason is None:
            return None
        return Chunk(
            text, ids, texts, logprobs, self._reason, self._prompt_done, self.completion() if self.finished else None
        )

    def _take(
        self, tokens: Sequence[_core.Sampled], now: float
    ) -> tuple[list[int], list[str], list[TokenLogprob] | None]:
        """Tokens up to the one that completes a stop string; those after it never were."""
        ids: list[int] = []
        texts: list[str] = []
        logprobs: list[TokenLogprob] | None = None if self._logprobs is None else []
        for token in tokens:
            if self._stops.stopped:
                break
            ids.append(token.id)
            if logprobs is not None:
                logprobs.append(TokenLogprob(token.id, token.logprob, token.top))
            texts.append("" if self._detokenizer is None else self._stops.push(self._detokenizer.push([token.id])))
        if ids:
            self._first = self._first or now
            self._last = now
            self._ids += ids
            if self._logprobs is not None and logprobs is not None:
                self._logprobs += logprobs
        return ids, texts, logprobs

    def stop(self) -> None:
        """Asks the engine to end the request within a step, from any thread; `step` brings the end."""
        if not self._cancelling:
            self._cancelling = True
            self._engine.cancel(self._id)

    def cancel(self) -> None:
        """Ends the request, if it has not ended, and waits until the engine has let go of it."""
        self._reason = self._reason or "cancelled"
        deadline = time.monotonic() + 60.0
        try:
            while not self._released and time.monotonic() < deadline:
                self.stop()
                self._released = self._engine.wait(self._id, _TICK_MS).finish_reason is not None
        except InvalidArgument:
            self._released = True  # the engine was closed

    def completion(self) -> Completion:
        return Completion(
            text="".join(self._text),
            token_ids=list(self._ids),
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self._reason or "cancelled",
            prompt_tokens=self._num_prompt,
            cached_tokens=self._cached,
            index=self._index,
            ttft_s=max(self._first - self._started, 0.0),
            decode_s=max(self._last - self._first, 0.0),
            stop=self._stops.found,
        )


class _Stream(Iterator[Chunk]):
    """Chunks of a request that runs already. Unlike a generator, it also cancels what was never asked for a chunk."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __next__(self) -> Chunk:
        try:
            while not self._run.finished:
                chunk = self._run.step(_TICK_MS)
                if self._run.finished:
                    self.close()
                if chunk is not None:
                    return chunk
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        self._run.cancel()

    def __del__(self) -> None:
        self.close()


def _finish_all(runs: Sequence[Run]) -> None:
    active = list(runs)
    while active:
        # Only the first is waited for; the others are asked whether they have news, so that a stop string is seen soon.
        for i, run in enumerate(active):
            run.step(_TICK_MS if i == 0 else 0)
        active = [run for run in active if not run.finished]


def _options(params: SamplingParams, seed: int) -> _core.SamplingOptions:
    options = _core.SamplingOptions()
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        setattr(options, name, float(getattr(params, name)))
    options.top_k = max(params.top_k, 0)
    options.seed = seed
    options.num_logprobs = -1 if params.logprobs is None else params.logprobs
    if params.logit_bias:
        options.logit_bias = [(int(i), float(bias)) for i, bias in params.logit_bias.items()]
    return options


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a model, None if it has none."""
    if path.is_dir():
        return Tokenizer.from_folder(path)
    return Tokenizer.from_gguf(_core.GgufFile(os.fspath(path)).metadata())
