"""A real tokenizer with one token per byte, whose id is the byte: `list(b"text")` are the tokens of "text"."""

from __future__ import annotations

import json

from aotllm.tokenization import Tokenizer

BOS, EOS, START, END = 256, 257, 258, 259
SPECIAL_TOKENS = {"<s>": BOS, "</s>": EOS, "<|im_start|>": START, "<|im_end|>": END}
VOCAB_SIZE = 260

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _alphabet() -> list[str]:
    # The byte-level alphabet (GPT-2): printable characters stand for themselves, the others for U+0100 and up.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_tokenizer(chat: bool = True) -> Tokenizer:
    """`chat`: with a template (ChatML), else as of a base model. A text prompt begins with <s>."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, token_id in SPECIAL_TOKENS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {char: i for i, char in enumerate(_alphabet())}, "merges": []},
    }
    return Tokenizer(json.dumps(document), CHAT_TEMPLATE if chat else None, "<s>", "</s>")
