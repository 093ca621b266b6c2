"""What the benchmarks of the activation kernels share: widths, the ordinary PyTorch chains, checks before timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.peers import copy_floor
from benchmarks.report import Row
from benchmarks.shapes import Options
from benchmarks.timing import Call, measure, roof_us
from quarot.rotation.hadamard import hadamard_matrix, hadamard_spec
from quarot.rotation.spec import HadamardSpec

BITS, CLIP = 4, 0.9


def tokens(options: Options) -> tuple[int, ...]:
    """Values of M: a decode step, small batches, prefill."""
    return options.tokens if options.quick else (1, 16, 256, 2048, 16384)


def spec_of(width: int) -> HadamardSpec:
    """The full-width transform that rotation uses for this width."""
    spec = hadamard_spec(width)
    assert spec is not None
    return spec


def keeping(function: Callable[[], Any]) -> Call:
    """``function`` as a call that keeps its last result, so that calls in one graph write to memory of their own."""
    kept: list[Any] = [None]

    def call() -> None:
        kept[0] = function()

    return call


def torch_hadamard(spec: HadamardSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """The transform as two fp16 matmuls with dense factors."""
    pow2 = spec.pow2 if spec.order > 1 else 64
    order = hadamard_matrix(spec.order) if spec.order > 1 else hadamard_matrix(spec.pow2 // 64)
    left = (order.double() * spec.size**-0.5).to("cuda", torch.float16)
    right = hadamard_matrix(pow2).to("cuda", torch.float16)
    return lambda x: torch.matmul(left, x.view(-1, left.shape[0], pow2) @ right).view(x.shape)


def torch_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token codes and scale in plain PyTorch."""
    scale = x.abs().amax(-1, keepdim=True).float() * (CLIP / 7)
    return (x / scale).round().clamp(-8, 7).to(torch.int8), scale


def torch_silu_mul(pair: torch.Tensor) -> torch.Tensor:
    gate, up = pair.chunk(2, -1)
    return F.silu(gate) * up


def row_per_peer(
    op: str,
    model: str,
    layer: str,
    m: int,
    width: int,
    nbytes: int,
    make: Callable[[], Call],
    unfused: Callable[[], Call],
    others: Mapping[str, Callable[[], Call]] = MappingProxyType({}),
) -> Iterator[Row]:
    """Time ``make`` against a copy of the same bytes, against the unfused chain and against ``others``."""
    us = measure(make, nbytes)
    makes = {"copy_floor": copy_floor(nbytes), "torch_unfused": unfused, **others}
    peers = {peer: measure(peer_make, nbytes) for peer, peer_make in makes.items()}
    for peer, peer_us in peers.items():
        yield Row(
            op, model, layer, m=m, k=width, dtype="float16", us=us, roof_us=roof_us(nbytes), peer=peer, peer_us=peer_us
        )
    torch.cuda.empty_cache()


def same_codes(actual: torch.Tensor, expected: torch.Tensor, op: str, share: float) -> None:
    """Raise unless codes differ by at most one, in fewer than ``share`` of places."""
    difference = (actual.int() - expected.int()).abs()
    if difference.max() > 1 or difference.count_nonzero() > share * difference.numel():
        raise AssertionError(
            f"{op} differs from its reference: {difference.count_nonzero()} of {difference.numel()} codes"
        )
