"""Running a model's own decoder layers one at a time on calibration windows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quarot.architectures import architecture_of, decoder, decoder_layers

TOKENS_PER_STEP = 16384
"""Tokens that go through a layer at once on a GPU; on a CPU it is one window."""


class LayerInputs:
    """The hidden states in front of a decoder layer, and the other arguments of every layer.

    Attributes:
        hidden: one set of hidden states [windows, length, hidden] in the model's dtype; ``advance`` overwrites them by
            the layer's outputs.
        steps: views of it, a few windows each.
    """

    def __init__(self, model: nn.Module, windows: torch.Tensor, device: torch.device | None) -> None:
        body = decoder(model)
        layers = [layer for _, layer in decoder_layers(model)]
        home = model.get_submodule(architecture_of(model).embed).weight.device
        self.device = device or home
        step = max(1, TOKENS_PER_STEP // windows.shape[1]) if self.device.type == "cuda" else 1
        hidden: torch.Tensor | None = None
        self._arguments: dict[tuple[int, int], tuple[tuple[Any, ...], dict[str, Any]]] = {}
        for start in range(0, len(windows), step):
            ids = windows[start : start + step]
            with _recorded(layers) as calls, torch.no_grad():
                body(input_ids=ids.to(home), use_cache=False)
            if hidden is None:  # all at once: gathered, they would be there twice for a moment
                hidden = calls[0][0].new_empty(len(windows), *calls[0][0].shape[1:], device=self.device)
            hidden[start : start + step].copy_(calls[0][0])
            for index, (_, args, kwargs) in enumerate(calls):
                self._arguments.setdefault((index, ids.shape[0]), (args, kwargs))
        assert hidden is not None
        self._hold(hidden, step)

    def _hold(self, hidden: torch.Tensor, step: int) -> None:
        self.hidden, self.steps = hidden, hidden.split(step)

    def copy(self) -> LayerInputs:
        """A second set of hidden states that starts from the same ones."""
        twin = copy.copy(self)
        twin._hold(self.hidden.clone(), len(self.steps[0]))
        return twin

    def run(self, index: int, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """The output of decoder layer ``index`` for one step of hidden states, on the layer's device."""
        device = next(layer.parameters()).device
        args, kwargs = self.arguments(index, hidden.shape[0], device)
        with torch.no_grad():
            out = layer(hidden.to(device), *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    def arguments(self, index: int, rows: int, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The other arguments of decoder layer ``index`` for that many windows; they are the same for all windows."""
        recorded = [count for layer, count in self._arguments if layer == index]
        count = rows if rows in recorded else recorded[0]

        def fitting(tensor: torch.Tensor) -> torch.Tensor:
            if count != rows and tensor.ndim and len(tensor) == count:
                tensor = tensor[:1].expand(rows, *tensor.shape[1:])
            return tensor.to(device)

        args, kwargs = self._arguments[index, count]
        return _mapped(args, fitting), _mapped(kwargs, fitting)

    def advance(self, index: int, layer: nn.Module) -> None:
        """Replace every step by the layer's output."""
        for hidden in self.steps:
            hidden.copy_(self.run(index, layer, hidden))


@contextmanager
def _recorded(layers: list[nn.Module]) -> Iterator[list[tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]]]:
    """Let hidden states pass through all decoder layers untouched, and record what each layer is called with."""
    calls: list[tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]] = []

    def passed(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((hidden_states, args, kwargs))
        return hidden_states

    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = passed
    try:
        yield calls
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Tensors inside tuples, lists and dicts changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value
