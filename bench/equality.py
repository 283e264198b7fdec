"""Whether every mode gave the same tokens, and where they first differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import GroupResult
from bench.prompts import Prompt


@dataclass(frozen=True)
class Divergence:
    """Two answers to one prompt that differ."""

    prompt: Prompt
    mode: str
    concurrency: int
    position: int
    """Index of the first differing token in the answers."""
    common_ids: tuple[int, ...]
    expected_id: int | None
    found_id: int | None
    """None: that answer ended here."""

    def describe(self, margin: float | None) -> str:
        """One line; `margin` is the target's logit difference between the two tokens."""
        size = "" if margin is None else f", logit margin {margin:.2e}"
        return (
            f"{self.mode} at concurrency {self.concurrency}, {self.prompt.prompt_class}: token {self.position} is "
            f"{self.found_id}, expected {self.expected_id}{size}; prompt {self.prompt.text[:60]!r}"
        )


def find_divergences(
    results: Sequence[GroupResult], prompts: Sequence[Prompt], reference_mode: str
) -> tuple[int, list[Divergence]]:
    """Compares every answer with `reference_mode`'s at the lowest concurrency. Returns (answers compared, differing).

    Results list the prompts in their order for each mode and concurrency.
    """
    sequences: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for result in results:
        own = sequences.setdefault((result.mode, result.concurrency), [])
        own += [tuple(answer.token_ids) for answer in result.answers]
    reference = sequences[(reference_mode, min(result.concurrency for result in results))]
    found, num_compared = [], 0
    for (mode, concurrency), answers in sequences.items():
        if answers is reference:
            continue
        for prompt, expected, actual in zip(prompts, reference, answers, strict=True):
            num_compared += 1
            if expected != actual:
                found.append(_divergence(prompt, mode, concurrency, expected, actual))
    return num_compared, found


def _divergence(
    prompt: Prompt, mode: str, concurrency: int, expected: tuple[int, ...], actual: tuple[int, ...]
) -> Divergence:
    shorter = min(len(expected), len(actual))
    position = next((i for i in range(shorter) if expected[i] != actual[i]), shorter)
    return Divergence(
        prompt,
        mode,
        concurrency,
        position,
        expected[:position],
        expected[position] if position < len(expected) else None,
        actual[position] if position < len(actual) else None,
    )


def logit_margins(model_dir: Path, divergences: Sequence[Divergence]) -> list[float | None]:
    """Difference of the target's float32 logits of the two tokens at each divergence; None where one answer ended."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    margins: list[float | None] = []
    for each in divergences:
        if each.expected_id is None or each.found_id is None:
            margins.append(None)
            continue
        turns = [{"role": "user", "content": each.prompt.text}]
        prompt_ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt_ids, *each.common_ids]])).logits[0, -1]
        margins.append(float((logits[each.expected_id] - logits[each.found_id]).abs()))
    return margins
