"""Writes rope_golden.h: inverse frequencies and attention factors of transformers' ROPE_INIT_FUNCTIONS.

python tests/golden/make_rope_golden.py > tests/golden/rope_golden.h     (needs torch and transformers)
"""

import math
from types import SimpleNamespace

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class Config(SimpleNamespace):
    """As much of a model configuration as the functions ask for."""

    def standardize_rope_params(self):
        pass


YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
CASES = [
    ("kNone", 64, 10000.0, {}),
    ("kNone", 128, 1000000.0, {}),
    ("kLinear", 32, 10000.0, {"factor": 8.0}),
    (
        "kLlama3",
        128,
        500000.0,
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    (
        "kLlama3",
        64,
        500000.0,
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    ("kYarn", 128, 1000000.0, YARN),
    ("kYarn", 64, 150000.0, {**YARN, "factor": 32.0, "truncate": False}),
    ("kYarn", 64, 10000.0, {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}),
    ("kYarn", 64, 10000.0, {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    ("kYarn", 32, 10000.0, {**YARN, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0}),
]


def default_inv_freq(dim, theta):
    """As in modeling_llama: the rope type "default" has no entry in the table of newer versions."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)), 1.0


def compute(kind, dim, theta, options):
    if kind == "kNone":
        return default_inv_freq(dim, theta)
    rope_type = {"kLinear": "linear", "kLlama3": "llama3", "kYarn": "yarn"}[kind]
    parameters = {"rope_type": rope_type, "rope_theta": theta, **options}
    original = options.get("original_max_position_embeddings", 4096)
    config = Config(
        rope_theta=theta,
        rope_parameters=parameters,
        rope_scaling=parameters,
        head_dim=dim,
        hidden_size=dim * 4,
        num_attention_heads=4,
        max_position_embeddings=int(original * options["factor"]),
        original_max_position_embeddings=original,
    )
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))


def main():
    print("// Made by make_rope_golden.py with transformers", transformers.__version__ + ": do not edit.")
    print("#pragma once\n\n#include <vector>\n")
    print("struct RopeGolden {\n  shoal::RopeConfig config;\n  double attention_factor;")
    print("  std::vector<float> inv_freq;  // f32, as transformers computes it\n};\n")
    print("// clang-format off\ninline std::vector<RopeGolden> rope_golden() {")
    print("  std::vector<RopeGolden> list;\n  shoal::RopeConfig config;")
    names = {"original_max_position_embeddings": "original_max_positions"}
    for kind, dim, theta, options in CASES:
        inv_freq, factor = compute(kind, dim, theta, options)
        assert len(inv_freq) == dim // 2 and math.isfinite(factor)
        fields = [f"rotary_dim = {dim}", f"theta = {theta}", f"scaling = shoal::RopeScaling::{kind}"]
        fields += [f"{names.get(key, key)} = {str(value).lower()}" for key, value in options.items()]
        print("  config = {};")
        for field in fields:
            print(f"  config.{field};")
        values = ", ".join(f"{value:.9e}f" for value in inv_freq.tolist())
        print(f"  list.push_back({{config, {float(factor)!r}, {{{values}}}}});")
    print("  return list;\n}\n// clang-format on")


if __name__ == "__main__":
    main()
