"""What fused kernels replace, in plain torch: the same results by a launch for each operation, without a value read.

All can be captured, so that a comparison is of what the device does and not of the host's launches.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scatter(row_lens: Tensor, packed: Tensor, padded: Tensor) -> None:
    """`kernels.ragged_rows`: packed [M, H] to padded [R + 1, W, H], whose last request takes the rows of nobody."""
    num_requests, width = len(row_lens), padded.shape[1]
    ends = row_lens.cumsum(0)
    rows = torch.arange(len(packed), device=packed.device)
    owner = torch.searchsorted(ends, rows, right=True)
    starts = torch.cat((ends - row_lens, ends[-1:]))
    places = (rows - starts[owner]).clamp(max=width - 1)
    places = torch.where(owner < num_requests, places, 0)
    padded.view(-1, padded.shape[2]).index_copy_(0, owner * width + places, packed)


def schedule(survivals: Tensor, limits: Tensor, budget: Tensor, lens: Tensor) -> None:
    """`kernels.verify_lens`: one stable sort of all drafts, [R, G]; earlier slots, then earlier rows win ties."""
    num_rows, num_slots = survivals.shape
    slots = torch.arange(num_slots, device=survivals.device)
    by_slot = torch.where(slots[None] < limits[:, None], survivals, 0.0).T.flatten()
    order = torch.sort(by_slot, descending=True, stable=True).indices
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    is_chosen = (ranks < budget) & (by_slot > 0)
    lens.copy_(is_chosen.view(num_slots, num_rows).sum(0))


def accept(logits: Tensor, draft_ids: Tensor, draft_probs: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`kernels.rejection_sample` of full windows: logits [R, G + 1, V], draft_ids [R, G], draft_probs [R, G, V].

    Returns accepted lengths [R] and the token after them [R]; the noise is torch's own.
    """
    num_rows, num_drafts = draft_ids.shape
    target_probs = torch.softmax(logits.float() / temperature, -1)
    index = draft_ids.long()[..., None]
    target = target_probs[:, :num_drafts].gather(2, index)[..., 0]
    draft = draft_probs.gather(2, index)[..., 0]
    is_accepted = torch.rand_like(target) * draft < target
    accepted_lens = is_accepted.int().cumprod(1).sum(1)
    residual = (target_probs[:, :num_drafts] - draft_probs).clamp(min=0)
    pending = torch.cat((residual, target_probs[:, num_drafts:]), 1)
    chosen = pending[torch.arange(num_rows, device=logits.device), accepted_lens]
    return accepted_lens, (chosen / torch.empty_like(chosen).exponential_()).argmax(-1)


def sample_blocks(
    base_logits: Tensor, w1: Tensor, w2: Tensor, anchor_ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """`kernels.markov_sample`, vanilla: base_logits [R, G, V]; drafts [R, G] and their distributions [R, G, V]."""
    previous, tokens, distributions = anchor_ids.long(), [], []
    for slot in range(base_logits.shape[1]):
        logits = base_logits[:, slot].float() + (w1[previous] @ w2.T).float()
        probs = torch.softmax(logits / temperature, -1)
        previous = (probs / torch.empty_like(probs).exponential_()).argmax(-1)
        tokens.append(previous)
        distributions.append(probs)
    return torch.stack(tokens, 1), torch.stack(distributions, 1)
