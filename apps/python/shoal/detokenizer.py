"""Text of tokens as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from shoal.errors import InvalidArgument
from shoal.tokenizer import Tokenizer


class Detokenizer:
    """Gives out characters when their last byte has come. Joined, the pieces are the text of all tokens at once: bytes
    that are no UTF-8 are U+FFFD. Control tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        hidden = self._tokenizer.control_ids
        return self._decoder.decode(b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in hidden))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Cuts a growing text before the first stop string in it. What may be the beginning of one is held back.

    Of several, the one that is complete first counts; of those that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        check_stops(stops)
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._longest = len(self._stops[0]) if self._stops else 0
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def push(self, text: str) -> str:
        """What is now sure to be before any stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = self._first_stop()
        if found is not None:
            start, self.found = found
            out, self._held = self._held[:start], ""
            return out
        keep = self._length_of_beginning()
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """The text has ended: what was held back was no stop string."""
        out, self._held = self._held, ""
        return out

    def _first_stop(self) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None  # end, start, which
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _length_of_beginning(self) -> int:
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return size
        return 0


def check_stops(stops: object) -> None:
    if isinstance(stops, (str, bytes)) or not isinstance(stops, Sequence):
        raise InvalidArgument("stop must be a list of strings")
    for stop in stops:
        if not isinstance(stop, str):
            raise InvalidArgument(f"a stop string is {type(stop).__name__}, expected str")
        if not stop:
            raise InvalidArgument("a stop string is empty")
