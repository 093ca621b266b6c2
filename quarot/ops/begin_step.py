"""``begin_step``: what every layer of a decode step needs and only the new token decides, in one kernel.

Notation: B rows with one new token each, V vocabulary, H hidden, R rotary dims, W pages a row of the table holds, P
tokens a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quarot.ops import registry
from quarot.ops.quantize_per_token import DTYPE_CODES

Step = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _check(ids: Tensor, embedding: Tensor, before: Tensor, positions: Tensor, table: Tensor, inverse: Tensor) -> None:
    batch = ids.numel()
    kinds = (ids.dtype, before.dtype, positions.dtype, table.dtype, inverse.dtype)
    if kinds != (torch.int64, torch.int32, torch.int64, torch.int32, torch.float32):
        raise ValueError(
            "begin_step: ids, before, positions, table and inverse_frequency must be int64, int32, int64, int32 and "
            f"float32, got {', '.join(map(str, kinds))}"
        )
    if before.shape != (batch,) or positions.numel() != batch or table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(
            f"begin_step: {batch} ids do not fit before {tuple(before.shape)}, positions {tuple(positions.shape)} and "
            f"table {tuple(table.shape)}"
        )
    if embedding.dim() != 2 or inverse.dim() != 1:
        raise ValueError(
            f"begin_step: embedding {tuple(embedding.shape)} and inverse_frequency {tuple(inverse.shape)} must be "
            "[V, H] and [R / 2]"
        )
    tensors = (ids, embedding, before, positions, table, inverse)
    if len({t.device for t in tensors}) > 1 or not all(t.is_contiguous() for t in tensors):
        raise ValueError("begin_step: its tensors must be contiguous, and on one device")


def reference(
    ids: Tensor,
    embedding: Tensor,
    before: Tensor,
    positions: Tensor,
    table: Tensor,
    inverse_frequency: Tensor,
    scaling: float,
    page_size: int,
    advance: bool,
) -> Step:
    """Specification, operation by operation."""
    _check(ids, embedding, before, positions, table, inverse_frequency)
    token = ids.view(-1)
    known = (token >= 0) & (token < embedding.shape[0])
    hidden = embedding[token.clamp(0, embedding.shape[0] - 1)].masked_fill(~known[:, None], torch.nan)
    page = before.long() // page_size
    inside = page < table.shape[1]
    pages = table.gather(1, page.clamp(max=table.shape[1] - 1)[:, None])[:, 0].long()
    slots = (pages * page_size + before % page_size).masked_fill(~inside, -1)
    lengths = before + 1
    angle = positions.view(-1, 1).float() * inverse_frequency
    angle = torch.cat([angle, angle], dim=-1)
    cos, sin = ((t * scaling).to(embedding.dtype) for t in (angle.cos(), angle.sin()))
    if advance:
        before.add_(1)
        positions.add_(1)
    return hidden, lengths, slots, cos, sin


def _empty(ids: Tensor, embedding: Tensor, inverse_frequency: Tensor) -> Step:
    batch, rotary = ids.numel(), 2 * inverse_frequency.shape[0]
    hidden = embedding.new_empty(batch, embedding.shape[1])
    lengths = ids.new_empty(batch, dtype=torch.int32)
    return hidden, lengths, ids.new_empty(batch), embedding.new_empty(batch, rotary), embedding.new_empty(batch, rotary)


def fake(
    ids: Tensor, embedding: Tensor, before: Tensor, positions: Tensor, table: Tensor, inverse: Tensor, *rest: object
) -> Step:
    """Shapes and dtypes of the outputs."""
    return _empty(ids, embedding, inverse)


def cuda(
    ids: Tensor,
    embedding: Tensor,
    before: Tensor,
    positions: Tensor,
    table: Tensor,
    inverse_frequency: Tensor,
    scaling: float,
    page_size: int,
    advance: bool,
) -> Step:
    """Launches csrc/decode_step/begin_step.cu."""
    _check(ids, embedding, before, positions, table, inverse_frequency)
    outputs = _empty(ids, embedding, inverse_frequency)
    if not ids.numel():
        return outputs
    with torch.cuda.device(ids.device):
        registry.extension().begin_step(  # type: ignore[union-attr]
            *(t.data_ptr() for t in (ids, embedding, before, positions, table, inverse_frequency, *outputs)),
            embedding.shape[0],
            embedding.shape[1] * embedding.element_size(),
            ids.numel(),
            table.shape[1],
            page_size,
            2 * inverse_frequency.shape[0],
            scaling,
            DTYPE_CODES[embedding.dtype],
            advance,
            registry.stream(ids),
        )
    return outputs


def available(ids: Tensor, embedding: Tensor, *rest: object) -> str | None:
    """Why the kernel cannot serve (None when it can)."""
    return None if embedding.dtype in DTYPE_CODES else f"no kernel for {embedding.dtype}"


begin_step = registry.define_op(
    "begin_step",
    "(Tensor ids, Tensor embedding, Tensor(a!) before, Tensor(b!) positions, Tensor table, Tensor inverse_frequency, "
    "float scaling, int page_size, bool advance)"
    " -> (Tensor hidden, Tensor lengths, Tensor slots, Tensor cos, Tensor sin)",
    reference=reference,
    fake=fake,
    cuda=cuda,
    available=available,
)
begin_step.__doc__ = """Embedding, place in the cache and rotary tables of one new token a row.

Args:
    ids: int64, B elements. embedding: [V, H]. An id outside 0 .. V-1 gives a row of NaN.
    before: int32 [B], tokens each row holds. positions: int64, B elements. Both move on by one if ``advance``.
    table: int32 [B, W] page ids.
    inverse_frequency: fp32 [R / 2]. scaling: of cosine and sine.
    page_size: P.

Returns:
    hidden [B, H]; lengths int32 [B], before + 1; slots int64 [B], -1 where the table has no page for the token; cos
    and sin [B, R] in the embedding's dtype, in transformers' layout (both halves alike).
"""
