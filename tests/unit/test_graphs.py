"""Which shapes of a step are captured, and which are refused."""

from __future__ import annotations

import pytest
import torch
from fakes.gpu import FakeGraphRunner

from service_kit.errors import InvalidRequestError
from service_kit.graphs import Geometry, StepGraphs, geometries, powers, tiers


def test_tiers_grow_by_at_most_half_from_8_on() -> None:
    assert tiers(100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)
    assert tiers(1) == (1,)
    assert tiers(512)[-3:] == (256, 384, 512)
    assert powers(12) == (1, 2, 4, 8, 12)


@pytest.mark.parametrize(("max_tokens", "max_rows"), [(1, 1), (24, 4), (63, 100), (512, 64)])
def test_every_step_of_a_session_has_the_smallest_geometry_that_holds_it(max_tokens: int, max_rows: int) -> None:
    known = geometries(max_tokens, max_rows)
    graphs = StepGraphs("step", FakeGraphRunner(), known)
    for tokens in range(1, max_tokens + 1):
        for rows in {1, 2, 3, min(max_rows, tokens)}:
            if rows > min(max_rows, tokens):
                continue
            chosen = graphs.fit(tokens, rows)
            assert chosen.tokens >= tokens
            assert chosen.rows >= rows
            assert chosen == min(each for each in known if each.tokens >= tokens and each.rows >= rows)


def test_a_geometry_that_was_not_captured_is_refused_by_name() -> None:
    numbers = torch.zeros(8)
    runner = FakeGraphRunner()
    graphs = StepGraphs("step", runner, [Geometry(4, 2), Geometry(8, 2)])
    with pytest.raises(InvalidRequestError, match=r"no step graph of 4 tokens x 2 rows was captured \(captured: none"):
        graphs.replay(Geometry(4, 2))
    graphs.capture(lambda geometry: lambda: numbers[: geometry.tokens].add_(1))
    assert runner.num_recorded == 2
    graphs.replay(graphs.fit(3, 1))
    assert numbers.tolist() == [3.0] * 4 + [1.0] * 4  # captured twice, replayed once
    with pytest.raises(InvalidRequestError, match="no step graph holds 9 tokens x 1 rows: the largest is 8 tokens"):
        graphs.fit(9, 1)
    with pytest.raises(InvalidRequestError, match="no step graph of 6 tokens x 2 rows was captured"):
        graphs.replay(Geometry(6, 2))
    graphs.drop()
    assert not graphs.is_captured


def test_a_step_that_reads_the_device_cannot_be_captured() -> None:
    graphs = StepGraphs("step", FakeGraphRunner(), [Geometry(1, 1)])
    with pytest.raises(RuntimeError, match="capturing"):
        graphs.capture(lambda geometry: lambda: float(torch.ones(1)))
