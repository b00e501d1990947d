"""`shoal inspect`: what is in a model file or folder."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

from shoal import _core, console, models
from shoal.errors import ModelFormatError, Unsupported, printable


def inspect(model: str, as_json: bool) -> int:
    path = models.resolve(model, console.say)
    found = describe(path)
    if as_json:
        print(json.dumps(_sound(found), ensure_ascii=False))
    else:
        _print(found)
    return 0


def describe(path: Path) -> dict[str, Any]:
    if path.is_dir():
        source: Any = _core.ModelFolder(os.fspath(path))
        metadata = json.loads((path / "config.json").read_text("utf-8"))
        text = metadata.get("text_config") if isinstance(metadata.get("text_config"), dict) else {}
        architecture = metadata.get("model_type") or text.get("model_type")
        code_bits = _code_bits(source)
    else:
        source = _core.GgufFile(os.fspath(path))
        metadata = source.metadata()
        architecture = metadata.get("general.architecture")
        code_bits = 0
    if not isinstance(architecture, str):
        raise ModelFormatError(f"{path.name} does not say what architecture it is")
    tensors = source.tensors()
    return {
        "path": os.fspath(path),
        "architecture": architecture,
        "supported": architecture in _core.registered_architectures() and code_bits is not None,
        "parameters": sum(_num_parameters(t, code_bits) for t in tensors),
        "bytes": source.total_bytes(),
        "formats": dict(Counter(t["format"] for t in tensors).most_common()),
        "metadata": {key: _shortened(value) for key, value in metadata.items()},
        "tensors": tensors,
    }


def _code_bits(folder: Any) -> int | None:
    """Bits of a quantised layer's codes, 0 for plain weights, None for a scheme that is not read."""
    try:
        return folder.code_bits()
    except Unsupported:
        return None


def _num_parameters(tensor: dict[str, Any], code_bits: int | None) -> int:
    """Weights in a tensor: packed codes count one each, scales and indices none."""
    name = tensor["name"]
    if code_bits and name.endswith(("scales", "_scale", "_scale_inv", "_scale_2")):
        return 0
    if tensor["format"].islower():
        return math.prod(tensor["shape"])
    return tensor["bytes"] * 8 // code_bits if code_bits and name.endswith(("weight", "_packed", "_blocks")) else 0


def _shortened(value: Any) -> Any:
    """A vocabulary is not worth a screen."""
    if isinstance(value, list) and len(value) > 64:
        return f"[{len(value)} entries]"
    return value


def _sound(value: Any) -> Any:
    """Without the lone surrogates and infinities that JSON cannot hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, dict):
        return {_sound(k): _sound(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_sound(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _print(found: dict[str, Any]) -> None:
    note = "" if found["supported"] else " (not supported by this build)"
    print(f"architecture  {printable(found['architecture'])}{note}")
    print(f"parameters    {found['parameters']:,}")
    print(
        f"weights       {console.size_text(found['bytes'])}: "
        + ", ".join(f"{n} {f}" for f, n in found["formats"].items())
    )
    print("\nmetadata")
    for key, value in found["metadata"].items():
        print(f"  {printable(key)} = {printable(value)}")
    print("\ntensors")
    for tensor in found["tensors"]:
        shape = " x ".join(map(str, tensor["shape"]))
        print(f"  {printable(tensor['name']):44} {tensor['format']:8} {shape}  {console.size_text(tensor['bytes'])}")
