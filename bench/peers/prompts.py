"""Prompts of a peers run: mixed over files, as text and as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from bench.peers.worker import PeerPrompt
from bench.prompts import Prompt
from service_kit.errors import ConfigurationError

MIXED = "mixed"
LONG = "long"


class Renderer:
    """The target's chat template and tokenizer."""

    def __init__(self, model_dir: Path) -> None:
        """Loads them."""
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)

    def render(self, text: str) -> tuple[int, ...]:
        """Token ids of a chat whose only turn is `text`, up to where the answer begins."""
        turns = [{"role": "user", "content": text}]
        return tuple(self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))


def mixed_prompts(prompts: Sequence[Prompt], renderer: Renderer, *, num: int, max_len: int) -> list[PeerPrompt]:
    """`num` prompts of at most `max_len` tokens, one of each file in turn.

    Raises ConfigurationError if there are fewer.
    """
    by_file: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_file.setdefault(prompt.prompt_class, []).append(prompt)
    chosen = []
    for prompt in chain.from_iterable(zip_longest(*by_file.values())):
        if prompt is None or len(token_ids := renderer.render(prompt.text)) > max_len:
            continue
        chosen.append(PeerPrompt(MIXED, prompt.text, token_ids))
        if len(chosen) == num:
            return chosen
    raise ConfigurationError(
        f"{len(chosen)} prompts of at most {max_len} tokens, {num} needed: give more, or lower --groups",
        field="--prompts",
    )


def long_prompts(prompts: Sequence[Prompt], renderer: Renderer, *, num: int, length: int) -> list[PeerPrompt]:
    """`num` prompts of about `length` tokens (never fewer), each from another place of the joined texts."""
    words = " ".join(prompt.text for prompt in prompts).split()
    stride = max(1, len(words) // max(1, num))
    chosen = []
    for start in range(0, stride * num, stride):
        rotated = words[start:] + words[:start]
        low, high = 1, length
        while low < high:
            middle = (low + high) // 2
            if len(renderer.render(" ".join(rotated[:middle]))) < length:
                low = middle + 1
            else:
                high = middle
        text = " ".join(rotated[:low])
        if len(token_ids := renderer.render(text)) < length:
            raise ConfigurationError(
                f"the prompts have too few words for {length} tokens: give more", field="--prompts"
            )
        chosen.append(PeerPrompt(LONG, text, token_ids))
    return chosen
