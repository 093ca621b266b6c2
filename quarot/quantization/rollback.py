"""Taking back a quantisation that failed halfway: every replaced linear layer is kept until the whole model is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from quarot.nn.quant_linear import linear_weight


class Rollback:
    """The linear layers of a model as they were before any of them was quantised.

    Args:
        model: its modules get replaced, and its weights perhaps changed, later on.
        names: of the linear layers that will be replaced.

    Memory: what is replaced stays, in CPU memory once :meth:`park` has been told of it.
    """

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        self._model = model
        self._layers = {name: model.get_submodule(name) for name in names}
        self._biases = {name: getattr(layer, "bias", None) for name, layer in self._layers.items()}
        self._homes = {name: linear_weight(layer).device for name, layer in self._layers.items()}
        self._weights: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._rotation = getattr(model, "quarot_rotation", None)
        self._config = getattr(model.config, "quantization_config", None)

    def park(self, names: Iterable[str]) -> None:
        """These layers have been replaced: the device needs their memory no more."""
        for name in names:
            self._layers[name].to("cpu")

    def keep_weights(self) -> None:
        """The weights are about to change in place (a learned rotation): remember all of them, in CPU memory."""
        self._weights = [(p, p.detach().to("cpu", copy=True)) for p in self._model.parameters()]

    @torch.no_grad()
    def undo(self) -> None:
        """The model as it was: modules, devices, weights, biases and the record of its rotation."""
        for name, layer in self._layers.items():
            layer.bias = self._biases[name]
            self._model.set_submodule(name, layer)
        for name, layer in self._layers.items():  # only now is the memory of the integers free
            layer.to(self._homes[name])
        for parameter, values in self._weights:
            parameter.copy_(values)
        if getattr(self._model, "quarot_rotation", None) is not self._rotation:
            from quarot.integrations.transformers import attach

            self._model.quarot_rotation = self._rotation
            attach(self._model, self._config)  # type: ignore[arg-type]
