"""The drafter executor: DSpark weights, draft K/V pages, and the gRPC service around them."""
