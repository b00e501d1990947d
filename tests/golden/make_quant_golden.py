"""Writes quant/<format>.bin: random blocks and the values that the PyPI package `gguf` reads (oracle of quant_test).

    python make_quant_golden.py

A file is, little-endian: u32 number of blocks, u32 bytes a block, u32 values a block, the blocks, the values as f32.
Formats that `gguf` can make also have <format>_encode.bin: u32 number of blocks, u32 bytes a block, u32 values a block,
the blocks that it makes, the values they are made of.

Bytes are random, so that every code, sign and scale occurs, scales that are infinite or NaN among them. Two codes are
avoided because shoal reads them as NaN and `gguf` does not: 255 as the scale of MXFP4, 0x7f (with any bit 7) as one of
NVFP4.
"""

import pathlib

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

# format: (blocks, offsets of f16 scales)
FORMATS = {
    "f32": (256, []),
    "f16": (512, []),
    "bf16": (512, []),
    "q4_0": (64, [0]),
    "q4_1": (64, [0, 2]),
    "q5_0": (64, [0]),
    "q5_1": (64, [0, 2]),
    "q8_0": (64, [0]),
    "q2_k": (16, [80, 82]),
    "q3_k": (16, [108]),
    "q4_k": (16, [0, 2]),
    "q5_k": (16, [0, 2]),
    "q6_k": (16, [208]),
    "iq4_nl": (64, [0]),
    "iq4_xs": (16, [0]),
    "iq2_xxs": (16, [0]),
    "iq2_xs": (16, [0]),
    "iq2_s": (24, [0]),
    "iq3_xxs": (16, [0]),
    "iq3_s": (24, [0]),
    "gguf_mxfp4": (64, []),
    "gguf_nvfp4": (48, []),
}
ENCODED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "gguf_mxfp4")


def qtype_of(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[name.removeprefix("gguf_").upper()]


def decode_blocks(rng: np.random.Generator, name: str) -> tuple[np.ndarray, np.ndarray]:
    count, scales = FORMATS[name]
    block_size, block_bytes = GGML_QUANT_SIZES[qtype_of(name)]
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    # Half of the blocks keep a random f16 scale (subnormal, huge, infinite, NaN); the others get an ordinary one.
    for offset in scales:
        ordinary = (rng.standard_normal(count) * 0.02).astype(np.float16).view(np.uint8).reshape(count, 2)
        blocks[count // 2 :, offset : offset + 2] = ordinary[count // 2 :]
    if scales:  # the special scales occur for sure: zero, minus zero, subnormal, infinity, NaN
        special = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E01], dtype=np.uint16)
        blocks[: special.size, scales[0] : scales[0] + 2] = special.view(np.uint8).reshape(-1, 2)
    if name == "gguf_mxfp4":
        blocks[:, 0] = np.concatenate([[0, 1, 2, 3, 127, 253, 254], rng.integers(0, 255, count - 7)])
    if name == "gguf_nvfp4":
        codes = blocks[:, :4]
        codes[0] = [0x00, 0x01, 0x08, 0x7E]
        codes[(codes & 0x7F) == 0x7F] = 0x38
    with np.errstate(all="ignore"):
        values = quants.dequantize(blocks, qtype_of(name)).astype(np.float32).reshape(count, block_size)
    return blocks, values


def encode_blocks(rng: np.random.Generator, name: str) -> tuple[np.ndarray, np.ndarray]:
    block_size, _ = GGML_QUANT_SIZES[qtype_of(name)]
    values = rng.standard_normal((24, block_size)) * np.exp2(rng.integers(-8, 4, (24, 1)))
    values[0] = 0.0
    values[1] = 0.75
    values[2] = -3.0
    values = values.astype(np.float32)
    return quants.quantize(values, qtype_of(name)).reshape(24, -1), values


def write(path: pathlib.Path, blocks: np.ndarray, values: np.ndarray) -> None:
    sizes = np.array([blocks.shape[0], blocks.shape[1], values.shape[1]], dtype="<u4")
    path.write_bytes(sizes.tobytes() + blocks.tobytes() + values.astype("<f4").tobytes())


def main() -> None:
    folder = pathlib.Path(__file__).parent / "quant"
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(20)
    for name in FORMATS:
        write(folder / f"{name}.bin", *decode_blocks(rng, name))
    for name in ENCODED:
        write(folder / f"{name}_encode.bin", *encode_blocks(rng, name))


if __name__ == "__main__":
    main()
