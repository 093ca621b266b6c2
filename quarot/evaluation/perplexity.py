"""Perplexity by the protocol of GPTQ and QuaRot (paper, section 5), to the letter, so that figures are comparable.

One string, tokenised once; cut into ``floor(tokens / window)`` windows that do not overlap, the remainder dropped; each
window seen alone, without a cache; per window the mean of ``window - 1`` next-token losses in float32; the perplexity
is the exponential of the mean over windows.

Keys and values count as they are quantised: without a cache the attention function ``"quarot"`` quantises and
dequantises all of them, with the integers that the cache would hold.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quarot.calibration.windows import check_token_ids
from quarot.integrations.transformers.plain_attention import fused_float32_attention
from quarot.memory import out_of_memory
from quarot.progress import progress_bar

_LOSS_ROWS = 2048
"""Rows of logits widened to float32 at a time: a 128k vocabulary takes 1 GB."""


@dataclass(frozen=True)
class PerplexityResult:
    """What was measured.

    Attributes:
        ppl: ``exp(nll)``.
        nll: mean negative log-likelihood of a token, in nats.
        windows: windows seen.
        tokens: tokens in those windows.
        seconds: wall time.
        window_nll: the mean of each window, in order.
    """

    ppl: float
    nll: float
    windows: int
    tokens: int
    seconds: float = 0.0
    window_nll: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"perplexity {self.ppl:.4f} ({self.windows} windows, {self.tokens} tokens, {self.seconds:.0f} s)"


def encode(tokenizer: Any, text: str) -> Tensor:
    """int64 [tokens]: the whole text at once, with the special tokens the tokenizer itself adds (Llama: one BOS)."""
    # The text is longer than the model's context on purpose; `verbose` silences the tokenizer's warning about it.
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)


def perplexity(
    model: Any,
    tokenizer: Any,
    text: str | Tensor | None = None,
    *,
    window: int = 2048,
    max_windows: int | None = None,
    batch_size: int = 1,
    progress: bool = True,
) -> PerplexityResult:
    """Perplexity of a causal language model on a text.

    Args:
        model: a transformers causal-LM model, on any device; not changed.
        tokenizer: its tokenizer; or token ids [tokens], and no text.
        text: the text as one string; or token ids [tokens].
        window: tokens a window (the papers: 2048).
        max_windows: look at the first ones only.
        batch_size: windows at once.
        progress: show a progress bar.

    Raises:
        ValueError: less than one window of text, or sizes that make no sense.
        FloatingPointError: the model's loss is NaN or infinite, with the window it happened in.
    """
    check_sizes(window, batch_size, max_windows)
    ids = _ids(tokenizer, text)
    check_token_ids(model, ids)
    count = len(ids) // window
    if not len(ids):
        raise ValueError("the text is empty")
    if count == 0:
        raise ValueError(
            f"the text has {len(ids)} tokens, fewer than one window of {window}: "
            f"pass window={len(ids)} (--window {len(ids)})"
        )
    count = min(count, max_windows or count)
    windows = ids[: count * window].view(count, window)
    device = model.get_input_embeddings().weight.device
    start, losses = time.monotonic(), []
    training = model.training
    model.eval()
    try:
        batches = list(windows.split(batch_size))
        what = f"a perplexity of windows of {batch_size} x {window} tokens"
        lower = f"batch_size (now {batch_size}) or window (now {window})"
        with fused_float32_attention(model), out_of_memory(what, lower):
            for batch in progress_bar(batches, "perplexity", progress):
                losses += _window_losses(model, batch.to(device)).tolist()
                wrong = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
                if wrong is not None:
                    raise FloatingPointError(f"the loss of window {wrong} is {losses[wrong]}: the model overflows")
    finally:
        model.train(training)
    nll = sum(losses) / count
    ppl = math.exp(nll) if nll < 700 else math.inf
    return PerplexityResult(ppl, nll, count, windows.numel(), time.monotonic() - start, tuple(losses))


def check_sizes(window: int, batch_size: int, max_windows: int | None) -> None:
    """Raise ValueError for a size that makes no sense."""
    if type(window) is not int or window < 2:
        raise ValueError(f"window={window!r} must be an integer, at least 2")
    if batch_size is None:
        raise ValueError("batch_size=None must be an integer, at least 1")
    check_at_least_1(batch_size=batch_size, max_windows=max_windows)


def check_at_least_1(**sizes: int | None) -> None:
    """Raise ValueError for a size, by name, that is neither None nor a positive integer."""
    for name, value in sizes.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} must be an integer, at least 1")


def _ids(tokenizer: Any, text: str | Tensor | None) -> Tensor:
    ids = tokenizer if text is None else text
    if isinstance(ids, str):
        if not callable(tokenizer):
            raise ValueError("a perplexity of text needs a tokenizer: perplexity(model, tokenizer, text)")
        ids = encode(tokenizer, ids)
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        raise ValueError("perplexity needs a tokenizer and a text, or integer token ids")
    return ids.reshape(-1).to(torch.int64).cpu()


@torch.inference_mode()
def _window_losses(model: Any, batch: Tensor) -> Tensor:
    """Mean next-token loss of each window: int64 [B, W] -> float64 [B] on the CPU."""
    logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
    targets = batch[:, 1:].to(logits.device)
    losses = []
    for rows, wanted in zip(logits, targets, strict=True):
        parts = zip(rows.split(_LOSS_ROWS), wanted.split(_LOSS_ROWS), strict=True)
        total = sum(F.cross_entropy(r.float(), w, reduction="sum").double() for r, w in parts)
        losses.append(total / len(wanted))
    return torch.stack(losses).cpu()
