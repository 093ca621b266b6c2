"""Calibration tokens: windows drawn at random from a text, as in GPTQ and the paper (section 5: 128 of 2048)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_JOINT = "\n\n"


def calibration_windows(calibration: Any, tokenizer: Any, *, samples: int, length: int, seed: int) -> torch.Tensor:
    """int64 [samples, length] token windows.

    Args:
        calibration: a text, an iterable of texts (joined by a blank line), a path of a text file, a ``datasets``
            dataset with a ``text`` column, token ids [n] to draw from, or token ids [windows, length] as they are.
        tokenizer: a transformers tokenizer; not needed for token ids.
        samples, length: how many windows, and tokens in each.
        seed: of ``random.Random``; offsets are ``randint(0, n - length - 1)``, so windows may overlap.

    Raises:
        ValueError: nothing to draw from, or fewer than ``length + 1`` tokens.
        TypeError: a kind of calibration data that is not listed above, or text without a tokenizer.
    """
    if isinstance(calibration, torch.Tensor) and calibration.dim() == 2 and _holds_ids(calibration):
        if not calibration.numel():
            raise ValueError(f"calibration ids of shape {tuple(calibration.shape)} hold no tokens")
        return calibration.long().cpu()
    ids = _token_ids(calibration, tokenizer)
    if ids.numel() <= length:
        raise ValueError(
            f"the calibration text has {ids.numel()} tokens; windows of calibration_length={length} need at least"
            f" {length + 1}: give more text, or set calibration_length to {max(ids.numel() - 1, 1)} or less"
            f"{_perhaps_a_path(calibration)}"
            if ids.numel() > 1
            else "the calibration text is empty: give some text, or quantise without calibration (w_method='rtn')"
        )
    draw = random.Random(seed)
    starts = [draw.randint(0, ids.numel() - length - 1) for _ in range(samples)]
    return torch.stack([ids[start : start + length] for start in starts])


def check_token_ids(model: Any, ids: torch.Tensor) -> None:
    """Raise ValueError where ids are outside the model's vocabulary: on a GPU such an index ends the process."""
    size = model.get_input_embeddings().weight.shape[0]
    low, high = (int(bound) for bound in ids.aminmax()) if ids.numel() else (0, 0)
    if low < 0 or high >= size:
        raise ValueError(
            f"token ids from {low} to {high} do not fit a vocabulary of {size}; is the tokenizer that of this model?"
        )


def held_out(calibration: Any, tokenizer: Any, *, samples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Calibration data without its end, for :func:`calibration_windows`, and its end, int64 [samples, length].

    The end is an eighth of the data at most, so there may be fewer samples, or none.
    """
    if isinstance(calibration, torch.Tensor) and calibration.dim() == 2:
        kept = len(calibration) - min(samples, len(calibration) // 8)
        return calibration[:kept], calibration[kept:].long().cpu()
    ids = _token_ids(calibration, tokenizer)
    samples = min(samples, len(ids) // (8 * length))
    kept = len(ids) - samples * length
    return ids[:kept], ids[kept:].view(samples, length)


def _token_ids(calibration: Any, tokenizer: Any) -> torch.Tensor:
    if isinstance(calibration, torch.Tensor):
        if calibration.dim() != 1 or not _holds_ids(calibration):
            raise TypeError(
                f"calibration ids must be integers of shape [n] or [windows, length], got"
                f" {calibration.dtype} {tuple(calibration.shape)}"
            )
        return calibration.long().cpu()
    text = _text(calibration)
    if tokenizer is None:
        raise TypeError("calibration text needs a tokenizer: pass tokenizer=, or token ids as a tensor")
    if not text.strip():
        return torch.empty(0, dtype=torch.long)
    # A text is longer than the model's context on purpose; `verbose` silences the tokenizer's warning about it.
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)


def _text(calibration: Any) -> str:
    if isinstance(calibration, os.PathLike) or (isinstance(calibration, str) and _is_file(calibration)):
        return Path(calibration).read_text(encoding="utf-8")
    if isinstance(calibration, str):
        return calibration
    columns = getattr(calibration, "column_names", None)
    if columns is not None:
        if "text" not in columns:
            raise TypeError(f"a calibration dataset needs a column `text`; this one has {columns}")
        return _JOINT.join(calibration["text"])
    if isinstance(calibration, Iterable):
        parts = list(calibration)
        if all(isinstance(part, str) for part in parts):
            return _JOINT.join(parts)
    kind = type(calibration).__name__
    raise TypeError(f"calibration must be text, texts, a path, a dataset or token ids, not {kind}")


def _holds_ids(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _perhaps_a_path(calibration: Any) -> str:
    short = isinstance(calibration, str) and len(calibration) < 200 and "\n" not in calibration
    return f" ({calibration!r} is taken as the text itself: there is no such file)" if short else ""


def _is_file(text: str) -> bool:
    return len(text) < 4096 and "\n" not in text and os.path.isfile(text)
