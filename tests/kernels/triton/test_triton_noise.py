"""Noise on the device: known answers of Philox4x64-10, numpy's streams bit for bit, exponentials within rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.philox import Purpose, coupled_exponentials, uniforms
from kernels.triton.noise import (
    coupled_words_from,
    coupled_words_of,
    first_uniform,
    philox_words,
    unit_exponential,
)
from kernels.triton.rows import as_signed

_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))


@triton.jit
def _words_kernel(counters_ptr, words_ptr):
    inputs = counters_ptr + tl.arange(0, 1)
    c0, c1, c2, c3 = tl.load(inputs), tl.load(inputs + 1), tl.load(inputs + 2), tl.load(inputs + 3)
    words = philox_words(
        c0.to(tl.uint64, bitcast=True),
        c1.to(tl.uint64, bitcast=True),
        c2.to(tl.uint64, bitcast=True),
        c3.to(tl.uint64, bitcast=True),
        tl.load(inputs + 4).to(tl.uint64, bitcast=True),
        tl.load(inputs + 5).to(tl.uint64, bitcast=True),
    )
    for place in tl.static_range(4):
        tl.store(words_ptr + place + tl.arange(0, 1), words[place].to(tl.int64, bitcast=True))


@triton.jit
def _coupled_kernel(address_ptr, ids_ptr, uniform_ptr, from_ptr, of_ptr, first_id, NUM_IDS: tl.constexpr):
    key, position = tl.load(address_ptr), tl.load(address_ptr + 1)
    tl.store(uniform_ptr, first_uniform(key, _ACCEPT, position, tl.load(address_ptr + 2)))
    places = tl.arange(0, NUM_IDS)
    tl.store(from_ptr + places, unit_exponential(coupled_words_from(first_id, key, position, NUM_IDS)))
    tl.store(of_ptr + places, unit_exponential(coupled_words_of(tl.load(ids_ptr + places), key, position)))


@triton.jit
def _exponential_kernel(words_ptr, out_ptr):
    places = tl.arange(0, 8)
    tl.store(out_ptr + places, unit_exponential(tl.load(words_ptr + places).to(tl.uint64, bitcast=True)))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [  # the vectors that come with Random123
        ("0 0 0 0 0 0", "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        (" ".join(["ffffffffffffffff"] * 6), "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0"),
        (
            "243f6a8885a308d3 13198a2e03707344 a4093822299f31d0 082efa98ec4e6c89 452821e638d01377 be5466cf34e90c6c",
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
)
def test_known_answers(inputs: str, words: str) -> None:
    counters = torch.tensor([as_signed(int(word, 16)) for word in inputs.split()], dtype=torch.int64)
    out = torch.empty(4, dtype=torch.int64)
    _words_kernel[(1,)](counters, out)
    assert out.numpy().view(np.uint64).tolist() == [int(word, 16) for word in words.split()]


@pytest.mark.parametrize(("key", "position", "round_"), [(5, 17, 3), (2**64 - 3, 2**31 + 5, 2**33)])
def test_streams_are_those_of_the_truth(key: int, position: int, round_: int) -> None:
    target_ids = torch.tensor([3, 0, 70, 71, 64, 9, 33, 1], dtype=torch.int32)
    address = torch.tensor([as_signed(key), position, round_], dtype=torch.int64)
    uniform = torch.empty(1, dtype=torch.float64)
    consecutive, single = torch.empty(8), torch.empty(8)
    _coupled_kernel[(1,)](address, target_ids, uniform, consecutive, single, 64, NUM_IDS=8)
    assert uniform.item() == uniforms(key, Purpose.ACCEPT, position, round_, 1)[0]
    truth = coupled_exponentials(key, position, 72)
    np.testing.assert_allclose(consecutive.numpy(), truth[64:], rtol=1e-6)
    np.testing.assert_allclose(single.numpy(), truth[target_ids.numpy()], rtol=1e-6)


def test_exponentials_of_the_smallest_and_largest_draws() -> None:
    draws = [0, 1, 2**20, 2**40, 2**52 - 1, 2**52, 2**53 - 2**30, 2**53 - 1]
    out = torch.empty(8)
    _exponential_kernel[(1,)](torch.tensor([as_signed(draw << 11) for draw in draws], dtype=torch.int64), out)
    truth = -np.log1p(-np.maximum(np.array(draws) * 2.0**-53, 2.0**-54))
    np.testing.assert_allclose(out.numpy(), truth, rtol=1e-6)
