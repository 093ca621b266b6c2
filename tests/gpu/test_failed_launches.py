"""A launch that fails is told once.

The CUDA runtime keeps the last error, and whoever asks next how its own launch went would be told of it.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from quarot.ops import registry
from quarot.ops.gemm_w8a8 import gemm_w8a8
from quarot.ops.quantize_per_token import DTYPE_CODES
from quarot.ops.rope import rope

decode_op = importlib.import_module("quarot.ops.decode_attention")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or registry.extension() is None, reason="needs a GPU and the compiled extension"
)

FORM = (128, 4, 4, 128, 128)
HALF = DTYPE_CODES[torch.float16]


def others_work() -> None:
    """What asks the runtime how its launch went: a kernel launched by <<<>>>, and CUTLASS."""
    qkv, table = torch.randn(4, 3 * 128, device="cuda", dtype=torch.float16), torch.ones(4, 128, device="cuda")
    rope(qkv, table.half(), table.half(), 1, 1, 128, None, None, 0.0)
    codes = torch.randint(-8, 8, (256, 256), dtype=torch.int8, device="cuda")
    weight, scale = torch.ones(256, 256, dtype=torch.int8, device="cuda"), torch.ones(256, device="cuda")
    out = gemm_w8a8(codes, scale, weight, scale, None, torch.float16)
    assert torch.equal(out.float()[:, 0], codes.sum(1).float())


def attend(plan: tuple[int, ...]) -> None:
    """One sequence of 64 tokens, as planned."""
    query = torch.zeros(1, 1, 8, 128, device="cuda", dtype=torch.float16)
    out, lse = torch.empty_like(query), torch.empty(8, device="cuda")
    pool = torch.zeros(1, 2, 4, 2176, dtype=torch.uint8, device="cuda")
    table, length = (torch.full((1, 1), x, dtype=torch.int32, device="cuda") for x in (0, 64))
    pointers = [x.data_ptr() for x in (query, pool, table, length, out, lse)]
    sizes = (HALF, 1, 1, 8, 2, 1, 1, 4, 0, True, 0, 0, 1.0)
    stream = torch.cuda.current_stream().cuda_stream
    registry.extension().decode_attention(*pointers, 0, 0, 0, 0, *FORM, *sizes, *plan, stream)  # type: ignore[union-attr]


def plan(*tuning: int, heads: tuple[int, int] = (8, 2), tokens: int = 64) -> list[int]:
    found = registry.extension().decode_plan(*FORM, HALF, 1, 1, *heads, tokens, *tuning)  # type: ignore[union-attr]
    return list(found)


def test_a_failed_launch_is_told_once() -> None:
    good = plan()
    for place, value in ((4, 64), (5, 100)):  # 64 warps a CTA, or a ring of 100 stages: no GPU takes either
        bad = good.copy()
        bad[place] = value
        with pytest.raises(RuntimeError, match=r"decode_attention: invalid .*batch=1, tokens=1, "):
            attend(tuple(bad))
        others_work()
    attend(tuple(good))
    torch.cuda.synchronize()


def test_clusters_that_find_no_place_are_no_error() -> None:
    """A ring too large for shared memory: the plan asks the runtime, which refuses, and goes without clusters."""
    assert plan(0, 100, 0, 0, False, 0, 8)[8] == 0
    others_work()
