"""Streaming gives whole characters, nothing of a stop string, and in the end the same text."""

from __future__ import annotations

import pytest
from conftest import byte_level_metadata
from hypothesis import given
from hypothesis import strategies as st
from shoal.detokenizer import Detokenizer, StopStrings

from shoal import InvalidArgument, Tokenizer

TINY = Tokenizer.from_gguf(byte_level_metadata())


@given(st.lists(st.integers(0, 300)))
def test_pieces_join_to_the_text(ids: list[int]) -> None:
    detokenizer = Detokenizer(TINY)
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish()
    assert text == TINY.decode(ids, skip_special_tokens=True)


def test_characters_come_whole() -> None:
    detokenizer = Detokenizer(TINY)
    assert [detokenizer.push([b]) for b in "é🚀".encode()] == ["", "é", "", "", "", "🚀"]
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.finish() == "�"


def test_control_tokens_have_no_text() -> None:
    assert Detokenizer(TINY).push([97, 260, 98]) == "ab"


def expected_cut(text: str, stops: list[str]) -> tuple[str, bool]:
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(1, 4), min_size=1),
)
def test_stop_strings(text: str, stops: list[str], sizes: list[int]) -> None:
    stopper = StopStrings(stops)
    out, at, i = "", 0, 0
    want, stopped = expected_cut(text, stops)
    while at < len(text):
        size = sizes[i % len(sizes)]
        out += stopper.push(text[at : at + size])
        at += size
        i += 1
        assert want.startswith(out)  # nothing of a stop string was let out
    if not stopper.stopped:
        out += stopper.finish()
    assert (out, stopper.stopped) == (want, stopped)


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    stopper = StopStrings(["END", "\n\n"])
    assert [stopper.push(t) for t in ("a", "E", "N", "x", "\n", "b", "E")] == ["a", "", "", "ENx", "", "\nb", ""]
    assert stopper.finish() == "E"


@pytest.mark.parametrize(
    ("stops", "message"), [([""], "empty"), (["a", ""], "empty"), ([1], "int"), ("ab", "list"), (3, "list")]
)
def test_bad_stop_strings(stops: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        StopStrings(stops)
