"""Makes tests/golden/tokenizer/*.json: token ids of awkward strings, by llama.cpp.

    python make_tokenizer_golden.py smollm2 SmolLM2-135M-Instruct.Q4_1.gguf
    python make_tokenizer_golden.py gemma3 gemma-3-270m-q4_k_m.gguf

Needs the package llama-cpp-python (0.3.36 was used). Each entry is [text, ids with control tokens found, ids without].
"""

# fmt: off
from __future__ import annotations

import json
import random
import sys
from pathlib import Path

FIXED = [
    "", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\t\n", "\r\n", "\r", "\r\n\r\n", " \n", "\n ", " \n \n  \n", "\x0b\x0c",
    "\u00a0", "\u3000", "\u2028", "\u2009a\u200ab", "a\u200bb", "\ufeffa", "\x00", "a\x00b", "\x01\x02\x7f\x80\x9f",
    "Hello", " Hello", "  Hello", "   Hello", "Hello ", "Hello  ", "Hello\n", "\nHello", "Hello world", "Hello, world!",
    " Hello World!", "hello\tworld", "hello\t\tworld  x   y    z", "HELLO hello HeLLo", "camelCaseAndPascalCase snake_case",
    "I'm you're we've he'll she'd it's don't", "I'M YOU'RE WE'VE", "'s", " 's", "''s", "'S", "o'clock rock'n'roll", "’s it’s",
    "' era", "'", "''", "'''", "!!!!!!", "...", "....", "?!?!", "---", "-----", "==========", "((()))", "[]{}<>", "!@#$%^&*()",
    "3", "33", "333", "3333", "33333", "333333", "3333333", "1234567890", "1,234,567.89", "1 2 3", "12a34b", "a1b2c3", "0x1F",
    "3.14159", "-5", "+5", "10%", "$100", "1e-5", "½", "4 ½ months", "²³", "ⅷ Ⅻ", "①②", "٣٤٥", "१२३", "１２３", "𝟙𝟚",
    "Äpfel", "ñandú", "naïve café", "e\u0301", "cafe\u0301", "Å\u030a", "a\u0300\u0301\u0302b", "ﬁ ﬂ", "ß", "İstanbul ı", "ſ 'ſ",
    "нещо на Български", "Привет, мир!", "Γειά σου Κόσμε", "שלום עולם", "مرحبا بالعالم", "سلام دنیا", "नमस्ते दुनिया", "ক খ গ",
    "สวัสดีชาวโลก", "កាន់តែពិសេសអាចខលចេញ", "မင်္ဂလာပါ", "გამარჯობა", "Բարեւ", "ሰላም", "안녕하세요 세계", "한", "こんにちは世界", "カタカナ",
    "ｶﾀｶﾅ", "你好，世界！", "我想在apple工作1314151天～", "繁體中文", "𠀀𪚥", "Cửa Việt", "Tiếng Việt", "ᏣᎳᎩ", "ꦗꦮ", "𓀀𓁐", "𐍈𐌰",
    "🚀", "🚀🚀", "😀 😁", "🚀 (normal) 😶‍🌫️ (multiple emojis concatenated) ✅", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "👍🏽", "☺️", "❤", "♥️", "©®™",
    "→ ← ↑ ↓", "∑∫∂√∞≠≤≥", "ℵ ℏ ℝ", "½ ¼ ¾", "°C µm Ω", "€£¥₹", "“quoted” ‘single’ «guillemets»", "– — … •", "a—b", "·",
    "\ue000", "\uf8ff x", "\U000f0000", "\uffff", "\ufffd", "\U0010ffff", "\u0378", "\U0001fbff", "\u202etxt\u202c", "\u00ad",
    "def f(x):\n    return x + 1\n", "if (a && b) { c++; }", "for(int i=0;i<10;++i){\n\tx[i] = y;\n}", "#include <stdio.h>",
    "<html><body class=\"x\">Hi</body></html>", "https://example.com/a?b=c&d=%20e#f", "user@example.com", "C:\\Users\\x", "/usr/bin",
    "SELECT * FROM t WHERE a='b';", "{\"a\": [1, 2, {\"b\": null}]}", "x = {'a': 1}", "a\\nb", "`code` **bold** _it_", "# Title\n\n- a\n- b",
    "        eight", "\t\ttabs", "a  b", "a   b", "a    b", "end   ", " \t \t ", "\n\n  \n\n", "x\n\n\ny", "\n" * 10, " " * 33, "\t" * 9,
    "\n" * 40, "a" * 100, "ab" * 60, "é" * 30, "漢" * 20, "🦙" * 8, "=" * 65, "-" * 33, "Hello" * 12, " the" * 20, "aaaa bbbb " * 6,
    "▁", "▁▁", "a▁b", " ▁ ", "▁Hello", "Ġ", "ĠHello", "Ċ", "ÄĠ", "<0x0A>", "<0x41>", "<0xZZ>", "<unk>", "<s>", "</s>", "<pad>",
    "<bos>", "<eos>", "<bos>Hello", "Hello<eos>", "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>",
    "<unused0>", "<unused99>", "[multimodal]", "<mask>", "<2mass>", "[@BOS@]", "<start_of_image>", "<end_of_image>",
    "<|im_start|>", "<|im_end|>", "<|im_start|>user\nHi<|im_end|>\n", "<|endoftext|>", "a<|endoftext|>b", " <|im_end|> ",
    "<|im_end", "|im_end|>", "<|im_end|>>", "<<|im_end|>", "<|im_end|><|im_end|>", "<|im_end|>\n", "<|im_END|>", "<repo_name>x",
    "<reponame>", "<file_sep>", "<jupyter_code>", "<empty_output>", "<issue_start>1<issue_comment>", "<|eot_id|>", "<think>x</think>",
]

BLOCKS = [
    (0x20, 0x7E), (0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF),
    (0x900, 0x97F), (0xE00, 0xE7F), (0x1E00, 0x1EFF), (0x2000, 0x206F), (0x20A0, 0x20BF), (0x2100, 0x21FF), (0x2200, 0x22FF),
    (0x2500, 0x257F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFF00, 0xFFEF), (0x1F300, 0x1F64F), (0x1D400, 0x1D7FF),
]
WORDS = "the of and Hello world don't I'm 3 42 1000 x_y foo() --> :: ;) naïve 漢字 мир 🚀 \n \n\n \t   <|im_end|> <eos> é ½ ... !!".split(" ")


def strings() -> list[str]:
    chooser = random.Random(20240917)
    out = list(FIXED)
    while len(out) < len(FIXED) + 180:  # of one block each, with spaces between
        low, high = chooser.choice(BLOCKS)
        out.append("".join(" " if chooser.random() < 0.15 else chr(chooser.randint(low, high)) for _ in range(chooser.randint(1, 24))))
    while len(out) < len(FIXED) + 280:  # of several
        out.append("".join(chr(chooser.randint(*chooser.choice(BLOCKS))) for _ in range(chooser.randint(1, 20))))
    while len(out) < len(FIXED) + 380:  # words and pieces of words, glued at random
        out.append("".join(chooser.choice(WORDS) + chooser.choice(["", " ", "  ", "\n"]) for _ in range(chooser.randint(1, 14))))
    return list(dict.fromkeys(out))


def main() -> None:
    name, model = sys.argv[1:]
    from llama_cpp import Llama

    llama = Llama(model, vocab_only=True, verbose=False)
    entries = []
    for text in strings():
        data = text.encode()
        entries.append([text, *(llama.tokenize(data, add_bos=False, special=special) for special in (True, False))])
    path = Path(__file__).parent / "tokenizer" / f"{name}.json"
    path.write_text("[\n" + ",\n".join(json.dumps(e, separators=(",", ":")) for e in entries) + "\n]\n")
    print(f"{path}: {len(entries)} strings")


if __name__ == "__main__":
    main()
