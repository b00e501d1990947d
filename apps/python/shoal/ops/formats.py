"""Whole arrays in any number format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.errors import InvalidArgument
from shoal.ops._call import call

_PARTS = ("codes", "scales", "zeros", "global_scale")


def quantize(format: str, array: Any, *, block_size: int | None = None, symmetric: bool = True) -> dict[str, Any]:
    """Encodes an array [..., n, k]; each row of k values by itself.

    Args:
        format: a name of formats.def: "int4", "fp8_e4m3", "mxfp4", "nvfp4", "q4_k", ...
        array: float32, float16 or bfloat16, any strides; finite values.
        block_size: int formats: a power of two >= 16, or <= 0 for one group a row (default 32). fp8_e4m3: 128 for
            blocks of 128 x 128, 0 for one scale, default one a row. Others have their own.
        symmetric: int formats: False adds zeros.

    Returns:
        The parts that the format has, of `codes`, `scales`, `zeros`, `global_scale`.

    Raises:
        InvalidArgument: names what does not fit.
        Unsupported: a format that can be read but not made.
    """
    parts = call(
        "quantize", {"format": format, "array": array, "block_size": block_size, "symmetric": symmetric, "out": None}
    )
    return {name: part for name, part in zip(_PARTS, parts, strict=True) if part is not None}


def dequantize(format: str, parts: Mapping[str, Any], shape: Sequence[int]) -> Any:
    """The float32 array of `shape` that `parts` (as `quantize` makes them) stand for.

    Absent parts are missing or None. The block size follows from the shape of the scales, one column being one a row.

    Raises:
        InvalidArgument: names the part that is missing or does not fit.
    """
    if not isinstance(parts, Mapping):
        raise InvalidArgument(f"dequantize: parts is of type {type(parts).__name__}, expected a dict")
    unknown = [name for name in parts if name not in _PARTS]
    if unknown:
        raise InvalidArgument(f"dequantize: parts has {unknown[0]!r}, expected {', '.join(_PARTS)}")
    given = {name: parts.get(name) for name in _PARTS}
    return call("dequantize", {"format": format, "shape": list(shape), "out": None, **given})
