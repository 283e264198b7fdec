"""`transformers` generate on the same model and prompts, as a peer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.measure import GroupResult
from bench.prompts import Prompt
from launcher.client import Answer, new_answer

NAME = "transformers"


class TransformersPeer:
    """The target in float32 (its fastest format on CPUs without native half precision), one request at a time."""

    def __init__(self, model_dir: Path) -> None:
        """Loads the target."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def run(self, prompt: Prompt, max_tokens: int, temperature: float) -> GroupResult:
        """Generates one answer. Time to the first token is not observed."""
        turns = [{"role": "user", "content": prompt.text}]
        inputs = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        answer, started = new_answer(), time.perf_counter()
        output = self._model.generate(**inputs, max_new_tokens=max_tokens, **sampling)
        wall_s = time.perf_counter() - started
        answer.token_ids = output[0, inputs["input_ids"].shape[1] :].tolist()
        answer.num_tokens = len(answer.token_ids)
        return GroupResult(NAME, prompt.prompt_class, 1, (_without_times(answer),), wall_s, {})


def _without_times(answer: Answer) -> Answer:
    answer.first_token = answer.last_token = None
    return answer
