"""`shoal bench`: time to first token and decode rate by context length, on random tokens."""

from __future__ import annotations

import csv
import json
import platform
import random
import resource
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from shoal import _core, console
from shoal.errors import InvalidArgument, printable
from shoal.llm import LLM, SamplingParams

COLUMNS = (
    "context",
    "ttft_s",
    "ttft_spread_s",
    "prefill_tok_s",
    "decode_tok_s",
    "decode_spread_tok_s",
    "step_ms",
    "peak_memory_mb",
)


def parse_contexts(text: str) -> list[int]:
    """ "512,8k" as numbers: k is 1024."""
    out = []
    for part in text.split(","):
        digits = part.strip().lower()
        factor = 1024 if digits.endswith("k") else 1
        digits = digits.removesuffix("k")
        if not digits.isascii() or not digits.isdigit() or not 1 <= int(digits) * factor <= 1 << 24:
            raise InvalidArgument(f'"{part}" is no context length; write for example 512,8k')
        out.append(int(digits) * factor)
    return out


def parse_numbers(text: str, name: str, limit: int) -> tuple[int, ...]:
    """ "1,4,16" as numbers from 1 to `limit`. `name`: the option's."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part[:9]) <= limit for part in parts):
        raise InvalidArgument(f'{name} is "{printable(text)}", expected numbers from 1 to {limit} like 1,4,16')
    return tuple(map(int, parts))


def bench(
    model: str, contexts: list[int], num_tokens: int, repetitions: int, output: str, engine: dict[str, Any]
) -> int:
    if num_tokens < 2 or repetitions < 1:
        raise InvalidArgument("a bench decodes at least 2 tokens and runs at least once")
    engine = {
        **engine,
        "max_context": engine.get("max_context") or max(contexts) + num_tokens + 1,
        "prefix_cache": False,
    }
    with console.load(model, **engine) as llm:
        rows = []
        _measure(llm, min(16, max(contexts)), min(4, num_tokens), 0)  # the first run pays for caches and threads
        for context in contexts:
            runs = [_measure(llm, context, num_tokens, i) for i in range(repetitions)]
            rows.append(_row(context, runs))
        print_results(rows, _setting(llm, num_tokens, repetitions), output, COLUMNS)
    return 0


def _measure(llm: LLM, context: int, num_tokens: int, seed: int) -> tuple[float, float]:
    """Seconds to the first token, and from there to the last."""
    chooser = random.Random(seed)
    limit = llm.info["vocab_size"]
    ids = [chooser.randrange(limit) for _ in range(context)]
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    (completion,) = llm.generate(ids, params)
    # A tiny model may deliver all tokens within one tick of the clock.
    return completion.ttft_s, max(completion.decode_s, 1e-9) / (completion.completion_tokens - 1)


def _row(context: int, runs: list[tuple[float, float]]) -> dict[str, float]:
    first = [ttft for ttft, _ in runs]
    rates = [1 / step for _, step in runs]
    return {
        "context": context,
        "ttft_s": statistics.median(first),
        "ttft_spread_s": max(first) - min(first),
        "prefill_tok_s": context / statistics.median(first),
        "decode_tok_s": statistics.median(rates),
        "decode_spread_tok_s": max(rates) - min(rates),
        "step_ms": 1e3 * statistics.median(step for _, step in runs),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 * 1.024,
    }


def _setting(llm: LLM, num_tokens: int, repetitions: int) -> dict[str, Any]:
    return {
        "model": llm.path.name,
        "version": _core.version,
        "processor": _core.cpu_info()["processor"],
        "system": platform.platform(),
        **{
            key: llm.info[key]
            for key in ("device", "isa", "threads", "kv_dtype", "page_size", "kv_bytes", "weight_bytes")
        },
        "decoded_tokens": num_tokens,
        "repetitions": repetitions,
    }


def print_results(rows: Sequence[dict[str, Any]], setting: dict[str, Any], output: str, columns: Sequence[str]) -> None:
    """`output`: md, json or csv. A value that is None was not to be had."""
    if output == "json":
        print(json.dumps({"setting": setting, "results": rows}, indent=2))
        return
    if output == "csv":
        writer = csv.DictWriter(sys.stdout, columns)
        writer.writeheader()
        writer.writerows(rows)
        return
    for key, value in setting.items():
        label = {"kv_bytes": "KV cache", "weight_bytes": "weights"}.get(key, key.replace("_", " "))
        print(f"{label:15} {console.size_text(value) if key.endswith('_bytes') else value}")
    print()
    print("| " + " | ".join(columns) + " |")
    print("|" + "---:|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row[c]) for c in columns) + " |")


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
