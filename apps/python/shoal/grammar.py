"""Answers that a grammar or a JSON schema binds, over an engine that knows no grammars.

The engine draws freely while llguidance reads along. A token that the grammar forbids is thrown away with all after
it, and the request goes on from the last good one with a draw among the allowed tokens: the others' bias is -inf. A
token thus has the probability p + (1 - P) p / P = p / P, P being that of all allowed ones, which is what masking in the
engine would give; with top_k, top_p or min_p the cut of the free draw is that of the whole vocabulary. What the grammar
leaves no choice about is appended without drawing. A forbidden token costs two submissions, whose prompts the prefix
cache mostly has.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import llguidance
import numpy

from shoal import _core
from shoal.errors import InvalidArgument, ShoalError, printable
from shoal.tokenizer import Tokenizer

_NUM_KEPT = 32  # compiled grammars
_MAX_MULTIPLE = 10_000  # llguidance keeps a state for each remainder: 100,000 take seconds, a million half a minute
_SEED_STEP = 0xD1B54A32D192ED03  # draws after a rejection are of a stream of their own

# Enough to indent; without a bound a small model can write blanks for ever.
_OPTIONS = {"whitespace_pattern": r"[ \n]{0,40}"}


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.control_ids if i < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode_plain(text if isinstance(text, str) else text.decode("utf-8", "replace"))


class Grammars:
    """Makes matchers for one model. Its vocabulary is read when first asked for, which takes a moment."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._ll_tokenizer: Any = None
        self._compiled: dict[str, llguidance.LLMatcher] = {}

    def matcher(self, schema: Mapping[str, Any] | None, grammar: str | None) -> llguidance.LLMatcher:
        """At the beginning of an answer. InvalidArgument for what is no schema or grammar, or cannot be bound to. The
        last few are kept, as clients ask with the same ones again and again."""
        name = "grammar" if schema is None else "json_schema"
        if schema is not None:
            check_schema(schema)
            try:
                grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidArgument(f"json_schema is no JSON schema: {printable(error, 300)}") from None
        assert grammar is not None
        with self._lock:
            found = self._compiled.pop(grammar, None) or self._compile(name, grammar)
            self._compiled[grammar] = found
            if len(self._compiled) > _NUM_KEPT:
                del self._compiled[next(iter(self._compiled))]
            return found.deep_copy()

    def _compile(self, name: str, grammar: str) -> llguidance.LLMatcher:
        if self._ll_tokenizer is None:
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size))
            ends = sorted(i for i in self._tokenizer.eos_ids if i < self._vocab_size)
            self._ll_tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=ends)
        matcher = llguidance.LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidArgument(f"{name} is not supported: {printable(matcher.get_error(), 300)}")
        return matcher


def check_schema(schema: Mapping[str, Any]) -> None:
    """InvalidArgument for a schema that would keep llguidance busy for minutes. All `multipleOf` of it are taken
    together, since those that hold for one number act as their least common multiple."""
    multiples: list[Decimal] = []
    left: list[Any] = [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            multiple = value.get("multipleOf")
            if isinstance(multiple, (int, float)) and math.isfinite(multiple) and multiple > 0:
                multiples.append(Decimal(str(multiple)))
            left += value.values()
        elif isinstance(value, (list, tuple)):
            left += value
    places = max((max(-int(m.as_tuple().exponent), 0) for m in multiples), default=0)
    common = 1
    for multiple in multiples:
        common = math.lcm(common, int(multiple.scaleb(places)))
        if common > _MAX_MULTIPLE:
            raise InvalidArgument(
                f"json_schema is not supported: its multipleOf have a common multiple above {_MAX_MULTIPLE} "
                f"(in units of their last decimal place)"
            )


class BoundEngine:
    """Stands between one Run and the engine, as the engine to the run."""

    def __init__(
        self, engine: _core.Engine, matcher: llguidance.LLMatcher, vocab_size: int, end_ids: frozenset[int]
    ) -> None:
        self._engine = engine
        self._end_ids = end_ids
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._cancelled = False
        self._ending: str | None = None  # reported once the engine has let go of the request
        self._masked = False  # the request draws among the allowed tokens only
        self._rejected = False  # what still comes of the request is not wanted
        self._num_submissions = 0
        self._num_prefix_hit = 0
        self._out: list[int] = []
        self._forced: list[int] = []  # appended without a draw, not yet reported

    def info(self) -> dict[str, Any]:
        return self._engine.info()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: _core.SamplingOptions,
        *,
        max_tokens: int,
        stop_ids: list[int],
        salt: int = 0,
        max_queued_tokens: int = 0,
    ) -> int | None:
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(sampling, name):  # they count the answer's tokens, of which the engine sees some as the prompt's
                raise InvalidArgument(f"{name} is {getattr(sampling, name):g}, with a grammar it can only be 0")
        self._prompt, self._sampling, self._left = list(prompt), sampling, max_tokens
        self._stop_ids, self._salt, self._max_queued_tokens = stop_ids, salt, max_queued_tokens
        self._bias, self._seed = list(sampling.logit_bias), sampling.seed
        self._force()
        self._request = self._go_on(masked=False)
        return None if self._request is None else 0

    def _force(self) -> None:
        """Appends what the grammar leaves no choice about. The last token is drawn, and all if probabilities are asked
        for."""
        if self._sampling.num_logprobs >= 0:
            return
        forced = self._matcher.compute_ff_tokens()[: self._left - 1]
        if forced and self._matcher.consume_tokens(forced):
            self._out += forced
            self._forced += forced
            self._left -= len(forced)

    def _go_on(self, masked: bool) -> int | None:
        sampling = self._sampling
        sampling.seed = (self._seed + self._num_submissions * _SEED_STEP) % (1 << 64)
        sampling.logit_bias = self._masked_bias() if masked else self._bias
        self._num_submissions += 1
        self._masked = masked
        return self._engine.submit(
            self._prompt + self._out,
            sampling,
            max_tokens=1 if masked else self._left,
            stop_ids=self._stop_ids,
            salt=self._salt,
            max_queued_tokens=self._max_queued_tokens,
        )

    def _masked_bias(self) -> list[tuple[int, float]]:
        bits = numpy.unpackbits(numpy.frombuffer(self._matcher.compute_bitmask(), numpy.uint8), bitorder="little")
        banned = numpy.flatnonzero(bits[: self._vocab_size] == 0).tolist()
        if len(banned) == self._vocab_size:
            raise ShoalError("the grammar allows no token of this model's vocabulary", "non_finite")
        out = set(banned)
        minus_infinity = float("-inf")
        return [(i, minus_infinity) for i in banned] + [(i, bias) for i, bias in self._bias if i not in out]

    def wait(self, _: int, timeout_ms: int) -> SimpleNamespace:
        update = self._engine.wait(self._request, timeout_ms)
        if self._num_submissions == 1:
            self._num_prefix_hit = update.num_prefix_hit
        taken = self._take(update.tokens)
        reason = update.finish_reason
        if reason is None:
            # Again when cancelled: that may have met the request before this one.
            if self._cancelled or self._ending is not None or self._rejected:
                self._engine.cancel(self._request)
        elif self._cancelled or reason in ("error", "non_finite"):
            pass
        elif self._ending is not None:
            reason = self._ending
        elif self._rejected:
            self._rejected, reason = False, None
            before = len(self._out)
            self._force()
            self._request = self._go_on(masked=len(self._out) == before)
        elif reason == "length" and self._left > 0:  # that was a masked draw
            reason = None
            self._force()
            self._request = self._go_on(masked=False)
        return SimpleNamespace(
            tokens=taken,
            num_prompt_done=min(update.num_prompt_done, len(self._prompt)),
            num_prefix_hit=self._num_prefix_hit,
            finish_reason=reason,
            error=update.error,
        )

    def _take(self, tokens: Sequence[_core.Sampled]) -> list[Any]:
        """The tokens that the grammar allows, with those that were forced before them."""
        taken: list[Any] = []
        if tokens and not self._rejected and self._ending is None:
            taken += [SimpleNamespace(id=i, logprob=0.0, top=[]) for i in self._forced]
            self._forced.clear()
        for token in tokens:
            if self._rejected or self._ending is not None:
                break
            if not self._accepts(token.id):
                if self._masked:
                    raise ShoalError(f"token {token.id} was drawn although the grammar bans it")
                self._rejected = True
                break
            taken.append(token)
            self._out.append(token.id)
            self._left -= 1
            if self._matcher.is_stopped():
                self._ending = "stop"
            elif self._left == 0:
                self._ending = "length"
        return taken

    def _accepts(self, token_id: int) -> bool:
        if self._matcher.is_stopped():  # by what was forced: only an end may follow, which it does not count as a token
            return token_id in self._end_ids
        return self._matcher.try_consume_tokens([token_id]) == 1

    def cancel(self, _: int) -> None:
        self._cancelled = True
        self._engine.cancel(self._request)
