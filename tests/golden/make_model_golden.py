"""Makes tests/golden/models: a tiny random model of every family with the logits that `transformers` computes for it.

Needs torch and transformers (5.23), which the tests themselves do not. Weights are stored in bf16 and computed in f32, so that
both engines see the same numbers.

Usage: python tests/golden/make_model_golden.py [FAMILY ...]
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import transformers

OUT = Path(__file__).parent / "models"
NUM_TOKENS = 48

BASE = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, vocab_size=160)
ROPE = dict(max_position_embeddings=256)


def families():
    """Name, configuration: small widths, every feature of the family that changes the arithmetic."""
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    partial_rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    yield "llama", transformers.LlamaConfig(**BASE, **ROPE, num_hidden_layers=2, rope_parameters=llama3)
    yield (
        "llama_bias",
        transformers.LlamaConfig(
            **BASE,
            **ROPE,
            num_hidden_layers=2,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            rope_parameters=linear,
        ),
    )
    yield "mistral", transformers.MistralConfig(**BASE, **ROPE, num_hidden_layers=2, sliding_window=9, head_dim=48)
    yield "qwen2", transformers.Qwen2Config(**BASE, **ROPE, num_hidden_layers=2, rope_parameters=yarn)
    yield "qwen3", transformers.Qwen3Config(**BASE, **ROPE, num_hidden_layers=2, head_dim=32)
    yield (
        "gemma3",
        transformers.Gemma3TextConfig(
            **BASE,
            **ROPE,
            num_hidden_layers=7,
            head_dim=32,
            sliding_window=10,
            query_pre_attn_scalar=48,
            final_logit_softcapping=6.0,
        ),
    )
    two = dict(**BASE, **ROPE, num_hidden_layers=2)
    three = dict(**BASE, **ROPE, num_hidden_layers=3)
    yield (
        "qwen3_moe",
        transformers.Qwen3MoeConfig(
            **three,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
    )
    yield "mixtral", transformers.MixtralConfig(**two, num_local_experts=5, num_experts_per_tok=2)
    granite = dict(embedding_multiplier=3.0, residual_multiplier=0.3, attention_multiplier=0.2, logits_scaling=0.5)
    yield "granite", transformers.GraniteConfig(**two, **granite)
    yield (
        "granitemoe",
        transformers.GraniteMoeConfig(**two, **granite, num_local_experts=6, num_experts_per_tok=3),
    )
    yield (
        "olmoe",
        transformers.OlmoeConfig(**two, num_experts=6, num_experts_per_tok=2, norm_topk_prob=False, rms_norm_eps=1e-5),
    )
    yield (
        "gpt_oss",
        transformers.GptOssConfig(
            **three,
            head_dim=32,
            num_local_experts=6,
            num_experts_per_tok=3,
            sliding_window=10,
            attention_bias=True,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={**yarn, "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False},
        ),
    )
    yield (
        "minimax_m2",
        transformers.MiniMaxM2Config(
            **two, head_dim=32, num_local_experts=8, num_experts_per_tok=3, rope_parameters=partial_rope
        ),
    )
    yield (
        "glm4_moe",
        transformers.Glm4MoeConfig(
            **three,
            head_dim=32,
            attention_bias=True,
            use_qk_norm=True,
            first_k_dense_replace=1,
            n_routed_experts=8,
            n_shared_experts=2,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            rope_parameters=partial_rope,
        ),
    )
    yield (
        "minimax_m3",
        transformers.MiniMaxM3VLTextConfig(
            **three,
            head_dim=32,
            dense_intermediate_size=80,
            shared_intermediate_size=48,
            num_local_experts=8,
            num_experts_per_tok=3,
            routed_scaling_factor=2.0,
            swiglu_limit=1.5,
            mlp_layer_types=["dense", "sparse", "sparse"],
            layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            index_n_heads=2,
            index_head_dim=24,
            index_block_size=4,
            index_topk_blocks=3,
            index_local_blocks=1,
            rotary_dim=16,
            rope_parameters=partial_rope,
        ),
    )
    yield (
        "deepseek_v32",
        transformers.DeepseekV32Config(
            **{**three, "num_key_value_heads": 4},
            q_lora_rank=24,
            kv_lora_rank=32,
            qk_nope_head_dim=24,
            qk_rope_head_dim=16,
            v_head_dim=20,
            first_k_dense_replace=1,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            index_topk=12,
            index_head_dim=32,
            index_n_heads=8,
            rope_parameters={**yarn, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
    )
    for name, q_rank, rope in (
        ("deepseek_v3", 24, {**yarn, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
        ("deepseek_v3_plain", None, {"rope_type": "default", "rope_theta": 10000.0}),
    ):
        yield (
            name,
            transformers.DeepseekV3Config(
                **{**three, "num_key_value_heads": 4},
                q_lora_rank=q_rank,
                kv_lora_rank=32,
                qk_nope_head_dim=24,
                qk_rope_head_dim=16,
                v_head_dim=20,
                first_k_dense_replace=1,
                n_routed_experts=8,
                n_shared_experts=1,
                num_experts_per_tok=3,
                moe_intermediate_size=32,
                n_group=4,
                topk_group=2,
                routed_scaling_factor=2.5,
                rope_parameters=rope,
            ),
        )
    hybrid = {**BASE, **ROPE, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
    yield (
        "lfm2",
        transformers.Lfm2Config(
            **hybrid, conv_L_cache=4, conv_bias=True, block_auto_adjust_ff_dim=True, block_multiple_of=32
        ),
    )
    yield (
        "lfm2_moe",
        transformers.Lfm2MoeConfig(
            **hybrid,
            conv_L_cache=3,
            num_dense_layers=1,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            use_expert_bias=True,
            routed_scaling_factor=1.0,
        ),
    )
    yield (
        "qwen3_next",
        transformers.Qwen3NextConfig(
            **{**BASE, **ROPE, "num_hidden_layers": 4},
            head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            linear_conv_kernel_dim=4,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            mlp_only_layers=[1],
            norm_topk_prob=True,
            layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        ),
    )
    delta = dict(
        head_dim=64,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    )
    yield "qwen3_5", transformers.Qwen3_5TextConfig(**three, **delta)
    yield (
        "qwen3_5_moe",
        transformers.Qwen3_5MoeTextConfig(
            **three,
            **delta,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
        ),
    )


# Their norm weights are stored less one.
ZERO_NORMS = ("gemma3_text", "minimax_m3_vl_text")


def randomise(model):
    """Random weights large enough that every part of the model changes the logits."""
    generator = torch.Generator().manual_seed(20260101)
    selection = [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.endswith(("e_score_correction_bias", "expert_bias"))
    ]
    for name, parameter in [*model.named_parameters(), *selection]:
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            values = 0.3 * values + (0.0 if model.config.model_type in ZERO_NORMS else 1.0)
        elif parameter.dim() == 1 or name.endswith("_bias"):
            values = 0.2 * values
        elif "embed" in name:
            values = (0.12 if model.config.tie_word_embeddings else 0.5) * values
        else:
            # gpt-oss keeps its experts transposed.
            inputs = parameter.shape[1 if model.config.model_type == "gpt_oss" else -1]
            values = values / inputs**0.5 * 1.2
        parameter.data = values.to(torch.bfloat16).to(torch.float32)


def publish_minimax_m3(folder: Path) -> None:
    """The text part under the names, and in the configuration, that the vision-language checkpoint has."""
    tensors = {}
    for name, value in safetensors.torch.load_file(folder / "model.safetensors").items():
        name = "language_model." + name.replace(".self_attn.indexer.", ".self_attn.index_")
        parts = [(name, value)]
        if ".mlp.experts." in name:
            stem = name.replace(".mlp.", ".block_sparse_moe.").rsplit(".", 1)[0]
            pieces = {"w1": value.chunk(2, 1)[0], "w3": value.chunk(2, 1)[1]} if "gate_up" in name else {"w2": value}
            parts = [(f"{stem}.{e}.{k}.weight", v) for k, stack in pieces.items() for e, v in enumerate(stack)]
        elif ".gate_up_proj." in name:
            parts = zip([name.replace("gate_up", kind) for kind in ("gate", "up")], value.chunk(2), strict=True)
        for part, v in parts:
            for kind in ("gate.", "shared_experts."):
                part = part.replace(f".mlp.{kind}", f".block_sparse_moe.{kind}")
            part = part.replace("gate.e_score_correction_bias", "e_score_correction_bias")
            tensors[part] = v.contiguous()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "minimax_m3_vl", "text_config": json.loads((folder / "config.json").read_text())}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main():
    for name, config in families():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        torch.manual_seed(0)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
        randomise(model)
        folder = OUT / name
        shutil.rmtree(folder, ignore_errors=True)
        tokens = torch.randint(0, config.vocab_size, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            logits = model(tokens).logits[0].numpy()
            greedy = model.generate(
                tokens[:, :16], max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None
            )[0, 16:]
        # Under the names that published checkpoints have, which save_pretrained restores.
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        values = json.loads(config.to_json_string(use_diff=False))
        drop = ("_name_or_path", "transformers_version", "id2label", "label2id", "architectures", "dtype")
        (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k not in drop}, indent=1))
        if name == "minimax_m3":
            publish_minimax_m3(folder)
        np.savez_compressed(
            folder / "golden.npz",
            tokens=tokens[0].numpy().astype(np.int32),
            logits=logits.astype(np.float32),
            greedy=greedy.numpy().astype(np.int32),
        )
        print(name, "logits", logits.shape, "largest", np.abs(logits).max(), "greedy", greedy.tolist()[:8])


if __name__ == "__main__":
    main()
