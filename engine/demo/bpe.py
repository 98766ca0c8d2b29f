"""The demo model's tokenizer: training, files for third-party tools, and a fast encoder.

Byte-level BPE with DeepSeek-V4's markers as added tokens. Digits stand alone (with the space before
them, if any), so that arithmetic sees them one by one.
"""

import json
import random
from pathlib import Path
from typing import Any

import regex  # type: ignore[import-untyped]
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from decant.engine.demo import chat
from decant.engine.demo.shape import CONFIG, VOCABULARY
from decant.engine.demo.words import (
    ADJECTIVES,
    CITIES,
    COLORS,
    FOODS,
    FOREIGN,
    NAMES,
    VERBS,
    WORDS,
)

DIGIT = r" ?\p{N}"
PATTERN = (
    r"[^\r\n\p{L}\p{P}\p{S}\p{N}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Encoder:
    """Text to ids with a cache per pre-token: the tokenizer's result, fast enough for a GPU."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        self.special = regex.compile("(" + "|".join(map(regex.escape, chat.SPECIAL)) + ")").split
        self.split = regex.compile(DIGIT + "|" + PATTERN).findall
        self.cache: dict[str, list[int]] = {
            s: [int(self.tokenizer.token_to_id(s) or 0)] for s in chat.SPECIAL
        }

    def __call__(self, text: str) -> list[int]:
        """ids of `text`; markers in it become their tokens."""
        ids: list[int] = []
        cache = self.cache
        for part in self.special(text):
            for piece in [part] if part in cache else self.split(part):
                got = cache.get(piece)
                if got is None:
                    got = self.tokenizer.encode(piece, add_special_tokens=False).ids
                    cache[piece] = got
                ids += got
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, markers included."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _texts(seed: int) -> list[str]:
    """What the merges are learnt from."""
    # corpus needs this module's Encoder, so it cannot be imported above.
    from decant.engine.demo import corpus, skills
    from decant.engine.demo.facts import Keys

    r = random.Random(seed)
    texts: list[str] = []
    for w in {*WORDS, *NAMES, *CITIES, *COLORS, *FOODS, *ADJECTIVES, *VERBS}:
        texts += [f" {w}"] * 1100 + [w] * 900
    for _ in range(9000):
        c = corpus.conversation(r, Keys(r), 1000)
        text = "".join(t for t, _, _ in chat.pieces(c))
        for s in chat.SPECIAL:
            text = text.replace(s, "\n")
        texts.append(text)
    texts += [chat.TOOLS_BLOCK, chat.FORMAT_BLOCK, skills.ABOUT, skills.REFUSAL] * 300
    texts += FOREIGN * 40
    return texts


def train(path: Path, vocabulary: int = VOCABULARY, seed: int = 0) -> None:
    """Learns the merges from generated text and writes tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(DIGIT), "isolated"),
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=chat.SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(sorted(_texts(seed)), trainer)
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] in chat.FLAGGED
    path.write_text(json.dumps(data, ensure_ascii=False, indent=0) + "\n")


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}<｜User｜>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<｜Assistant｜></think>{{ m['content'] }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>"
    "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
)
"""For third-party tools: plain chats, equal to our encoding. Tools need the server's encoder."""


def write_companions(folder: Path) -> None:
    """tokenizer_config.json and generation_config.json beside tokenizer.json."""
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": chat.BOS,
        "eos_token": chat.EOS,
        "pad_token": chat.EOS,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    generation: dict[str, Any] = {
        "_from_model_config": True,
        "bos_token_id": CONFIG["bos_token_id"],
        "eos_token_id": CONFIG["eos_token_id"],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    for name, fields in (
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(fields, ensure_ascii=False, indent=1) + "\n")
