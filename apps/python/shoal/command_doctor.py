"""`shoal doctor`: what this installation and this machine have, and what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from shoal import _core, models
from shoal.errors import ShoalError
from shoal.settings import config_path

_PACKAGES = ("numpy", "tokenizers", "jinja2", "typer", "rich")


def doctor(as_json: bool) -> int:
    found = examine()
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)
    return 1 if found["problems"] else 0


def examine() -> dict[str, Any]:
    cpu = _core.cpu_info()
    problems: list[str] = []
    notes: list[str] = []
    try:
        isa = _core.default_isa()
    except ShoalError as error:
        isa = None
        problems.append(str(error))
    memory = _memory()
    gpus = _gpus()
    if gpus and not _core.has_cuda:
        notes.append("there is a GPU, but this build has no CUDA (build it with SHOAL_CUDA=ON): it runs on the CPU")
    cuda_devices = _core.cuda_devices()
    if _core.has_cuda and not cuda_devices:
        notes.append(f"this build has CUDA, but no device: {_core.why_no_cuda_device()}")
    if not gpus and not _core.has_cuda:
        notes.append("no GPU and no CUDA in this build: models run on the CPU")
    if isa == "scalar":
        notes.append("only plain instructions are used, which is slow; AVX2 or AVX-512 would be much faster")
    available = memory.get("available_bytes")
    if available is not None and available < 1 << 30:
        notes.append("less than 1 GB of memory is free")
    return {
        "version": _core.version,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "processor": cpu["processor"],
        "isas": cpu["isas"],
        "isa": isa,
        "forced_isa": os.environ.get("SHOAL_CPU_ISA"),
        "threads": cpu["threads"],
        "usable_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cpu["threads"],
        "memory": memory,
        "cuda_build": _core.has_cuda,
        "cuda_devices": cuda_devices,
        "gpus": gpus,
        "architectures": list(_core.registered_architectures()),
        "cache": os.fspath(models.cache_folder()),
        "cached_models": [name for name, model in models.NAMED_MODELS.items() if models.cached(model)],
        "config": os.fspath(config_path()),
        "config_exists": config_path().is_file(),
        "problems": problems,
        "notes": notes,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory() -> dict[str, int]:
    out: dict[str, int] = {}
    names = {"MemTotal": "total_bytes", "MemAvailable": "available_bytes"}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in names:
                out[names[key]] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return out


def _gpus() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.returncode == 0 else []


def _print(found: dict[str, Any]) -> None:
    from shoal.console import size_text

    memory = found["memory"]
    forced = f" (SHOAL_CPU_ISA={found['forced_isa']})" if found["forced_isa"] else ""
    rows = {
        "shoal": f"{found['version']}, Python {found['python']}, {found['system']}",
        "packages": ", ".join(f"{name} {version or 'missing'}" for name, version in found["packages"].items()),
        "processor": f"{found['processor']}, {found['threads']} threads ({found['usable_threads']} usable)",
        "instructions": f"{found['isa'] or 'none'}{forced} of {', '.join(found['isas'])}",
        "memory": ", ".join(f"{size_text(value)} {key.removesuffix('_bytes')}" for key, value in memory.items())
        or "unknown",
        "CUDA": ("in this build" if found["cuda_build"] else "not in this build")
        + "; GPUs: "
        + ("; ".join(found["gpus"]) or "none"),
        "architectures": ", ".join(found["architectures"]) or "none",
        "cache": f"{found['cache']} ({', '.join(found['cached_models']) or 'no models'})",
        "config": found["config"] + ("" if found["config_exists"] else " (not there)"),
    }
    for name, value in rows.items():
        print(f"{name:14} {value}")
    for note in found["notes"]:
        print(f"note: {note}")
    for problem in found["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
