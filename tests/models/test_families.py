"""Every family against the logits that `transformers` computed (tests/golden/models), from folders and from GGUF."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import tiny_models

import shoal

GOLDEN = Path(__file__).parent.parent / "golden" / "models"
FAMILIES = sorted(p.name for p in GOLDEN.iterdir())
# llama_bias is not among them: GGUF has no names for its biases of o, gate, up and down.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "gpt_oss": "gpt-oss",
    "lfm2": "lfm2",
}
GREEDY = shoal.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
MARGIN = 1e-3


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def golden(family: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / family / "golden.npz"))


def changed_folder(tmp_path: Path, name: str, change: dict) -> Path:
    """A golden folder whose configuration, of the text part, has other values."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config.get("text_config", config).update(change)
    folder = tiny_models.write_folder(tmp_path / "model", config, {})
    (folder / "model.safetensors").write_bytes((GOLDEN / name / "model.safetensors").read_bytes())
    return folder


def check_logits(llm: shoal.LLM, expected: dict[str, np.ndarray], tolerance: float = 2e-3) -> None:
    logits = llm.logits([expected["tokens"].tolist()])[0]
    assert logits.shape == expected["logits"].shape
    largest = np.abs(expected["logits"]).max()
    assert np.abs(logits - expected["logits"]).max() <= tolerance * largest


def test_folder_matches_transformers(family):
    llm = shoal.LLM(str(GOLDEN / family), exact=True)
    expected = golden(family)
    check_logits(llm, expected)
    prompt = expected["tokens"][:16].tolist()
    tokens = llm.generate([prompt], GREEDY)[0].token_ids
    if tokens != expected["greedy"].tolist():  # only a near tie may differ
        at = int(np.flatnonzero(np.array(tokens) != expected["greedy"])[0])
        logits = np.sort(llm.logits([prompt + tokens[:at]])[0][-1])
        assert logits[-1] - logits[-2] <= MARGIN


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_gguf_matches_transformers(name, tmp_path):
    config = json.loads((GOLDEN / name / "config.json").read_text())
    if name == "gemma3":
        config["query_pre_attn_scalar"] = config["head_dim"]
    tensors = tiny_models.read_safetensors(GOLDEN / name / "model.safetensors")
    path = tmp_path / "tiny.gguf"
    tiny_models.write(path, config, tensors, ARCHITECTURES[name])
    llm = shoal.LLM(str(path), exact=True)
    if name == "gemma3":
        # GGUF has no key for query_pre_attn_scalar: the folder with the common value is the reference here, itself held to
        # transformers above with another value.
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes((GOLDEN / name / "model.safetensors").read_bytes())
        expected = golden(name)
        expected["logits"] = shoal.LLM(str(folder), exact=True).logits([expected["tokens"].tolist()])[0]
        check_logits(llm, expected, 1e-5)
        return
    check_logits(llm, golden(name))


def test_granite_files_that_would_be_computed_wrongly_are_refused(tmp_path, monkeypatch):
    config = json.loads((GOLDEN / "granitemoe" / "config.json").read_text())
    tensors = tiny_models.read_safetensors(GOLDEN / "granitemoe" / "model.safetensors")
    names = tiny_models.NAMES | {"blk.{}.ffn_gate_shexp.weight": "model.layers.{}.self_attn.q_proj.weight"}
    with monkeypatch.context() as patch:
        patch.setattr(tiny_models, "NAMES", names)
        tiny_models.write(tmp_path / "shared.gguf", config, tensors, "granitemoe")
    with pytest.raises(shoal.Unsupported, match="granitemoe: a shared expert is not supported"):
        shoal.LLM(str(tmp_path / "shared.gguf"))
    add = gguf.GGUFWriter.add_logit_scale

    def add_more(writer, value):
        writer.add_rope_scaling_finetuned(False)
        add(writer, value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_logit_scale", add_more)
    tiny_models.write(tmp_path / "unrotated.gguf", config, tensors, "granitemoe")
    with pytest.raises(shoal.Unsupported, match="granitemoe: attention without rotary positions"):
        shoal.LLM(str(tmp_path / "unrotated.gguf"))


def gpt_oss_mxfp4(tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The experts as random MXFP4 blocks, as published gpt-oss has them, and the same model with their values in f32."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    random = np.random.default_rng(11)
    packed, plain = {}, {}
    for name, value in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = plain[name] = value
            continue
        experts, k, n = value.shape
        blocks = random.integers(0, 256, (experts, n, k // 32, 16), dtype=np.uint8)
        scales = random.integers(120, 124, (experts, n, k // 32), dtype=np.uint8)
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(experts, n, k // 32, 32)  # even values in low nibbles
        decoded = values[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
        packed[name + "_blocks"], packed[name + "_scales"] = blocks, scales
        plain[name] = decoded.reshape(experts, n, k).swapaxes(1, 2).copy()
    return packed, plain


def test_gpt_oss_in_mxfp4_equals_its_dequantised_weights(tmp_path):
    config = json.loads((GOLDEN / "gpt_oss" / "config.json").read_text())
    packed, plain = gpt_oss_mxfp4(tiny_models.read_safetensors(GOLDEN / "gpt_oss" / "model.safetensors"))
    tokens = golden("gpt_oss")["tokens"].tolist()
    logits = []
    for name, tensors in (("packed", packed), ("plain", plain)):
        method = {"quantization_config": {"quant_method": "mxfp4"}} if name == "packed" else {}
        folder = tiny_models.write_folder(tmp_path / name, config | method, tensors)
        logits.append(shoal.LLM(str(folder), exact=True).logits([tokens])[0])
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=2e-5 * np.abs(logits[1]).max())


def test_fused_experts_equal_those_apart(tmp_path):
    """qwen3_5_moe as some checkpoints have it: one tensor for all experts, gates before ups, and no dense width."""
    config = json.loads((GOLDEN / "qwen3_5_moe" / "config.json").read_text())
    del config["intermediate_size"]
    tensors = tiny_models.read_safetensors(GOLDEN / "qwen3_5_moe" / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}.mlp.experts."
        parts = {
            kind: [tensors.pop(f"{stem}{e}.{kind}_proj.weight") for e in range(8)] for kind in ("gate", "up", "down")
        }
        tensors[stem + "gate_up_proj"] = np.concatenate([np.stack(parts["gate"]), np.stack(parts["up"])], axis=1)
        tensors[stem + "down_proj"] = np.stack(parts["down"])
    folder = tiny_models.write_folder(tmp_path / "fused", config, tensors)
    check_logits(shoal.LLM(str(folder), exact=True), golden("qwen3_5_moe"))


@pytest.mark.parametrize(("name", "change"), [("deepseek_v32", "index_topk"), ("minimax_m3", "index_topk_blocks")])
def test_what_an_indexer_leaves_out_is_not_read(name, change, tmp_path):
    """The golden logits are those of a choice: attention to all positions gives others, but for the first of them."""
    chosen = 12  # positions in either model
    folder = changed_folder(tmp_path, name, {change: 256})
    expected = golden(name)
    logits = shoal.LLM(str(folder), exact=True).logits([expected["tokens"].tolist()])[0]
    largest = np.abs(expected["logits"]).max()
    difference = np.abs(logits - expected["logits"]).max(axis=1) / largest
    assert difference[:chosen].max() <= 2e-3
    assert difference[chosen:].max() > 0.1


def test_minimax_m3_by_the_keys_of_published_configs(tmp_path):
    config = json.loads((GOLDEN / "minimax_m3" / "config.json").read_text())
    text = config["text_config"]
    text["sparse_attention_config"] = {
        "sparse_attention_freq": [int(kind == "minimax_m3_sparse") for kind in text.pop("layer_types")],
        "sparse_num_index_heads": text.pop("index_n_heads"),
        "sparse_index_dim": text.pop("index_head_dim"),
        "sparse_block_size": text.pop("index_block_size"),
        "sparse_topk_blocks": text.pop("index_topk_blocks"),
        "sparse_local_block": text.pop("index_local_blocks"),
    }
    text["moe_layer_freq"] = [int(kind == "sparse") for kind in text.pop("mlp_layer_types")]
    text["hidden_act"] = "swigluoai"
    folder = tiny_models.write_folder(tmp_path / "model", config, {})
    (folder / "model.safetensors").write_bytes((GOLDEN / "minimax_m3" / "model.safetensors").read_bytes())
    check_logits(shoal.LLM(str(folder), exact=True), golden("minimax_m3"))


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3"])
def test_an_indexer_keeps_its_keys_in_every_type_of_cache(name, kv_dtype):
    folder = str(GOLDEN / name)
    tokens = golden(name)["tokens"].tolist()
    whole, chunked = shoal.LLM(folder, kv_dtype=kv_dtype), shoal.LLM(folder, kv_dtype=kv_dtype, max_batch_tokens=5)
    expected = whole.generate([tokens], GREEDY)[0].token_ids
    assert chunked.generate([tokens], GREEDY)[0].token_ids == expected
    assert whole.generate([tokens], GREEDY)[0].token_ids == expected  # a prefix hit


def test_int8_activations_stay_close(family):
    """Default mode on f32 weights changes nothing but the KV cache's type."""
    llm = shoal.LLM(str(GOLDEN / family))
    check_logits(llm, golden(family), 2e-2)


TYPES = [t for t in gguf.GGMLQuantizationType if t.name in (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "MXFP4", "NVFP4")]  # fmt: skip


def random_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Blocks of random codes with small finite scales: legal for every type, also those that nobody can encode here."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    n, k = shape
    if kind.name == "F32":
        return (random.standard_normal(shape) / np.sqrt(k)).astype(np.float32)
    if kind.name == "F16":
        return (random.standard_normal(shape) / np.sqrt(k)).astype(np.float16)
    if kind.name == "BF16":
        return (random.standard_normal(shape) / np.sqrt(k)).astype(ml_dtypes.bfloat16).view(np.uint8).reshape(n, -1)
    raw = random.integers(0, 256, (n, k // block, size), dtype=np.uint8)
    f16 = {  # byte offsets of the half-precision scales
        "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
        "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "IQ2_XXS": [0], "IQ2_XS": [0],
        "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "MXFP4": [], "NVFP4": []}[kind.name]  # fmt: skip
    for offset in f16:
        scale = random.uniform(0.0005, 0.002, raw.shape[:2]).astype(np.float16)
        raw[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    if kind.name == "MXFP4":
        raw[..., 0] = random.integers(118, 123, raw.shape[:2])
    if kind.name == "NVFP4":
        raw[..., :4] = random.integers(8, 24, (*raw.shape[:2], 4))
    return raw.reshape(n, -1)


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name.lower())
def test_every_gguf_type_equals_its_dequantised_weights(kind, tmp_path):
    """Loads each block type; exact logits equal those of the same model with the weights that `gguf` decodes."""
    config, tensors = tiny_models.random_llama(seed=3)
    blocks, decoded = {}, dict(tensors)

    def quantise(name, value):
        if not name.startswith("blk."):
            return None
        blocks[name] = random_blocks(kind, value.shape, len(blocks))
        return blocks[name], kind

    path = tmp_path / "quantised.gguf"
    tiny_models.write(path, config, tensors, "llama", quantise)

    def dequantise(name, value):
        if name not in blocks:
            return None
        raw = blocks[name]
        if kind.name == "BF16":
            values = raw.view(ml_dtypes.bfloat16).astype(np.float32)
        else:
            values = raw.astype(np.float32) if kind.name in ("F32", "F16") else gguf.quants.dequantize(raw, kind)
        return values.reshape(value.shape).astype(np.float32), gguf.GGMLQuantizationType.F32

    reference = tmp_path / "dequantised.gguf"
    tiny_models.write(reference, config, decoded, "llama", dequantise)
    tokens = [(i * 37) % 320 for i in range(20)]
    expected = shoal.LLM(str(reference), exact=True).logits([tokens])[0]
    logits = shoal.LLM(str(path), exact=True).logits([tokens])[0]
    assert np.isfinite(expected).all() and np.abs(expected).max() > 0.1
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    default = shoal.LLM(str(path)).logits([tokens])[0]
    np.testing.assert_allclose(default, expected, rtol=0, atol=0.1 * np.abs(expected).max())


def test_greedy_tokens_do_not_depend_on_company(family):
    """Alone, in a batch, in chunks, with small pages, after a prefix hit, preempted and resumed: the same tokens."""
    folder = str(GOLDEN / family)
    tokens = golden(family)["tokens"].tolist()
    prompts = [tokens[:n] for n in (5, 17, 33, 48)]
    alone = shoal.LLM(folder)
    expected = [alone.generate([p], GREEDY)[0].token_ids for p in prompts]
    num_rows = alone.stats()["num_tokens"]
    again = [alone.generate([p], GREEDY)[0].token_ids for p in prompts]  # prefix hits
    assert alone.stats()["num_tokens"] - num_rows < num_rows
    together = [c.token_ids for c in shoal.LLM(folder, page_size=16).generate(prompts, GREEDY)]
    chunked = [c.token_ids for c in shoal.LLM(folder, max_batch_tokens=7).generate(prompts, GREEDY)]
    assert again == expected
    assert together == expected
    assert chunked == expected
    # Short prompts with long answers are let in together and outgrow the pages.
    short = [tokens[i : i + 5] for i in range(4)]
    long = shoal.SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)
    expected = [alone.generate([p], long)[0].token_ids for p in short]
    one_page = alone.info["kv_bytes"] // alone.info["num_pages"] * 16 // alone.info["page_size"]
    crowded = shoal.LLM(folder, page_size=16, kv_bytes=7 * one_page, max_context=96)
    assert [c.token_ids for c in crowded.generate(short, long)] == expected
    assert crowded.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_long_prompt_in_one_step_equals_chunks(threads, tmp_path):
    """Over 1024 keys attention may split a row's keys over threads: the step's scratch memory must cover it, the bits stay."""
    config, tensors = tiny_models.random_llama(seed=4, layers=1, positions=4096)
    path = tmp_path / "long.gguf"
    tiny_models.write(path, config, tensors, "llama")
    prompt = [(i * 131) % 320 for i in range(3000)]
    params = shoal.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    whole = shoal.LLM(str(path), threads=threads, max_batch_tokens=len(prompt), max_context=4096)
    chunked = shoal.LLM(str(path), threads=1, max_batch_tokens=170, max_context=4096, page_size=128)
    expected = chunked.generate([prompt], params)[0].token_ids
    assert whole.generate([prompt], params)[0].token_ids == expected


def test_a_plan_tells_the_weights_that_a_load_makes(family):
    folder = str(GOLDEN / family)
    for exact in (False, True):
        plan = shoal._core.plan_model(folder, [64], exact=exact)
        info = shoal.LLM(folder, exact=exact, max_context=64).info
        assert plan["weight_bytes"] == info["weight_bytes"]
        assert plan["parameters"] == info["num_parameters"]
        config = json.loads((GOLDEN / family / "config.json").read_text())
        assert len(plan["layers"]) == config.get("text_config", config)["num_hidden_layers"]


RESIDENT = """
import json, sys
import shoal
from shoal import command_inspect

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

folder, length = sys.argv[1], int(sys.argv[2])
options = {"max_context": length, "kv_dtype": "f32", "max_batch_tokens": 256}
plan = command_inspect.describe(__import__("pathlib").Path(folder), **options)["plan"]
before = resident()
llm = shoal.LLM(folder, device="cpu", **options)
vocab_size = llm.info["vocab_size"]
params = shoal.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
llm.generate([[(i * 7919) % vocab_size for i in range(length - 8)]], params)
print(json.dumps({"needs": plan["memory"], "resident": resident() - before}))
"""


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_a_long_context_takes_the_memory_that_inspect_told(name, tmp_path):
    """With windows, and with states. 32K here; 128K takes a minute and a half (`python -c`, the same lines)."""
    length = 32768
    config = json.loads((GOLDEN / name / "config.json").read_text()) | {"max_position_embeddings": length}
    folder = tiny_models.write_folder(tmp_path / "model", config, {})
    (folder / "model.safetensors").write_bytes((GOLDEN / name / "model.safetensors").read_bytes())
    result = subprocess.run(
        [sys.executable, "-c", RESIDENT, str(folder), str(length)], capture_output=True, text=True, check=True
    )
    found = json.loads(result.stdout)
    (need,) = (need for need in found["needs"] if need["context"] == length)
    assert need["total"] == need["weights"] + need["kv"] + need["states"] + need["workspace"]
    assert abs(found["resident"] - need["total"]) <= 0.05 * need["total"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("glm4_moe", {"topk_group": 1, "num_experts_per_tok": 3}, "goes to 3 experts, the best 1 groups have 2"),
        ("glm4_moe", {"n_group": 3}, "8 experts are not a multiple of 3 groups"),
        ("minimax_m2", {"num_local_experts": 513}, "sigmoid routing to 513 experts is not supported"),
        ("qwen3_moe", {"num_experts_per_tok": 33}, "33 experts, expected at most 32"),
        ("lfm2", {"layer_types": ["conv"]}, "layer_types has 1 entries for 4 layers"),
        ("lfm2", {"layer_types": None}, '"layer_types" is missing'),
        ("lfm2", {"block_ffn_dim_multiplier": 1e308}, "feed_forward.w1.weight"),
        ("qwen3_next", {"layer_types": ["conv"] * 4}, 'layer type "conv" is not supported'),
        ("qwen3_next", {"linear_num_key_heads": 3}, "4 value heads are not a multiple of 3 key heads"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 1e308}}, "expected a part of 1"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, 'layer type "full_attention" is not supported'),
        ("deepseek_v32", {"mlp_layer_types": ["dense", "mixed", "sparse"]}, 'MLP type "mixed" is not supported'),
        ("deepseek_v32", {"q_lora_rank": None}, 'deepseek_v32 without "q_lora_rank" is not supported'),
        ("deepseek_v32", {"index_head_dim": 20}, "index_head_dim 20 is not a multiple of 8"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk"),
        ("minimax_m3", {"layer_types": ["sliding_attention"] * 3}, 'layer type "sliding_attention" is not supported'),
        ("minimax_m3", {"index_n_heads": 1}, "1 index heads for 2 key-value heads are not supported"),
        ("minimax_m3", {"index_head_dim": 20}, "index_head_dim 20 is not a multiple of 8"),
        ("minimax_m3", {"index_local_blocks": 4}, "index_local_blocks"),
        ("minimax_m3", {"moe_layer_freq": [0, 1]}, "moe_layer_freq has 2 entries for 3 layers"),
        ("deepseek_v3", {"kv_lora_rank": 48}, "kv_a_proj_with_mqa.weight"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_at_load(name, change, message, tmp_path):
    folder = changed_folder(tmp_path, name, change)
    with pytest.raises(shoal.ShoalError) as error:
        shoal.LLM(str(folder))
    assert message in str(error.value)
