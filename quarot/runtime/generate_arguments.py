"""Checks of what ``quarot.generate`` is called with: by name, and before a GPU is asked anything it cannot answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quarot.calibration.windows import check_token_ids
from quarot.field_types import check_seed, check_types


@dataclass(frozen=True)
class Numbers:
    """The numbers among the arguments; making one checks them."""

    max_new_tokens: int
    prefill_chunk: int
    seed: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("max_new_tokens", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"generate: {name}={getattr(self, name)} must be at least 1")
        check_seed("generate: seed", self.seed)


def check_tokens(model: Any, ids: Any, mask: Any) -> None:
    """Raise ValueError for a prompt that the model cannot read, or a mask that does not fit it."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel() or ids.dtype != torch.int64:
        raise ValueError(f"generate: input_ids must be int64 [batch >= 1, tokens >= 1], got {_what(ids)}")
    device = model.get_input_embeddings().weight.device
    if ids.device != device:
        raise ValueError(f"generate: input_ids are on {ids.device}, the model on {device}")
    check_token_ids(model, ids)
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.shape != ids.shape or mask.device != device:
        raise ValueError(f"generate: attention_mask must be {list(ids.shape)} on {device}, got {_what(mask)}")
    if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask[:, -1].all()):
        raise ValueError("generate: attention_mask must hold 0 and 1, and 1 in its last column: pad on the left")


def check_streamer(streamer: Any, batch: int) -> None:
    """Raise ValueError for what cannot take the tokens of one row."""
    if streamer is None:
        return
    if not (callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))):
        raise ValueError(f"generate: a streamer has put(tokens) and end(), got {streamer!r}")
    if batch != 1:
        raise ValueError(f"generate: a streamer takes one row, got a batch of {batch}")


def _what(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"


def end_tokens(model: Any, eos: int | Iterable[int] | None) -> Tensor:
    """The tokens that end a row, int64 on the model's device: those given, else the model's own."""
    if eos is None:
        eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    given = eos.tolist() if isinstance(eos, Tensor) else eos
    values = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    if not all(type(value) is int for value in values):
        raise ValueError(f"generate: eos_token_id={eos!r} must be a token id or several")
    return torch.tensor(values, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
