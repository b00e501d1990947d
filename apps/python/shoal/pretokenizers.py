"""Pre-tokenizers of byte-level BPE by the names that GGUF files use (`tokenizer.ggml.pre`).

A pre-tokenizer is a list of regular expressions. Each splits every piece left by those before it into its matches and
what lies between; the words that remain are never merged across. The expressions are those of the models' own
tokenizer.json files; where only llama.cpp has one, it is that. Regular expressions are Oniguruma's.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = _WORDS % r"\p{N}{1,3}"
_QWEN2 = _WORDS % r"\p{N}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?%s*%s+%s|[^\r\n\p{L}\p{N}]?%s+%s*%s|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES


def _ranges(text: str) -> str:
    """ "41-5A B5" as the inside of a character class."""
    return "".join("-".join(f"\\x{{{code}}}" for code in part.split("-")) for part in text.split())


def _cased(contraction: str, numbers: str) -> str:
    return _CASED % (_UPPER, _LOWER, contraction, _UPPER, _LOWER, contraction, numbers)


_GPT4O = _cased(_CONTRACTION + "?", r"\p{N}{1,3}")
_DIGITS_THEN_GPT2 = [r"\p{N}", _GPT2]
_CJK = f"[{_ranges('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_ASIAN = f"[{_ranges('4E00-9FA5 800-4E00 AC00-D7FF')}]+"
_DEEPSEEK3 = [
    r"\p{N}{1,3}",
    _CJK,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES,
]
# Letters of alphabets with case, as the first DeepSeek models list them. In hexadecimal, since editors normalise some.
_CASED_LETTERS = _ranges(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943 "
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class PreTokenizer:
    expressions: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token stays one, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise


def _make(*expressions: str, **flags: bool) -> PreTokenizer:
    return PreTokenizer(tuple(expressions), **flags)


_DEFAULT = _make(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_KINDS: list[tuple[str, PreTokenizer]] = [
    ("default", _DEFAULT),
    ("gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4", _make(_GPT2)),
    ("mpt olmo jais trillion granite-docling", _make(_GPT2)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _make(_LLAMA3, ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", _make(_LLAMA3)),
    ("glm4 glm5", _make(_LLAMA3, ignore_merges=True)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _make(_QWEN2)),
    (
        "qwen35",
        _make(
            _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,
        ),
    ),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", _make(*_DIGITS_THEN_GPT2)),
    (
        "deepseek-llm",
        _make(
            r"[\r\n]",
            r"\s?[" + _CASED_LETTERS + "]+",
            r"\s?[" + _ranges("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002") + "]+",
            r"\s+$",
            _ASIAN,
            r"\p{N}+",
        ),
    ),
    ("deepseek-coder", _make(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _make(*_DEEPSEEK3)),
    ("falcon", _make(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("tekken", _make(_cased("", r"\p{N}"), ignore_merges=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _make(_GPT4O)),
    (
        "seed-coder",
        _make(
            _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        _make(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
    ("bloom poro-chat gpt3-finnish", _make(_BLOOM)),
    ("viking", _make(_BLOOM, r"\p{N}")),
]
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: kind for names, kind in _KINDS for name in names.split()}
