"""The inner loop of GPTQ: rounding the columns of one block, one after the other.

A block is B columns of a weight with N rows, held transposed [B, N] so that the columns it walks are contiguous. Each
column takes about eight tiny kernels; on a GPU a block is recorded once as a CUDA graph and replayed, because launching
them one by one would take several times longer than running them.
"""

from __future__ import annotations

import torch

from quarot.recording import recording

_MOST_GRAPHS = 8


def round_block(
    block: torch.Tensor,
    factor: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bits: int,
    codes: torch.Tensor,
    errors: torch.Tensor,
) -> None:
    """Round B columns in order; every rounding error moves into the columns behind it.

    Args:
        block: [B, N] fp32, overwritten: row i becomes column i as it was when it was rounded.
        factor: [B, B] upper triangular part of U.
        scale, zero: [B, N] fp32, of every column (zero None when symmetric).
        bits: of the codes.
        codes, errors: [B, N] fp32, written: integers, and errors divided by the diagonal of ``factor``.
    """
    half = 2 ** (bits - 1)
    # masked_fill, not where: a scalar in where is a copy from the host, which no graph can record.
    inverse_scale = scale.reciprocal().masked_fill_(scale <= 0, 0.0)
    inverse_diagonal = factor.diagonal().reciprocal()[:, None]
    value = torch.empty_like(block[0])
    for i in range(block.shape[0]):
        code, error = codes[i], errors[i]
        torch.mul(block[i], inverse_scale[i], out=code)
        code.round_()
        if zero is not None:
            code.add_(zero[i])
        code.clamp_(-half, half - 1)
        if zero is None:
            torch.mul(code, scale[i], out=value)
        else:
            torch.sub(code, zero[i], out=value).mul_(scale[i])
        torch.sub(block[i], value, out=error).mul_(inverse_diagonal[i])
        block[i + 1 :].addr_(factor[i, i + 1 :], error, alpha=-1)


class BlockRounder:
    """:func:`round_block` for blocks of one shape; on a GPU from the second block on as a CUDA graph."""

    def __init__(self, columns: int, rows: int, bits: int, symmetric: bool, device: torch.device) -> None:
        def buffer(width: int) -> torch.Tensor:
            return torch.empty(columns, width, device=device)

        self.bits = bits
        self.block, self.scale, self.codes, self.errors = (buffer(rows) for _ in range(4))
        self.zero = None if symmetric else buffer(rows)
        self.factor = buffer(columns)
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self, block: torch.Tensor, factor: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(codes, errors, values before rounding), each [B, N], valid until the next call."""
        self.block.copy_(block)
        self.factor.copy_(factor)
        self.scale.copy_(scale)
        if self.zero is not None and zero is not None:
            self.zero.copy_(zero)
        if self._graph is not None:
            self._graph.replay()
        elif self.block.is_cuda and self._calls == 1:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(self.block.device), recording(self._graph):
                self._run()
            self._graph.replay()
        else:
            self._run()
        self._calls += 1
        return self.codes, self.errors, self.block

    def _run(self) -> None:
        round_block(self.block, self.factor, self.scale, self.zero, self.bits, self.codes, self.errors)


_rounders: dict[tuple[object, ...], BlockRounder] = {}


def rounder(columns: int, rows: int, bits: int, symmetric: bool, device: torch.device) -> BlockRounder:
    """A rounder for this shape; on a GPU the last few are kept, so that all layers of a model share their graphs."""
    if device.type != "cuda":
        return BlockRounder(columns, rows, bits, symmetric, device)
    key = (columns, rows, bits, symmetric, device)
    found = _rounders.pop(key, None) or BlockRounder(columns, rows, bits, symmetric, device)
    _rounders[key] = found
    while len(_rounders) > _MOST_GRAPHS:
        del _rounders[next(iter(_rounders))]
    return found


def forget_rounders() -> None:
    """Free the graphs and their buffers."""
    _rounders.clear()
