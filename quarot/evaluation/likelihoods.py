"""Log-likelihoods of continuations, batch by batch, as lm-eval's ``HFLM`` defines them.

``HFLM`` waits for the device several times a request; here a batch is waited for once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quarot.progress import progress_bar

Request = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as text, then as token ids, neither of them empty."""


def likelihoods(
    logits_of: Callable[[Tensor], Tensor],
    requests: Sequence[Request],
    *,
    batch_size: int,
    max_length: int,
    device: torch.device,
    **_: Any,
) -> list[tuple[float, bool]]:
    """For each request the log-likelihood of its continuation, and whether greedy decoding would produce it.

    Args:
        logits_of: from token ids [B, T], padded on the right, to logits [B, T, V].
        requests: in any order; those of similar length share a batch, the longest come first.
        batch_size: of them.
        max_length: tokens that the model sees; longer contexts lose their beginning.
        device: of the token ids.

    Raises:
        ValueError: a continuation of more than ``max_length`` tokens, or logits that are NaN.
    """
    longest = max((len(continuation) for _, _, continuation in requests), default=0)
    if longest > max_length:
        raise ValueError(f"a continuation has {longest} tokens; the model sees {max_length}")
    order = sorted(range(len(requests)), key=lambda index: -sum(map(len, requests[index][1:])))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    answers: dict[int, tuple[float, bool]] = {}
    for batch in progress_bar(batches, "scoring", total=len(batches)):
        tokens = [(requests[i][1] + requests[i][2])[-max_length - 1 :] for i in batch]
        lengths = [len(requests[i][2]) for i in batch]
        ids = torch.zeros(len(batch), max(map(len, tokens)) - 1, dtype=torch.int64)
        for row, own in zip(ids, tokens, strict=True):
            row[: len(own) - 1] = torch.tensor(own[:-1])
        # The logits behind token t are of token t + 1: rows and places of those that predict the continuations.
        rows = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(lengths)).to(device)
        ends = zip(tokens, lengths, strict=True)
        places = torch.cat([torch.arange(len(own) - 1 - n, len(own) - 1) for own, n in ends]).to(device)
        wanted = torch.tensor([token for i in batch for token in requests[i][2]]).to(device)
        scores = logits_of(ids.to(device))[rows, places].float().log_softmax(-1)
        found = scores.gather(1, wanted[:, None])[:, 0]
        missed = (scores.argmax(-1) != wanted).to(found.dtype)
        sums = torch.zeros(2, len(batch), device=device, dtype=found.dtype)
        sums.index_add_(1, rows, torch.stack([found, missed]))
        for index, likelihood, misses in zip(batch, *sums.tolist(), strict=True):
            if math.isnan(likelihood):
                raise ValueError(f"the log-likelihood of {requests[index][0][1]!r} is nan: so are the model's logits")
            answers[index] = likelihood, misses == 0
    return [answers[index] for index in range(len(requests))]
