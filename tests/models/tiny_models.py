"""Writes tiny models: GGUF with the `gguf` package, and Hugging Face folders; from the golden folders, or random ones."""

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np

# GGUF's name <- Hugging Face's, for the families that are read. "{}" is the layer.
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.attn_q.bias": "model.layers.{}.self_attn.q_proj.bias",
    "blk.{}.attn_k.bias": "model.layers.{}.self_attn.k_proj.bias",
    "blk.{}.attn_v.bias": "model.layers.{}.self_attn.v_proj.bias",
    "blk.{}.attn_q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "blk.{}.attn_k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
}
GEMMA3_NAMES = {
    **NAMES,
    "blk.{}.ffn_norm.weight": "model.layers.{}.pre_feedforward_layernorm.weight",
    "blk.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.post_ffw_norm.weight": "model.layers.{}.post_feedforward_layernorm.weight",
}
LFM2_NAMES = {
    **{name: hf for name, hf in NAMES.items() if not name.startswith("blk.{}.ffn")},
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.operator_norm.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.out_proj.weight",
    "blk.{}.attn_q_norm.weight": "model.layers.{}.self_attn.q_layernorm.weight",
    "blk.{}.attn_k_norm.weight": "model.layers.{}.self_attn.k_layernorm.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.ffn_norm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.feed_forward.w1.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.feed_forward.w3.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.feed_forward.w2.weight",
    **{
        f"blk.{{}}.shortconv.{name}.{part}": f"model.layers.{{}}.conv.{name}.{part}"
        for name in ("conv", "in_proj", "out_proj")
        for part in ("weight", "bias")
    },
}
GLM4_NAMES = {
    **{name: hf for name, hf in NAMES.items() if not name.startswith("blk.{}.ffn_norm")},
    "blk.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
    **{
        f"blk.{{}}.ffn_{kind}_shexp.weight": f"model.layers.{{}}.mlp.shared_experts.{kind}_proj.weight"
        for kind in ("gate", "up", "down")
    },
}
MINIMAX_NAMES = {
    **NAMES,
    "blk.{}.exp_probs_b.bias": "model.layers.{}.block_sparse_moe.e_score_correction_bias",
}
GPT_OSS_NAMES = {
    **{name: hf for name, hf in NAMES.items() if not name.startswith("blk.{}.ffn_norm")},
    "blk.{}.attn_output.bias": "model.layers.{}.self_attn.o_proj.bias",
    "blk.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks",
    "blk.{}.ffn_gate_inp.bias": "model.layers.{}.mlp.router.bias",
}


def gguf_experts(layer: int, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts' tensors of a layer as GGUF has them: one a kind, stacked; nothing if the layer is dense."""
    prefix = f"model.layers.{layer}."
    names = ("mlp.gate", "block_sparse_moe.gate", "mlp.router", "block_sparse_moe.router.layer")
    routers = [f"{prefix}{name}.weight" for name in names]
    router = next((name for name in routers if name in tensors), None)
    if router is None:
        return {}
    out = {f"blk.{layer}.ffn_gate_inp.weight": tensors[router]}
    fused = tensors.get(prefix + "mlp.experts.gate_up_proj")  # gpt-oss: transposed, gate and up interleaved
    if fused is not None:
        bias = tensors[prefix + "mlp.experts.gate_up_proj_bias"]
        for i, kind in enumerate(("gate", "up")):
            out[f"blk.{layer}.ffn_{kind}_exps.weight"] = fused[:, :, i::2].swapaxes(1, 2)
            out[f"blk.{layer}.ffn_{kind}_exps.bias"] = bias[:, i::2]
        out[f"blk.{layer}.ffn_down_exps.weight"] = tensors[prefix + "mlp.experts.down_proj"].swapaxes(1, 2)
        out[f"blk.{layer}.ffn_down_exps.bias"] = tensors[prefix + "mlp.experts.down_proj_bias"]
        return out
    if router.endswith("router.layer.weight"):  # granitemoe: gate above up
        gate, up = np.split(tensors[prefix + "block_sparse_moe.input_linear.weight"], 2, axis=1)
        down = tensors[prefix + "block_sparse_moe.output_linear.weight"]
        return out | {
            f"blk.{layer}.ffn_{kind}_exps.weight": w for kind, w in (("gate", gate), ("up", up), ("down", down))
        }
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if "block_sparse_moe" in router:
        names = {"gate": "w1", "up": "w3", "down": "w2"}
    for kind, name in names.items():
        stem = router.replace(".gate.weight", ".experts.")
        count = len(tensors[router])
        out[f"blk.{layer}.ffn_{kind}_exps.weight"] = np.stack(
            [tensors[f"{stem}{e}.{name}.weight"] for e in range(count)]
        )
    return out


def add_experts(writer: gguf.GGUFWriter, config: dict, tensors: dict[str, np.ndarray], quantise) -> None:
    count = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if count is None:
        return
    if config.get("n_shared_experts"):
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    for layer in range(config["num_hidden_layers"]):
        for name, value in gguf_experts(layer, tensors).items():
            add(writer, name, np.asarray(value, np.float32), quantise)


def add(writer: gguf.GGUFWriter, name: str, value: np.ndarray, quantise) -> None:
    stored = quantise(name, value) if quantise is not None and name.endswith("weight") and value.ndim >= 2 else None
    if stored is None:
        writer.add_tensor(name, np.ascontiguousarray(value))
    else:
        writer.add_tensor(name, stored[0], raw_dtype=stored[1])


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q and k as llama's GGUF files have them: channel i of the first half beside channel i of the second."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, config: dict, tensors: dict[str, np.ndarray], architecture: str, quantise=None) -> None:
    """`quantise(name, array) -> (raw array, type) | None` chooses the storage of a matrix; None keeps f32."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    w1 = tensors.get("model.layers.0.feed_forward.w1.weight")  # lfm2's config does not give the width itself
    writer.add_feed_forward_length(config["intermediate_size"] if w1 is None else len(w1))
    writer.add_head_count(heads)
    if architecture == "lfm2":
        writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    else:
        writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.get("norm_eps") or config["rms_norm_eps"])
    if architecture.startswith("granite"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    rope = config["rope_parameters"]
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_float32("gemma3.final_logit_softcapping", config["final_logit_softcapping"])
        rope = {"rope_type": "default"}
    else:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        kinds = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
        writer.add_rope_scaling_type(kinds[rope["rope_type"]])
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    if architecture == "gpt-oss":
        writer.add_sliding_window(config["sliding_window"])
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    names = {
        "gemma3": GEMMA3_NAMES,
        "glm4moe": GLM4_NAMES,
        "gpt-oss": GPT_OSS_NAMES,
        "lfm2": LFM2_NAMES,
        "minimax-m2": MINIMAX_NAMES,
    }.get(architecture, NAMES)
    for pattern, hf_pattern in names.items():
        layers = range(config["num_hidden_layers"]) if "{}" in pattern else [0]
        for layer in layers:
            name, value = pattern.format(layer), tensors.get(hf_pattern.format(layer))
            if value is None:
                continue
            value = np.asarray(value, dtype=np.float32)
            if name.endswith("shortconv.conv.weight"):
                value = value.squeeze(1)
            if architecture == "gemma3" and "norm" in name:
                value = value + 1
            if architecture in ("llama", "granite", "granitemoe") and (".attn_q." in name or ".attn_k." in name):
                value = interleave(value, heads if ".attn_q." in name else kv_heads)
            add(writer, name, value, quantise)
    add_experts(writer, config, tensors, quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_factors(rope: dict, head_dim: int) -> np.ndarray:
    """What converters store as rope_freqs.weight: by how much each frequency is divided (Llama 3.1)."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * np.pi / frequencies
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelengths - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    factors = np.where(wavelengths < high, 1.0, np.where(wavelengths > low, rope["factor"], 0.0))
    middle = factors == 0.0
    factors[middle] = 1.0 / ((1 - smooth[middle]) / rope["factor"] + smooth[middle])
    return factors.astype(np.float32)


def random_llama(
    seed: int, hidden: int = 256, layers: int = 2, positions: int = 256
) -> tuple[dict, dict[str, np.ndarray]]:
    """A random llama whose widths suit every block format (multiples of 256)."""
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
        "hidden_size": hidden,
        "intermediate_size": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    random = np.random.default_rng(seed)

    def matrix(n: int, k: int) -> np.ndarray:
        return (random.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(320, hidden) * 8,
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(320, hidden) * 2,
    }
    for i in range(layers):
        prefix = f"model.layers.{i}."
        tensors[prefix + "input_layernorm.weight"] = random.uniform(0.5, 1.5, hidden).astype(np.float32)
        tensors[prefix + "post_attention_layernorm.weight"] = random.uniform(0.5, 1.5, hidden).astype(np.float32)
        for name, n, k in (
            ("self_attn.q_proj", 256, hidden),
            ("self_attn.k_proj", 128, hidden),
            ("self_attn.v_proj", 128, hidden),
            ("self_attn.o_proj", hidden, 256),
            ("mlp.gate_proj", 512, hidden),
            ("mlp.up_proj", 512, hidden),
            ("mlp.down_proj", hidden, 512),
        ):
            tensors[f"{prefix}{name}.weight"] = matrix(n, k)
    return config, tensors


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    out = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            values = np.frombuffer(raw[8 + size + begin : 8 + size + end], ml_dtypes.bfloat16)
            out[name] = values.reshape(entry["shape"]).astype(np.float32)
    return out


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    kinds = {
        "uint8": "U8",
        "int8": "I8",
        "int32": "I32",
        "int64": "I64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
    }
    header, at = {}, 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": kinds[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_folder(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
