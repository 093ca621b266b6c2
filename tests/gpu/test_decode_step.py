"""The kernels at both ends of a decode step against their references."""

from __future__ import annotations

import pytest
import torch

from quarot.ops import argmax_rows as argmax
from quarot.ops import begin_step as begin

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [4096, 576, 90], ids=["vectors", "smollm2", "unaligned"])
@pytest.mark.parametrize("batch", [1, 7])
def test_begin_step(batch, hidden, dtype):
    embedding = torch.randn(1000, hidden, device="cuda").to(dtype)
    ids = torch.randint(0, 1000, (batch, 1), device="cuda")
    ids[-1] = 1000 if batch > 1 else 3  # not in the vocabulary
    before = torch.randint(0, 200, (batch,), device="cuda", dtype=torch.int32)
    positions = torch.randint(0, 131072, (batch, 1), device="cuda")
    table = torch.randperm(3 * batch, device="cuda").int().view(batch, 3)  # pages for 192 tokens
    frequency = 1.0 / (10000.0 ** (torch.arange(0, 128, 2, dtype=torch.float32, device="cuda") / 128))
    state, expected_state = [before.clone(), positions.clone()], [before.clone(), positions.clone()]
    torch.full((batch, 3 * hidden), torch.nan, device="cuda", dtype=dtype)  # poison, freed again
    got = begin.cuda(ids, embedding, *state, table, frequency, 1.25, 64, True)
    expected = begin.reference(ids, embedding, *expected_state, table, frequency, 1.25, 64, True)
    for ours, theirs in zip((*got, *state), (*expected, *expected_state), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 5, 1000, 32000, 128256, 151936])
def test_argmax_rows(columns, dtype):
    x = torch.randn(4, columns, device="cuda").to(dtype)
    x[1] = x[1].round()  # ties
    x[2, columns // 2] = torch.nan
    x[3] = -torch.inf
    assert torch.equal(argmax.cuda(x), x.argmax(-1))
    strided = torch.randn(3, columns + 1, device="cuda").to(dtype)[:, 1:]
    assert torch.equal(argmax.cuda(strided), strided.argmax(-1))
    assert argmax.cuda(x[:0]).shape == (0,)
