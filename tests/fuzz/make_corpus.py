"""Writes the seeds of the fuzzers into corpus/<fuzzer>/. No packages needed: python tests/fuzz/make_corpus.py"""

import json
import struct
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"

# Value types of GGUF and how struct packs them.
GGUF_TYPES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def scalar(kind: int, value) -> bytes:
    return string(value) if kind == 8 else struct.pack("<" + GGUF_TYPES[kind], value)


def entry(key: str, kind: int, value) -> bytes:
    return string(key) + struct.pack("<I", kind) + scalar(kind, value)


def array(key: str, kind: int, values: list) -> bytes:
    return string(key) + struct.pack("<IIQ", 9, kind, len(values)) + b"".join(scalar(kind, v) for v in values)


def gguf(entries: list[bytes], tensors: list[tuple[str, list[int], int, int]], alignment=32, version=3) -> bytes:
    """`tensors`: name, dimensions innermost first, ggml type, bytes."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries)
    offset = 0
    for name, dims, kind, num_bytes in tensors:
        out += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        offset = (offset + num_bytes + alignment - 1) // alignment * alignment
    out += b"\0" * (-len(out) % alignment)
    return out + bytes(i % 251 for i in range(offset))


def safetensors(header: dict | str, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def gguf_seeds() -> dict[str, bytes]:
    kinds = [entry(f"k{kind}", kind, 1) for kind in GGUF_TYPES]
    arrays = [array(f"a{kind}", kind, [1, 0]) for kind in GGUF_TYPES]
    tokens = array("tokenizer.ggml.tokens", 8, ["<s>", "a", "\u00e9"])
    name = entry("general.architecture", 8, "llama")
    split = [entry("split.no", 2, 0), entry("split.count", 2, 1), entry("split.tensors.count", 5, 1)]
    return {
        "empty": gguf([], []),
        "version2": gguf([name], [], version=2),
        "values": gguf([*kinds, entry("s", 8, b"\xff\0")], []),
        "arrays": gguf([*arrays, tokens, array("none", 8, [])], []),
        "tensors": gguf([name], [("a.weight", [2, 3], 0, 24), ("b", [32, 2], 2, 36), ("c", [], 1, 2)]),
        "blocks": gguf([], [("q4_k", [256], 12, 144), ("q6_k", [256], 14, 210), ("iq4_nl", [32], 20, 18)]),
        "alignment": gguf([entry("general.alignment", 4, 8)], [("x", [1, 1, 1, 2], 30, 4)], alignment=8),
        "unsupported": gguf([], [("x", [4], 26, 16)]),
        "split": gguf(split, [("x", [1], 0, 4)]),
        "zero_dimension": gguf([], [("x", [4, 0], 0, 0)]),
    }


def safetensors_seeds() -> dict[str, bytes]:
    return {
        "empty": safetensors({}, b""),
        "metadata": safetensors({"__metadata__": {"format": "pt"}}, b""),
        "tensors": safetensors(
            {"a": tensor("F32", [2, 1], 0, 8), "b": tensor("BF16", [3], 8, 14), "c": tensor("F16", [], 14, 16)},
            bytes(16),
        ),
        "others": safetensors(
            {"i": tensor("I64", [1], 0, 8), "f8": tensor("F8_E4M3", [2], 8, 10), "f4": tensor("F4", [4], 10, 12)},
            bytes(12),
        ),
        "zero_dimension": safetensors({"x": tensor("F32", [0, 4], 0, 0)}, b""),
        "padded": safetensors('{"x":{"shape":[1],"dtype":"U8","data_offsets":[0,1]}}   ', b"x"),
        "overlap": safetensors({"x": tensor("U8", [4], 0, 4), "y": tensor("U8", [4], 2, 6)}, bytes(6)),
    }


def json_seeds() -> dict[str, bytes]:
    return {
        "kinds": b'{"n": null, "t": true, "f": false, "i": -12, "d": 2.5e-3, "s": "x", "a": [1, []], "o": {}}',
        "numbers": b"[0, -0, 0.0, 9223372036854775807, 9223372036854775808, 1e308, 4.9e-324, 1e-400, 1E+2]",
        "strings": rb'["\"\\\/\b\f\n\r\t", "\u0041\u00e9\ud83d\ude00", "\u0000"]',
        "utf8": '["\u00e9\u20ac\U0001f600\U0010ffff"]'.encode(),
        "too_large": b"1e400",
        "duplicate": b'{"a": 1, "b": 2, "a": 3}',
        "deep": b"[" * 64 + b"]" * 64,
        "surrogate": rb'["\ud800"]',
        "config": json.dumps({"model_type": "llama", "rope_scaling": None, "eos_token_id": [1, 2]}, indent=2).encode(),
    }


def main() -> None:
    for fuzzer, seeds in {"gguf": gguf_seeds(), "safetensors": safetensors_seeds(), "json": json_seeds()}.items():
        folder = CORPUS / fuzzer
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in seeds.items():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
