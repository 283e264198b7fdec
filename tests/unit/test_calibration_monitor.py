"""Calibration while serving: judged on rounds that nobody selected, corrected slowly and by history alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.executors import fake_pair
from fakes.rig import running

from kernels.sampling import Regime, SlotSampling
from scheduler_service import draft_planner
from scheduler_service.audit import are_audited, audit_key, audited_windows
from scheduler_service.calibration_monitor import CalibrationError, CalibrationMonitor
from scheduler_service.policy import DraftedBatch, StepWork, VerifyPolicy, trims_by_confidence
from scheduler_service.policy.static import StaticPolicy
from scheduler_service.policy.threshold import ThresholdPolicy
from scheduler_service.request import SamplingOptions
from scheduler_service.step_record import RowRound, StepRecord

BLOCK, SHARE = 4, 0.2
Logits = np.ndarray


def is_audited(request_id: str, choice: int, round_: int, share: float) -> bool:
    return bool(are_audited([audit_key(request_id, choice)], [round_], share)[0])


def sigmoid(logits: Logits) -> Logits:
    return 1 / (1 + np.exp(-logits))


def over_confident_when_unsure(logits: Logits) -> Logits:
    """Acceptance of a drafter that is right where it is sure: a window that trims never sees the rest."""
    return sigmoid(np.where(logits > 1.0, logits, logits - 2.5))


def shifted(shift: float) -> Callable[[Logits], Logits]:
    """Acceptance of a drafter that is off everywhere."""
    return lambda logits: sigmoid(logits + shift)


def rounds(
    truth: Callable[[Logits], Logits],
    count: int,
    *,
    seed: int = 0,
    regime: Regime = Regime.GREEDY,
    share: float = SHARE,
) -> Iterator[RowRound]:
    """Rounds in windows that end before the survival falls below 0.7; audited ones whole."""
    random = np.random.default_rng(seed)
    sequence: Any = SimpleNamespace(sampling=SlotSampling(regime))
    for index in range(count):
        logits = random.normal(1.0, 1.5, BLOCK)
        confidences = sigmoid(logits).astype(np.float32)
        is_accepted = random.random(BLOCK) < truth(logits)
        whole = BLOCK if is_accepted.all() else int(is_accepted.argmin())
        is_audit = is_audited(f"request {index // 50}", 0, index % 50, share)
        window = BLOCK if is_audit else int((np.cumprod(confidences) >= 0.7).sum())
        accepted = min(whole, window)
        yield RowRound(
            sequence, 0, [1] * BLOCK, confidences, np.full(BLOCK, np.nan, np.float32), window, window, accepted,
            [1] * (accepted + 1), is_audit=is_audit,
        )  # fmt: skip


def observe(monitor: CalibrationMonitor, given: Iterator[RowRound]) -> dict[int, CalibrationError]:
    """By position."""
    for each in given:
        monitor.observe(StepRecord(1, StepWork(1, 1, 1, 1.0, BLOCK), 0, 1, 1, [each]))
    return {each.position: each for each in monitor.errors()}


def test_unbiased_where_windows_are_trimmed() -> None:
    truth = over_confident_when_unsure
    audited = observe(CalibrationMonitor(BLOCK, corrects=False), rounds(truth, 8000))
    everything = CalibrationMonitor(BLOCK, observes_all=True, corrects=False)
    known = observe(everything, rounds(truth, 3000, share=1.0, seed=1))
    for position in range(1, BLOCK + 1):
        assert audited[position].error == pytest.approx(known[position].error, abs=0.03)
        assert audited[position].num_observed == pytest.approx(1100, rel=0.1)  # 1,600 audits, fading
    assert known[1].error > 0.15

    # All verified positions, as if nobody had selected them.
    verified = observe(CalibrationMonitor(BLOCK, observes_all=True, corrects=False), rounds(truth, 3000))
    assert verified[1].error < known[1].error - 0.08
    # A trimmed draft counted as rejected, of a drafter that is right.
    right = observe(CalibrationMonitor(BLOCK, corrects=False), rounds(shifted(0.0), 8000))
    assert max(each.error for each in right.values()) < 0.06
    rejected = CalibrationMonitor(BLOCK, observes_all=True, corrects=False)
    counted = observe(rejected, (_as_rejected(each) for each in rounds(shifted(0.0), 3000)))
    assert counted[2].error > 0.1


def _as_rejected(each: RowRound) -> RowRound:
    fields = {**each.__dict__, "verify_len": BLOCK}
    return RowRound(**fields)


def test_a_drafter_that_is_off_is_corrected() -> None:
    monitor = CalibrationMonitor(BLOCK)
    before = observe(CalibrationMonitor(BLOCK, corrects=False), rounds(shifted(-0.8), 3000, share=1.0))
    after = observe(monitor, rounds(shifted(-0.8), 3000, share=1.0))
    other = observe(monitor, rounds(shifted(0.6), 3000, regime=Regime.REJECTION, share=1.0))
    for position in (1, 2):
        assert after[position].correction == pytest.approx(-0.8, abs=0.25)
        assert before[position].error > 0.1
    judged = observe(_judge_of(monitor), rounds(shifted(-0.8), 3000, seed=5, share=1.0))
    assert judged[1].error < 0.04
    assert judged[2].error < 0.05
    found = {(each.regime, each.position): each.correction for each in monitor.errors()}
    assert len(other) == BLOCK
    assert found[Regime.REJECTION, 1] == pytest.approx(0.6, abs=0.25)
    assert found[Regime.GREEDY, 1] == after[1].correction  # regimes do not touch one another
    assert (Regime.COUPLED, 1) not in found
    drifted = observe(monitor, rounds(shifted(0.5), 8000, seed=7, share=1.0))
    assert drifted[1].correction == pytest.approx(0.5, abs=0.3)


def _judge_of(monitor: CalibrationMonitor) -> CalibrationMonitor:
    """Judges the corrections of another as they are now."""
    judge = CalibrationMonitor(BLOCK, corrects=False)
    judge.corrected = monitor.corrected  # type: ignore[method-assign]
    return judge


def test_corrections_are_slow_and_bounded() -> None:
    monitor = CalibrationMonitor(1)
    steps = [0.0]
    for each in rounds(shifted(-20.0), 3000, share=1.0):
        monitor.observe(StepRecord(1, StepWork(1, 1, 1, 1.0, 1), 0, 1, 1, [_first_draft(each)]))
        steps.append(monitor.errors()[0].correction)
    assert max(abs(np.diff(steps))) <= 1 / 25
    assert steps[-1] == -2.0 == min(steps)


def _first_draft(each: RowRound) -> RowRound:
    cut = {"draft_ids": [1], "confidences": each.confidences[:1], "verify_len": 1, "num_accepted": 0}
    return RowRound(**{**each.__dict__, **cut})


def test_what_is_no_probability_stays_none_and_the_rest_keeps_its_order() -> None:
    monitor = CalibrationMonitor(BLOCK)
    given = np.array([[0.3, 1.0, 0.0, np.nan], [-0.5, 1.5, np.inf, 0.9]], np.float32)
    regimes = [Regime.GREEDY, Regime.COUPLED]
    np.testing.assert_allclose(monitor.corrected(given, regimes)[0], given[0], rtol=1e-6)
    for shift in (-2.0, -0.5, 0.7, 2.0):
        monitor._odds[:] = np.exp(shift)
        found = monitor.corrected(given, regimes)
        np.testing.assert_allclose(found[0, :3], [sigmoid(np.log(0.3 / 0.7) + shift), 1.0, 0.0], rtol=1e-5)
        is_valid = (found >= 0) & (found <= 1)
        assert is_valid.tolist() == [[True, True, True, False], [False, False, False, True]]


def test_a_drafter_that_is_always_certain_cannot_be_corrected() -> None:
    monitor = CalibrationMonitor(BLOCK)
    certain = (
        RowRound(**{**each.__dict__, "confidences": np.ones(BLOCK, np.float32)}) for each in rounds(shifted(-1), 50)
    )
    found = observe(monitor, certain)
    assert found[1].error > 0.1
    assert found[1].correction == 0.0


def test_every_round_counts_where_windows_ignore_confidences() -> None:
    assert [
        mode for mode in ("static", "fixed", "threshold", "compact", "cap-accept") if trims_by_confidence(mode)
    ] == [
        "threshold",
        "compact",
    ]
    found = observe(CalibrationMonitor(BLOCK, observes_all=True), rounds(shifted(0.0), 300, share=1.0))
    assert found[1].num_observed > 250
    assert observe(CalibrationMonitor(BLOCK), rounds(shifted(0.0), 300, share=0.0)) == {}


def test_the_share_of_audits_and_who_decides() -> None:
    drawn = [is_audited(f"r{request}", 0, round_, 0.05) for request in range(100) for round_ in range(300)]
    assert np.mean(drawn) == pytest.approx(0.05, abs=0.005)
    by_request = np.reshape(drawn, (100, 300))
    assert by_request.sum(axis=0).max() < 20  # not the same rounds of every request
    assert by_request.any(axis=1).all()
    assert [is_audited("r0", 0, round_, 0.05) for round_ in range(300)] == by_request[0].tolist()
    assert [is_audited("r0", 1, round_, 0.05) for round_ in range(300)] != by_request[0].tolist()
    assert not any(is_audited("r0", 0, round_, 0.0) for round_ in range(300))
    assert all(is_audited("r0", 0, round_, 1.0) for round_ in range(300))


def test_audits_are_drawn_by_splitmix64() -> None:
    # The generator's first numbers from seed 0.
    for round_, number in ((1, 0xE220A8397B1DCDAF), (2, 0x6E789E6AA1B965F4), (3, 0x06C45D188009454F)):
        share = number / 2**64
        assert are_audited([0, 1], [round_, round_], share + 1e-12)[0]
        assert not are_audited([0, 1], [round_, round_], share - 1e-12)[0]
    assert audit_key("a", 0) not in (audit_key("a", 1), audit_key("b", 0))


class Shown(StaticPolicy):
    """Remembers what it was shown."""

    def windows(self, batch: DraftedBatch) -> Any:
        self.batch = batch
        return super().windows(batch)


def test_to_the_policy_an_audit_is_fixed_work() -> None:
    policy = Shown(1)
    confidences = np.array([[0.9, 0.8, 0.7], [0.9, np.nan, 0.7], [0.1, 0.1, 0.1], [0.9, 0.9, 0.9]], np.float32)
    batch = DraftedBatch(
        confidences, [3, 3, 2, 5], 4, 4, contexts=[10, 20, 30, 40], num_rows=4, num_context=100.0, max_budget=7
    )
    windows = audited_windows(policy, batch, [False, True, True, False])
    assert windows.verify_lens == windows.commit_lens == [1, 1, 2, 1]  # an unusable confidence ends an audit as well
    assert windows.num_invalid == 1
    shown = policy.batch
    assert list(shown.max_drafts) == [3, 0, 0, 5]
    # Counted as planned: what turns out to be unusable must not change the others' windows.
    assert (shown.num_tokens, shown.num_context, shown.max_budget) == (4 + 5, 100.0 + 60 + 60, 2)
    assert shown.work.num_drafted == 4
    assert audited_windows(policy, batch, [False] * 4).verify_lens == [1, 1, 1, 1]
    assert policy.batch is batch


@pytest.mark.parametrize("policy", [ThresholdPolicy(0.95), StaticPolicy(0)])
def test_audits_do_not_depend_on_confidences(policy: VerifyPolicy) -> None:
    for confidence in (0.01, 0.5, 0.99):
        batch = DraftedBatch(np.full((2, BLOCK), confidence, np.float32), [BLOCK, BLOCK], 2, 2)
        assert audited_windows(policy, batch, [True, False]).verify_lens[0] == BLOCK


def _audits(confidence: float, **settings: Any) -> tuple[set[tuple[str, int]], Any]:
    """Drafted rounds that were verified whole, by request and round, and the load at the end."""
    with running(
        "threshold", fake_pair(confidence=confidence), confidence_threshold=0.9, audit_share=0.25, **settings
    ) as rig:
        streams = [
            rig.submit([1, 2, 3 + k], 30, request_id=f"r{k}", sampling=SamplingOptions(temperature=0.0))
            for k in range(4)
        ]
        texts = [stream.text() for stream in streams]
        assert len(texts) == 4
        whole = set()
        by_slot = {}
        for call in rig.verifier.calls:
            for admission in call.slots.admissions:
                by_slot[admission.slot] = f"r{len(by_slot)}"
            for slot, drafts, round_ in zip(call.row_slots, call.row_num_drafts, call.row_rounds, strict=True):
                if drafts:
                    whole.add((by_slot[slot], round_))
        return whole, rig.scheduler.load()


def test_the_engine_audits_by_request_and_round_alone() -> None:
    whole, load = _audits(0.5)
    assert whole
    assert all(is_audited(request, 0, round_, 0.25) for request, round_ in whole)
    assert load.ledger.num_audited_rounds == len(whole)
    assert load.ledger.num_audit_drafts == load.ledger.num_verified >= len(whole)
    assert {each.regime for each in load.calibration_errors} == {Regime.GREEDY}
    # Fewer drafts verified, and so more rounds, where the drafts are as good but confidences differ: the same ones.
    again, _ = _audits(0.2)
    assert again == whole


def test_audits_can_be_switched_off() -> None:
    with running("threshold", fake_pair(confidence=0.5), confidence_threshold=0.9, audit_share=0.0) as rig:
        rig.submit([1, 2, 3], 20).wait()
        load = rig.scheduler.load()
    assert (load.ledger.num_audited_rounds, load.ledger.num_verified, load.calibration_errors) == (0, 0, [])


@pytest.mark.parametrize("recalibrate", [True, False])
def test_the_engine_judges_whole_blocks_and_corrects(recalibrate: bool) -> None:
    with running("static", fake_pair(confidence=0.5, quality=1.0), recalibrate=recalibrate) as rig:
        for stream in [rig.submit([1, 2, k], 40) for k in range(1, 5)]:
            stream.wait()
        errors = {each.position: each for each in rig.scheduler.load().calibration_errors}
    assert errors[1].num_observed > 10
    assert (errors[1].correction > 0) == recalibrate  # everything is accepted, half of it was expected
    assert errors[1].error == pytest.approx(0.5, abs=0.2 if recalibrate else 1e-6)


@pytest.mark.parametrize("recalibrate", [True, False])
def test_the_policy_sees_corrected_confidences(recalibrate: bool) -> None:
    """All drafts are accepted, half of it is believed: too little for the threshold until audits have shown better."""
    drafter = fake_pair(confidence=0.5, quality=1.0)
    settings: Any = {"confidence_threshold": 0.6, "audit_share": 0.5, "recalibrate": recalibrate}
    with running("threshold", drafter, **settings) as rig:
        for k in range(1, 13):
            rig.submit([1, 2, k], 50, request_id=f"r{k}").wait()
        load = rig.scheduler.load()
    assert load.ledger.num_audited_rounds > 50
    assert (load.ledger.num_verified > load.ledger.num_audit_drafts) == recalibrate


def test_no_audits_where_a_latency_target_bounds_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = {"confidence_threshold": 0.9, "audit_share": 1.0}
    for budget, has_audits in ((None, True), (20, False)):
        monkeypatch.setattr(draft_planner, "_cap", lambda *given, budget=budget: (given[-1], budget))
        with running("threshold", fake_pair(confidence=0.5), **settings) as rig:
            rig.submit([1, 2, 3], 20).wait()
            assert bool(rig.scheduler.load().ledger.num_audited_rounds) == has_audits
