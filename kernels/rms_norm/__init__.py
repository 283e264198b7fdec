"""Root-mean-square norm along a row, alone or fused with the residual addition before it."""
