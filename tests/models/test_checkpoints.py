"""Quantised Hugging Face checkpoints: each scheme's logits equal those of the same model with dequantised weights.

The encoders here pack random codes as the schemes' own tools do (AutoGPTQ, AutoAWQ, compressed-tensors, modelopt, DeepSeek's
fp8), each with the trap its names hide; the dequantised weights come from the codes in float64.
"""

import ml_dtypes
import numpy as np
import pytest
import tiny_models

import shoal

TOKENS = [(i * 37) % 320 for i in range(20)]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the last axis as int32 words, the first in the lowest bits."""
    per_word = 32 // bits
    groups = values.reshape(*values.shape[:-1], -1, per_word).astype(np.uint32)
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(groups << shifts, axis=-1).astype(np.uint32).view(np.int32)


class Codes:
    """Random integer codes [n, k] with scales and zeros for groups along k."""

    def __init__(self, random, n, k, bits, group, symmetric, scale_type=np.float16):
        groups = k // group
        self.codes = random.integers(0, 2**bits, (n, k))
        self.zeros = np.full((n, groups), 2 ** (bits - 1))
        if not symmetric:
            self.zeros = random.integers(1, 2**bits, (n, groups))  # a zero of 0 cannot be stored less one
        self.scales = (random.uniform(0.5, 1.5, (n, groups)) / 2**bits / 4).astype(scale_type)
        self.group_of = np.arange(k) // group

    def values(self):
        zeros, scales = (a.astype(np.float64)[:, self.group_of] for a in (self.zeros, self.scales))
        return ((self.codes - zeros) * scales).astype(np.float32)


def gptq(random, n, k, bits=4, group=32, symmetric=False, v2=False, act_order=False):
    c = Codes(random, n, k, bits, group, symmetric)
    if act_order:
        c.group_of = random.permutation(c.group_of)
    zeros = c.zeros if v2 else c.zeros - 1
    parts = {
        "qweight": words(c.codes, bits).T.copy(),
        "qzeros": words(zeros.T, bits),
        "scales": c.scales.T.copy(),
        "g_idx": c.group_of.astype(np.int32),
    }
    return parts, c.values()


def awq(random, n, k, group=32):
    c = Codes(random, n, k, 4, group, False)

    def pack(values):  # [rows, n]: nibble i of a word is column AWQ_ORDER[i]
        return words(values.reshape(len(values), -1, 8)[:, :, AWQ_ORDER].reshape(len(values), -1), 4)

    return {"qweight": pack(c.codes.T), "qzeros": pack(c.zeros.T), "scales": c.scales.T.copy()}, c.values()


def packed(random, n, k, bits=4, group=32, symmetric=True, scale_type=ml_dtypes.bfloat16):
    c = Codes(random, n, k, bits, group, symmetric, scale_type)
    parts = {
        "weight_packed": words(c.codes, bits),
        "weight_scale": c.scales,
        "weight_shape": np.array([n, k], np.int64),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(c.zeros.T, bits).T.copy()  # packed along n
    return parts, c.values()


def int8(random, n, k):
    codes = random.integers(-128, 128, (n, k)).astype(np.int8)
    scales = (random.uniform(0.5, 1.5, (n, 1)) / 1000).astype(ml_dtypes.bfloat16)
    return {"weight": codes, "weight_scale": scales}, codes.astype(np.float32) * scales.astype(np.float32)


def e4m3(random, shape):
    return random.uniform(-2, 2, shape).astype(ml_dtypes.float8_e4m3fn)


def fp8(random, n, k, name="weight_scale_inv", kind="block"):
    codes = e4m3(random, (n, k))
    shape = {"block": (-(-n // 128), -(-k // 128)), "row": (n, 1), "tensor": ()}[kind]
    scales = np.asarray(random.uniform(0.02, 0.08, shape), np.float32)
    spread = np.kron(scales, np.ones((128, 128)))[:n, :k] if kind == "block" else scales
    return {"weight": codes, name: scales}, (codes.astype(np.float64) * spread).astype(np.float32)


def nvfp4(random, n, k, divides):
    codes = random.integers(0, 16, (n, k), dtype=np.uint8)
    scales = random.uniform(0.5, 4, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    factor = 0.02
    values = E2M1[codes] * np.repeat(scales.astype(np.float64), 16, axis=1) * factor
    bytes_ = codes[:, 0::2] | codes[:, 1::2] << 4
    if divides:
        parts = {"weight_packed": bytes_, "weight_global_scale": np.array([1 / factor], np.float32)}
    else:
        parts = {"weight": bytes_, "weight_scale_2": np.array(factor, np.float32)}
    return parts | {"weight_scale": scales}, values.astype(np.float32)


def compressed(format_, **weights):
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": {"group_0": {"weights": weights}}}


def gptq_config(**options):
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, **options}


# Name: encoder, quantization_config.
SCHEMES = {
    "gptq": (gptq, gptq_config()),
    "gptq_symmetric": (lambda *a: gptq(*a, symmetric=True), gptq_config(sym=True)),
    "gptq_v2": (lambda *a: gptq(*a, v2=True), gptq_config(checkpoint_format="gptq_v2")),
    "gptq_act_order": (lambda *a: gptq(*a, act_order=True), gptq_config(desc_act=True)),
    "gptq_8_bits": (lambda *a: gptq(*a, bits=8, symmetric=True, group=64), gptq_config(bits=8, group_size=64)),
    "gptq_2_bits": (lambda *a: gptq(*a, bits=2), gptq_config(bits=2)),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "packed": (packed, compressed("pack-quantized", num_bits=4, group_size=32, strategy="group", symmetric=True)),
    "packed_zeros": (
        lambda *a: packed(*a, symmetric=False),
        compressed("pack-quantized", num_bits=4, group_size=32, strategy="group", symmetric=False),
    ),
    "packed_8_bits": (
        lambda *a: packed(*a, bits=8, group=128),
        compressed("pack-quantized", num_bits=8, group_size=128, strategy="group", symmetric=True),
    ),
    "packed_f32_scales": (
        lambda *a: packed(*a, scale_type=np.float32),
        compressed("pack-quantized", num_bits=4, group_size=32, strategy="group", symmetric=True),
    ),
    "int8": (int8, compressed("int-quantized", num_bits=8, strategy="channel", type="int", symmetric=True)),
    "float8_rows": (
        lambda *a: fp8(*a, name="weight_scale", kind="row"),
        compressed("float-quantized", num_bits=8, strategy="channel", type="float"),
    ),
    "float8_tensor": (
        lambda *a: fp8(*a, name="weight_scale", kind="tensor"),
        compressed("float-quantized", num_bits=8, strategy="tensor", type="float"),
    ),
    "fp8_blocks": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nvfp4_packed": (
        lambda *a: nvfp4(*a, divides=True),
        compressed("nvfp4-pack-quantized", num_bits=4, group_size=16, type="float"),
    ),
    "modelopt_nvfp4": (
        lambda *a: nvfp4(*a, divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "modelopt_fp8": (
        lambda *a: fp8(*a, name="weight_scale", kind="tensor"),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
}


def checkpoint(name, tmp_path):
    """Folders of the quantised and of the dequantised model, and the quantised tensors with their config."""
    encode, method = SCHEMES[name]
    config, tensors = tiny_models.random_llama(seed=5)
    config |= {"model_type": "llama", "vocab_size": 320, "tie_word_embeddings": False}
    random = np.random.default_rng(17)
    quantised, plain = {}, {}
    for tensor, value in tensors.items():
        if not tensor.endswith("_proj.weight"):
            quantised[tensor] = plain[tensor] = value
            continue
        parts, values = encode(random, *value.shape)
        quantised |= {tensor.removesuffix("weight") + part: array for part, array in parts.items()}
        plain[tensor] = values
    tiny_models.write_folder(tmp_path / "plain", config, plain)
    tiny_models.write_folder(tmp_path / "quantised", config | {"quantization_config": method}, quantised)
    return quantised, config | {"quantization_config": method}


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_equal_those_of_dequantised_weights(name, tmp_path):
    checkpoint(name, tmp_path)
    expected = shoal.LLM(str(tmp_path / "plain"), exact=True).logits([TOKENS])[0]
    largest = np.abs(expected).max()
    assert np.isfinite(expected).all() and largest > 0.1
    exact = shoal.LLM(str(tmp_path / "quantised"), exact=True).logits([TOKENS])[0]
    np.testing.assert_allclose(exact, expected, rtol=0, atol=2e-5 * largest)
    default = shoal.LLM(str(tmp_path / "quantised")).logits([TOKENS])[0]
    np.testing.assert_allclose(default, expected, rtol=0, atol=0.1 * largest)


@pytest.mark.parametrize("name", ["gptq_symmetric", "packed_zeros"])
def test_embedding_and_output_may_be_quantised_too(name, tmp_path):
    encode, method = SCHEMES[name]
    config, tensors = tiny_models.random_llama(seed=6)
    config |= {"model_type": "llama", "vocab_size": 320, "tie_word_embeddings": False}
    random = np.random.default_rng(18)
    quantised, plain = dict(tensors), dict(tensors)
    for tensor in ("model.embed_tokens.weight", "lm_head.weight"):
        parts, values = encode(random, *tensors[tensor].shape)
        if tensor.startswith("lm_head") or name == "gptq_symmetric":  # which is read as q4_0 blocks
            del quantised[tensor]
            quantised |= {tensor.removesuffix("weight") + part: array for part, array in parts.items()}
            plain[tensor] = values
    config |= {"quantization_config": method}
    plain_config = {key: value for key, value in config.items() if key != "quantization_config"}
    tiny_models.write_folder(tmp_path / "plain", plain_config, plain)
    tiny_models.write_folder(tmp_path / "quantised", config, quantised)
    expected = shoal.LLM(str(tmp_path / "plain"), exact=True).logits([TOKENS])[0]
    for exact in (True, False):
        logits = shoal.LLM(str(tmp_path / "quantised"), exact=exact).logits([TOKENS])[0]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=(2e-5 if exact else 0.1) * np.abs(expected).max())
    if name == "packed_zeros":
        parts, _ = encode(random, *tensors["model.embed_tokens.weight"].shape)
        del quantised["model.embed_tokens.weight"]
        quantised |= {"model.embed_tokens." + part: array for part, array in parts.items()}
        tiny_models.write_folder(tmp_path / "embedding", config, quantised)
        with pytest.raises(shoal.Unsupported, match=r"model\.embed_tokens"):
            shoal.LLM(str(tmp_path / "embedding"), exact=True)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_lying_checkpoint_is_refused_by_name(name, tmp_path):
    """Each tensor of one layer missing, of another shape, or with a scale that is not finite: one sentence that names it."""
    quantised, config = checkpoint(name, tmp_path)
    stem = "model.layers.1.self_attn.q_proj."
    optional = {"weight_shape", "weight_zero_point", "g_idx"}
    lies = {}
    for tensor in [t for t in quantised if t.startswith(stem)]:
        part = tensor.removeprefix(stem)
        value = quantised[tensor]
        if part not in optional:
            lies[f"{part} missing"] = (tensor, None)
        if part != "weight_shape":
            lies[f"{part} wrong"] = (tensor, np.concatenate([np.atleast_1d(value)] * 2))
        if value.dtype in (np.float16, np.float32, ml_dtypes.bfloat16) or (part, value.dtype) == (
            "weight_scale",
            ml_dtypes.float8_e4m3fn,
        ):
            bad = value.copy()
            bad.reshape(-1)[0] = np.nan
            lies[f"{part} NaN"] = (tensor, bad)
    for lie, (tensor, value) in lies.items():
        tensors = {k: v for k, v in quantised.items() if k != tensor}
        if value is not None:
            tensors[tensor] = value
        folder = tiny_models.write_folder(tmp_path / lie.replace(" ", "_"), config, tensors)
        with pytest.raises(shoal.ShoalError) as error:
            shoal.LLM(str(folder))
        assert stem in str(error.value) and "\n" not in str(error.value), (lie, str(error.value))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"quant_method": "bitsandbytes"}, 'method "bitsandbytes" are not supported'),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, 'awq version "gemv" with 4 bits is not supported'),
        ({"quant_method": "fp8"}, "fp8 without a weight_block_size of [128, 128] is not supported"),
        (compressed("marlin-24", num_bits=4), 'compressed-tensors format "marlin-24" with 4 bits is not supported'),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, 'modelopt algorithm "W4A8" is not supported'),
        ({"quant_method": "gptq", "group_size": 7}, "a group of 7 values is not supported"),
    ],
)
def test_unknown_schemes_are_refused_by_name(method, message, tmp_path):
    config, tensors = tiny_models.random_llama(seed=5)
    config |= {"model_type": "llama", "vocab_size": 320, "quantization_config": method}
    folder = tiny_models.write_folder(tmp_path / "model", config, tensors)
    with pytest.raises(shoal.Unsupported, match=r"config\.json") as error:
        shoal.LLM(str(folder))
    assert message in str(error.value)


def test_inspect_counts_packed_weights(tmp_path):
    from shoal.command_inspect import describe

    checkpoint("gptq", tmp_path)
    quantised, plain = describe(tmp_path / "quantised"), describe(tmp_path / "plain")
    assert quantised["supported"] is True
    assert quantised["parameters"] == plain["parameters"]
    assert any(t["format"] == "I32" and t["name"].endswith("qweight") for t in quantised["tensors"])


@pytest.mark.parametrize("name", ["gptq", "awq", "packed", "int8", "fp8_blocks", "nvfp4_packed"])
def test_a_config_that_claims_more_than_there_is_costs_nothing(name, tmp_path):
    """Widths of a petabyte: refused by the shape of the first tensor, before anything is allocated for them."""
    quantised, config = checkpoint(name, tmp_path)
    huge = config | {"intermediate_size": 1 << 24, "num_attention_heads": 65536, "num_key_value_heads": 65536}
    folder = tiny_models.write_folder(tmp_path / "huge", huge, quantised)
    with pytest.raises(shoal.ModelFormatError, match=r"model\.layers\.0\."):
        shoal.LLM(str(folder))
