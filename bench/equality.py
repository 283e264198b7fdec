"""Whether answers have the same tokens, and where they first differ."""

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
    run: str
    """What gave the second answer, in words."""
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
            f"{self.run}, {self.prompt.prompt_class}: token {self.position} is {self.found_id}, expected "
            f"{self.expected_id}{size}; prompt {self.prompt.text[:60]!r}"
        )


def find_divergences(results: Sequence[GroupResult], reference_mode: str) -> tuple[int, list[Divergence]]:
    """Compares every answer with `reference_mode`'s first one to the same prompt, of the lowest concurrency that has
    it. Returns (answers compared, differing)."""
    expected: dict[Prompt, tuple[int, ...]] = {}
    num_answers, found = 0, []
    ordered = sorted(results, key=lambda result: (result.mode != reference_mode, result.concurrency))
    for result in ordered:
        run = f"{result.mode} at concurrency {result.concurrency}"
        for prompt, answer in zip(result.prompts, result.answers, strict=True):
            own = tuple(answer.token_ids)
            num_answers += 1
            if (reference := expected.setdefault(prompt, own)) != own:
                found.append(_divergence(prompt, run, reference, own))
    return num_answers - len(expected), found


def differences(
    prompts: Sequence[Prompt], expected: Sequence[Sequence[int]], actual: Sequence[Sequence[int]], run: str
) -> list[Divergence]:
    """Where the token ids of `actual`, answers to `prompts` by `run`, are not those `expected`."""
    pairs = zip(prompts, map(tuple, expected), map(tuple, actual), strict=True)
    return [_divergence(prompt, run, own, other) for prompt, own, other in pairs if own != other]


def _divergence(prompt: Prompt, run: str, expected: tuple[int, ...], actual: tuple[int, ...]) -> Divergence:
    shorter = min(len(expected), len(actual))
    position = next((i for i in range(shorter) if expected[i] != actual[i]), shorter)
    return Divergence(
        prompt,
        run,
        position,
        expected[:position],
        expected[position] if position < len(expected) else None,
        actual[position] if position < len(actual) else None,
    )


def logit_margins(model_dir: Path, divergences: Sequence[Divergence]) -> list[float | None]:
    """Difference of the target's float32 logits of the two tokens at each divergence; None where one answer ended."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    disable_progress_bar: Any = logging.disable_progress_bar
    disable_progress_bar()  # it would write into the caller's own display
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
