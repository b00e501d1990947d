"""Token ids equal those of llama.cpp; control tokens come only from where they may."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
import tokenizers
from conftest import GOLDEN, byte_level_metadata
from hypothesis import given
from hypothesis import strategies as st
from shoal.tokenizer import _Splitter
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from shoal import InvalidArgument, ModelFormatError, Tokenizer, Unsupported, _core

# Vocabularies of llama.cpp's tests that have vectors beside them, and what they say that is not said here.
VOCABULARIES = [
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
]


def golden(name: str) -> list:
    return json.loads((GOLDEN / "tokenizer" / f"{name}.json").read_text())


def read_gguf(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_gguf(_core.GgufFile(os.fspath(path)).metadata())
    assert tokenizer is not None
    return tokenizer


def check_golden(tokenizer: Tokenizer, name: str) -> None:
    entries = golden(name)
    assert len(entries) >= 500
    wrong = [text for text, ids, _ in entries if tokenizer.encode(text) != ids]
    wrong += [text for text, _, plain in entries if tokenizer.encode_plain(text) != plain]
    assert wrong == []


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return read_gguf(smollm2_path)


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Tokenizer:
    return read_gguf(gemma3_path)


def test_smollm2_equals_llama_cpp(smollm2: Tokenizer) -> None:
    check_golden(smollm2, "smollm2")


def test_smollm2_round_trip(smollm2: Tokenizer) -> None:
    for text, _, _ in golden("smollm2"):
        assert smollm2.decode(smollm2.encode(text)) == text
        assert smollm2.decode(smollm2.encode_plain(text)) == text


def test_smollm2_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.bos_id == 1 and smollm2.eos_id == 2
    assert smollm2.eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert smollm2.encode("hi", add_special_tokens=True) == smollm2.encode("hi")  # add_bos_token is false
    assert smollm2.decode([2, *smollm2.encode("hi")], skip_special_tokens=True) == "hi"


def test_gemma3_equals_llama_cpp(gemma3: Tokenizer) -> None:
    check_golden(gemma3, "gemma3")


def test_gemma3_special_tokens(gemma3: Tokenizer) -> None:
    assert gemma3.encode("hi", add_special_tokens=True) == [2, *gemma3.encode("hi")]
    assert gemma3.token_id("<end_of_turn>") in gemma3.eos_ids and 1 in gemma3.eos_ids
    assert gemma3.chat_template is None
    with pytest.raises(Unsupported, match="no chat template"):
        gemma3.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabulary_vectors(name: str) -> None:
    folder = os.environ.get("SHOAL_VOCAB_DIR")
    if not folder:
        pytest.skip("SHOAL_VOCAB_DIR does not name llama.cpp's folder of ggml-vocab-*.gguf files")
    path = Path(folder) / f"ggml-vocab-{name}.gguf"
    tokenizer = read_gguf(path)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().splitlines()
    assert len(lines) >= 40
    for text, line in zip(texts, lines, strict=False):  # some files lack the ids of the last, empty text
        assert tokenizer.encode(text) == [int(i) for i in line.split()], text


# By hand


def test_merges_in_order_of_rank(tiny: Tokenizer) -> None:
    assert tiny.encode("he") == [256]
    assert tiny.encode("hello") == [256, ord("l"), ord("l"), ord("o")]  # "l lo" needs "lo", which is no token
    assert tiny.encode("é") == [0xC3, 0xA9]


def test_control_tokens_are_found_only_by_encode(tiny: Tokenizer) -> None:
    assert tiny.encode("a<|im_end|>b") == [97, 260, 98]
    assert tiny.encode_plain("a<|im_end|>b") == [97, *b"<|im_end|>", 98]
    assert tiny.encode("a<think>b") == tiny.encode_plain("a<think>b") == [97, 261, 98]  # user-defined


@given(st.text())
def test_plain_text_never_becomes_control_tokens(text: str) -> None:
    tokenizer = _shared()
    for candidate in (text, f"<|im_end|>{text}<|im_start|>", f"<|im_{text}<|endoftext|>"):
        ids = tokenizer.encode_plain(candidate)
        assert not tokenizer.control_ids & set(ids)
        assert tokenizer.decode(ids) == candidate


_SHARED: list[Tokenizer] = []


def _shared() -> Tokenizer:
    if not _SHARED:
        tokenizer = Tokenizer.from_gguf(byte_level_metadata())
        assert tokenizer is not None
        _SHARED.append(tokenizer)
    return _SHARED[0]


def test_lone_surrogates_become_replacement_characters(tiny: Tokenizer) -> None:
    assert tiny.decode(tiny.encode("a\udc80b")) == "a�b"


def test_beginning_and_end() -> None:
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(**both))
    assert tokenizer is not None
    assert tokenizer.encode("a") == [97]
    assert tokenizer.encode("a", add_special_tokens=True) == [258, 97, 260]
    assert tokenizer.encode("<|endoftext|>a", add_special_tokens=True) == [258, 97, 260]  # no second beginning


def test_end_tokens_by_text() -> None:
    tokens = ["<|eot_id|>", "<|end|>", "<|return|>", "<|call|>", "</s>", "x"]
    base = byte_level_metadata()
    metadata = {
        **base,
        "tokenizer.ggml.tokens": [*base["tokenizer.ggml.tokens"], *tokens],
        "tokenizer.ggml.token_type": [*base["tokenizer.ggml.token_type"], 1, 3, 3, 3, 1, 3],
        "tokenizer.ggml.eot_token_id": 267,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer is not None
    # <|endoftext|>, <|im_end|>, <|eot_id|>, <|return|>, <|call|> and the named one; not <|end|>, not the HTML tag.
    assert tokenizer.eos_ids == {258, 260, 262, 264, 265, 267}
    assert tokenizer.encode_plain("<|eot_id|>") == list(b"<|eot_id|>")  # control whatever the file says


def test_no_tokenizer() -> None:
    assert Tokenizer.from_gguf({"general.architecture": "llama"}) is None
    assert Tokenizer.from_gguf({"tokenizer.ggml.model": "none"}) is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, Unsupported, 'kind "bert"'),
        ({"tokenizer.ggml.model": "t5"}, Unsupported, 'kind "t5"'),
        ({"tokenizer.ggml.model": "rwkv"}, Unsupported, 'kind "rwkv"'),
        ({"tokenizer.ggml.pre": "no\nsuch"}, Unsupported, r'pre-tokenizer "no\\nsuch" is not supported'),
        ({"tokenizer.ggml.tokens": None}, ModelFormatError, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": [1, 2]}, ModelFormatError, "no list of the right type"),
        ({"tokenizer.ggml.tokens": []}, ModelFormatError, "is empty"),
        ({"tokenizer.ggml.token_type": [1, 2]}, ModelFormatError, "has 2 entries, the vocabulary has 262"),
        ({"tokenizer.ggml.merges": None}, ModelFormatError, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.bos_token_id": 262}, ModelFormatError, "is 262, the vocabulary has 262 tokens"),
        ({"tokenizer.ggml.eos_token_id": -1}, ModelFormatError, "is -1"),
        ({"tokenizer.ggml.eot_token_id": "x"}, ModelFormatError, "is x"),
        ({"tokenizer.ggml.add_bos_token": 1}, ModelFormatError, "expected true or false"),
        ({"tokenizer.chat_template": "\n  {% for %}"}, ModelFormatError, "chat template, line 2, column"),
    ],
)
def test_bad_metadata(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(byte_level_metadata(**changes))


def test_negative_ids_are_refused_and_padding_is_empty(tiny: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="negative"):
        tiny.decode([-1])
    assert tiny.decode([97, 5000, 98]) == "ab"


# SentencePiece


def spm(pieces: dict[str, float], text: str) -> list[str]:
    names = ["<unk>", *pieces]
    vocabulary = _core.SpmVocabulary([n.encode() for n in names], [0.0, *pieces.values()])
    return [names[i] for i in vocabulary.encode(text.encode(), 0)]


def test_spm_merges_the_best_pair_first() -> None:
    assert spm({"a": -1, "b": -1, "c": -1, "ab": -3, "bc": -2}, "abc") == ["a", "bc"]
    assert spm({"a": -1, "b": -1, "c": -1, "ab": -2, "bc": -3}, "abc") == ["ab", "c"]


def test_spm_ties_go_to_the_left() -> None:
    assert spm({"a": 0, "aa": 0}, "aaa") == ["aa", "a"]
    # Two ways to the same piece: ranks, as the tokenizers library has them, would take the right one here.
    assert spm({"a": 0, "b": 0, "ab": 0, "ba": 0, "aba": 0}, "ababa") == ["aba", "ba"]


def test_spm_bytes_and_unknown() -> None:
    pieces = {"a": 0.0, "<0xC3>": 0.0, "<0xA9>": 0.0}
    assert spm(pieces, "aé") == ["a", "<0xC3>", "<0xA9>"]
    assert spm(pieces, "aü") == ["a", "<0xC3>", "<unk>"]
    assert spm(pieces, "") == []


@given(st.text(alphabet="ab▁é", max_size=40))
def test_spm_equals_brute_force(text: str) -> None:
    pieces = {"a": -1.0, "b": -2.0, "▁": -3.0, "ab": -4.0, "ba": -4.0, "▁a": -5.0, "aba": -2.5, "▁ab": -1.5, "bb": -6.0}
    symbols = list(text)
    while True:
        pairs = [(pieces[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in pieces]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    expected = [s for symbol in symbols for s in ([symbol] if symbol in pieces else ["<unk>"] * len(symbol.encode()))]
    assert spm(pieces, text) == expected


def test_spm_sizes_must_agree() -> None:
    with pytest.raises(InvalidArgument, match="3 scores for 1 tokens"):
        _core.SpmVocabulary([b"a"], [1.0, 2.0, 3.0])


def spm_tokenizer(**changes: object) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a", "b", "<x>"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1, 1, 1, 1, 4],
        **changes,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer is not None
    return tokenizer


def test_spm_space_prefix() -> None:
    tokenizer = spm_tokenizer()
    assert tokenizer.encode("a", add_special_tokens=True) == [1, 261]
    assert tokenizer.encode("ab") == [261, 262]
    assert tokenizer.encode("a<x>a") == [261, 263, 261]  # after a special token too
    assert tokenizer.decode([261, 262]) == "ab"
    assert tokenizer.decode([1, 261]) == "<s> a"
    bare = spm_tokenizer(**{"tokenizer.ggml.add_space_prefix": False})
    assert bare.encode("ab") == [260, 262]
    assert bare.decode([261]) == " a"


# Hugging Face folders


def write_folder(folder: Path, **config: object) -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(alphabet))}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    library.add_tokens([AddedToken("<tool>", special=False)])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<s>",
                "eos_token": {"content": "</s>"},
                "chat_template": "{{ messages[0].content }}",
                **config,
            }
        )
    )


def test_folder(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [257, 300]}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("Hello <s> wörld</s>", "a<tool>b", ""):
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a", add_special_tokens=True) == library.encode("a").ids
    assert not tokenizer.control_ids & set(tokenizer.encode_plain("Hello <s> wörld</s>"))
    assert 258 in tokenizer.encode_plain("a<tool>b")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (256, 257, {257, 300})
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


def test_folder_template_file_wins(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages | length }}")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>1"


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(Unsupported, match=r"has tokenizer\.model but no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_broken_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelFormatError, match="expected an object"):
        Tokenizer.from_folder(tmp_path)


@given(
    st.lists(st.text(alphabet="ab<|", min_size=1, max_size=4), min_size=1, max_size=6),
    st.text(alphabet="ab<|", max_size=30),
)
def test_splitter_takes_the_leftmost_longest(words: list[str], text: str) -> None:
    ids = {word: i for i, word in enumerate(dict.fromkeys(words))}
    expected: list[str | int] = []
    at = start = 0
    while at < len(text):
        found = max((w for w in ids if text.startswith(w, at)), key=len, default=None)
        if found is None:
            at += 1
            continue
        expected += [text[start:at]] if at > start else []
        expected.append(ids[found])
        at = start = at + len(found)
    expected += [text[start:]] if start < len(text) else []
    assert _Splitter(ids).split(text) == expected


def test_tokens_that_are_no_text_are_refused() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"][7] = "\udcff\udcfe"  # bytes that are no UTF-8, as the reader hands them on
    with pytest.raises(ModelFormatError, match="token 7 is no UTF-8"):
        Tokenizer.from_gguf(metadata)
