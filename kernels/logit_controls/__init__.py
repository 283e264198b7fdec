"""Penalties, bias and bans of a request, applied to one row of the target's logits.

`reference.py` reads the whole text for every row; `cpu.py` keeps counts and touches the tokens concerned only. Order:
bias, repetition penalty (Keskar et al. 2019, section 4.1), frequency and presence penalty, bans. Single precision
throughout, each logit from its own token's counts alone, so that the result depends on the text and on nothing else.

The *text* is the prompt and the answer so far; at a draft's row it ends with the draft before. Repetition counts all
of it and banned sequences may begin anywhere in it; frequency and presence count the answer, as OpenAI's do.
"""
