"""Compares shoal with other CPU engines on one GGUF: same file, same threads, interleaved runs, median ratios.

Each peer lives in a virtual environment of its own under build/peers and comes from PyPI: llama-cpp-python (built here;
also with the model requantised to Q4_0, its fastest), ik-llama-cpp-python, openvino-genai.

Usage: bench/peers_cpu.py MODEL.gguf [--threads 2] [--rounds 5] [--engines shoal,llama.cpp,...]
                          [-o bench/results/FILE.json]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "build" / "peers"
PACKAGES = {
    "llama.cpp": ["llama-cpp-python==0.3.36"],
    "ik_llama.cpp": ["ik-llama-cpp-python==0.1.5"],
    "openvino": ["openvino-genai==2026.4.1.0", "numpy"],
}
ENGINES = ["shoal", "llama.cpp", "llama.cpp q4_0", "ik_llama.cpp", "openvino"]
DECODE = 128
# name -> (prompt tokens, sequences, decoded tokens per sequence); a rate counts prompt tokens or decoded tokens
CASES = {
    "prompt 512": (512, 1, 0),
    "prompt 2048": (2048, 1, 0),
    "decode at 0": (1, 1, DECODE),
    "decode at 2048": (2048, 1, DECODE),
    "decode, 8 at once": (1, 8, DECODE),
}


def prompt_ids(length: int, salt: int) -> list[int]:
    """Token ids that no cache has seen before: a small linear congruential sequence."""
    state, ids = 12345 + 7919 * salt, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append(1000 + state // 65536 % 20000)
    return ids


# ---- workers
class ShoalWorker:
    def __init__(self, model: str, threads: int):
        import shoal

        self.shoal = shoal
        self.llm = shoal.LLM(model, threads=threads, max_context=4096)

    def run(self, prompt: int, sequences: int, decode: int, salt: int) -> float:
        params = self.shoal.SamplingParams(max_tokens=max(decode, 1), temperature=0, ignore_eos=True)
        prompts = [prompt_ids(prompt, salt * 64 + i) for i in range(sequences)]
        if decode == 0:
            start = time.perf_counter()
            self.llm.generate(prompts, params)
            return prompt / (time.perf_counter() - start)
        if sequences == 1:
            times = [time.perf_counter() for _ in self.llm.stream(prompts[0], params)]
            return (len(times) - 1) / (times[-1] - times[0])
        start = time.perf_counter()
        self.llm.generate(prompts, params)
        return sequences * decode / (time.perf_counter() - start)


class LlamaWorker:
    """llama.cpp and ik_llama.cpp through their C interface."""

    def __init__(self, model: str, threads: int, ik: bool):
        if ik:
            import ik_llama_cpp._ctypes_api as api
        else:
            import llama_cpp.llama_cpp as api
        self.api, self.ik = api, ik
        api.llama_backend_init()
        if not ik:
            callback_type = api.llama_log_callback
            self.quiet = callback_type(lambda *_: None)
            api.llama_log_set(self.quiet, None)
        model_params = api.llama_model_default_params()
        self.model = api.llama_model_load_from_file(model.encode(), model_params)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 4096, 2048, 512, 8
        params.n_threads = params.n_threads_batch = threads
        if hasattr(params, "kv_unified"):
            params.kv_unified = True  # one sequence may use the whole context
        if ik:  # the flash attention of its published library crashes on Zen 1 and on Sapphire Rapids alike
            params.flash_attn = False
        self.context = api.llama_init_from_model(self.model, params)
        self.batch = api.llama_batch_init(2048, 0, 1)

    def clear(self):
        if self.ik:
            self.api.llama_kv_cache_clear(self.context)
        else:
            self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def decode(self, rows: list[tuple[int, int, int]], last_only: bool):
        """rows: (token, position, sequence)"""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = not last_only or i == len(rows) - 1
        if self.api.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self.api.llama_get_logits_ith(self.context, len(rows) - 1)[0]  # waits for the result

    def run(self, prompt: int, sequences: int, decode: int, salt: int) -> float:
        self.clear()
        start = time.perf_counter()
        for sequence in range(sequences):
            ids = prompt_ids(prompt, salt * 64 + sequence)
            self.decode([(token, i, sequence) for i, token in enumerate(ids)], True)
        if decode == 0:
            return prompt / (time.perf_counter() - start)
        start = time.perf_counter()
        for step in range(decode):
            self.decode([(2000 + step, prompt + step, sequence) for sequence in range(sequences)], False)
        return sequences * decode / (time.perf_counter() - start)


class OpenVinoWorker:
    def __init__(self, model: str, threads: int):
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.openvino, self.genai = numpy, openvino, openvino_genai
        self.pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)

    def run(self, prompt: int, sequences: int, decode: int, salt: int) -> float:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = max(decode, 2)
        config.ignore_eos, config.do_sample = True, False
        ids = self.numpy.array([prompt_ids(prompt, salt * 64 + i) for i in range(sequences)], dtype=self.numpy.int64)
        inputs = self.genai.TokenizedInputs(self.openvino.Tensor(ids), self.openvino.Tensor(self.numpy.ones_like(ids)))
        metrics = self.pipeline.generate(inputs, config).perf_metrics
        if decode == 0:
            return prompt / (metrics.get_ttft().mean / 1000)
        # Not get_tpot(): its durations are divided by the number of sequences already.
        seconds = (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1000
        return sequences * (decode - 1) / seconds


def worker(engine: str, model: str, threads: int, salt: int):
    if engine == "shoal":
        instance = ShoalWorker(model, threads)
    elif engine == "openvino":
        instance = OpenVinoWorker(model, threads)
    else:
        instance = LlamaWorker(model, threads, engine == "ik_llama.cpp")
    instance.run(64, 1, 4, 10**6 + salt)  # warm up: pages of the file, thread pools
    rates = {}
    for number, (name, case) in enumerate(CASES.items()):
        try:
            rates[name] = instance.run(*case, salt * 16 + number)
        except Exception as error:
            print(f"{engine}: {name}: {error}", file=sys.stderr)
    print("RESULT " + json.dumps(rates))


# ---- orchestration
def environment(engine: str) -> Path:
    """The interpreter of a peer's environment, made on first use."""
    if engine == "shoal":
        return Path(sys.executable)
    name = engine.removesuffix(" q4_0")
    folder = PEERS / name
    if not (folder / "bin" / "python").exists():
        print(f"installing {' '.join(PACKAGES[name])} into {folder.relative_to(ROOT)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *PACKAGES[name]], check=True)
    return folder / "bin" / "python"


def requantise(model: Path, folder: Path) -> Path:
    """The model in Q4_0, by llama.cpp itself."""
    out = folder / "model-q4_0.gguf"
    code = (
        "import sys, ctypes, llama_cpp as l\n"
        "p = l.llama_model_quantize_default_params(); p.ftype = 2; p.allow_requantize = True\n"
        "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(p)))"
    )
    subprocess.run([environment("llama.cpp"), "-c", code, model, out], check=True, capture_output=True)
    return out


def run_worker(engine: str, model: Path, threads: int, salt: int) -> dict[str, float]:
    command = [
        environment(engine),
        __file__,
        "--worker",
        engine,
        str(model),
        "--threads",
        str(threads),
        "--salt",
        str(salt),
    ]
    env = dict(os.environ, OMP_NUM_THREADS=str(threads))
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    for line in result.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    print(f"{engine} failed: {result.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    return {}


def table(medians: dict[str, dict[str, float]], engines: list[str]) -> str:
    lines = [
        "| tokens/s | " + " | ".join(engines) + " | shoal to fastest peer |",
        "|---|" + "---|" * (len(engines) + 1),
    ]
    for case in CASES:
        peers = [medians[e][case] for e in engines if e != "shoal" and case in medians[e]]
        own = medians.get("shoal", {}).get(case)
        ratio = f"{own / max(peers):.2f}" if own and peers else "-"
        cells = [f"{medians[e][case]:.0f}" if case in medians[e] else "-" for e in engines]
        lines.append(f"| {case} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--salt", type=int, default=0, help=argparse.SUPPRESS)
    if "--worker" in sys.argv:
        at = sys.argv.index("--worker")
        engine = sys.argv[at + 1]
        options = parser.parse_args(sys.argv[1:at] + sys.argv[at + 2 :])
        worker(engine, str(options.model), options.threads, options.salt)
        return 0
    options = parser.parse_args()
    engines = options.engines.split(",")
    samples: dict[str, dict[str, list[float]]] = {engine: {case: [] for case in CASES} for engine in engines}
    with tempfile.TemporaryDirectory() as folder:
        files = {engine: options.model for engine in engines}
        if "llama.cpp q4_0" in engines:
            files["llama.cpp q4_0"] = requantise(options.model, Path(folder))
        for salt in range(options.rounds):
            for engine in engines:  # interleaved: a slow minute of the machine hits all alike
                for case, rate in run_worker(engine, files[engine], options.threads, salt).items():
                    samples[engine][case].append(rate)
    medians = {e: {c: statistics.median(v) for c, v in cases.items() if v} for e, cases in samples.items()}
    print(table(medians, engines))
    if options.output:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
        cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
        processor = names[0] if names else platform.machine()
        options.output.write_text(
            json.dumps(
                {
                    "kind": "peers_cpu",
                    "model": options.model.name,
                    "processor": processor,
                    "threads": options.threads,
                    "rounds": options.rounds,
                    "date": time.strftime("%Y-%m-%d"),
                    "commit": commit.stdout.strip(),
                    "packages": PACKAGES,
                    "samples": samples,
                    "medians": medians,
                },
                indent=1,
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
