"""`shoal eval`: perplexity of a text, and how far the logits are from stored ones.

The text is cut into windows of --ctx tokens, each with the beginning-of-sequence token the model wants; the second half
of each window is scored, so that every scored token has a context (the convention of llama.cpp's perplexity tool).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shoal import console
from shoal.errors import InvalidArgument, ShoalError, printable
from shoal.llm import LLM


def evaluate(
    model: str,
    text_file: str,
    against: str | None,
    save: str | None,
    window: int,
    num_windows: int,
    as_json: bool,
    engine: dict[str, Any],
) -> int:
    if window < 4:
        raise InvalidArgument(f"a window of {window} tokens is too small to score")
    text = _read_text(text_file)
    reference = None if against is None else Reference(against)
    with console.load(model, **{**engine, "max_context": window}) as llm:
        windows = cut_windows(llm, text, window, num_windows)
        if reference is not None:
            windows = reference.windows(windows)
        totals = Totals()
        with _writer(save) as store, console.bar(f"{len(windows)} windows") as progress:
            for i, ids in enumerate(windows):
                (logits,) = llm.logits([ids])
                start = 0 if reference is not None and reference.whole else len(ids) // 2
                totals.score(logits[start:-1], ids[start + 1 :])
                if reference is not None:
                    totals.compare(logits[start:], reference.logits(i, len(ids) - start, llm.info["vocab_size"]))
                store(i, ids, logits[start:])
                progress((i + 1) / len(windows))
    report(totals, as_json)
    return 0


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise ShoalError(f'cannot read "{printable(path)}": {error.strerror}', "io") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f'"{printable(path)}" is no UTF-8 text') from None


def cut_windows(llm: LLM, text: str, window: int, num_windows: int) -> list[list[int]]:
    ids = llm.tokenizer.encode_plain(text)
    prefix = [llm.tokenizer.bos_id] if llm.tokenizer.encode_plain("", add_special_tokens=True) else []
    step = window - len(prefix)
    windows = [prefix + ids[at : at + step] for at in range(0, len(ids) - step + 1, step)]
    if num_windows > 0:
        windows = windows[:num_windows]
    if not windows:
        raise InvalidArgument(f"the text has {len(ids)} tokens, less than one window of {step}; choose a smaller --ctx")
    return windows


class Totals:
    """Sums over scored tokens, in float64."""

    def __init__(self) -> None:
        self.nll = self.nll_squared = 0.0
        self.tokens = 0
        self.divergences: list[np.ndarray] = []
        self.same_top = 0

    def score(self, logits: np.ndarray, targets: list[int]) -> None:
        """logits [num_tokens, vocab_size] predict targets [num_tokens]."""
        for rows, wanted in _blocks(logits, np.asarray(targets)):
            nll = -log_softmax(rows)[np.arange(len(rows)), wanted]
            self.nll += float(nll.sum())
            self.nll_squared += float((nll * nll).sum())
            self.tokens += len(rows)

    def compare(self, logits: np.ndarray, reference: np.ndarray) -> None:
        """Kullback-Leibler divergence of each row from the reference's: sum p_ref (log p_ref - log p)."""
        for rows, wanted in _blocks(logits, reference):
            ours, theirs = log_softmax(rows), log_softmax(wanted)
            probability = np.exp(theirs)
            terms = np.where(probability > 0, probability * (np.where(probability > 0, theirs, 0) - ours), 0)
            self.divergences.append(np.maximum(terms.sum(axis=1), 0))
            self.same_top += int((rows.argmax(axis=1) == wanted.argmax(axis=1)).sum())

    def results(self) -> dict[str, Any]:
        mean = self.nll / self.tokens
        variance = max(self.nll_squared / self.tokens - mean * mean, 0.0)
        perplexity = math.exp(mean) if mean < 700 else math.inf
        out: dict[str, Any] = {
            "tokens": self.tokens,
            "nll": mean,
            "perplexity": perplexity,
            "perplexity_error": perplexity * math.sqrt(variance / max(self.tokens - 1, 1)),
        }
        if self.divergences:
            values = np.concatenate(self.divergences)
            out |= {
                "kl_mean": float(values.mean()),
                "kl_p99": float(np.quantile(values, 0.99)),
                "kl_max": float(values.max()),
                "top1_agreement": self.same_top / len(values),
            }
        return out


def _blocks(logits: np.ndarray, other: np.ndarray, size: int = 64) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A few rows at a time: a large vocabulary in float64 would fill the memory."""
    for at in range(0, len(logits), size):
        yield logits[at : at + size], other[at : at + size]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def report(totals: Totals, as_json: bool) -> None:
    results = totals.results()
    if as_json:
        print(json.dumps(results))
        return
    print(
        f"perplexity {results['perplexity']:.4f} +- {results['perplexity_error']:.4f} over {results['tokens']} tokens"
    )
    if "kl_mean" in results:
        print(
            f"KL divergence mean {results['kl_mean']:.6f}, 99 % {results['kl_p99']:.6f}, max {results['kl_max']:.6f}; "
            f"top-1 agreement {100 * results['top1_agreement']:.2f} %"
        )


# Stored logits: an .npz with ids_<i> and logits_<i> for each window, or an .npy [num_tokens, vocab_size] of one window


class Reference:
    def __init__(self, path: str) -> None:
        self._name = printable(Path(path).name)
        try:
            stored = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            raise ShoalError(f'cannot read "{printable(path)}": {error.strerror or error}', "io") from None
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise InvalidArgument(f'"{self._name}" is no .npy or .npz file of numbers: {error}') from None
        self.whole = isinstance(stored, np.ndarray)  # of a whole window, not of its second half
        self._stored = stored
        if self.whole and stored.ndim != 2:
            raise InvalidArgument(f'"{self._name}" has shape {stored.shape}, expected [num_tokens, vocab_size]')

    def windows(self, windows: list[list[int]]) -> list[list[int]]:
        """Those that were stored; they must be of the same tokens."""
        if self.whole:
            rows = len(self._stored)
            if not 2 <= rows <= len(windows[0]):
                raise InvalidArgument(f'"{self._name}" has {rows} rows, a window has {len(windows[0])} tokens')
            return [windows[0][:rows]]
        count = sum(name.startswith("ids_") for name in self._stored.files)
        windows = windows[:count]
        for i, ids in enumerate(windows):
            if self._window("ids", i).tolist() != ids:
                raise InvalidArgument(f'"{self._name}" was made of other tokens (another text, --ctx or tokenizer)')
        if not windows:
            raise InvalidArgument(f'"{self._name}" holds no windows')
        return windows

    def logits(self, index: int, rows: int, vocab_size: int) -> np.ndarray:
        values = self._stored if self.whole else self._window("logits", index)
        if values.shape != (rows, vocab_size):
            raise InvalidArgument(f'"{self._name}" has logits of shape {values.shape}, expected {(rows, vocab_size)}')
        # Impossible tokens (-inf) are fine, rows without a possible one, NaN and +inf are not.
        if values.dtype.kind != "f" or not np.isfinite(values.max(axis=1)).all():
            raise InvalidArgument(f'"{self._name}" has logits that are no numbers to compare with')
        return values

    def _window(self, kind: str, index: int) -> np.ndarray:
        try:
            return self._stored[f"{kind}_{index}"]
        except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise InvalidArgument(f'"{self._name}" has no sound {kind}_{index}: {error}') from None


@contextlib.contextmanager
def _writer(path: str | None) -> Iterator[Any]:
    """A function that stores one window; they are written as they come, since together they may exceed the memory."""
    if path is None:
        yield lambda index, ids, logits: None
        return
    if not path.endswith(".npz"):
        raise InvalidArgument(f'--save writes .npz files, not "{printable(path)}"')
    partial = f"{path}.partial"  # the file gets its name when it is whole; --against may be reading an older one
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:

            def store(index: int, ids: list[int], logits: np.ndarray) -> None:
                for name, values in (("ids", np.asarray(ids, np.int32)), ("logits", logits)):
                    with archive.open(f"{name}_{index}.npy", "w", force_zip64=True) as out:
                        np.lib.format.write_array(out, np.ascontiguousarray(values), allow_pickle=False)

            yield store
        os.replace(partial, path)
    except OSError as error:
        raise ShoalError(f'cannot write "{printable(path)}": {error.strerror or error}', "io") from None
    finally:
        Path(partial).unlink(missing_ok=True)
