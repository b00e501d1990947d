"""Text to token ids and back, from the tokenizer of a GGUF file or of a Hugging Face folder.

Two ways to read a text: `encode` finds control tokens in it ("<|im_end|>"), as transformers does; `encode_plain` never
does, so that nothing a user types can end a turn or begin another. Tokens that a model's authors added without giving
them control ("user-defined") are found in both.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from shoal.chat import ChatTemplate, render_for_ids
from shoal.errors import InvalidArgument, ModelFormatError, Unsupported, printable
from shoal.pretokenizers import PRE_TOKENIZERS, PreTokenizer

# Texts by which GGUF files that name no end-of-turn token still mark one. Such a token is a control token even where
# the file calls it something else.
END_TEXTS = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ "
    "<｜end▁of▁sentence｜>".split()
)

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type
_SPACE = "▁"


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, the others for U+0100 and up."""
    printable_bytes = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable_bytes}
    others = (b for b in range(256) if b not in set(printable_bytes))
    table.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[c] for c in token])
    except KeyError:  # not in the alphabet: stands for itself
        return token.encode("utf-8", "surrogateescape")


def _spm_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode("utf-8", "surrogateescape")


def _sound(text: str) -> str:
    """The text without lone surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _trie_pattern(words: Iterable[str]) -> str:
    """A regular expression that matches the longest of `words`; shared beginnings are written once, since Python tries
    alternatives one by one and a vocabulary may have thousands of special tokens."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}

    def write(node: dict[str, Any]) -> str:
        parts = []
        # A chain without branches is spelled out in a loop, so that the depth of recursion is that of branching.
        for character in node:
            if character == "":
                continue
            text, child = re.escape(character), node[character]
            while len(child) == 1 and "" not in child:
                ((following, child),) = child.items()
                text += re.escape(following)
            rest = write(child)
            parts.append(text + rest)
        if not parts:
            return ""
        body = parts[0] if len(parts) == 1 and "" not in node else f"(?:{'|'.join(parts)})"
        return body + "?" if "" in node else body

    return write(trie)


class _Splitter:
    """Cuts a text at given tokens: leftmost first, then longest. Yields pieces of text and token ids."""

    def __init__(self, ids: Mapping[str, int], lstrip: Iterable[int] = (), rstrip: Iterable[int] = ()) -> None:
        self._ids = {text: i for text, i in ids.items() if text}
        self.texts = list(self._ids)
        self._pattern = re.compile(_trie_pattern(self._ids)) if self._ids else None
        self._lstrip = frozenset(lstrip)
        self._rstrip = frozenset(rstrip)

    def split(self, text: str) -> list[str | int]:
        if self._pattern is None:
            return [text] if text else []
        out: list[str | int] = []
        at = 0
        for match in self._pattern.finditer(text):
            token_id = self._ids[match.group()]
            before = text[at : match.start()]
            if token_id in self._lstrip:
                before = before.rstrip()
            if before:
                out.append(before)
            out.append(token_id)
            at = match.end()
            if token_id in self._rstrip:
                at += len(text[at:]) - len(text[at:].lstrip())
        if at < len(text):
            out.append(text[at:])
        return out

    def find(self, text: str) -> list[tuple[int, int]]:
        """Position and id of each token found."""
        if self._pattern is None:
            return []
        return [(match.start(), self._ids[match.group()]) for match in self._pattern.finditer(text)]


class _LibraryBackend:
    """A tokenizer of the `tokenizers` library. `control` are its tokens that only `encode` may find."""

    def __init__(self, library: tokenizers.Tokenizer, kind: str) -> None:
        self._library = library
        self._kind = kind
        # Whether control tokens are found is a state of the library's object.
        self._lock = threading.Lock()
        self._added = {i: token.content for i, token in library.get_added_tokens_decoder().items()}
        added = library.get_added_tokens_decoder().items()
        self.control = {token.content: i for i, token in added if token.special}
        self.control_splitter = _Splitter(
            self.control,
            (i for i, token in added if token.special and token.lstrip),
            (i for i, token in added if token.special and token.rstrip),
        )
        self.size = library.get_vocab_size(with_added_tokens=True)
        self.strips_space = False

    def encode(self, text: str, parse_control: bool) -> list[int]:
        with self._lock:
            self._library.encode_special_tokens = not parse_control
            return self._library.encode(text, add_special_tokens=False).ids

    def affixes(self) -> tuple[list[int], list[int]]:
        """What the library's own post-processor puts around a text."""
        with self._lock:
            inside = self._library.encode("a", add_special_tokens=False).ids
            around = self._library.encode("a", add_special_tokens=True).ids
        for start in range(len(around) - len(inside) + 1):
            if around[start : start + len(inside)] == inside:
                return around[:start], around[start + len(inside) :]
        return [], []

    def id_of(self, text: str) -> int | None:
        return self._library.token_to_id(text)

    def text_of(self, token_id: int) -> str | None:
        return self._library.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode("utf-8", "surrogateescape")
        text = self._library.id_to_token(token_id)
        if text is None:
            return b""
        return _byte_level_bytes(text) if self._kind == "byte_level" else _spm_bytes(text)


class _SpmBackend:
    """SentencePiece BPE by scores (GGUF model "llama"), merged by the library's own code."""

    def __init__(
        self,
        tokens: list[str],
        scores: list[float],
        control: dict[str, int],
        user_defined: dict[str, int],
        byte_ids: frozenset[int],
        space_prefix: bool,
        unknown_id: int | None,
        rstrip: Iterable[int],
    ) -> None:
        from shoal import _core

        self._tokens = tokens
        self._ids = {text: i for i, text in enumerate(tokens)}
        self._raw = frozenset(control.values()) | frozenset(user_defined.values())
        self._byte_ids = byte_ids
        self._vocabulary = _core.SpmVocabulary([t.encode("utf-8", "surrogateescape") for t in tokens], scores)
        self._space_prefix = space_prefix
        self._unknown_id = -1 if unknown_id is None else unknown_id
        rstrip = frozenset(rstrip)
        self.control = control
        self.control_splitter = _Splitter(control, (), rstrip)
        self._all_splitter = _Splitter({**control, **user_defined}, (), rstrip)
        self._user_splitter = _Splitter(user_defined)
        self.size = len(tokens)
        self.strips_space = space_prefix

    def encode(self, text: str, parse_control: bool) -> list[int]:
        splitter = self._all_splitter if parse_control else self._user_splitter
        out: list[int] = []
        after_special = True  # a word after a special token or at the beginning has a space before it
        for piece in splitter.split(text):
            if isinstance(piece, int):
                out.append(piece)
                after_special = True
                continue
            if self._space_prefix and after_special:
                piece = " " + piece
            out += self._vocabulary.encode(piece.replace(" ", _SPACE).encode(), self._unknown_id)
            after_special = False
        return out

    def affixes(self) -> tuple[list[int], list[int]]:
        return [], []

    def id_of(self, text: str) -> int | None:
        return self._ids.get(text)

    def text_of(self, token_id: int) -> str | None:
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else None

    def token_bytes(self, token_id: int) -> bytes:
        if token_id >= len(self._tokens):
            return b""
        text = self._tokens[token_id]
        if token_id in self._raw:
            return text.encode("utf-8", "surrogateescape")
        return _spm_bytes(text) if token_id in self._byte_ids else text.replace(_SPACE, " ").encode()


class Tokenizer:
    """Made by `from_gguf`, `from_folder`; a model's own is `LLM.tokenizer`."""

    def __init__(
        self,
        backend: _LibraryBackend | _SpmBackend,
        *,
        bos_id: int | None,
        eos_id: int | None,
        eos_ids: Iterable[int],
        prefix: Sequence[int],
        suffix: Sequence[int],
        templates: Mapping[str, str],
    ) -> None:
        self._backend = backend
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.eos_ids = frozenset(eos_ids)  # any of these ends an answer
        self._prefix = list(prefix)
        self._suffix = list(suffix)
        self.control_ids = frozenset(backend.control.values())
        self._bytes: dict[int, bytes] = {}
        self._templates = {name: ChatTemplate(text, self._special_texts()) for name, text in templates.items()}

    # Making

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer | None:
        """From the metadata of a GGUF file; None if it has no tokenizer."""
        model = metadata.get("tokenizer.ggml.model")
        if model is None or model in ("no_vocab", "none"):
            return None
        return _from_gguf(cls, model, metadata)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """From tokenizer.json and its companions in a Hugging Face folder; None if there is no tokenizer."""
        return _from_folder(cls, Path(folder))

    # Text to ids

    @property
    def vocab_size(self) -> int:
        return self._backend.size

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. Control tokens in it are found. `add_special_tokens`: with what the model expects around
        a text (usually the beginning-of-sequence token)."""
        return self._around(self._backend.encode(_sound(text), True), add_special_tokens)

    def encode_plain(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The same for text that must stay text: "<|im_end|>" becomes the tokens of these ten characters."""
        return self._around(self._backend.encode(_sound(text), False), add_special_tokens)

    def _around(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        if not add_special_tokens:
            return ids
        # A rendered chat template has its own beginning; a second one would only confuse the model.
        has_prefix = bool(self._prefix) and ids[: len(self._prefix)] == self._prefix
        return ([] if has_prefix else self._prefix) + ids + self._suffix

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled exactly so in the vocabulary."""
        return self._backend.id_of(text)

    # Ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for: UTF-8, or a part of a character. Empty for an id that has no token (padding)."""
        found = self._bytes.get(token_id)
        if found is None:
            if token_id < 0:
                raise InvalidArgument(f"token id {token_id} is negative")
            found = self._bytes[token_id] = self._backend.token_bytes(token_id)
        return found

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        kept = [i for i in ids if not (skip_special_tokens and i in self.control_ids)]
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        if self._backend.strips_space and kept and kept[0] not in self.control_ids and text.startswith(" "):
            text = text[1:]  # the space that encoding put before the first word
        return text

    # Chat

    @property
    def chat_template(self) -> str | None:
        """The template used by default, None if the model has none."""
        template = self._default_template()
        return None if template is None else template.source

    def _default_template(self) -> ChatTemplate | None:
        return self._templates.get("default") or next(iter(self._templates.values()), None)

    def _special_texts(self) -> dict[str, str]:
        def text_of(token_id: int | None) -> str:
            return "" if token_id is None else (self._backend.text_of(token_id) or "")

        return {"bos_token": text_of(self.bos_id), "eos_token": text_of(self.eos_id)}

    def _find_template(self, wanted: str | None, tools: Any) -> ChatTemplate:
        if wanted is not None:
            return self._templates.get(wanted) or ChatTemplate(wanted, self._special_texts())
        template = self._templates.get("tool_use") if tools else None
        template = template or self._default_template()
        if template is None:
            raise Unsupported("the model has no chat template; pass chat_template=, or continue plain text instead")
        return template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the model's text. `chat_template`: the name of one of the model's templates, or the text
        of one. Further keywords are variables of the template."""
        template = self._find_template(chat_template, tools)
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, documents=documents, **variables
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """Ids of the conversation. Control tokens come from the template alone, never from what the messages say."""
        template = self._find_template(chat_template, tools)
        variables.update(add_generation_prompt=add_generation_prompt, tools=tools, documents=documents)
        splitter = self._backend.control_splitter
        text, marker = render_for_ids(template, messages, variables, splitter)
        if not marker:
            return self.encode(text)
        out: list[int] = []
        for piece in splitter.split(text):
            out += [piece] if isinstance(piece, int) else self.encode_plain(piece.replace(marker, ""))
        return out


# GGUF


def _classify(tokens: list[str], types: list[int]) -> tuple[dict[str, int], dict[str, int]]:
    """Control and user-defined tokens by text."""
    control: dict[str, int] = {}
    user_defined: dict[str, int] = {}
    for i, kind in enumerate(types):
        if kind in (_UNKNOWN, _CONTROL):
            control[tokens[i]] = i
        elif kind == _USER_DEFINED:
            user_defined[tokens[i]] = i
    for i, text in ((i, t) for i, t in enumerate(tokens) if t in END_TEXTS):
        # As an ordinary token "</s>" is an HTML tag.
        if text != "</s>" or text in user_defined:
            user_defined.pop(text, None)
            control[text] = i
    return control, user_defined


def _end_ids(named: Iterable[int | None], control: Mapping[str, int]) -> set[int]:
    ids = {i for i in named if i is not None}
    ends = {text: i for text, i in control.items() if text in END_TEXTS}
    # Harmony-style models end a message with "<|end|>" and an answer with "<|return|>" or a call.
    if "<|end|>" in ends and "<|call|>" in ends and "<|return|>" in ends:
        ids.discard(ends.pop("<|end|>"))
    if "<|end|>" in ends and "<|calls|>" in ends and "<|flush|>" in ends:
        ids.discard(ends.pop("<|end|>"))
    return ids | set(ends.values())


def _list_of(metadata: Mapping[str, Any], key: str, kind: type | tuple[type, ...], length: int | None = None) -> list:
    values = metadata.get(key)
    if not isinstance(values, list) or (values and not isinstance(values[0], kind)):
        raise ModelFormatError(f"{key} is missing or no list of the right type")
    if length is not None and len(values) != length:
        raise ModelFormatError(f"{key} has {len(values)} entries, the vocabulary has {length}")
    return values


def _token_id(metadata: Mapping[str, Any], name: str, size: int, default: int | None = None) -> int | None:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise ModelFormatError(f"{key} is {printable(value)}, the vocabulary has {size} tokens")
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if not isinstance(value, bool):
        raise ModelFormatError(f"{key} is {printable(value)}, expected true or false")
    return value


def _merges(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    out = []
    for line in _list_of(metadata, "tokenizer.ggml.merges", str):
        at = line.find(" ", 1)
        left, right = line[:at], line[at + 1 :]
        # A merge into or from what is no token can never show.
        if at > 0 and left in vocabulary and right in vocabulary and left + right in vocabulary:
            out.append((left, right))
    return out


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    for text, token_id in vocabulary.items():
        if not _is_utf8(text):
            raise ModelFormatError(f"tokenizer.ggml.tokens: token {token_id} is no UTF-8 text")
    return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **options))


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _byte_level(metadata: Mapping[str, Any], vocabulary: dict[str, int], kind: PreTokenizer) -> tokenizers.Tokenizer:
    library = _bpe(vocabulary, _merges(metadata, vocabulary), ignore_merges=kind.ignore_merges)
    splits = [pre_tokenizers.Split(Regex(e), "isolated") for e in kind.expressions]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return library


def _gemma4(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    """SentencePiece's alphabet with ranked merges; only runs of newlines are split off."""
    library = _bpe(vocabulary, _merges(metadata, vocabulary), byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    library.normalizer = normalizers.Replace(" ", _SPACE)
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    return library


def _add_tokens(library: tokenizers.Tokenizer, control: Iterable[str], user_defined: Iterable[str]) -> None:
    library.add_tokens([AddedToken(t, normalized=False, special=False) for t in user_defined if t])
    library.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control if t])


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    out = {}
    for key, value in metadata.items():
        if key == prefix and isinstance(value, str):
            out["default"] = value
        elif key.startswith(prefix + ".") and isinstance(value, str):
            out[key[len(prefix) + 1 :]] = value
    return out


def _from_gguf(cls: type[Tokenizer], model: str, metadata: Mapping[str, Any]) -> Tokenizer:
    if model not in ("gpt2", "llama", "gemma4"):
        raise Unsupported(f'tokenizer kind "{printable(model)}" is not supported; known are gpt2, llama and gemma4')
    tokens = _list_of(metadata, "tokenizer.ggml.tokens", str)
    size = len(tokens)
    if size == 0:
        raise ModelFormatError("tokenizer.ggml.tokens is empty")
    types = metadata.get("tokenizer.ggml.token_type", [])
    if types:
        _list_of(metadata, "tokenizer.ggml.token_type", int, size)
    control, user_defined = _classify(tokens, types)
    is_spm = model == "llama"
    bos_id = _token_id(metadata, "bos_token_id", size, 1 if is_spm and size > 2 else None)
    eos_id = _token_id(metadata, "eos_token_id", size, 2 if is_spm and size > 2 else None)
    add_bos = is_spm or model == "gemma4"

    backend: _LibraryBackend | _SpmBackend
    if is_spm:
        backend = _spm_backend(metadata, tokens, types, control, user_defined)
    else:
        vocabulary = {text: i for i, text in enumerate(tokens)}
        if model == "gemma4":
            library = _gemma4(metadata, vocabulary)
        else:
            name = metadata.get("tokenizer.ggml.pre", "default")
            kind = PRE_TOKENIZERS.get(name)
            if kind is None:
                raise Unsupported(f'pre-tokenizer "{printable(name)}" is not supported')
            library = _byte_level(metadata, vocabulary, kind)
            add_bos = kind.add_bos
        _add_tokens(library, control, user_defined)
        backend = _LibraryBackend(library, "spm" if model == "gemma4" else "byte_level")

    add_bos = _flag(metadata, "add_bos_token", add_bos)
    add_eos = _flag(metadata, "add_eos_token", False)
    named = [eos_id, *(_token_id(metadata, f"{name}_token_id", size) for name in ("eot", "eom"))]
    return cls(
        backend,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=_end_ids(named, control),
        prefix=[bos_id] if add_bos and bos_id is not None else [],
        suffix=[eos_id] if add_eos and eos_id is not None else [],
        templates=_gguf_templates(metadata),
    )


def _spm_backend(
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: list[int],
    control: dict[str, int],
    user_defined: dict[str, int],
) -> _SpmBackend:
    scores: list[float] = []
    if "tokenizer.ggml.scores" in metadata:
        scores = _list_of(metadata, "tokenizer.ggml.scores", (float, int), len(tokens))
    rstrip: set[int] = set()
    name = str(metadata.get("general.name", "")).lower()
    if (
        "phi-3" in name or "phi3" in name
    ):  # its tokenizer drops white space after most control tokens; GGUF cannot say so
        rstrip = {i for text, i in control.items() if text not in ("<unk>", "<s>", "<|endoftext|>")}
    return _SpmBackend(
        tokens,
        scores,
        control,
        user_defined,
        byte_ids=frozenset(i for i, kind in enumerate(types) if kind == _BYTE),
        space_prefix=_flag(metadata, "add_space_prefix", True),
        unknown_id=_token_id(metadata, "unknown_token_id", len(tokens), 0),
        rstrip=rstrip,
    )


# Hugging Face folders


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelFormatError(f"{path.name}: {error}") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path.name}: expected an object")
    return value


def _decoder_kind(library: tokenizers.Tokenizer) -> str:
    """How the library's tokens spell bytes."""
    names: list[str] = []

    def collect(decoder: dict[str, Any]) -> None:
        names.append(decoder.get("type", ""))
        for inner in decoder.get("decoders", []):
            collect(inner)

    if library.decoder is not None:
        collect(json.loads(library.decoder.__getstate__()))
    if "ByteLevel" in names:
        return "byte_level"
    if "ByteFallback" in names or "Metaspace" in names:
        return "spm_stripped" if "Strip" in names or "Metaspace" in names else "spm"
    raise Unsupported(f"tokenizer.json: decoder {printable(', '.join(names) or 'none')} is not supported")


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        templates["default"] = declared
    elif isinstance(declared, list):
        templates = {
            e["name"]: e["template"] for e in declared if isinstance(e, dict) and {"name", "template"} <= e.keys()
        }
    stored = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(stored, str):
        templates["default"] = stored
    try:
        jinja = folder / "chat_template.jinja"
        if jinja.is_file():
            templates["default"] = jinja.read_text("utf-8")
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[extra.stem] = extra.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"chat template: {error}") from None
    return templates


def _from_folder(cls: type[Tokenizer], folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        for other in ("tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json"):
            if (folder / other).is_file():
                raise Unsupported(f"the folder has {other} but no tokenizer.json, the only format that is read")
        return None
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelFormatError(f"tokenizer.json: {error}") from None
    library.no_truncation()
    library.no_padding()
    kind = _decoder_kind(library)
    backend = _LibraryBackend(library, kind.removesuffix("_stripped"))
    backend.strips_space = kind.endswith("_stripped")

    config = _read_json(folder / "tokenizer_config.json")
    special = _read_json(folder / "special_tokens_map.json")

    def special_id(name: str) -> int | None:
        text = _token_text(config.get(name)) or _token_text(special.get(name))
        return None if text is None else backend.id_of(text)

    bos_id, eos_id = special_id("bos_token"), special_id("eos_token")
    ends: list[int | None] = [eos_id]
    for name in ("generation_config.json", "config.json"):
        declared = _read_json(folder / name).get("eos_token_id")
        declared_ids = declared if isinstance(declared, list) else [declared]
        ends += [i for i in declared_ids if isinstance(i, int) and not isinstance(i, bool)]
    prefix, suffix = backend.affixes()
    if config.get("add_bos_token") is True and bos_id is not None and bos_id not in prefix:
        prefix = [bos_id, *prefix]
    return cls(
        backend,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=_end_ids(ends, backend.control),
        prefix=prefix,
        suffix=suffix,
        templates=_folder_templates(folder, config),
    )
