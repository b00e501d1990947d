"""The command line, in processes of its own."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, shoal, shoal_here

import shoal as package

REQUEST = ("--temp", "0", "-n", "6", "--raw")


def check_failure(result: subprocess.CompletedProcess, status: int, text: str) -> None:
    assert result.returncode == status, result.stderr
    assert text in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("shoal: ")
    assert result.stdout == ""


# Settings


def test_version() -> None:
    result = shoal("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"shoal {package.__version__}\n", "")


def test_help_names_the_commands(home: Path) -> None:
    result = shoal("--help")
    assert result.returncode == 0
    for command in ("run", "bench", "eval", "inspect", "doctor"):
        assert command in result.stdout
        assert shoal_here(command, "--help").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["frobnicate"], "frobnicate"),
        (["run", "--nonsense"], "--nonsense"),
        (["run", "--top-p", "2"], "--top-p"),
        (["run", "--temp", "-1"], "--temp"),
        (["run", "--top-k", "many"], "--top-k"),
        (["run", "-p", "a", "-f", "b"], "exclude each other"),
        (["run", "-p", ""], "the prompt is empty"),
        (["run", "-p", "x", "--stop", ""], "stop string is empty"),
        (["run", "-p", "x", "--temp", "nan"], "temp"),
        (["run", "--json", "-p"], "-p"),
        (["bench", "--context", "5 miles"], "no context length"),
        (["bench", "-o", "xml"], "expected md, json or csv"),
        (["eval"], "--text is missing"),
    ],
)
def test_wrong_use(home: Path, arguments: list[str], text: str) -> None:
    check_failure(shoal_here(*arguments), 2, text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "nowhere.gguf", "-p", "x"], 'no model at "nowhere.gguf"'),
        (["inspect", "nowhere.gguf"], 'no model at "nowhere.gguf"'),
        (["run", "-f", "nowhere.txt"], 'cannot read "nowhere.txt"'),
        (["eval", "--text", "nowhere.txt"], 'cannot read "nowhere.txt"'),
    ],
)
def test_failures(home: Path, arguments: list[str], text: str) -> None:
    check_failure(shoal_here(*arguments), 1, text)


def test_broken_model_file(home: Path) -> None:
    (home / "bad.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    check_failure(shoal_here("run", str(home / "bad.gguf"), "-p", "x"), 1, "bad.gguf")
    (home / "evil\n\x1b[31m").write_bytes(b"no model")
    result = shoal_here("inspect", str(home / "evil\n\x1b[31m"))
    check_failure(result, 1, "evil")
    assert "\x1b" not in result.stderr


def config_of(result: subprocess.CompletedProcess) -> dict[str, str]:
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if " = " in line]
    return dict(line.split(" = ", 1) for line in lines)


def test_precedence_of_settings(home: Path) -> None:
    file = home / "c.toml"
    file.write_text('temp = 0.1\ntop-k = 1\nkv-dtype = "int8"\ncontext = "9k"\n[run]\ntop-k = 2\nmin-p = 0.3\n')
    env = {"SHOAL_CONFIG": str(file), "SHOAL_MIN_P": "0.2", "SHOAL_SEED": "5", "SHOAL_RAW": "1"}
    shown = config_of(shoal_here("run", "--print-config", "--seed", "6", env=env))
    assert "print-config" not in shown  # what is printed can be the file
    assert shown["seed"] == "6  # flag"
    assert shown["min-p"] == "0.2  # variable SHOAL_MIN_P"
    assert shown["raw"] == "true  # variable SHOAL_RAW"
    assert shown["top-k"] == "2  # file"
    assert shown["temp"] == "0.1  # file"
    assert shown["kv-dtype"] == '"int8"  # file'
    assert shown["top-p"] == "0.95  # default"
    assert config_of(shoal_here("bench", "--print-config", env=env))["context"] == '"9k"  # file'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temp = ", "c.toml"),
        ("nonsense = 1", "there is no option nonsense"),
        ("[nonsense]\na = 1", "there is no command [nonsense]"),
        ("[doctor]\ntemp = 1", "[doctor] has no option temp"),
        ("temp = 'hot'", "temp"),
    ],
)
def test_bad_settings_file(home: Path, text: str, message: str) -> None:
    file = home / "c.toml"
    file.write_text(text)
    check_failure(shoal_here("run", "-p", "x", env={"SHOAL_CONFIG": str(file)}), 2, message)


def test_settings_file_must_exist_if_named(home: Path) -> None:
    check_failure(shoal_here("doctor", env={"SHOAL_CONFIG": "/nowhere.toml"}), 2, "does not exist")
    check_failure(shoal_here("run", "-p", "x", env={"SHOAL_TOP_K": "x"}), 2, "SHOAL_TOP_K")


def test_every_option_has_its_variable() -> None:
    import typer
    from shoal.cli import app

    for name, command in typer.main.get_command(app).commands.items():
        for parameter in command.params:
            long = [o for o in parameter.opts if o.startswith("--")]
            if long and parameter.name not in ("help", "print_config_"):
                assert parameter.envvar == "SHOAL_" + long[0][2:].replace("-", "_").upper(), (name, parameter.name)


# Without a model


def test_doctor(home: Path) -> None:
    result = shoal("doctor", "--json", env={"SHOAL_CPU_ISA": "scalar"})
    found = json.loads(result.stdout)
    assert result.returncode == 0
    assert found["isa"] == found["forced_isa"] == "scalar" and "scalar" in found["isas"]
    assert found["version"] == package.__version__ and found["cached_models"] == []
    assert found["memory"]["total_bytes"] > 0 and found["threads"] >= 1
    text = shoal_here("doctor")
    assert text.returncode == 0 and "processor" in text.stdout and "CUDA" in text.stdout
    wrong = shoal_here("doctor", env={"SHOAL_CPU_ISA": "mmx"})
    assert wrong.returncode == 1 and "mmx" in wrong.stderr


# With the default model


def test_answers(smollm2_path: Path) -> None:
    result = shoal(
        "run", str(smollm2_path), "-p", "What is the capital of France?", "--temp", "0", "-n", "12", "--exact"
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout and result.stdout.endswith("\n")
    assert "decode" in result.stderr and "tok/s" in result.stderr
    assert "\x1b" not in result.stdout + result.stderr  # no decoration: not a terminal


def test_pipe_and_file_and_option_are_alike(smollm2_path: Path, tmp_path: Path) -> None:
    text = "The three primary colours are"
    (tmp_path / "p.txt").write_text(text + "\n")
    outs = [
        shoal("run", str(smollm2_path), "-p", text, *REQUEST, "-q"),
        shoal("run", str(smollm2_path), "-f", str(tmp_path / "p.txt"), *REQUEST, "-q"),
        shoal("run", str(smollm2_path), *REQUEST, "-q", stdin=text + "\n"),
    ]
    assert len({o.stdout for o in outs}) == 1 and outs[0].stdout
    assert {o.stderr for o in outs} == {""}


def test_json_lines(smollm2_path: Path) -> None:
    result = shoal("run", str(smollm2_path), "-p", "Numbers: 1 2 3 4 é 🚀", *REQUEST, "--json")
    assert result.returncode == 0 and result.stderr == ""
    *tokens, last = map(json.loads, result.stdout.splitlines())
    assert list(last) == [
        "text", "prompt_tokens", "completion_tokens", "ttft_s", "prefill_tok_s", "decode_tok_s", "finish_reason",
    ]  # fmt: skip
    assert all(list(t) == ["token", "id"] for t in tokens)
    assert "".join(t["token"] for t in tokens) == last["text"]
    assert sum(t["id"] is not None for t in tokens) == last["completion_tokens"] == 6
    assert last["finish_reason"] == "length" and last["ttft_s"] > 0


def test_a_prompt_stays_text(smollm2_path: Path) -> None:
    counts = []
    for prompt in ("<|im_end|>", "<|endoftext|>"):
        result = shoal("run", str(smollm2_path), "-p", prompt, *REQUEST, "--json")
        counts.append(json.loads(result.stdout.splitlines()[-1])["prompt_tokens"])
    assert min(counts) > 3


def test_stop(smollm2_path: Path) -> None:
    result = shoal(
        "run", str(smollm2_path), "-p", "1, 2, 3, 4,", "--temp", "0", "-n", "20", "--raw", "-q", "--stop", " 7"
    )
    assert result.returncode == 0 and "6" in result.stdout and "7" not in result.stdout


def test_broken_pipe_is_quiet(smollm2_path: Path) -> None:
    command = f'"{sys.executable}" -m shoal.cli run "{smollm2_path}" -p "1 2 3" --raw -q -n 40 --temp 0 | head -c 1'
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, env={**os.environ, "SHOAL_THREADS": "1"}
    )
    assert len(result.stdout) == 1
    assert result.stderr == ""


def test_ctrl_c_stops_an_answer(smollm2_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "shoal.cli",
            "run",
            str(smollm2_path),
            "-p",
            "A story:",
            "--raw",
            "-n",
            "4000",
            "--ignore-eos",
        ],
        env={**os.environ, "SHOAL_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err and b"cancelled" in err


def read_until(terminal: int, text: str, timeout: float = 90) -> str:
    out, deadline = "", time.monotonic() + timeout
    while text not in out:
        assert time.monotonic() < deadline, out
        try:
            out += os.read(terminal, 4096).decode("utf-8", "replace")
        except OSError:
            break
    return out


def test_conversation_at_a_terminal(smollm2_path: Path, tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"SHOAL_CACHE": str(tmp_path), "SHOAL_THREADS": "1"}
        os.execv(
            sys.executable,
            [
                sys.executable,
                "-m",
                "shoal.cli",
                "run",
                str(smollm2_path),
                "--temp",
                "0",
                "-n",
                "16",
                "--ctx",
                "512",
                "--exact",
            ],
        )
    read_until(terminal, "> ")
    os.write(terminal, b"What is the capital of France?\n")
    assert "Paris" in read_until(terminal, "tok/s")
    os.write(terminal, b"/nonsense\n")
    assert "no command /nonsense" in read_until(terminal, "/exit")
    os.write(terminal, b"/clear\n")
    read_until(terminal, "> ")
    os.write(terminal, b"/exit\n")
    while True:
        try:
            if not os.read(terminal, 4096):
                break
        except OSError:
            break
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0


def test_inspect(smollm2_path: Path) -> None:
    found = json.loads(shoal_here("inspect", str(smollm2_path), "--json").stdout)
    assert found["architecture"] == "llama" and found["supported"] is True
    assert 134e6 < found["parameters"] < 136e6
    assert {"name", "format", "shape", "bytes"} == set(found["tensors"][0])
    assert found["metadata"]["tokenizer.ggml.pre"] == "smollm"
    plan = found["plan"]
    assert plan["layers"] == ["attention; dense"] * 30 and plan["parameters"] == found["parameters"]
    assert plan["kv_token_bytes"] == {"f32": 46080, "f16": 23040, "bf16": 23040, "int8": 11520}
    assert {(group["format"], group["count"], group["why"]) for group in plan["weights"]} == {
        ("q4_1", 120, None),
        ("q8_0", 1, None),
    }
    (need,) = plan["memory"]
    assert need["context"] == 8192 and need["kv"] == 8192 * 23040  # the model's context is no longer
    text = shoal_here("inspect", str(smollm2_path), "--kv-dtype", "int8").stdout
    assert "134,515,008" in text and "token_embd.weight" in text
    assert "30 x attention; dense" in text and "KV cache in int8" in text
    exact = json.loads(shoal_here("inspect", str(smollm2_path), "--exact", "--json").stdout)["plan"]["weights"]
    assert {group["why"] for group in exact} == {"exact activations were asked for"}


def test_what_cannot_run_is_said(tmp_path: Path) -> None:
    tiny = GOLDEN / "models" / "llama"
    check_failure(shoal_here("run", str(tiny), "-p", "hi"), 1, "has no tokenizer, which `shoal run` needs")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    assert json.loads(shoal_here("inspect", str(tmp_path), "--json").stdout)["supported"] is False
    assert "not supported" in shoal_here("inspect", str(tmp_path)).stdout
    check_failure(shoal_here("run", str(tmp_path), "-p", "hi"), 1, "hqq")


def test_bench(smollm2_path: Path) -> None:
    arguments = ("bench", str(smollm2_path), "--context", "16,32", "-n", "4", "-r", "1")
    rows = json.loads(shoal(*arguments, "-o", "json").stdout)["results"]
    assert [r["context"] for r in rows] == [16, 32] and all(r["decode_tok_s"] > 0 for r in rows)
    table = shoal(*arguments).stdout
    assert re.search(r"weights +12[67]\.\d MB", table) and "| context |" in table  # padding differs by instruction set
    lines = shoal(*arguments, "-o", "csv").stdout.splitlines()
    assert lines[0].startswith("context,ttft_s,") and len(lines) == 3


def test_eval(smollm2_path: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("The sun rises in the east and sets in the west. Water is made of hydrogen and oxygen. " * 3)
    stored = tmp_path / "l.npz"
    base = ("eval", str(smollm2_path), "--text", str(text), "--ctx", "24", "--json")
    first = json.loads(shoal(*base, "--save", str(stored)).stdout)
    assert 1 < first["perplexity"] < 50
    again = json.loads(shoal(*base, "--against", str(stored)).stdout)
    assert again["perplexity"] == first["perplexity"]
    assert again["kl_mean"] == again["kl_max"] == 0 and again["top1_agreement"] == 1
    with np.load(stored) as arrays:
        assert arrays["logits_0"].shape == (12, 49152) and arrays["ids_0"].shape == (24,)
    check_failure(shoal(*base, "--ctx", "32", "--against", str(stored)), 2, "made of other tokens")
    check_failure(shoal(*base, "--against", str(text)), 2, "is no .npy or .npz file")
    check_failure(shoal(*base, "--ctx", "4000"), 2, "less than one window")
    # Onto the file that is being read: it is replaced when the new one is whole.
    over = json.loads(shoal(*base, "--against", str(stored), "--save", str(stored)).stdout)
    assert over["kl_max"] == 0 and json.loads(shoal(*base, "--against", str(stored)).stdout)["kl_max"] == 0
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []
    for name, values, message in (
        ("nan", np.full((24, 49152), np.nan, np.float32), "no numbers to compare with"),
        ("complex", np.zeros((24, 49152), np.complex64), "no numbers to compare with"),
        ("scalar", np.float32(1), "has shape"),
    ):
        np.save(tmp_path / f"{name}.npy", values)
        check_failure(shoal(*base, "--against", str(tmp_path / f"{name}.npy")), 2, message)
    np.savez(tmp_path / "gap.npz", ids_1=np.zeros(24, np.int32))
    check_failure(shoal(*base, "--against", str(tmp_path / "gap.npz")), 2, "no sound ids_0")


def test_closed_streams_and_odd_files(smollm2_path: Path, tmp_path: Path) -> None:
    def through_shell(tail: str) -> subprocess.CompletedProcess:
        command = f'"{sys.executable}" -m shoal.cli run "{smollm2_path}" -n 2 --temp 0 {tail}'
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)

    assert through_shell("-p hi >&-").returncode == 0
    assert through_shell("-p hi 2>&-").stdout
    result = through_shell("-f - <&-")
    assert result.returncode == 2 and "empty" in result.stderr
    os.mkfifo(tmp_path / "fifo.gguf")
    check_failure(shoal("inspect", str(tmp_path / "fifo.gguf")), 2, "not a regular file")
    check_failure(shoal("run", str(smollm2_path), "-p", "x", "--ctx", "2147483647"), 2, "exceeds the 8192 positions")
    deep = tmp_path / "deep.toml"
    deep.write_text("x=" + "[" * 5000)
    result = shoal("run", str(smollm2_path), "-p", "x", env={"SHOAL_CONFIG": str(deep)})
    assert result.returncode == 2 and "Traceback" not in result.stderr


def test_eval_against_another_engine(smollm2_path: Path, tmp_path: Path) -> None:
    from shoal import LLM

    text = "The quick brown fox jumps over the lazy dog. " * 4
    (tmp_path / "t.txt").write_text(text)
    with LLM(smollm2_path, max_context=32) as llm:
        ids = llm.tokenizer.encode(text)[:24]
        (logits,) = llm.logits([ids])
    np.save(tmp_path / "l.npy", logits + 3)  # a constant does not matter
    base = ("eval", str(smollm2_path), "--text", str(tmp_path / "t.txt"), "--ctx", "32", "--json")
    result = json.loads(shoal(*base, "--against", str(tmp_path / "l.npy")).stdout)
    assert result["kl_max"] < 1e-5 and result["top1_agreement"] == 1 and result["tokens"] == 23
