"""The gated activation of a feed-forward layer."""
