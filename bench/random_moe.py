"""Writes a random qwen3moe GGUF with the widths of Qwen3-30B-A3B and few layers: for
comparing speeds (bench/peers_cpu.py).

The blocks hold random codes and small scales; every engine reads the same file, whose text would be noise.

Usage: bench/random_moe.py OUT.gguf [--type Q4_K] [--layers 6]
"""

import argparse

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, WIDTH, VOCAB = 2048, 32, 4, 128, 128, 8, 768, 32000
SCALES = {"Q4_K": [0, 2], "Q2_K": [80, 82], "Q6_K": [208], "Q8_0": [0], "Q4_0": [0], "MXFP4": []}  # bytes of f16 scales


def blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // block
    raw = random.integers(0, 256, (count, size), dtype=np.uint8)
    for offset in SCALES[kind.name]:
        raw[:, offset : offset + 2] = random.uniform(2e-4, 6e-4, count).astype(np.float16)[:, None].view(np.uint8)
    if kind.name == "MXFP4":
        raw[:, 0] = random.integers(118, 121, count)
    return raw.reshape(*shape[:-1], -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--type", default="Q4_K", choices=sorted(SCALES))
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    kind = gguf.GGMLQuantizationType[args.type]
    dense = kind if args.type != "MXFP4" else gguf.GGMLQuantizationType.Q8_0  # as published: only experts are MXFP4
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(args.out, "qwen3moe")
    writer.add_name("random")
    writer.add_block_count(args.layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(6144)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_feed_forward_length(WIDTH)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, *shape: int, own: gguf.GGMLQuantizationType = dense) -> None:
        writer.add_tensor(name + ".weight", blocks(own, shape, random), raw_dtype=own)

    def vector(name: str, size: int) -> None:
        writer.add_tensor(name + ".weight", np.ones(size, np.float32))

    matrix("token_embd", VOCAB, HIDDEN)
    matrix("output", VOCAB, HIDDEN)
    vector("output_norm", HIDDEN)
    for i in range(args.layers):
        for name, size in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", 128), ("attn_k_norm", 128)):
            vector(f"blk.{i}.{name}", size)
        matrix(f"blk.{i}.attn_q", HEADS * HEAD_DIM, HIDDEN)
        matrix(f"blk.{i}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"blk.{i}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"blk.{i}.attn_output", HIDDEN, HEADS * HEAD_DIM)
        router = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32) / np.sqrt(np.float32(HIDDEN))
        writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", router)
        matrix(f"blk.{i}.ffn_gate_exps", EXPERTS, WIDTH, HIDDEN, own=kind)
        matrix(f"blk.{i}.ffn_up_exps", EXPERTS, WIDTH, HIDDEN, own=kind)
        matrix(f"blk.{i}.ffn_down_exps", EXPERTS, HIDDEN, WIDTH, own=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
