"""Incremental detokenisation: what comes out never depends on how the tokens arrive."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.detokenizer import Detokenizer, Piece

TEXT = st.text(st.sampled_from("ab<|>é€😀\n "), max_size=12)
BYTES = st.one_of(TEXT.map(str.encode), st.binary(max_size=12))
STOPS = st.lists(st.text(st.sampled_from("ab<€"), min_size=1, max_size=4), max_size=3)


def table(pieces: list[bytes]) -> Callable[[int], bytes]:
    return lambda token_id: pieces[token_id]


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p for p in points if p < len(data))})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def run(tokens: list[bytes], stops: list[str], step_len: int) -> tuple[str, int, bool]:
    detokenizer = Detokenizer(table(tokens), stops)
    text, count = "", 0
    for start in range(0, len(tokens) or 1, step_len):
        ids = list(range(start, min(start + step_len, len(tokens))))
        step = detokenizer.push(ids, len(ids) - 1, is_last=start + step_len >= len(tokens))
        text += "".join(piece.text for piece in step.pieces)
        count += step.num_tokens
        if step.is_stopped:
            return text, count, True
    return text, count, False


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The stop string that is complete first ends the text where it starts; of several, the longest does."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)[1]], True) if found else (text, False)


@given(BYTES, st.lists(st.integers(1, 11)), STOPS, st.integers(1, 5))
def test_any_split_gives_the_same_text(data: bytes, points: list[int], stops: list[str], step_len: int) -> None:
    text, _, is_stopped = run(cut(data, points), stops, step_len)
    assert (text, is_stopped) == expected(data.decode(errors="replace"), stops)


@given(BYTES, STOPS)
def test_step_size_does_not_matter_for_token_counts(data: bytes, stops: list[str]) -> None:
    tokens = cut(data, list(range(1, len(data))))
    assert run(tokens, stops, 1) == run(tokens, stops, 4)


def test_every_split_of_an_emoji() -> None:
    data = "a😀b".encode()
    for first in range(len(data)):
        for second in range(first, len(data)):
            text, _, _ = run(cut(data, [first, second]), [], 1)
            assert text == "a😀b"


def test_an_incomplete_character_is_held_and_never_valid_bytes_are_not() -> None:
    detokenizer = Detokenizer(table([b"a\xf0\x9f", b"\x98\x80", b"\xff", b"\xe2\x82", b"x"]))
    texts = ["".join(p.text for p in detokenizer.push([i], 0).pieces) for i in range(5)]
    assert texts == ["a", "😀", "\ufffd", "", "\ufffdx"]


def test_flush_shows_what_stays_incomplete() -> None:
    detokenizer = Detokenizer(table([b"ok\xf0\x9f"]))
    assert detokenizer.push([0], 0, is_last=True).pieces == (Piece("ok", False), Piece("\ufffd", False))


def test_a_possible_stop_string_is_held_and_released_when_it_fails() -> None:
    detokenizer = Detokenizer(table([b"one <", b"|e", b"xit"]), ["<|end|>"])
    assert detokenizer.push([0], 1).pieces == (Piece("one ", True),)
    assert detokenizer.push([1], 0).pieces == ()
    assert detokenizer.push([2], 0).pieces == (Piece("<", True), Piece("|e", False), Piece("xit", False))


@pytest.mark.parametrize("num_accepted", [0, 2, 4])
def test_a_stop_string_inside_a_step_cuts_text_and_tokens(num_accepted: int) -> None:
    detokenizer = Detokenizer(table([b"keep S", b"TO", b"P tail", b"more"]), ["STOP"])
    step = detokenizer.push([0, 1, 2, 3], num_accepted)
    assert step.is_stopped
    assert step.num_tokens == 3
    assert step.pieces == (Piece("keep ", num_accepted > 0),)


def test_pieces_say_which_tokens_were_drafts() -> None:
    detokenizer = Detokenizer(table([b"a", b"", b"c"]))
    assert detokenizer.push([0, 1, 2], 2).pieces == (Piece("a", True), Piece("", True), Piece("c", False))


@pytest.mark.parametrize("step_len", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [
        (0, ""),
        (1, ""),  # "ab" is complete with the second token
        (2, "ab<"),  # the "ab" within two tokens does not count, the one that ends the fifth does
        (3, "ab<"),
        (5, "ab<ab<€"),
        (99, "ab<ab<€<b"),
    ],
)
def test_stop_strings_within_the_first_tokens_do_not_count(min_tokens: int, text: str, step_len: int) -> None:
    tokens = [piece.encode() for piece in ("a", "b", "<", "a", "b", "<", "€", "<", "b")]
    detokenizer = Detokenizer(table(tokens), ["ab", "<b"], min_tokens)
    found = ""
    for start in range(0, len(tokens), step_len):
        ids = list(range(start, min(start + step_len, len(tokens))))
        step = detokenizer.push(ids, 0, is_last=start + step_len >= len(tokens))
        found += "".join(piece.text for piece in step.pieces)
        if step.is_stopped:
            break
    assert found == text


def test_a_shorter_stop_string_in_what_is_held_back_does_not_count_later() -> None:
    tokens = [b"x", b"a", b"b", b"c", b"d"]
    detokenizer = Detokenizer(table(tokens), ["xabcy", "ab"], min_tokens=3)
    steps = [detokenizer.push([token_id], 0, is_last=token_id == 4) for token_id in range(5)]
    assert not any(step.is_stopped for step in steps)
    assert "".join(piece.text for step in steps for piece in step.pieces) == "xabcd"
