"""Tensors of several linear layers as one, below each other, without a second copy: the layers' own become views."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quarot.nn.quant_linear import QuantLinear


class Joint(NamedTuple):
    """The tensors of some layers, one below the other, and where each layer's part was when they were made.

    ``state_dict`` and saving see the same names and values as before. A layer keeps its joint tensors
    (:attr:`QuantLinear.joint`) until it is moved.
    """

    qweight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    addresses: tuple[int, ...]


def joined(members: Sequence[QuantLinear]) -> Joint:
    """The joint tensors of layers that fit; made again when a member was moved or reloaded since."""
    joint: Joint | None = members[0].joint
    if torch.compiler.is_compiling() and joint is not None:  # it sees no addresses
        return joint
    if not _fits(joint, members):
        with _one_at_a_time:
            joint = members[0].joint
            if not _fits(joint, members):
                joint = Joint(*_join(members), _addresses(members))
                for m in members:
                    m.joint = joint
                QuantLinear.moves += 1
    assert joint is not None
    return joint


_one_at_a_time = threading.Lock()


def _fits(joint: Joint | None, members: Sequence[QuantLinear]) -> bool:
    return joint is not None and all(m.joint is joint for m in members) and joint.addresses == _addresses(members)


def _addresses(members: Sequence[QuantLinear]) -> tuple[int, ...]:
    """Of codes, scales and biases, from ``_parameters``, which saves Python code a look-up."""
    tensors = [m._parameters.get(name) for name in ("qweight", "weight_scale", "bias") for m in members]
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def _join(members: Sequence[QuantLinear]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if len(members) == 1:
        m = members[0]
        return m.qweight.data, m.weight_scale.data, None if m.bias is None else m.bias.data
    qweight = torch.cat([m.qweight.data for m in members])
    scale = torch.cat([m.weight_scale.data for m in members])
    bias = None
    if any(m.bias is not None for m in members):
        kind = next(m.bias for m in members if m.bias is not None)
        bias = torch.cat([kind.new_zeros(m.out_features) if m.bias is None else m.bias.data for m in members])
    if qweight.is_cuda and not torch.cuda.is_current_stream_capturing():
        # Other threads, on other streams, are to find the layers as they were or all there.
        torch.cuda.current_stream(qweight.device).synchronize()
    strip = row = 0
    for m in members:
        m.qweight.data = qweight[strip : strip + m.qweight.shape[0]]
        m.weight_scale.data = scale[row : row + m.out_features]
        if m.bias is not None and bias is not None:
            m.bias.data = bias[row : row + m.out_features]
        strip, row = strip + m.qweight.shape[0], row + m.out_features
    return qweight, scale, bias
