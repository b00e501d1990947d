"""`shoal inspect`: what is in a model file or folder, and what it needs here."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

from shoal import _core, console, models
from shoal.errors import ModelFormatError, Unsupported, printable

CONTEXTS = (8 << 10, 32 << 10, 128 << 10)  # whose memory is told


def inspect(model: str, as_json: bool, **engine: Any) -> int:
    """`engine`: options of `shoal.LLM` that a plan takes; a max_context is told beside CONTEXTS."""
    path = models.resolve(model, console.say)
    found = describe(path, **engine)
    if as_json:
        print(json.dumps(_sound(found), ensure_ascii=False))
    else:
        _print(found)
    return 0


def describe(path: Path, *, max_context: int = 0, **engine: Any) -> dict[str, Any]:
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
    plan, problem = None, None
    if architecture not in _core.registered_architectures():
        problem = f"the architecture {printable(architecture)} is not supported"
    else:
        try:
            plan = _core.plan_model(
                os.fspath(path), sorted({*CONTEXTS, *([max_context] if max_context else [])}), **engine
            )
        except (ModelFormatError, Unsupported) as error:
            problem = str(error)
    return {
        "path": os.fspath(path),
        "architecture": architecture,
        "supported": plan is not None,
        "problem": problem,
        "isa": _core.default_isa(),
        "plan": plan and _explained(plan, engine.get("exact", False)),
        "parameters": sum(_num_parameters(t, code_bits) for t in tensors),
        "bytes": source.total_bytes(),
        "formats": dict(Counter(t["format"] for t in tensors).most_common()),
        "metadata": {key: _shortened(value) for key, value in metadata.items()},
        "tensors": tensors,
    }


def _explained(plan: dict[str, Any], exact: bool) -> dict[str, Any]:
    """With the reason beside every group of weights that no int8 kernel computes."""
    for group in plan["weights"]:
        group["why"] = None
        if group["variant"] == "f32":
            if group["format"] in ("f32", "f16", "bf16"):
                group["why"] = "its weights are not quantised"
            elif exact:
                group["why"] = "exact activations were asked for"
            else:
                group["why"] = f"no int8 kernel reads {group['format']}: decoded to f32 in every step"
    return plan


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
    if found["problem"]:
        print(f"problem       {found['problem']}")
    print(f"parameters    {found['parameters']:,}")
    print(
        f"weights       {console.size_text(found['bytes'])}: "
        + ", ".join(f"{n} {f}" for f, n in found["formats"].items())
    )
    bits = 8 * found["bytes"] / found["parameters"] if found["parameters"] else 0
    print(f"a parameter   {bits:.2f} bits")
    if found["plan"]:
        _print_plan(found["plan"], found["isa"])
    print("\nmetadata")
    for key, value in found["metadata"].items():
        print(f"  {printable(key)} = {printable(value)}")
    print("\ntensors")
    for tensor in found["tensors"]:
        shape = " x ".join(map(str, tensor["shape"]))
        print(f"  {printable(tensor['name']):44} {tensor['format']:8} {shape}  {console.size_text(tensor['bytes'])}")


def _print_plan(plan: dict[str, Any], isa: str) -> None:
    print("\nlayers")
    for kind, count in Counter(plan["layers"]).items():
        print(f"  {count:4} x {kind}")
    print("\nkernels on this processor (" + isa + ")")
    for group in plan["weights"]:
        why = f": {group['why']}" if group["why"] else ""
        print(
            f"  {group['format']:10} {group['variant']:6} {group['layout']:16} {group['count']:6} matrices, "
            f"{console.size_text(group['bytes'])}{why}"
        )
    print(f"\nmemory, KV cache in {plan['kv_dtype']}")
    per_token = ", ".join(f"{console.size_text(size)} in {name}" for name, size in plan["kv_token_bytes"].items())
    print(f"  KV cache, a token   {per_token}")
    if plan["state_bytes"]:
        print(f"  states, a sequence  {console.size_text(plan['state_bytes'])}")
    for need in plan["memory"]:
        parts = ", ".join(
            f"{name} {console.size_text(need[name])}" for name in ("weights", "kv", "states", "workspace") if need[name]
        )
        print(f"  {need['context']:7} tokens      {console.size_text(need['total'])} ({parts})")
    if not plan["memory"]:
        print(f"  the model's context of {plan['max_context']} is shorter than {CONTEXTS[0]}: see --ctx")
