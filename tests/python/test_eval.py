"""The sums of `shoal eval`, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from shoal.command_bench import parse_contexts
from shoal.command_eval import Totals, log_softmax
from shoal.errors import InvalidArgument


def test_perplexity_by_hand() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32)) + 7
    totals = Totals()
    totals.score(logits, [0, 1])
    results = totals.results()
    assert results["perplexity"] == pytest.approx(math.sqrt(2 * 10), rel=1e-6)
    assert results["tokens"] == 2 and "kl_mean" not in results


def test_divergence_by_hand() -> None:
    ours = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32))
    theirs = np.log(np.array([[0.75, 0.25], [0.9, 0.1]], np.float32))
    totals = Totals()
    totals.score(ours, [0, 0])
    totals.compare(ours, theirs)
    results = totals.results()
    wanted = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert results["kl_max"] == pytest.approx(wanted, rel=1e-5)
    assert results["kl_mean"] == pytest.approx(wanted / 2, rel=1e-5)
    assert results["top1_agreement"] == 1.0


def test_impossible_tokens_of_the_reference_do_not_count() -> None:
    totals = Totals()
    ours = np.zeros((1, 2), np.float32)
    totals.score(ours, [0])
    totals.compare(ours, np.array([[0.0, -np.inf]], np.float32))
    assert totals.results()["kl_mean"] == pytest.approx(math.log(2))


def test_log_softmax_is_safe() -> None:
    assert log_softmax(np.array([[1000.0, 0.0]], np.float32))[0].tolist() == [0.0, -1000.0]


def test_context_lengths() -> None:
    assert parse_contexts("512, 8k,1K") == [512, 8192, 1024]
    for wrong in ("", "0", "k", "-1", "1.5k", "8m", "½"):
        with pytest.raises(InvalidArgument, match="no context length"):
            parse_contexts(wrong)
