"""Scores of tokens on the wire and off it."""

from __future__ import annotations

from collections.abc import Iterable

from dspark.v1 import types_pb2

from kernels.token_scores import TokenScore

__all__ = ["TokenScore", "scores_from_pb", "scores_to_pb"]


def scores_to_pb(scores: Iterable[TokenScore]) -> list[types_pb2.TokenScore]:
    """One message a token."""
    return [
        types_pb2.TokenScore(
            logprob=each.logprob, rank=each.rank, top_token_ids=each.top_ids, top_logprobs=each.top_logprobs
        )
        for each in scores
    ]


def scores_from_pb(messages: Iterable[types_pb2.TokenScore]) -> list[TokenScore]:
    """One score a token."""
    return [
        TokenScore(each.logprob, each.rank, tuple(each.top_token_ids), tuple(each.top_logprobs)) for each in messages
    ]
