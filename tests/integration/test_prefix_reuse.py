"""A chat of two turns on the embedded models: what the first turn computed is found again, draft context included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes.rig import Stream
from tokenizers import Tokenizer

import drafter_service.server
import verifier_service.server
from drafter_service.settings import DrafterSettings
from launcher.models import ModelPair
from scheduler_service.request import GenerateSpec, SamplingOptions
from scheduler_service.service import Scheduler
from scheduler_service.settings import SchedulerSettings
from scheduler_service.startup import build_scheduler
from scheduler_service.transport import InProcessTransport
from service_kit.engine_thread import EngineThread
from verifier_service.settings import VerifierSettings

pytestmark = pytest.mark.model

PAGE_SIZE = 16
QUESTION = "<|im_start|>user\nName three colours of the rainbow.<|im_end|>\n<|im_start|>assistant\n"
NEXT_QUESTION = "<|im_end|>\n<|im_start|>user\nAnd three more, please.<|im_end|>\n<|im_start|>assistant\n"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def executors(pair: ModelPair) -> Iterator[tuple[Any, Any]]:
    thread = EngineThread("test-engine")
    target = str(pair.target)
    yield (
        verifier_service.server.load_servicer(VerifierSettings(model=target), thread),
        drafter_service.server.load_servicer(DrafterSettings(model=str(pair.drafter), target=target), thread),
    )
    thread.stop()


@contextmanager
def _scheduler(executors: tuple[Any, Any], prefix_cache: str) -> Iterator[Scheduler]:
    settings: dict[str, Any] = {"verify_mode": "static", "guard": False, "prefix_cache": prefix_cache}
    settings |= {"max_num_seqs": 2, "max_model_len": 256, "max_prefill_decode_steps": 0, "kv_memory": "64MiB"}
    verifier, drafter = (InProcessTransport(executor) for executor in executors)
    scheduler = build_scheduler(SchedulerSettings(**settings), verifier, drafter)
    try:
        yield scheduler
        scheduler.check_integrity()
    finally:
        scheduler.stop()


def _ask(scheduler: Scheduler, prompt: list[int], sampling: SamplingOptions) -> tuple[Stream, int]:
    """The answer, and the prefill tokens it took."""
    before = scheduler.load().ledger.num_prefill_tokens
    stream = Stream()
    spec = GenerateSpec("turn", prompt, sampling, max_tokens=NUM_TOKENS, ignore_eos=True)
    scheduler.submit(spec, stream)
    stream.ended.wait(300)
    return stream, scheduler.load().ledger.num_prefill_tokens - before


@pytest.mark.parametrize("sampling", [SamplingOptions(temperature=0.0), SamplingOptions(temperature=0.7, seed=3)])
def test_the_second_turn_computes_only_what_is_new(
    executors: tuple[Any, Any], pair: ModelPair, sampling: SamplingOptions
) -> None:
    tokenizer = Tokenizer.from_file(str(Path(pair.target) / "tokenizer.json"))
    question = tokenizer.encode(QUESTION).ids
    found = {"off": 0, "isolated": (len(question) + NUM_TOKENS - 1) // PAGE_SIZE * PAGE_SIZE}
    answers = {}
    for prefix_cache, num_found in found.items():
        with _scheduler(executors, prefix_cache) as scheduler:
            first, _ = _ask(scheduler, question, sampling)
            prompt = question + first.text() + tokenizer.encode(NEXT_QUESTION).ids
            second, num_prefilled = _ask(scheduler, prompt, sampling)
            assert second.wait().num_cached_tokens == num_found
            assert num_prefilled == len(prompt) - num_found
            answers[prefix_cache] = [(each.text(), each.wait().choices) for each in (first, second)]
    # The same text, and by the same drafts: accepted lengths after a hit are those of a cold run.
    assert answers["isolated"] == answers["off"]
    assert answers["off"][1][1][0].num_accepted > 0
