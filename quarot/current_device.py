"""Where kernels go that ask PyTorch for its current GPU and look at no tensor: Triton's, and CUDA graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def current(device: torch.device) -> AbstractContextManager[object]:
    """A GPU is the current one inside the block; other devices change nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
