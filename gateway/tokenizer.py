"""Text to token ids, and token ids to bytes."""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.tools.form import CALL_TAGS
from service_kit.errors import ConfigurationError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def load_tokenizer(model_dir: Path) -> TextTokenizer:
    """Reads tokenizer.json; other tokenizer files are converted by transformers, which is only then imported.

    Raises ConfigurationError when there is no usable tokenizer.
    """
    path = model_dir / "tokenizer.json"
    try:
        if path.is_file():
            return TextTokenizer(Tokenizer.from_file(str(path)))
        from transformers import AutoTokenizer

        converted = AutoTokenizer.from_pretrained(model_dir, local_files_only=True).backend_tokenizer
        if converted.get_vocab_size() <= len(converted.get_added_tokens_decoder()):  # transformers' idea of no files
            raise ConfigurationError(f"{model_dir} has no tokenizer (tokenizer.json): copy the model's own there")
        return TextTokenizer(converted)
    except ConfigurationError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigurationError(f"{model_dir} has no usable tokenizer (tokenizer.json): {error}") from error


class TextTokenizer:
    """A tokenizer with the exact bytes of every token. Encoding is safe from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigurationError for a tokenizer whose tokens are neither byte-level nor byte-fallback pieces."""
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: id for id, token in added.items() if token.special}
        """Text and id of the tokens that mark structure, such as the end of a turn."""
        self._special_names = {id: name.encode() for name, id in self.special_tokens.items()}
        self._strips = {token.content: (token.lstrip, token.rstrip) for token in added.values()}
        self.shown_tokens = {t.content: id for id, t in added.items() if not t.special or t.content in CALL_TAGS}
        """Text and id of the added tokens that are text: tags of calls, whatever the tokenizer says, and others."""
        shown = set(self.shown_tokens.values())
        self._added_bytes = {id: token.content.encode() if id in shown else b"" for id, token in added.items()}
        self._kind = _decoder_kind(json.loads(tokenizer.to_str())["decoder"])

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt: special tokens in it count, and the model's own prefix (such as BOS) is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered chat template, which holds every special token itself."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which special tokens are just characters."""
        return list(self._plain.encode(text, add_special_tokens=False).ids) if text else []

    def normalize(self, text: str) -> str:
        """The text as the tokenizer's normaliser leaves it."""
        return str(self._tokenizer.normalizer.normalize_str(text)) if self._tokenizer.normalizer else text

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches any special token, the name in group 1, with the white space it swallows; longest first."""
        names = sorted(self.special_tokens, key=len, reverse=True)
        parts: list[str] = []
        for name in names:
            left, right = (r"\s*" if strip else "" for strip in self._strips[name])
            parts.append(f"{left}(?P<t{len(parts)}>{re.escape(name)}){right}")
        return re.compile("|".join(parts) or r"(?!)")

    def named_bytes(self, token_id: int) -> bytes:
        """Bytes that a token is shown by: like `token_bytes`, but special tokens have their name."""
        return self._special_names.get(token_id) or self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes a token adds to the text: none for special tokens and for ids outside the tokenizer."""
        added = self._added_bytes.get(token_id)
        if added is not None:
            return added
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._kind == "byte_level":
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                return token.encode()
        match = _BYTE_TOKEN.match(token)
        return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character of byte-level BPE: printable Latin-1 bytes stand for themselves, the others, in order,
    for the characters from U+0100 (GPT-2's convention)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _decoder_kind(decoder: dict[str, Any] | None) -> str:
    stages = [decoder, *(decoder or {}).get("decoders", ())] if decoder else []
    types = {stage["type"] for stage in stages}
    if "ByteLevel" in types:
        return "byte_level"
    if types & {"ByteFallback", "Metaspace"}:
        return "byte_fallback"
    raise ConfigurationError(
        f"the tokenizer's decoder {sorted(types) or 'is missing and'} is not supported: "
        "byte-level and byte-fallback (SentencePiece) tokenizers are"
    )
