"""Structured output: forms that answers must have, compiled by llguidance to matchers, which allow tokens.

A form is compiled once (`compiler`), a choice gets a matcher of its own (`matcher`), and before a step's rows are
verified the tokens that each may emit are written to shared memory (`token_masks`). The verifier applies them to the
target's distribution; matchers are advanced by committed tokens alone.
"""
