"""Modes of `bench serve`, what limits them, and how they are compared."""

from __future__ import annotations

import math

import pytest

from bench.comparison import judge, paired_ratio
from bench.decomposition import Round, find_levers
from bench.measure import GroupResult
from bench.modes import parse_modes
from bench.pareto import Gains, Missing, Point, frontier, gains
from launcher.client import Answer
from scheduler_service.settings import SchedulerSettings
from service_kit.errors import ConfigurationError


def test_requests_without_drafts_share_the_server() -> None:
    modes = parse_modes("compact:undrafted,compact,compact:undrafted:again")
    assert [(spec.shares, spec.repeats, spec.is_scheduled) for spec in modes] == [
        ("compact", "", False),
        ("", "", True),
        ("compact", "compact:undrafted", False),
    ]
    results = [
        *_groups("compact:undrafted", [100.0, 100.0, 100.0]),
        *_groups("compact", [98.0, 99.0, 97.0]),
        *_groups("compact:undrafted:again", [101.0, 100.0, 99.0]),
    ]
    (verdict,) = judge(results, modes)
    assert (verdict.mode, verdict.best, verdict.to_best.median) == ("compact", "compact:undrafted", 0.98)
    assert verdict.noise == pytest.approx(0.01)
    assert not verdict.is_within_noise


def test_modes_are_a_verify_mode_and_changed_settings() -> None:
    specs = {spec.name: spec for spec in parse_modes("off, off:again,fixed:3,threshold:0.5,compact:lagged:no-guard")}
    assert (specs["off"].changes, specs["off"].repeats, specs["off:again"].repeats) == ((), "", "off")
    assert specs["fixed:3"].changes == (("DSPARK_SCHEDULER_FIXED_WINDOW", "3"),)
    assert specs["threshold:0.5"].verify_mode == "threshold"
    compact = specs["compact:lagged:no-guard"]
    assert dict(compact.changes) == {"DSPARK_SCHEDULER_LOSSLESS_RULE": "lagged", "DSPARK_SCHEDULER_GUARD": "false"}


def test_every_mode_starts_with_settings_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in parse_modes("off,static,fixed:1,threshold:0.5,compact,compact:lagged:fixed-blocks:no-guard,cap-accept"):
        with monkeypatch.context() as patched:
            for name, value in spec.changes:
                patched.setenv(name, value)
            settings = SchedulerSettings(verify_mode=spec.verify_mode)  # type: ignore[arg-type]
            changed = {f"DSPARK_SCHEDULER_{name.upper()}" for name in settings.model_fields_set - {"verify_mode"}}
            assert changed == {name for name, _ in spec.changes}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("off,warp", "'warp' is no mode: use some of off, static, fixed:2, threshold:0.5, compact, cap-accept"),
        ("fixed", "'fixed' needs a number, e.g. fixed:2"),
        ("fixed:0", "needs a number"),
        ("threshold:2", "needs a number, e.g. threshold:0.5"),
        ("static:lagged", "static may be followed by undrafted, again, not by 'lagged'"),
        ("compact:fast", "may be followed by causal, lagged, fixed-blocks, no-guard, undrafted, again, not by 'fast'"),
        ("off,off", "off is given twice: name a second server of it off:again"),
        ("static,off:again", "off:again has nothing to compare with: add off"),
        ("off:undrafted,off", "off:undrafted: off is no server that drafts"),
        ("compact:undrafted", "compact:undrafted has nothing to compare with: add compact"),
        ("compact,compact:again,compact:again:undrafted", "compact:again is no server that drafts"),
        ("off,off:again:again", "one server too many: use off:again"),
    ],
)
def test_a_mode_that_cannot_be_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_modes(text)


def test_levers_add_up_to_what_is_missing() -> None:
    plain = Round(0.0, 9.0, 1.0, 1.0, 0.0)
    own = Round(4.0, 14.0, 2.0, 1.6, 3.0)
    levers = find_levers(own, plain)
    best, speedup = 1 + own.num_verified, plain.token_ms / own.token_ms
    assert sum(lever.loss for lever in levers) == pytest.approx(math.log(best / speedup))
    assert levers[0].words == "acceptance: 1.60 of 4.00 tokens a round"
    assert {lever.words for lever in levers[1:]} == {
        "drafting: 20% of a round",
        "verification width: 25% of a round",
        "overhead: 5% of a round",
    }
    wide = find_levers(own._replace(verify_ms=60.0, accepted_len=3.9), plain)
    assert wide[0].words == "verification width: 77% of a round"
    assert all(lever.loss == 0 for lever in find_levers(plain, plain))


CURVE = [Point(100.0, 100.0), Point(50.0, 200.0), Point(40.0, 180.0), Point(20.0, 260.0)]


def test_points_that_others_beat_are_not_on_the_frontier() -> None:
    assert frontier(CURVE[::-1]) == [CURVE[0], CURVE[1], CURVE[3]]


def test_gains_are_taken_between_measured_points_only() -> None:
    assert gains(Point(75.0, 300.0), CURVE) == Gains(throughput=2.0, user_speed=Missing.CANNOT)
    assert gains(Point(35.0, 230.0), CURVE) == Gains(throughput=1.0, user_speed=1.0)
    assert gains(Point(120.0, 150.0), CURVE) == Gains(throughput=Missing.CANNOT, user_speed=1.6)
    assert gains(Point(10.0, 50.0), CURVE) == Gains(throughput=Missing.UNMEASURED, user_speed=Missing.UNMEASURED)
    assert gains(Point(100.0, 100.0), CURVE[:1]) == Gains(throughput=1.0, user_speed=1.0)


def _groups(mode: str, speeds: list[float]) -> list[GroupResult]:
    return [GroupResult(mode, "a", 4, (Answer(0.0, num_tokens=120),), 120 / speed, {}) for speed in speeds]


def test_more_groups_tell_smaller_differences() -> None:
    base, luck = [100.0] * 60, [90.0, 96.0, 98.0, 100.0, 102.0, 104.0, 110.0, 100.0, 99.0, 101.0] * 6
    many, few = paired_ratio(luck, base), paired_ratio(luck[:7], base[:7])
    assert many.median == few.median == 1.0
    assert few.low <= 0.96
    assert few.high >= 1.04
    assert many.p25 < many.low < 1.0 < many.high < many.p75


def test_compact_is_judged_by_the_best_other_and_by_equal_servers() -> None:
    modes = parse_modes("off,off:again,static,compact,cap-accept")
    results = [
        *_groups("off", [100.0, 100.0, 100.0]),
        *_groups("off:again", [99.0, 100.0, 104.0]),
        *_groups("static", [90.0, 110.0, 80.0]),
        *_groups("compact", [99.0, 99.0, 99.0]),
        *_groups("cap-accept", [200.0, 200.0, 200.0]),
    ]
    (verdict,) = judge(results, modes)
    assert (verdict.mode, verdict.best, verdict.concurrency) == ("compact", "off", 4)
    assert verdict.to_best.median == pytest.approx(0.99)
    assert verdict.to_best_of_each.p25 == pytest.approx(0.945)
    assert verdict.noise == pytest.approx(0.04)
    assert verdict.is_within_noise is True
    slower = [result for result in results if result.mode != "compact"] + _groups("compact", [95.0, 95.0, 95.0])
    assert judge(slower, modes)[0].is_within_noise is False
    without = [result for result in results if result.mode != "off:again"]
    assert judge(without, parse_modes("off,static,compact"))[0].is_within_noise is None
    assert judge(results, parse_modes("compact")) == []
