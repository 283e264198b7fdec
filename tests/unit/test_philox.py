"""Random streams: known answers, addresses that never meet, derived keys, and the compiled draws beside them."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from kernels import draws
from kernels.draws import coupled_index, inverse_cdf_index, uniform
from kernels.markov_sample.cpu import sample_block
from kernels.philox import Purpose, coupled_exponentials, derive_key, uniforms
from kernels.rejection_sample.cpu import accept_row
from kernels.sampling import Regime, SlotSampling

MASK = 2**64 - 1
KEYS = (0, 1, 2**63, 2**64 - 1)


def philox_block(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 in plain integers (Salmon et al. 2011, section 3.3)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        product0, product1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (product1 >> 64) ^ c1 ^ k0, product1 & MASK, (product0 >> 64) ^ c3 ^ k1, product0 & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # published with the algorithm's own library (Random123, philox4x64 with 10 rounds)
        (
            (0, 0, 0, 0),
            (0, 0),
            [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B],
        ),
        (
            (MASK, MASK, MASK, MASK),
            (MASK, MASK),
            [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
        ),
    ],
)
def test_plain_integers_give_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: list[int]
) -> None:
    assert philox_block(counter, key) == words


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("position", "round_"), [(0, 0), (5, 2), (2**32 - 1, 2**32 - 1)])
def test_streams_are_philox_at_their_address(key: int, position: int, round_: int) -> None:
    for purpose in Purpose:
        blocks = [philox_block((1 + i, position, round_, 0), (key, purpose)) for i in range(3)]
        expected = [(word >> 11) * 2.0**-53 for block in blocks for word in block]
        assert uniforms(key, purpose, position, round_, 12).tolist() == expected
        assert uniform(key, purpose, position, round_) == expected[0]


def test_a_longer_stream_begins_with_the_shorter() -> None:
    assert np.array_equal(uniforms(3, Purpose.COUPLED, 7, 0, 1000)[:63], uniforms(3, Purpose.COUPLED, 7, 0, 63))


def test_no_two_addresses_share_a_draw() -> None:
    addresses = list(itertools.product((0, 1, MASK), Purpose, (0, 1, 2), (0, 1, 2)))
    draws = np.concatenate([uniforms(*address, 64) for address in addresses])
    assert np.unique(draws).size == draws.size


@pytest.mark.parametrize("key", [-1, 2**64])
def test_keys_beyond_64_bits_are_refused(key: int) -> None:
    with pytest.raises(OverflowError):
        uniforms(key, Purpose.DRAFT, 0, 0, 1)


def test_derived_keys() -> None:
    for key in KEYS:
        derived = [derive_key(key, index) for index in range(100)]
        assert derived[0] == key
        assert all(0 <= other <= MASK for other in derived)
        assert len(set(derived)) == 100
    assert derive_key(0, 1) != derive_key(1, 1)


def test_exponentials_are_finite_positive_and_of_unit_mean() -> None:
    exponentials = coupled_exponentials(9, 4, 100_000)
    assert exponentials.min() > 0.0
    assert np.isfinite(exponentials).all()
    assert abs(exponentials.mean() - 1.0) < 4.0 / 100_000**0.5  # 4 standard errors


def _weights(size: int, dtype: npt.DTypeLike) -> npt.NDArray[np.floating]:
    """Unnormalised weights of which about a third are 0, never all."""
    rng = np.random.default_rng(size)
    weights = np.exp(3.0 * rng.standard_normal(size)) * (rng.random(size) < 0.7)
    weights[size // 2] = 1.0
    return weights.astype(dtype)


@pytest.mark.parametrize("size", [1, 63, 100, 1000])
def test_coupled_index_is_the_arg_min(size: int) -> None:
    weights = _weights(size, np.float64)
    target_ids = np.random.default_rng(1).permutation(3 * size)[:size].astype(np.uint32)
    for key in (*KEYS, *range(2, 60)):
        exponentials = coupled_exponentials(key, 11, 3 * size)
        with np.errstate(divide="ignore"):
            assert coupled_index(weights, None, key, 11) == np.argmin(exponentials[:size] / weights)
            assert coupled_index(weights, target_ids, key, 11) == np.argmin(exponentials[target_ids] / weights)


def test_coupled_draws_follow_the_weights() -> None:
    """Chi-square with 4 degrees of freedom, significance 1e-4 (critical value 23.51)."""
    weights = np.array([0.05, 0.5, 0.1, 0.15, 0.2])
    counts = np.bincount([coupled_index(weights, None, key, 3) for key in range(5000)], minlength=5)
    assert ((counts - 5000 * weights) ** 2 / (5000 * weights)).sum() < 23.51


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 63, 256, 1000])
def test_inverse_cdf_index_is_the_first_above(size: int, dtype: npt.DTypeLike) -> None:
    weights = _weights(size, dtype)
    mass_through = np.cumsum(weights, dtype=np.float64)
    for chance in np.random.default_rng(2).random(200):
        expected = np.searchsorted(mass_through, chance * mass_through[-1], side="right")
        assert inverse_cdf_index(weights, float(chance)) == expected


@pytest.mark.parametrize("size", [1, 63, 256, 1000])
def test_inverse_cdf_index_never_takes_a_weight_of_zero(size: int) -> None:
    weights = np.zeros(size)
    weights[size // 3] = 0.1
    weights[size // 2] += 0.2
    for chance in (0.0, 0.3, 1.0 - 2.0**-53):
        assert weights[inverse_cdf_index(weights, chance)] > 0.0
    assert inverse_cdf_index(weights, 0.0) == size // 3
    assert inverse_cdf_index(weights, 1.0 - 2.0**-53) == size // 2


def test_warm_up_compiles_what_the_kernels_call() -> None:
    draws.warm_up()
    kernels = (draws._uniform, draws._inverse_cdf_index, draws._coupled_index)
    num_compiled = [len(kernel.signatures) for kernel in kernels]
    for regime in (Regime.COUPLED, Regime.REJECTION):
        for top_k in (0, 2):
            sampling = SlotSampling(regime, top_k=top_k)
            for draft_to_target in (None, np.arange(3, dtype=np.uint32)):
                probs = np.zeros((2, 3), np.float32)
                inputs = np.zeros((1, 2, 3), np.float32), np.zeros((1, 2, 1), np.float32), None, None
                row = np.zeros(1, np.uint32), [sampling], np.zeros(1, np.int64), np.zeros(1, np.int64)
                block = sample_block(*inputs, *row, draft_to_target, [probs])
                if regime == Regime.COUPLED:
                    probs[:] = 1.0
                for logits in (np.zeros((3, 3), np.float32), np.array([[0, -9, 0]] * 3, np.float32)):
                    accept_row(logits, block.token_ids[0], probs, draft_to_target, sampling, 0, 1)
    assert [len(kernel.signatures) for kernel in kernels] == num_compiled
