"""Tokenizers that split texts as those of well-known families do, trained on a little of many languages."""

from __future__ import annotations

import functools
import json
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_VOCAB_SIZE: Final = 1500
LLAMA_3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN_2: Final = LLAMA_3.replace("{1,3}", "")
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_4O: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_3: Final = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ\u30a0-ヿ]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)
_TEXTS: Final = (
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 12:34 and 5,678.90 on 2026-11-22.",
    "HELLO World! I'LL THEY'RE we've I'm don't he'd  two   three    four\n\nlines\r\nand\ttabs",
    "def f(x, y=1):\n    return {'a': [x, y]}  # so it is\n",
    "El veloz murciélago hindú comía feliz cardillo y kiwi. Größe, Straße, naïve café, Ærø, İstanbul",
    "Съешь ещё этих мягких французских булок, да выпей чаю. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "敏捷的棕色狐狸跳过懒狗。いろはにほへと、ちりぬるを。키스의 고유조건은 입술끼리 만나야 하고",
    "IT'Sa WE'LLb you'veX THEY'REs don'tx I'Ma HE'Dx it's we'll 1234567 ٣٤٥٦ ٣٤ ९८७६ \uff19\uff18\uff17\uff16",
    "½ ² ﬁn ﬂy \u212b \u212a ½ ² ﬁn ﬂy \u212b \u212a",
    "½ ² ﬁn ﬂy \u212b \u212a ½ ² ﬁn ﬂy \u212b \u212a",
    "a!\nb;\nc)\n\nd};\n.../\nhttps://x.y/z//\n--/\n---\n***\n\u3000\u3000\u3000一\u3000\u3000二\xa0\xa0\xa0x\u2003\u2003\u2003y",
    "नमस्ते दुनिया क्षत्रिय ไทยไม่มีวรรค שלום עולם مرحبا بالعالم 👩‍👩‍👧‍👦🇨🇭🙂👍🏽",
)
BYTE_LEVEL: Final = ("gpt2", "llama3", "qwen2", "gpt4o", "deepseek3")
SENTENCEPIECE: Final = ("llama2", "gemma")
KINDS: Final = (*BYTE_LEVEL, *SENTENCEPIECE)
_BEGIN: Final = "<|begin|>"
_SPECIAL: Final = ["<unk>", _BEGIN, "<|end|>"]


@functools.cache
def tokenizer_of_kind(kind: str) -> Tokenizer:
    """kind: of KINDS"""
    tokenizer = _sentencepiece(kind) if kind in SENTENCEPIECE else _byte_level(kind)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<think>", lstrip=True, rstrip=True)])
    if kind != "gpt2":
        begin = tokenizer.token_to_id(_BEGIN)
        tokenizer.post_processor = processors.TemplateProcessing(f"{_BEGIN} $A", special_tokens=[(_BEGIN, begin)])
    return tokenizer


def _byte_level(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    patterns = {"llama3": (LLAMA_3,), "qwen2": (QWEN_2,), "gpt4o": (GPT_4O,), "deepseek3": DEEPSEEK_3}.get(kind, ())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level]) if splits else byte_level
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(tokenizer, trainers.BpeTrainer(vocab_size=_VOCAB_SIZE, special_tokens=_SPECIAL, initial_alphabet=alphabet))
    return tokenizer


def _sentencepiece(kind: str) -> Tokenizer:
    """Make a BPE as transformers makes them of SentencePiece's: what is no token is bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=_VOCAB_SIZE, special_tokens=[*_SPECIAL, *bytes_], limit_alphabet=150)
    _train(tokenizer, trainer)
    # As special tokens they would be found in texts.
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["content"] in _SPECIAL]
    description["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(description))
    spaces = normalizers.Replace(" ", "▁")
    if kind == "llama2":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    else:
        tokenizer.normalizer = spaces
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _train(tokenizer: Tokenizer, trainer: trainers.BpeTrainer) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator(_TEXTS * 3, trainer)
