"""Target distribution of a row after temperature, top-k, top-p and min-p.

`target_probs(logits, sampling) -> probs` in `reference.py` and `cpu.py`. Shapes: logits [n, V] float32, probs [n, V]
float64. Double precision costs little beside the forward and keeps sums over a whole vocabulary, ratios to draft
probabilities and inverse-CDF draws free of a bias that could be measured.

Order (that of `transformers`): temperature, top-k, top-p, min-p. Tokens are ranked by logit, highest first, equal
logits by id, lowest first; every filter keeps a prefix of that ranking, never an empty one:
top-k the first k; top-p the shortest prefix holding at least top_p of the mass that top-k left; min-p the tokens with
at least min_p times the largest probability. A greedy row is a point mass on its first-ranked token.

A logit of -inf is a masked token (probability 0). NaN, +inf, or no finite logit at all is an InvalidRowError.
"""

from __future__ import annotations


class InvalidRowError(ValueError):
    """Numbers of one row that no distribution can be made of: the row fails, its neighbours do not."""
