"""One stable sort of all drafts, position by position."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def verify_lens(survivals: Tensor, limits: Tensor, budget: Tensor, lens: Tensor) -> None:
    """Writes `lens` [R] (see the package)."""
    values = survivals.numpy()
    num_rows, num_slots = values.shape
    is_candidate = (np.arange(num_slots) < limits.numpy()[:, None]) & (values > 0)  # NaN compares false
    by_position = np.where(is_candidate, values, 0.0).T.ravel()  # a stable sort then breaks ties by position, then row
    count = min(int(budget), int(np.count_nonzero(by_position)))
    order = np.argsort(-by_position, kind="stable")[:count]
    chosen = torch.from_numpy(np.bincount(order % num_rows, minlength=num_rows).astype(np.int32))
    torch.where(limits >= 0, chosen, lens, out=lens)
