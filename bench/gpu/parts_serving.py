"""Parts that serve: a scheduler over both executors in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.gpu.floors import draft, step
from bench.gpu.part import Bench, Row, SkippedError
from bench.gpu.serving import Executors, Rates, answer_all, steady_rates

MODES = ("off", "compact", "static")
SMOLLM2, SMOLLM2_DRAFTER = "smollm2-135m-instruct", "smollm2-135m-dspark"
_PROMPT_LEN = 16
_QUESTIONS = (
    "What is the capital of France?",
    "Write a function in Python that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h?",
    "Name three uses of baking soda.",
    "Translate to Spanish: The library opens at nine.",
    "Write a short poem about the sea.",
    "What does the SQL keyword JOIN do?",
)


def throughput(bench: Bench) -> Iterator[Row]:
    """Tokens a second against concurrency: plain, scheduled and whole-block verification at a set acceptance rate.

    See `chain_models` for what such a drafter shows and what it does not. "tokens/step" is what a row commits; where
    whole blocks are verified it must come to what the acceptance rate says.
    """
    scale, block = bench.scale, bench.scale.chain.block_size
    most = max(scale.requests)
    expected = sum(scale.acceptance**k for k in range(block + 1))
    executors, chain = bench.chain
    for mode in MODES:
        with executors.scheduler(
            verify_mode=mode,
            max_num_seqs=most,
            max_batch_tokens=max(most * (block + 1), _PROMPT_LEN),
            max_model_len=scale.max_model_len,
            kv_memory=scale.kv_memory,
        ) as scheduler:
            for requests in scale.requests:
                prompts = [chain.text(997 * request, _PROMPT_LEN) for request in range(requests)]
                rates = steady_rates(scheduler, prompts, scale.seconds, scale.min_steps)
                row = {"mode": mode, "requests": requests, **_row(bench, requests, rates)}
                yield {**row, "expected": expected} if mode == "static" else row


def overlap(bench: Bench) -> Iterator[Row]:
    """Plain decoding with `chain_plain_steps` on and off: whether step t + 1 is sent while step t runs, so that the
    verifier does not wait for the scheduler in between. Drafted steps are never chained; nothing else is switched."""
    scale, most = bench.scale, max(bench.scale.overlap_requests)
    found: dict[int, dict[bool, Rates]] = {requests: {} for requests in scale.overlap_requests}
    executors, chain = bench.chain
    for is_chained in (True, False):
        with executors.scheduler(
            verify_mode="off",
            chain_plain_steps=is_chained,
            max_num_seqs=most,
            max_batch_tokens=max(2 * most, _PROMPT_LEN),
            max_model_len=scale.max_model_len,
            kv_memory=scale.kv_memory,
        ) as scheduler:
            for requests in scale.overlap_requests:
                prompts = [chain.text(997 * request, _PROMPT_LEN) for request in range(requests)]
                found[requests][is_chained] = steady_rates(scheduler, prompts, scale.seconds, scale.min_steps)
    for requests, rates in found.items():
        floor = bench.floor_us(*step(scale.chain, requests, _PROMPT_LEN, 1))
        yield {
            "requests": requests,
            "chained step ms": rates[True].step_ms,
            "unchained step ms": rates[False].step_ms,
            "ratio": rates[False].step_ms / rates[True].step_ms,
            "floor ms": None if floor is None else floor / 1e3,
        }


def smollm2(bench: Bench) -> Iterator[Row]:
    """SmolLM2-135M with its trained drafter on a few questions, greedy; "same texts": as without drafts, where products
    of few and of many rows may round differently (bfloat16)."""
    target, drafter = _find(bench, SMOLLM2), _find(bench, SMOLLM2_DRAFTER)
    bench.clear()
    scale, most = bench.scale, max(bench.scale.text_requests)
    prompts = [_encode(target, question) for question in _QUESTIONS]
    plain: dict[int, list[list[int]]] = {}
    executors = Executors(target, drafter, **scale.executors)
    try:
        for mode in MODES:
            with executors.scheduler(
                verify_mode=mode,
                max_num_seqs=most,
                max_batch_tokens=max(256, 8 * most),
                max_model_len=min(scale.max_model_len, 1024),
                kv_memory=scale.kv_memory // 8,
            ) as scheduler:
                for requests in scale.text_requests:
                    chosen = [prompts[request % len(prompts)] for request in range(requests)]
                    rates, texts = answer_all(scheduler, chosen, scale.text_tokens)
                    same = sum(
                        own == other for own, other in zip(texts, plain.setdefault(requests, texts), strict=True)
                    )
                    yield {
                        "mode": mode,
                        "requests": requests,
                        "tokens/s": rates.tokens_per_second,
                        "step ms": rates.step_ms,
                        "tokens/step": rates.tokens_per_step,
                        "same texts": f"{same} of {requests}",
                    }
    finally:
        executors.close()


def _row(bench: Bench, requests: int, rates: Rates) -> Row:
    model, verified = bench.scale.chain, round(rates.verified_per_step)
    works = step(model, requests * (1 + verified), _PROMPT_LEN, 1 + verified)
    if verified:
        works += draft(model, requests * (model.block_size + 1), _PROMPT_LEN)
    floor = bench.floor_us(*works)
    return {
        "tokens/s": rates.tokens_per_second,
        "step ms": rates.step_ms,
        "floor ms": None if floor is None else floor / 1e3,
        "tokens/step": rates.tokens_per_step,
        "verified/step": rates.verified_per_step,
    }


def _find(bench: Bench, name: str) -> Path:
    if bench.models is None:
        raise SkippedError(f"{name}: no --models was given")
    directory = bench.models / name
    if not (directory / "config.json").is_file():
        raise SkippedError(f"{name} is not in {bench.models}")
    return directory


def _encode(target: Path, question: str) -> list[int]:
    """Token ids of a question as a chat; bytes where the target has no tokenizer."""
    if not (target / "tokenizer.json").is_file():
        return [byte % 256 for byte in question.encode()][:_PROMPT_LEN]
    from tokenizers import Tokenizer

    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return list(Tokenizer.from_file(str(target / "tokenizer.json")).encode(text).ids)
