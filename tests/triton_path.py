"""Texts of tiny models through a whole scheduler, by mode, from executors of one kind.

    python tests/triton_path.py triton device      (with TRITON_INTERPRET=1)

Prints JSON: kind → mode → texts of the tiny pair. Kinds: "reference" (plain torch), "cpu", "triton" (its kernels in the
CPU's engine), "device" (steps captured whole, on a GPU that is not there) and "cuda" (on one that is).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from fakes.gpu import fake_gpu
from fakes.rig import Stream
from in_process import GOLDEN_DRAFTERS, GOLDEN_TARGET, Executors
from tiny_pair import BLOCK_SIZE, TinyPair, make_pair

from scheduler_service.cost_model import CostModel
from scheduler_service.cost_model_file import StoredCosts
from scheduler_service.cost_model_start import CostSource
from scheduler_service.prefill_limit import PrefillCosts
from scheduler_service.request import GenerateSpec, SamplingOptions
from service_kit.gpu import GpuFacts, choose_device
from verifier_service.device_blocks import DeviceBlocks

MODES = ("off", "static", "compact", "lens")
"""lens: compact by the lagged rule, its lengths chosen by the verifier."""
_COSTS = StoredCosts(
    CostModel(4e6, 2e5, 40.0, np.arange(65) * 3e5, {size: np.arange(9) * 1e6 for size in (BLOCK_SIZE, 7)}),
    PrefillCosts(1e6, {1: 1e6}, 0.0),
)
_KEY = 2**63 + 5
"""Of unseeded requests, whose draws are then the same in every kind of executor."""
_FACTS = GpuFacts("a GPU that is not there", (9, 0), True, 2**34, 2**34)
_REQUESTS = (
    SamplingOptions(temperature=0.0),
    SamplingOptions(temperature=1.5, seed=7, top_p=0.9),
    SamplingOptions(temperature=0.0, frequency_penalty=0.5),  # in graphs of their own
    SamplingOptions(temperature=2.0),  # rejection sampling
)
NUM_INVARIANT = 3
"""Requests whose text no mode changes."""
_NUM_TOKENS = 5
_GOLDEN = TinyPair(GOLDEN_TARGET, GOLDEN_DRAFTERS[0])
_LENS = {"lossless_rule": "lagged", "verify_lens_on_device": True, "audit_share": 0.0}
_ALONE = ((0, 1, 3), (2,))
"""Requests at once where lengths are chosen by the verifier: not beside one with controls."""


def texts(kind: str, modes: Sequence[str] = MODES, pair: TinyPair = _GOLDEN) -> dict[str, list[list[int]]]:
    """Token ids of every request by mode, all requests of a mode at once."""
    settings: dict[str, Any] = {"kernels": kind} if kind in ("reference", "cpu", "triton") else {"device": "cuda"}
    gpu = fake_gpu(refuses_reads=False)
    patches = [
        mock.patch.object(CostSource, "obtain", return_value=_COSTS),
        mock.patch("scheduler_service.admission.secrets", SimpleNamespace(randbits=lambda bits: _KEY)),
    ]
    on_fake_gpu = [
        mock.patch("verifier_service.loading.open_gpu", return_value=gpu),
        mock.patch("drafter_service.loading.open_gpu", return_value=gpu),
        mock.patch.object(choose_device, "__defaults__", (lambda: _FACTS,)),
    ]
    patches += on_fake_gpu if kind == "device" else []
    for patch in patches:
        patch.start()
    settled = mock.patch.object(DeviceBlocks, "start", autospec=True, side_effect=DeviceBlocks.start).start()
    executors = Executors(pair.target, (pair.drafter,), **settings)
    found = {}
    try:
        for mode in modes:
            name, more = ("compact", _LENS) if mode == "lens" else (mode, {})
            with executors.scheduler(name, max_num_seqs=4, max_model_len=48, max_batch_tokens=16, **more) as scheduler:
                streams = [Stream() for _ in _REQUESTS]
                for together in _ALONE if mode == "lens" else [range(len(_REQUESTS))]:
                    for index in together:
                        prompt = [(7 * index + 11 * place) % 512 for place in range(3 + 2 * index)]
                        spec = GenerateSpec(f"r{index}", prompt, _REQUESTS[index], _NUM_TOKENS)
                        scheduler.submit(spec, streams[index])
                    assert all(streams[index].ended.wait(600) for index in together)
                assert [stream.wait().error for stream in streams] == [""] * len(streams)
                found[mode] = [stream.text() for stream in streams]
    finally:
        executors.close()
        mock.patch.stopall()
    if kind == "device":
        assert settled.call_count > 0 or "lens" not in modes
        assert gpu.runner.num_replayed > 0
        assert gpu.memory.num_open == 0
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        tiny = make_pair(Path(directory))
        print(json.dumps({kind: texts(kind, pair=tiny) for kind in sys.argv[1:]}))
