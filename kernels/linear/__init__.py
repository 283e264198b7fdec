"""Linear layers through packed weights, whose rows do not depend on the rows beside them."""

from kernels.linear.linear import Linear, WeightFormat, make_linear, make_quantized_linear

__all__ = ["Linear", "WeightFormat", "make_linear", "make_quantized_linear"]
