"""One training loop for everything that is learned by distillation: Adam, a short warm-up, half a cosine to zero.

On a GPU the whole step (forward, backward, update) is recorded into one CUDA graph and replayed: a model of a few
hundred kernels a layer is otherwise bound by the launches. Where recording fails the loop runs eagerly.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quarot.precision import tf32
from quarot.progress import progress_bar
from quarot.recording import recording
from quarot.tuning.material import Material

logger = logging.getLogger("quarot")

Loss = Callable[[Tensor, Tensor], Tensor]
"""From token ids [B, T] and targets [B, T, hidden] to a scalar."""

_WARM_UP = 0.05
_BETAS = (0.9, 0.99)
_EAGER_STEPS = 2
_LOOKS = 8
"""How often the held-out loss is looked at, in the second half of the training."""


@tf32(True)
def optimize(
    loss_of: Loss,
    groups: list[dict[str, Any]],
    material: Material,
    *,
    steps: int,
    batch_size: int,
    seed: int,
    description: str,
    progress: bool = True,
    seconds: float | None = None,
) -> list[float]:
    """Minimise the mean of ``loss_of`` over the windows; returns the loss of every step.

    The parameters end as they were when the loss on the held-out windows was least: training that learns its text by
    heart stops counting there.

    Args:
        loss_of: the loss of a batch.
        groups: Adam's parameter groups, each with its peak learning rate ``base``.
        material: on any device; every window is drawn once before any is drawn again.
        steps, batch_size, seed: length of the training, windows a step, order of the windows.
        description, progress: of the progress bar.
        seconds: as many of the steps as fit into this time, by the duration of a trial step; None for all of them.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    device = groups[0]["params"][0].device
    windows, targets, held = material
    trained = len(windows) - held
    batch_size = min(batch_size, trained)
    graphed = device.type == "cuda"
    for group in groups:
        # A rate that lives on the device can change under a recorded step.
        group["lr"] = torch.zeros((), device=device) if graphed else 0.0
    optimizer = torch.optim.Adam(groups, betas=_BETAS, capturable=graphed, fused=graphed)
    # Buffers of their own: what a recorded step reads, and never a view of the caller's tensors.
    ids, wanted = (tensor[:batch_size].to(device, copy=True) for tensor in (windows, targets))

    def step() -> Tensor:
        loss = loss_of(ids, wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    def eager() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        return step()

    begin = time.monotonic()
    run = _recorded(step, optimizer) if graphed and steps > _EAGER_STEPS else None
    if seconds is not None:
        steps = min(steps, _affordable(run or eager, device, seconds - (time.monotonic() - begin)))
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    losses: list[Tensor] = []
    best = _Best([p for group in groups for p in group["params"]])
    for index in progress_bar(range(steps), description, progress, steps):
        if len(order) < batch_size:
            order += torch.randperm(trained, generator=generator).tolist()
        chosen, order = order[:batch_size], order[batch_size:]
        ids.copy_(windows[chosen])
        wanted.copy_(targets[chosen])
        _set_rates(optimizer, index, steps)
        losses.append((run or eager)().clone())
        if held and (steps - 1 - index) % max(1, steps // (2 * _LOOKS)) == 0 and 2 * index >= steps - 1:
            best.look(_held_loss(loss_of, windows[trained:], targets[trained:], batch_size, device))
    best.restore()
    optimizer.zero_grad(set_to_none=True)
    found = torch.stack(losses).tolist() if losses else []
    if not all(math.isfinite(loss) for loss in found):
        raise FloatingPointError(f"{description}: the loss is not finite; lower the learning rate")
    return found


class _Best:
    """The parameters as they were at the least loss that was looked at."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters, self.kept = parameters, list[Tensor]()
        self.loss = math.inf

    @torch.no_grad()
    def look(self, loss: float) -> None:
        if loss < self.loss:
            self.loss, self.kept = loss, [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, kept in zip(self.parameters, self.kept, strict=False):
            parameter.copy_(kept)


@torch.no_grad()
def _held_loss(loss_of: Loss, windows: Tensor, targets: Tensor, batch_size: int, device: torch.device) -> float:
    parts = zip(windows.split(batch_size), targets.split(batch_size), strict=True)
    return sum(float(loss_of(ids.to(device), wanted.to(device))) * len(ids) for ids, wanted in parts) / len(windows)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No gradients for what the model has already (embeddings, norms)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _recorded(step: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], Tensor] | None:
    """The step as a CUDA graph; None, with a warning, when it cannot be recorded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_EAGER_STEPS):  # at a learning rate of zero: allocates what a graph may not
            optimizer.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    try:
        with recording(graph):
            loss = step()
    except Exception as error:
        torch.cuda.synchronize()
        logger.warning("a training step cannot be recorded as a CUDA graph (%s); it runs eagerly", error)
        return None

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def _affordable(run: Callable[[], Tensor], device: torch.device, seconds: float) -> int:
    """How many steps fit into ``seconds``, at least one; tried at a learning rate of zero."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.monotonic()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    one = time.monotonic() - start
    return max(1, int((seconds - 3 * one) / one))


def _set_rates(optimizer: torch.optim.Optimizer, index: int, steps: int) -> None:
    warm = max(1, round(_WARM_UP * steps))
    factor = min(1.0, (index + 1) / warm) * 0.5 * (1 + math.cos(math.pi * index / steps))
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(group["base"] * factor)
        else:
            group["lr"] = group["base"] * factor
