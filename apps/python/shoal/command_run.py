"""`shoal run`: one answer to a prompt, or a conversation at a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal import console, models
from shoal.errors import InvalidArgument, ShoalError, Unsupported, printable
from shoal.llm import LLM, Chunk, Completion, SamplingParams

_HELP = """/help   this text
/clear  forget the conversation
/exit   leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one."""


@dataclass
class RunOptions:
    prompt: str | None
    file: str | None
    system: str | None
    raw: bool
    json: bool
    quiet: bool
    params: SamplingParams


def run(model: str, options: RunOptions, engine: dict[str, Any]) -> int:
    text = read_prompt(options)
    if text is None and options.json:
        raise InvalidArgument("--json needs a prompt: -p, -f or a pipe")
    with console.load(model, **engine) as llm:
        if text is None:
            return chat(llm, options)
        ids = prompt_ids(llm, text, options)
        return answer_once(llm, ids, options)


def read_prompt(options: RunOptions) -> str | None:
    """The text to answer; None for a conversation at a terminal."""
    if options.prompt is not None and options.file is not None:
        raise InvalidArgument("-p and -f exclude each other")
    if options.prompt is not None:
        text = options.prompt
    elif options.file is not None and options.file != "-":
        try:
            text = Path(options.file).read_text("utf-8")
        except OSError as error:
            raise ShoalError(f'cannot read "{printable(options.file)}": {error.strerror}', "io") from None
        except UnicodeDecodeError:
            raise InvalidArgument(f'"{printable(options.file)}" is no UTF-8 text') from None
    elif options.file == "-" or not sys.stdin.isatty():
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidArgument("what comes through the pipe is no UTF-8 text") from None
    else:
        return None
    if options.prompt is None:
        text = text.removesuffix("\n")  # the one that every text file ends with
    if not text:
        raise InvalidArgument("the prompt is empty: give it with -p, -f or through a pipe")
    return text


def prompt_ids(llm: LLM, text: str, options: RunOptions) -> list[int]:
    if not llm.has_tokenizer:
        raise Unsupported(
            f"{llm.path.name} has no tokenizer, which `shoal run` needs; shoal.LLM in Python takes token ids"
        )
    tokenizer = llm.tokenizer
    if options.raw or tokenizer.chat_template is None:
        if options.system is not None:
            raise InvalidArgument(
                "--system needs a chat template" + (", which --raw leaves out" if options.raw else "")
            )
        return tokenizer.encode_plain(text, add_special_tokens=True)
    return tokenizer.encode_chat(_messages(options, text))


def _messages(options: RunOptions, text: str) -> list[dict[str, str]]:
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": text}]


def answer_once(llm: LLM, ids: list[int], options: RunOptions) -> int:
    show = print_json if options.json else print_text
    completion, interrupted = _show_stream(llm, ids, options.params, show)
    if completion is None:
        return 130
    if options.json:
        print_json_summary(completion)
    else:
        if completion.text and not completion.text.endswith("\n"):
            print(flush=True)  # also in a pipe: what follows, our own figures first, begins a line
        if not options.quiet:
            console.say(console.dim(console.summary(completion)))
    return 130 if interrupted else 0


def _show_stream(llm: LLM, ids: list[int], params: SamplingParams, show: Any) -> tuple[Completion | None, bool]:
    """Shows an answer as it comes; Ctrl-C ends it. What came so far, and whether it was interrupted."""
    stream = llm._stream(ids, params)
    last: Completion | None = None
    pieces: list[Chunk] = []
    try:
        for chunk in _read_prompt_bar(stream, len(ids)):
            pieces.append(chunk)
            show(chunk)
            last = chunk.completion or last
    except KeyboardInterrupt:
        stream.close()
        text = "".join(c.text for c in pieces)
        token_ids = [i for c in pieces for i in c.token_ids]
        return Completion(text, token_ids, None, "cancelled", len(ids)), True
    return last, False


def _read_prompt_bar(stream: Iterator[Chunk], num_prompt: int) -> Iterator[Chunk]:
    """The chunks with text; those before them move a bar."""
    with console.bar("reading the prompt", num_prompt >= 256) as progress:
        for chunk in stream:
            if chunk.token_ids or chunk.completion is not None:
                break
            progress(chunk.prompt_done / num_prompt)
        else:
            return
    yield chunk
    yield from (c for c in stream if c.token_ids or c.text or c.completion is not None)


def print_text(chunk: Chunk) -> None:
    sys.stdout.write(chunk.text)
    sys.stdout.flush()


def print_json(chunk: Chunk) -> None:
    for token, token_id in zip(chunk.token_texts, chunk.token_ids, strict=True):
        print(json.dumps({"token": token, "id": token_id}, ensure_ascii=False), flush=True)
    rest = chunk.text[sum(map(len, chunk.token_texts)) :]
    if rest:  # text that was held back, and turned out to be no stop string
        print(json.dumps({"token": rest, "id": None}, ensure_ascii=False), flush=True)


def print_json_summary(completion: Completion) -> None:
    values = {
        "text": completion.text,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "ttft_s": completion.ttft_s,
        "prefill_tok_s": completion.prefill_tok_s,
        "decode_tok_s": completion.decode_tok_s,
        "finish_reason": completion.finish_reason,
    }
    print(json.dumps(values, ensure_ascii=False), flush=True)


# Conversation


def chat(llm: LLM, options: RunOptions) -> int:
    if options.raw or llm.tokenizer.chat_template is None:
        why = "--raw continues a text" if options.raw else "the model has no chat template"
        raise InvalidArgument(f"{why}; give it one with -p, -f or a pipe")
    start = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(start)
    params = replace(options.params, max_tokens=options.params.max_tokens)
    console.say(console.dim(f"{llm.path.name}, {llm.info['device']}, context {llm.max_context}; /help for commands"))
    with _history():
        while (line := _read_line()) is not None:
            command = line.strip()
            if not command:
                continue
            if command in ("/exit", "/quit", "/bye"):
                break
            if command == "/clear":
                messages = list(start)
            elif command.startswith("/"):
                console.say(_HELP if command == "/help" else f"no command {printable(command)}\n{_HELP}")
            else:
                _turn(llm, messages, line, params, options)
    return 0


def _turn(llm: LLM, messages: list[dict[str, str]], line: str, params: SamplingParams, options: RunOptions) -> None:
    asked = [*messages, {"role": "user", "content": line}]
    try:
        completion, interrupted = _show_stream(llm, llm.tokenizer.encode_chat(asked), params, print_text)
    except InvalidArgument as error:  # the conversation has outgrown the context
        console.say(f"{error}; /clear begins a new conversation")
        return
    print(flush=True)
    if completion is None:
        return
    if not options.quiet:
        console.say(console.dim("[stopped]" if interrupted else console.summary(completion)))
    messages[:] = [*asked, {"role": "assistant", "content": completion.text}]


def _read_line() -> str | None:
    """A line of the user, None at the end."""
    lines: list[str] = []
    while True:
        prompt = "> " if not lines else "… "
        try:
            if sys.stdout.isatty():
                line = input(prompt)
            else:  # input() would write the prompt into the answer
                sys.stderr.write(prompt)
                sys.stderr.flush()
                read = sys.stdin.readline()
                if not read:
                    return None
                line = read.removesuffix("\n")
        except EOFError:
            console.say("")
            return None
        except KeyboardInterrupt:
            console.say("")
            lines.clear()
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing with earlier lines, where Python has readline. Only the user can read the file."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = models.cache_folder() / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(path)
