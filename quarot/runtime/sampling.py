"""Choosing the next token on the GPU: greedy, or temperature with top-k and top-p; a graph can record it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quarot.field_types import check_types
from quarot.ops.argmax_rows import argmax_rows

_COLDEST = 1e-30
"""Logits divided by less overflow."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: sample among the k most likely tokens only; None for all.
        top_p: sample among the fewest tokens whose probabilities reach p; None for all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.temperature != 0 and self.temperature < _COLDEST:
            raise ValueError(f"temperature={self.temperature!r} must be 0 (greedy), or {_COLDEST} or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k!r} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} must be above 0 and at most 1")

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Token ids int64 [B] from logits [B, vocabulary], in fp32; no host sync."""
        if self.temperature == 0:
            return argmax_rows(logits)
        scores = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[:, -1:], -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = scores.sort(dim=-1, descending=True)
            probability = ordered.softmax(-1)
            # A token stays while the more likely ones have not reached p; the most likely one always stays.
            dropped = probability.cumsum(-1) - probability >= self.top_p
            scores = scores.scatter(-1, order, ordered.masked_fill(dropped, -torch.inf))
        # The largest of p / Exponential(1) is a sample of p: no sync, unlike torch.multinomial.
        noise = torch.empty_like(scores).exponential_(generator=generator)
        return (scores.softmax(-1) / noise).argmax(-1)
