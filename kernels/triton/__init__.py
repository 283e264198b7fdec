"""What the Triton kernels of several operations share. An operation's own kernels are in its folder's `triton.py`."""
