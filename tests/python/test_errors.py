"""Errors of the library arrive as the documented classes, with their codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from shoal.errors import printable

import shoal
from shoal import InvalidArgument, ModelFormatError, OutOfMemory, ShoalError, Unsupported, _core


def test_classes() -> None:
    assert issubclass(InvalidArgument, (ShoalError)) and issubclass(InvalidArgument, ValueError)
    assert issubclass(OutOfMemory, ShoalError) and issubclass(OutOfMemory, MemoryError)
    codes = {cls: cls("x").code for cls in (InvalidArgument, ModelFormatError, OutOfMemory, Unsupported, ShoalError)}
    assert list(codes.values()) == ["invalid_argument", "model_format", "out_of_memory", "unsupported", "internal"]


def test_translation(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(ModelFormatError) as caught:
        _core.GgufFile(str(bad))
    assert caught.value.code == "model_format" and "bad.gguf" in str(caught.value)
    with pytest.raises(ShoalError) as caught:
        _core.GgufFile(str(tmp_path / "none.gguf"))
    assert "none.gguf" in str(caught.value)


def test_forced_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CPU_ISA", "scalar")
    assert _core.default_isa() == "scalar"
    monkeypatch.setenv("SHOAL_CPU_ISA", "mmx")
    with pytest.raises(InvalidArgument, match="mmx"):
        _core.default_isa()


def test_what_the_build_has() -> None:
    info = _core.cpu_info()
    assert info["isas"][0] == "scalar" and info["threads"] >= 1 and info["processor"]
    assert "llama" in _core.registered_architectures()
    assert _core.version == shoal.__version__


def test_printable() -> None:
    assert printable('a"b\\c\n\x1b') == "a\\x22b\\x5cc\\n\\x1b" or printable('a"b\\c\n\x1b').isprintable()
    assert len(printable("x" * 1000)) == 80
    assert printable("ünï") == "ünï"


def test_the_package_lists_its_names() -> None:
    for name in shoal.__all__:
        assert getattr(shoal, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shoal.nothing
