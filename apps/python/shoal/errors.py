"""Errors: one clear sentence each, and a stable `code`. The bindings raise these classes too."""


class ShoalError(Exception):
    """Anything that shoal refuses or fails at. `code` is a stable word for programs."""

    code = "internal"

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class InvalidArgument(ShoalError, ValueError):
    """An argument or option breaks the documented contract."""

    code = "invalid_argument"


class ModelFormatError(ShoalError):
    """A model file or folder is malformed or contradicts itself."""

    code = "model_format"


class OutOfMemory(ShoalError, MemoryError):
    """Memory or the page budget does not suffice."""

    code = "out_of_memory"


class Unsupported(ShoalError):
    """Valid, but this build or device has no path for it; the message names it."""

    code = "unsupported"


def printable(name: object, limit: int = 80) -> str:
    """A name taken from a file or a user, made safe to print: escaped and cut, as the C++ side does."""
    text = str(name)
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(
        c if c.isprintable() and c not in '"\\' else c.encode("unicode_escape", "replace").decode() for c in cut
    )
