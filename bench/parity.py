"""Compares shoal's logits and greedy tokens with `transformers` computing in f32 on the same (dequantised) weights.

The reference runs in an environment of its own under build/peers/transformers (torch, transformers, gguf from PyPI).

Usage: bench/parity.py MODEL.gguf [--tokens 2048] [-o bench/results/FILE.json]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["torch==2.15.0", "transformers==5.24.0", "gguf==0.19.0", "accelerate==1.15.0"]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics are",
    "import numpy as np\n\nx = np.",
    "Q: What is 17 times 23?\nA:",
    "In 1969, the first humans",
    "SELECT name, COUNT(*) FROM",
    "Dear Sir or Madam,",
    "The mitochondria is",
    "<html>\n<head>\n<title>",
    "1, 1, 2, 3, 5, 8,",
    "To make a good cup of coffee, first",
    "Water boils at",
    "Der schnelle braune Fuchs",
    "La vie est",
    "The opposite of hot is",
    "List of planets:\n1. Mercury\n2.",
    "Machine learning is a field of",
    "She opened the door and saw",
]

REFERENCE = r"""
import json, sys, torch, numpy as np, transformers
model_path, request, out = sys.argv[1:4]
request = json.load(open(request))
folder, _, file = model_path.rpartition("/")
model = transformers.AutoModelForCausalLM.from_pretrained(folder or ".", gguf_file=file, dtype=torch.float32).eval()
with torch.no_grad():
    logits = model(torch.tensor([request["text"]])).logits[0].numpy()
    greedy, margins = [], []
    for prompt in request["prompts"]:
        ids = torch.tensor([prompt])
        new = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, min_new_tokens=64, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )
        top = model(new).logits[0, len(prompt) - 1 : -1].topk(2).values
        greedy.append(new[0, len(prompt):].tolist())
        margins.append((top[:, 0] - top[:, 1]).tolist())
versions = [f"torch=={torch.__version__}", f"transformers=={transformers.__version__}"]
np.savez(out, logits=logits, greedy=np.array(greedy), margins=np.array(margins), versions=np.array(versions))
"""


def reference(model: Path, text: list[int], prompts: list[list[int]]) -> dict[str, np.ndarray]:
    folder = ROOT / "build" / "peers" / "transformers"
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing {' '.join(PACKAGES)} into {folder.relative_to(ROOT)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
    with tempfile.TemporaryDirectory() as temporary:
        request, out = Path(temporary) / "request.json", Path(temporary) / "out.npz"
        request.write_text(json.dumps({"text": text, "prompts": prompts}))
        subprocess.run([python, "-c", REFERENCE, model.resolve(), request, out], check=True)
        return dict(np.load(out))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def divergence(logits: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """Mean Kullback-Leibler divergence from `base`, share of equal most likely tokens."""
    p, q = log_softmax(base), log_softmax(logits)
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    return {
        "mean_kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "top1_agreement": float((logits.argmax(axis=1) == base.argmax(axis=1)).mean()),
    }


def greedy_agreement(own: list[list[int]], expected: np.ndarray, margins: np.ndarray) -> dict[str, int]:
    """A difference counts unless the reference itself was undecided (margin of its two best below 1e-3) there."""
    differences = undecided = 0
    for tokens, reference_tokens, margin in zip(own, expected, margins, strict=True):
        different = np.flatnonzero(np.array(tokens) != reference_tokens)
        if different.size:
            if margin[different[0]] > 1e-3:
                differences += 1
            else:
                undecided += 1
    return {"prompts": len(own), "different": differences, "undecided": undecided}


def main() -> int:
    import shoal

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()

    exact = shoal.LLM(str(options.model), exact=True, max_context=options.tokens + 128)
    text = exact.tokenizer.encode((ROOT / "LICENSE").read_text())[: options.tokens]
    prompts = [exact.tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = reference(options.model, text, prompts)
    params = shoal.SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    exact_logits = exact.logits([text])[0]
    exact_tokens = [c.token_ids for c in exact.generate(prompts, params)]
    del exact
    default = shoal.LLM(str(options.model), max_context=options.tokens + 128)
    default_logits = default.logits([text])[0]

    largest = float(np.abs(expected["logits"]).max())
    result = {
        "kind": "parity",
        "model": options.model.name,
        "date": time.strftime("%Y-%m-%d"),
        "tokens": len(text),
        "packages": expected["versions"].tolist(),
        "exact_vs_transformers": {
            "max_difference_to_largest_logit": float(np.abs(exact_logits - expected["logits"]).max()) / largest,
            "greedy_64": greedy_agreement(exact_tokens, expected["greedy"], expected["margins"]),
            **divergence(exact_logits, expected["logits"]),
        },
        "default_vs_exact": divergence(default_logits, exact_logits),
    }
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
