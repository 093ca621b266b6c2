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
"""From a batch of windows and their targets to a scalar."""

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
        FloatingPointError: the loss or its gradient is not finite; the parameters are worthless then.
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

    def forget() -> None:
        optimizer.zero_grad(set_to_none=True)

    def eager() -> Tensor:
        forget()
        return step()

    begin = time.monotonic()
    run = _recorded(step, forget) if graphed and steps > _EAGER_STEPS else None
    if seconds is not None:
        steps = min(steps, _affordable(run or eager, device, seconds - (time.monotonic() - begin)))
    draws = _batches(trained, batch_size, seed)
    losses: list[Tensor] = []
    best = _Best([p for group in groups for p in group["params"]])
    watch = _HeldOut(loss_of, ids, wanted, windows[trained:], targets[trained:], recorded=run is not None)
    for index in progress_bar(range(steps), description, progress, steps):
        chosen = next(draws)
        ids.copy_(windows[chosen])
        wanted.copy_(targets[chosen])
        _set_rates(optimizer, index, steps)
        losses.append((run or eager)().clone())
        if held and _is_looked_at(index, steps):
            best.look(watch.loss())
    best.restore()
    forget()
    found = torch.stack(losses).tolist() if losses else []
    # A gradient that is not finite in the last step shows in no loss.
    finite = torch.stack([p.isfinite().all() for group in groups for p in group["params"]])
    if not (all(map(math.isfinite, found)) and finite.all()):
        raise FloatingPointError(f"{description}: the loss or its gradient is not finite; lower the learning rate")
    return found


def _batches(windows: int, size: int, seed: int) -> Iterator[list[int]]:
    """Numbers of ``size`` windows at a time, for ever: all of them, in a random order, before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while True:
        if len(order) < size:
            order += torch.randperm(windows, generator=generator).tolist()
        yield order[:size]
        order = order[size:]


def _is_looked_at(index: int, steps: int) -> bool:
    """Whether the held-out loss counts behind this step: ``_LOOKS`` times or so in the second half, and at the end."""
    return 2 * index >= steps - 1 and (steps - 1 - index) % max(1, steps // (2 * _LOOKS)) == 0


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


class _HeldOut:
    """The loss on the held-out windows; batches of the training's size through its buffers, recorded like its steps."""

    def __init__(
        self, loss_of: Loss, ids: Tensor, wanted: Tensor, windows: Tensor, targets: Tensor, recorded: bool
    ) -> None:
        self.loss_of, self.ids, self.wanted, self.windows, self.targets = loss_of, ids, wanted, windows, targets
        self.records = recorded
        self.run: Callable[[], Tensor] | None = None

    @torch.no_grad()
    def loss(self) -> float:
        """Mean over the windows, as the parameters are now."""
        size = len(self.ids)
        parts = zip(self.windows.split(size), self.targets.split(size), strict=True)
        return sum(float(self._loss_of(*part)) * len(part[0]) for part in parts) / len(self.windows)

    def _loss_of(self, ids: Tensor, wanted: Tensor) -> Tensor:
        if len(ids) < len(self.ids):
            return self.loss_of(ids.to(self.ids.device), wanted.to(self.ids.device))
        self.ids.copy_(ids)
        self.wanted.copy_(wanted)
        if self.records:
            self.records, self.run = False, _recorded(self._forward)
        return (self.run or self._forward)()

    def _forward(self) -> Tensor:
        return self.loss_of(self.ids, self.wanted)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """What the model has already (embeddings, norms) gets no gradients, and is fp32 where it is fp16.

    So the hidden states are fp32: the gradient of a mean over thousands of tokens is below what fp16 can hold.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    narrow = [p for p in model.parameters() if p.dtype == torch.float16]
    for parameter in trained:
        parameter.requires_grad_(False)
    for parameter in narrow:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter in narrow:
            parameter.data = parameter.data.half()
        for parameter in trained:
            parameter.requires_grad_(True)


def _recorded(step: Callable[[], Tensor], prepare: Callable[[], None] = lambda: None) -> Callable[[], Tensor] | None:
    """The step as a CUDA graph; None, with a warning, when it cannot be recorded.

    It is tried first, at a learning rate of zero, which allocates what a graph may not; ``prepare`` precedes each time.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_EAGER_STEPS):
            prepare()
            step()
    torch.cuda.current_stream().wait_stream(side)
    prepare()
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
