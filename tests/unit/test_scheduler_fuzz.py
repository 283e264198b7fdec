"""Random traffic on too little memory: every text is the target's own, every page and slot comes back."""

from __future__ import annotations

import random
import time

import pytest
from fakes.executors import fake_pair, reference_text
from fakes.rig import GREEDY, Stream, running

from kernels.philox import derive_key
from kernels.sampling import Regime, SlotSampling
from scheduler_service.request import FinishReason, SamplingOptions


@pytest.mark.parametrize("mode", ["off", "static", "compact", "cap-accept"])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic(mode: str, seed: int) -> None:
    dice = random.Random(seed)
    pair = fake_pair(quality=dice.choice([0.3, 0.8, 1.0]))
    page_bytes = 1000 if mode == "off" else 1500
    settings = {"kv_memory": dice.randint(16, 30) * page_bytes, "max_batch_tokens": dice.choice([8, 24, 64])}
    settings |= {"feature_ring_rows": dice.choice([6, 9, 64]), "prefix_cache": dice.choice(["isolated", "shared"])}
    stems = [[dice.randint(1, 49) for _ in range(24)] for _ in range(3)]
    settings |= {"guard": seed % 2 == 0, "guard_probe_share": 0.3}
    with running(mode, pair, **settings) as rig:
        streams: list[tuple[Stream, list[int], int | None, int]] = []
        for _ in range(14):
            prompt = dice.choice(stems)[: dice.randint(0, 24)] + [
                dice.randint(1, 49) for _ in range(dice.randint(1, 16))
            ]
            key = dice.choice([None, dice.randint(0, 2**64 - 1)])
            sampling = SamplingOptions(temperature=0.0) if key is None else SamplingOptions(seed=key)
            num_choices = dice.choice([1, 1, 2, 3]) if len(prompt) < 24 else 1
            tenant = dice.choice([b"a", b"b"])
            spec = {"sampling": sampling, "num_choices": num_choices, "isolation_key": tenant}
            stream = rig.submit(prompt, dice.randint(1, 30), **spec)
            streams.append((stream, prompt, key, num_choices))
            if dice.random() < 0.3:
                victim = dice.choice(streams)[0].request
                assert victim is not None
                rig.scheduler.abort(victim.request_id, dice.choice([None, 0, 1]))
            time.sleep(dice.choice([0, 0, 0.003]))
        for stream, prompt, key, num_choices in streams:
            summary = stream.wait()
            assert not summary.error
            for choice in range(num_choices):
                text = stream.text(choice)
                slot = GREEDY if key is None else SlotSampling(Regime.COUPLED, key=derive_key(key, choice))
                assert text == reference_text(prompt, len(text), slot)
                ended = summary.choices[choice]
                assert ended.num_tokens == len(text)
                if ended.finish_reason is not FinishReason.ABORT:
                    assert stream.request is not None
                    assert len(text) == stream.request.max_tokens
        rig.wait_until_idle()
        assert rig.scheduler.load().num_prefix_cache_hits > 0
