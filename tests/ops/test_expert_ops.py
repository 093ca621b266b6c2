"""The ops of a mixture of experts on few tokens: references against loops, bad experts, refusals, the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import ops
from torch.library import opcheck

from quarot.ops.expert_gemm_w4a4 import expert_gemm_w4a4
from quarot.ops.expert_route import expert_route
from quarot.ops.expert_sum import expert_sum
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.quantization.packing import pack_int4_tiles, pack_int8

HALVES = [torch.float16, torch.bfloat16, torch.float32]


def gemm_arguments(m: int = 5, top_k: int = 3, experts: int = 4, n: int = 48, k: int = 72) -> tuple[torch.Tensor, ...]:
    codes = pack_int8(torch.randint(-128, 128, (m, k), dtype=torch.int8))
    tiles = [pack_int4_tiles(torch.randint(-8, 8, (n, k), dtype=torch.int8)) for _ in range(experts)]
    expert = torch.randint(experts, (m, top_k))
    return codes, torch.rand(m), expert, torch.stack(tiles), torch.rand(experts, n)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_each_row_is_the_gemm_of_its_expert(dtype: torch.dtype) -> None:
    codes, row_scale, expert, qweight, scale = gemm_arguments()
    out = expert_gemm_w4a4(codes, row_scale, expert, qweight, scale, dtype)
    assert out.shape == (15, 48) and out.dtype == dtype
    for m in range(5):
        for f in range(3):
            e = int(expert[m, f])
            row = slice(m, m + 1)
            alone = gemm_w4a4(codes[row], row_scale[row], qweight[e], scale[e], None, dtype)
            assert torch.equal(out[m * 3 + f], alone[0])


def test_an_expert_that_does_not_exist_gives_nan() -> None:
    codes, row_scale, expert, qweight, scale = gemm_arguments()
    expected = expert_gemm_w4a4(codes, row_scale, expert, qweight, scale, torch.float32)
    expert[1, 2], expert[4, 0] = 4, -1
    out = expert_gemm_w4a4(codes, row_scale, expert, qweight, scale, torch.float32)
    bad = torch.tensor([5, 12])
    assert out[bad].isnan().all()
    expected[bad] = torch.nan
    assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.zeros(5, 64, dtype=torch.int8), r"qweight \(4, 3, 3, 256\) does not fit codes \(5, 64\)"),
        (1, torch.ones(4), r"row_scale \(4,\) does not fit"),
        (2, torch.zeros(4, 3, dtype=torch.int64), r"expert \(4, 3\) does not fit"),
        (2, torch.zeros(5, 3, dtype=torch.int32), r"expert must be torch.int64 on cpu, got torch.int32"),
        (4, torch.ones(4, 40), "does not fit"),
        (4, torch.ones(3, 48), r"qweight \(4, 3, 3, 256\) does not fit"),
        (0, torch.tensor(1, dtype=torch.int8), "does not fit"),
        (2, torch.tensor(1), "does not fit"),
        (2, torch.zeros(5, 3, 1, dtype=torch.int64), "does not fit"),
        (3, torch.tensor(1, dtype=torch.uint8), "does not fit"),
        (4, torch.tensor(1.0), "does not fit"),
        (5, torch.int32, "out_dtype torch.int32 holds no fractions"),
    ],
)
def test_what_does_not_fit_is_refused(place: int, value: torch.Tensor, message: str) -> None:
    arguments: list[Any] = [*gemm_arguments(), torch.float16]
    arguments[place] = value
    with pytest.raises(ValueError, match=message):
        expert_gemm_w4a4(*arguments)


@pytest.mark.parametrize("normalize", [True, False])
def test_routing_is_the_top_of_the_softmax(normalize: bool) -> None:
    logits = torch.randn(7, 20)
    weight, expert = expert_route(logits, 4, normalize, torch.float32)
    value, index = logits.softmax(-1).topk(4)
    assert torch.equal(expert, index)
    torch.testing.assert_close(weight, value / value.sum(-1, keepdim=True) if normalize else value)


def test_equal_logits_go_to_the_first_experts() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [0.0, -0.0, 0.0, -1.0, 0.0], [1.0, torch.nan, 2.0, 5.0, 0.0]])
    weight, expert = expert_route(logits, 2, True, torch.float16)
    assert expert.tolist() == [[1, 2], [0, 1], [1, 3]]
    assert weight[:2].tolist() == [[0.5, 0.5]] * 2 and weight[2].isnan().all()
    with pytest.raises(ValueError, match="top_k=6 at most E"):
        expert_route(logits, 6, True, torch.float16)
    with pytest.raises(ValueError, match=r"must be floats, got torch.float32 and torch.int64"):
        expert_route(logits, 2, True, torch.int64)  # all weights would be 0


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=str)
def test_experts_are_added_in_their_order(dtype: torch.dtype) -> None:
    x, weight = torch.randn(12, 24, dtype=dtype), torch.rand(4, 3)
    out = expert_sum(x, weight)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    for t in range(4):
        total = torch.zeros(24, dtype=kind)
        for j in range(3):
            total = total + x[3 * t + j].to(kind) * weight[t, j].to(kind)
        assert torch.equal(out[t], total.to(dtype))
    with pytest.raises(ValueError, match=r"must be \[T \* top_k, N\]"):
        expert_sum(x[:11], weight)
    with pytest.raises(ValueError, match=r"must be floats, got .* and torch.int64"):
        expert_sum(x, weight.long())
    assert torch.equal(expert_sum(x[:0], weight[:, :0]), torch.zeros(4, 24, dtype=dtype))


def test_schemas() -> None:
    opcheck(ops.quarot.expert_gemm_w4a4.default, (*gemm_arguments(), torch.float16))
    opcheck(ops.quarot.expert_route.default, (torch.randn(3, 8), 2, True, torch.float16))
    opcheck(ops.quarot.expert_sum.default, (torch.randn(6, 16), torch.rand(3, 2)))


def test_the_compiler_takes_a_whole_block() -> None:
    codes, row_scale, _, qweight, scale = gemm_arguments()

    def block(logits: torch.Tensor) -> torch.Tensor:
        weight, expert = expert_route(logits, 3, True, torch.float32)
        return expert_sum(expert_gemm_w4a4(codes, row_scale, expert, qweight, scale, torch.float32), weight)

    logits = torch.randn(5, 4)
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    assert torch.equal(compiled(logits), block(logits))
