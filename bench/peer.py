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
        """Generates one answer, timed like a server's: from the text of the prompt to each token."""
        turns = [{"role": "user", "content": prompt.text}]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        answer = new_answer()
        inputs = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
        self._model.generate(**inputs, max_new_tokens=max_tokens, **sampling, streamer=_TokenTimes(answer))
        ended = answer.last_token or answer.started
        answer.num_prompt_tokens, answer.num_tokens = inputs["input_ids"].shape[1], len(answer.token_ids)
        return GroupResult(NAME, prompt.prompt_class, 1, (answer,), ended - answer.started, {}, (prompt,))


class _TokenTimes:
    """A streamer of `generate`: it gets the prompt, then each token when it is chosen."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._is_prompt = answer, True

    def put(self, token_ids: Any) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._answer.last_token = time.perf_counter()
        self._answer.first_token = self._answer.first_token or self._answer.last_token
        self._answer.token_ids += token_ids.flatten().tolist()

    def end(self) -> None:
        """Nothing is held back."""
