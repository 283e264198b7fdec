"""Blocks that a drafter publishes for a verifier that settles verify lengths itself."""

from __future__ import annotations

import numpy as np
import pytest
from drafter_harness import SESSION, TARGET, VANILLA_DRAFTER, DrafterHarness

from kernels.sampling import Regime
from kernels.survivals import corrected, survivals
from service_kit.errors import InvalidRequestError
from service_kit.handoff import Arena

CONTEXT, BLOCK = 5, 7


def test_published_blocks_hold_the_survivals_of_corrected_confidences() -> None:
    with DrafterHarness(VANILLA_DRAFTER, TARGET) as harness:
        blocks = Arena.attach(harness.info.blocks_arena, session=SESSION)
        assert (blocks.spec.shape, blocks.spec.dtype) == ((harness.sizes["num_slots"], 2, BLOCK), np.float64)
        harness.admit(1, Regime.GREEDY, pages=[1])
        harness.write_features(1, 0, np.random.default_rng(0).standard_normal((CONTEXT, 192), np.float32), step_id=5)
        row = (1, 17, CONTEXT, 1)
        plain = harness.draft(ingests=[(1, 0, CONTEXT, 4, 6)], rows=[row], num_drafts=3)
        assert not blocks.stamps.any()
        odds = np.array([[3.0, 0.5, 1.0]])
        reply = harness.draft(
            rows=[row], num_drafts=3, publishes_blocks=True, confidence_odds=odds.astype("<f8").tobytes()
        )
        assert (reply.token_ids, reply.confidences) == (plain.token_ids, plain.confidences)
        assert blocks.stamps[1].tolist() == [SESSION, 1, 1, CONTEXT + 1]
        assert not blocks.stamps[0].any()
        assert blocks.rows[1, 0, :3].tolist() == list(reply.token_ids)
        confidences = np.frombuffer(reply.confidences, "<f4")[None]
        assert blocks.rows[1, 1].tolist() == survivals(corrected(confidences, odds))[0].tolist() + [0.0] * 4
        assert blocks.rows[1, 1, 0] > confidences[0, 0]

        lost = harness.draft(ingests=[(1, 4, 1, 90, 99)], rows=[(1, 17, 5, 2)], num_drafts=BLOCK, publishes_blocks=True)
        assert lost.ingest_failures
        assert blocks.stamps[1].tolist() == [SESSION, 2, 1, CONTEXT + 1]
        assert not blocks.rows[1, 1].any()
        with pytest.raises(InvalidRequestError, match="1 confidence odds for 1 x 2"):
            harness.draft(rows=[row], num_drafts=2, publishes_blocks=True, confidence_odds=b"\0" * 8)
        blocks.close()
