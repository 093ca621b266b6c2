"""``residual_bits``: an experiment that keeps the residual stream in few bits (the paper's open question, section 6).

After a rotation the stream has no outlier channels, so it can be rounded per token like any other activation. Here it
is, wherever it rests: in front of every attention block, in front of every MLP and in front of the final norm. What the
norm reads and what the block's output is added to is the same rounded stream, as if nothing else had been stored.
Sums are formed in the model's dtype and rounded once.

It is a simulation: no kernel stores the stream in codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from quarot.architectures import architecture_of, decoder_layers
from quarot.calibration.fake_quantize import fake_quantize


@contextmanager
def residual_bits(model: Any, bits: int, clip: float | None = None) -> Iterator[None]:
    """Round the residual stream of ``model`` inside the block; whatever else is quantised stays so.

    Args:
        model: of a supported family, rotated or not, quantised or not.
        bits: 2 to 8, symmetric, one scale per token; 16 changes nothing.
        clip: constant clip ratio; the default is 1.0, and at 4 bits the 0.9 of activations. (With 6 bits 0.9 costs far
            more than it gains: what is clipped is carried along by all layers behind.)

    Raises:
        ValueError: other bits.
    """
    record = architecture_of(model)
    if type(bits) is not int or not (2 <= bits <= 8 or bits == 16):
        raise ValueError(f"residual_bits={bits!r} must be from 2 to 8, or 16 to change nothing")
    ratio = (0.9 if bits == 4 else 1.0) if clip is None else clip

    def rounded(x: Tensor) -> Tensor:
        return fake_quantize(x, bits, ratio)

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (rounded(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": rounded(kwargs["hidden_states"])}

    handles = [model.get_submodule(record.final_norm).register_forward_pre_hook(lambda _, args: rounded(args[0]))]
    for _, layer in decoder_layers(model):
        middle = _Middle(rounded, float(getattr(layer, "residual_multiplier", 1.0)))
        handles += [
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.get_submodule(record.mlp_norm).register_forward_pre_hook(middle.before_norm),
            layer.get_submodule(record.mlp).register_forward_hook(middle.after_mlp),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Middle:
    """The stream between attention and MLP: the norm is given the rounded one, and so must be the sum behind the MLP.

    The layer adds the MLP's output to the stream it kept, so the rounding error goes into that output.
    """

    def __init__(self, rounded: Any, multiplier: float) -> None:
        self.rounded, self.multiplier = rounded, multiplier
        self.error: Tensor | None = None

    def before_norm(self, _: Any, args: tuple[Tensor, ...]) -> Tensor:
        stream: Tensor = self.rounded(args[0])
        self.error = stream - args[0]
        return stream

    def after_mlp(self, _: Any, args: Any, out: Tensor) -> Tensor:
        error, self.error = self.error, None
        assert error is not None
        return out + error / self.multiplier  # Granite scales what it adds
