"""The command line. Answers go to stdout, everything else to stderr. Exit status 2: used wrongly, 1: failed."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import __version__
from shoal.errors import InvalidArgument, OutOfMemory, ShoalError, printable
from shoal.models import NAMED_MODELS
from shoal.server.options import ServerOptions
from shoal.settings import default_map, option, origin_of, print_config, read_config

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Runs quantised language models.",
)

# Options that several commands share

Model = Annotated[
    str, typer.Argument(metavar="MODEL", envvar="SHOAL_MODEL", help="A GGUF file, a model folder, or a name (smollm2).")
]
Device = Annotated[str, option("--device", help="auto, cpu, cuda or cuda:N", rich_help_panel="Engine")]
KvDtype = Annotated[str, option("--kv-dtype", help="KV cache: auto, f32, bf16, f16 or int8", rich_help_panel="Engine")]
Context = Annotated[
    int,
    option("--ctx", help="tokens of prompt and answer; 0: the model's, at most 8192", min=0, rich_help_panel="Engine"),
]
Threads = Annotated[int, option("--threads", "-t", help="0: all cores", min=0, rich_help_panel="Engine")]
Exact = Annotated[bool, option("--exact", help="activations and sums in f32", rich_help_panel="Engine")]
BatchTokens = Annotated[
    int, option("--max-batch-tokens", help="token budget of a step", min=1, rich_help_panel="Engine")
]
PageSize = Annotated[int, option("--page-size", help="tokens of a KV page", min=1, rich_help_panel="Engine")]
Json = Annotated[bool, option("--json", help="JSON on stdout")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Show each option's value and where it came from.")]

_SERVER = ServerOptions("")  # for its defaults


def engine_options(
    device: str, kv_dtype: str, ctx: int, threads: int, exact: bool, max_batch_tokens: int, page_size: int
) -> dict[str, Any]:
    return {
        "device": device,
        "kv_dtype": kv_dtype,
        "max_context": ctx,
        "threads": threads,
        "exact": exact,
        "max_batch_tokens": max_batch_tokens,
        "page_size": page_size,
    }


def _version(value: bool) -> None:
    if value:
        print(f"shoal {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Runs quantised language models."""
    context.default_map = default_map(read_config(), context.command.commands)


@app.command("run")
def run_command(
    context: typer.Context,
    model: Model = "smollm2",
    prompt: Annotated[str | None, option("--prompt", "-p", help="the text to answer or continue")] = None,
    file: Annotated[str | None, option("--file", "-f", help="a file with the text; - for stdin")] = None,
    system: Annotated[str | None, option("--system", help="the system message")] = None,
    max_tokens: Annotated[
        int, option("--max-tokens", "-n", help="tokens of an answer; 0: as many as the context holds", min=0)
    ] = 512,
    temp: Annotated[float, option("--temp", help="0: the most likely token", min=0, rich_help_panel="Sampling")] = 0.8,
    top_k: Annotated[int, option("--top-k", help="0: off", min=0, rich_help_panel="Sampling")] = 40,
    top_p: Annotated[float, option("--top-p", help="1: off", min=0, max=1, rich_help_panel="Sampling")] = 0.95,
    min_p: Annotated[float, option("--min-p", help="0: off", min=0, max=1, rich_help_panel="Sampling")] = 0.05,
    seed: Annotated[int | None, option("--seed", help="not set: random", rich_help_panel="Sampling")] = None,
    repetition_penalty: Annotated[
        float, option("--repetition-penalty", help="1: off", rich_help_panel="Sampling")
    ] = 1.0,
    presence_penalty: Annotated[float, option("--presence-penalty", help="0: off", rich_help_panel="Sampling")] = 0.0,
    frequency_penalty: Annotated[float, option("--frequency-penalty", help="0: off", rich_help_panel="Sampling")] = 0.0,
    stop: Annotated[list[str] | None, option("--stop", help="end before this text; may be repeated")] = None,
    ignore_eos: Annotated[bool, option("--ignore-eos", help="go on after the end of the answer")] = False,
    raw: Annotated[bool, option("--raw", help="continue the text as it is, without the chat template")] = False,
    json: Json = False,
    quiet: Annotated[bool, option("--quiet", "-q", help="no statistics")] = False,
    device: Device = "auto",
    kv_dtype: KvDtype = "auto",
    ctx: Context = 0,
    threads: Threads = 0,
    exact: Exact = False,
    max_batch_tokens: BatchTokens = 2048,
    page_size: PageSize = 32,
    print_config_: PrintConfig = False,
) -> int:
    """Answer a prompt, or chat at a terminal."""
    if print_config_:
        print_config(context)
    from shoal.command_run import RunOptions, run
    from shoal.llm import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens or None,
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop or None,
        ignore_eos=ignore_eos,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    params.check()
    engine = engine_options(device, kv_dtype, ctx, threads, exact, max_batch_tokens, page_size)
    return run(model, RunOptions(prompt, file, system, raw, json, quiet, params), engine)


@app.command("serve")
def serve_command(
    context: typer.Context,
    model: Model = "smollm2",
    host: Annotated[str, option("--host", help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, option("--port", help="0: any that is free", min=0, max=65535)] = 8000,
    api_key: Annotated[list[str] | None, option("--api-key", help="key of a client; may be repeated")] = None,
    api_key_file: Annotated[str | None, option("--api-key-file", help="a file with keys, one a line")] = None,
    allow_no_key: Annotated[bool, option("--allow-no-key", help="serve everybody without a key")] = False,
    served_model_name: Annotated[
        str | None, option("--served-model-name", help="what clients call the model; not set: the name of its file")
    ] = None,
    access_log: Annotated[
        bool, option("--access-log/--no-access-log", help="a JSON line on stderr for each request")
    ] = True,
    request_log: Annotated[
        str | None,
        option("--request-log", help="a folder for requests that failed by a fault of ours, with their prompts"),
    ] = None,
    tool_parser: Annotated[str, option("--tool-parser", help="auto, hermes, llama_json or none")] = "auto",
    reasoning: Annotated[str, option("--reasoning", help="split out <think>…</think>: auto, think or none")] = "auto",
    drain_timeout: Annotated[
        float, option("--drain-timeout", help="seconds for running answers after SIGTERM", min=0)
    ] = _SERVER.drain_timeout,
    max_body: Annotated[
        int, option("--max-body", help="bytes of a request", min=1, rich_help_panel="Limits")
    ] = _SERVER.max_body,
    max_header: Annotated[
        int, option("--max-header", help="bytes of its head", min=1024, rich_help_panel="Limits")
    ] = _SERVER.max_header,
    max_connections: Annotated[
        int, option("--max-connections", help="open at once", min=1, rich_help_panel="Limits")
    ] = _SERVER.max_connections,
    max_messages: Annotated[
        int, option("--max-messages", help="of a conversation", min=1, rich_help_panel="Limits")
    ] = _SERVER.max_messages,
    max_tools: Annotated[
        int, option("--max-tools", help="of a request", min=0, rich_help_panel="Limits")
    ] = _SERVER.max_tools,
    max_stops: Annotated[
        int, option("--max-stops", help="stop strings of a request", min=0, rich_help_panel="Limits")
    ] = _SERVER.max_stops,
    max_stop_length: Annotated[
        int, option("--max-stop-length", help="characters of one", min=1, rich_help_panel="Limits")
    ] = _SERVER.max_stop_length,
    max_n: Annotated[
        int, option("--max-n", help="answers to a prompt", min=1, max=1024, rich_help_panel="Limits")
    ] = _SERVER.max_n,
    max_json_depth: Annotated[
        int, option("--max-json-depth", help="levels of nesting", min=8, max=200, rich_help_panel="Limits")
    ] = _SERVER.max_json_depth,
    max_queue: Annotated[
        int, option("--max-queue", help="requests that wait; more: 429", min=1, rich_help_panel="Limits")
    ] = _SERVER.max_queue,
    max_queue_age: Annotated[
        float, option("--max-queue-age", help="seconds that one waits; longer: 503", min=0, rich_help_panel="Limits")
    ] = _SERVER.max_queue_age,
    receive_timeout: Annotated[
        float, option("--receive-timeout", help="seconds for a request to arrive", min=0.1, rich_help_panel="Limits")
    ] = _SERVER.receive_timeout,
    stall_timeout: Annotated[
        float, option("--stall-timeout", help="seconds without reading", min=0.1, rich_help_panel="Limits")
    ] = _SERVER.stall_timeout,
    keep_alive: Annotated[
        float, option("--keep-alive", help="seconds between signs of life in a stream", min=0.1)
    ] = _SERVER.keep_alive,
    ready_window: Annotated[
        float, option("--ready-window", help="seconds for which a token shows that the engine works", min=0.1)
    ] = _SERVER.ready_window,
    replicas: Annotated[
        int, option("--replicas", help="processes with the model each, behind one port; they divide the threads", min=1)
    ] = 1,
    health_interval: Annotated[
        float, option("--health-interval", help="seconds between questions to a replica whether it lives", min=0.1)
    ] = _SERVER.health_interval,
    health_timeout: Annotated[
        float, option("--health-timeout", help="seconds that it has to answer, else it is started anew", min=0.1)
    ] = _SERVER.health_timeout,
    max_seqs: Annotated[int, option("--max-seqs", help="sequences in one step", min=1, rich_help_panel="Engine")] = 64,
    device: Device = "auto",
    kv_dtype: KvDtype = "auto",
    ctx: Context = 0,
    threads: Threads = 0,
    exact: Exact = False,
    max_batch_tokens: BatchTokens = 2048,
    page_size: PageSize = 32,
    print_config_: PrintConfig = False,
) -> int:
    """Serve the OpenAI API, and a chat page."""
    if print_config_:
        print_config(context)
    for name, value, known in (
        ("--tool-parser", tool_parser, ("auto", "hermes", "llama_json", "none")),
        ("--reasoning", reasoning, ("auto", "think", "none")),
    ):
        if value not in known:
            raise InvalidArgument(f"{name} is {printable(value)}, expected {', '.join(known)}")
    from shoal.command_serve import read_keys, serve
    from shoal.server.request_log import open_folder

    options = ServerOptions(
        name=served_model_name or (model if model in NAMED_MODELS else Path(model).stem),
        keys=read_keys(api_key or (), api_key_file),
        access_log=access_log,
        request_log=None if request_log is None else open_folder(request_log),
        reasoning=reasoning,
        tool_parser=tool_parser,
        max_body=max_body,
        max_header=max_header,
        max_connections=max_connections,
        max_messages=max_messages,
        max_tools=max_tools,
        max_stops=max_stops,
        max_stop_length=max_stop_length,
        max_n=max_n,
        max_json_depth=max_json_depth,
        max_queue=max_queue,
        max_queue_age=max_queue_age,
        receive_timeout=receive_timeout,
        stall_timeout=stall_timeout,
        keep_alive=keep_alive,
        ready_window=ready_window,
        health_interval=health_interval,
        health_timeout=health_timeout,
        drain_timeout=drain_timeout,
    )
    engine = engine_options(device, kv_dtype, ctx, threads, exact, max_batch_tokens, page_size)
    return serve(model, host, port, allow_no_key, options, engine | {"max_seqs": max_seqs}, replicas)


@app.command("bench")
def bench_command(
    context: typer.Context,
    model: Model = "smollm2",
    synthetic: Annotated[
        str, option("--synthetic", help="random weights of a published size in place of MODEL; another name lists them")
    ] = "",
    contexts: Annotated[str, option("--context", help="prompt lengths, for example 512,8k")] = "512,2k",
    max_tokens: Annotated[int, option("--max-tokens", "-n", help="tokens to decode", min=2)] = 32,
    repetitions: Annotated[int, option("--repetitions", "-r", help="runs of each", min=1)] = 3,
    output: Annotated[str, option("--output", "-o", help="md, json or csv")] = "md",
    server: Annotated[
        str, option("--server", help="measure the server at this address; MODEL is what it calls its model")
    ] = "",
    concurrency: Annotated[
        str, option("--concurrency", help="clients at once, for example 1,4,16", rich_help_panel="Server")
    ] = "1,4,16",
    requests: Annotated[
        int, option("--requests", help="of each level; 0: four for each client", min=0, rich_help_panel="Server")
    ] = 0,
    duration: Annotated[
        float, option("--duration", help="seconds of each level, in place of requests", min=0, rich_help_panel="Server")
    ] = 0,
    ttft_limit: Annotated[
        float, option("--ttft-limit", help="goodput: seconds to the first token", min=0, rich_help_panel="Server")
    ] = 2.0,
    itl_limit: Annotated[
        float,
        option("--itl-limit", help="goodput: an answer's mean seconds between tokens", min=0, rich_help_panel="Server"),
    ] = 0.1,
    plot: Annotated[str | None, option("--plot", help="an SVG file to write", rich_help_panel="Server")] = None,
    api_key: Annotated[list[str] | None, option("--api-key", help="for the server", rich_help_panel="Server")] = None,
    device: Device = "auto",
    kv_dtype: KvDtype = "auto",
    ctx: Context = 0,
    threads: Threads = 0,
    exact: Exact = False,
    max_batch_tokens: BatchTokens = 2048,
    page_size: PageSize = 32,
    print_config_: PrintConfig = False,
) -> int:
    """Measure time to first token and decode rate by context length; with --server by clients at once."""
    if print_config_:
        print_config(context)
    if output not in ("md", "json", "csv"):
        raise InvalidArgument(f"--output is {output}, expected md, json or csv")
    from shoal.command_bench import bench, parse_contexts, parse_numbers

    _refuse_flags(context, "with" if server else "without", _NOT_WITH_SERVER if server else _ONLY_WITH_SERVER)
    lengths = parse_contexts(contexts)
    if server:
        from shoal.command_bench_server import Load, bench_server

        levels = parse_numbers(concurrency, "--concurrency", 1024)
        load = Load(levels, tuple(lengths), max_tokens, requests, duration, ttft_limit, itl_limit)
        name = None if context.get_parameter_source("model").name == "DEFAULT" else model
        return bench_server(server, name, api_key[0] if api_key else None, load, output, plot)
    engine = engine_options(device, kv_dtype, ctx, threads, exact, max_batch_tokens, page_size)
    model = f"synthetic:{synthetic}" if synthetic else model
    return bench(model, lengths, max_tokens, repetitions, output, engine)


_NOT_WITH_SERVER = (
    "synthetic", "repetitions", "device", "kv_dtype", "ctx", "threads", "exact", "max_batch_tokens", "page_size"
)  # fmt: skip
_ONLY_WITH_SERVER = ("concurrency", "requests", "duration", "ttft_limit", "itl_limit", "plot")


def _refuse_flags(context: typer.Context, how: str, names: tuple[str, ...]) -> None:
    """What stands on the command line and would have no effect. Variables and files may hold for other commands."""
    for name in names:
        if context.get_parameter_source(name).name == "COMMANDLINE":
            raise InvalidArgument(f"--{name.replace('_', '-')} has no effect {how} --server")


@app.command("eval")
def eval_command(
    context: typer.Context,
    model: Model = "smollm2",
    text: Annotated[str, option("--text", help="a UTF-8 text file")] = "",
    against: Annotated[str | None, option("--against", help="stored logits (.npz of --save, or .npy)")] = None,
    save: Annotated[str | None, option("--save", help="store the logits (.npz)")] = None,
    ctx: Annotated[int, option("--ctx", help="tokens of a window", min=4)] = 512,
    windows: Annotated[
        int, option("--windows", help="windows of --ctx tokens, each scored in its second half; 0: all", min=0)
    ] = 0,
    json: Json = False,
    device: Device = "auto",
    kv_dtype: KvDtype = "auto",
    threads: Threads = 0,
    exact: Exact = False,
    max_batch_tokens: BatchTokens = 2048,
    page_size: PageSize = 32,
    print_config_: PrintConfig = False,
) -> int:
    """Perplexity of a text; with --against also KL divergence and top-1 agreement."""
    if print_config_:
        print_config(context)
    if not text:
        raise InvalidArgument("--text is missing")
    from shoal.command_eval import evaluate

    engine = engine_options(device, kv_dtype, 0, threads, exact, max_batch_tokens, page_size)
    return evaluate(model, text, against, save, ctx, windows, json, engine)


@app.command("inspect")
def inspect_command(
    context: typer.Context,
    model: Model = "smollm2",
    json: Json = False,
    kv_dtype: KvDtype = "auto",
    ctx: Context = 0,
    threads: Threads = 0,
    exact: Exact = False,
    max_batch_tokens: BatchTokens = 2048,
    page_size: PageSize = 32,
    print_config_: PrintConfig = False,
) -> int:
    """Show what is in a model file, and what it needs on this machine's processor."""
    if print_config_:
        print_config(context)
    from shoal.command_inspect import inspect

    engine = engine_options("cpu", kv_dtype, ctx, threads, exact, max_batch_tokens, page_size)
    del engine["device"]
    return inspect(model, json, **engine)


@app.command("doctor")
def doctor_command(context: typer.Context, json: Json = False, print_config_: PrintConfig = False) -> int:
    """Show what this machine and this installation have."""
    if print_config_:
        print_config(context)
    from shoal.command_doctor import doctor

    return doctor(json)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and gives the exit status. Every error is one sentence on stderr."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        status = typer.main.get_command(app).main(arguments, prog_name="shoal", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except InvalidArgument as error:
        return _fail(error, 2)
    except ShoalError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nobody reads on. Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError:
        return _fail(OutOfMemory("out of memory"), 1)
    except OSError as error:
        return _fail(error, 1)
    except Exception as error:
        # Usage errors of the command-line library, whose classes differ between its versions.
        if not hasattr(error, "format_message"):
            if type(error).__name__ == "Abort":
                return 130
            raise
        message = error.format_message().rstrip(".") + origin_of(error)
        # Without a command the help has been shown already.
        return _fail(message, error.exit_code) if type(error).__name__ != "NoArgsIsHelpError" else 2


def _fail(error: object, status: int) -> int:
    with contextlib.suppress(OSError):
        print(f"shoal: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
