"""More calibration text from the model itself, for what is trained on it.

A few hundred thousand tokens are enough for the second moments that GPTQ needs, but training on them for many rounds
learns them by heart: the divergence falls on the calibration text and not on any other. The teacher can answer for any
tokens, so windows are varied: in every round, some tokens of each window are replaced by samples from the
full-precision model's own prediction at their place. The text drifts from the calibration text towards what the model
itself would write (the aim of data-free training, Liu et al., 2023, LLM-QAT), at one forward pass a round instead of
one a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

REPLACED = 0.5
"""Share of the tokens that a round replaces."""
_ROWS = 2048


@torch.no_grad()
def resampled_windows(model: Any, windows: Tensor, rounds: int, seed: int, batch_size: int = 8) -> Tensor:
    """The windows [W, T] followed by their ``rounds`` resampled versions: int64 [(rounds + 1) * W, T] on the CPU.

    Args:
        model: a full-precision causal-LM model; its logits are sampled as they are, at temperature 1.
        windows: int64 [W, T]; the first token of each stays.
        rounds: each resamples the result of the one before.
        seed: of the samples (per device type: a GPU draws others than a CPU).
        batch_size: windows that go through the model at once.
    """
    device = model.get_input_embeddings().weight.device
    generator = torch.Generator(device).manual_seed(seed)
    versions = [windows]
    for _ in range(rounds):
        steps = [_resample(model, ids.to(device), generator).cpu() for ids in versions[-1].split(batch_size)]
        versions.append(torch.cat(steps))
    return torch.cat(versions)


def _resample(model: Any, ids: Tensor, generator: torch.Generator) -> Tensor:
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    scale = 1.0 / float(getattr(model.config, "logits_scaling", None) or 1.0)
    drawn = [_sample(model.lm_head(rows).float() * scale, generator) for rows in states.flatten(0, 1).split(_ROWS)]
    replaced = torch.rand(ids[:, 1:].shape, device=ids.device, generator=generator) < REPLACED
    return torch.cat([ids[:, :1], torch.where(replaced, torch.cat(drawn).view_as(replaced), ids[:, 1:])], dim=1)


def _sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One token a row, by the Gumbel trick (``torch.multinomial`` is limited to 2^24 outcomes and slower)."""
    uniform = torch.rand(logits.shape, device=logits.device, generator=generator).clamp_(1e-9, 1 - 1e-7)
    return (logits - uniform.log_().neg_().log_()).argmax(-1)
