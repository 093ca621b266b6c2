"""The kernels of a mixture of experts against their references: integers and float steps equal, not close."""

from __future__ import annotations

import pytest
import torch

from quarot.ops import expert_gemm_w4a4 as expert_gemm
from quarot.ops.expert_route import expert_route
from quarot.ops.expert_sum import expert_sum
from quarot.ops.registry import device_reason, reference_backend

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or device_reason(0) is not None, reason="needs a GPU and the compiled extension"
)
HALVES = [torch.float16, torch.bfloat16, torch.float32]
# tokens, experts a token, experts, outputs, inputs
SIZES = [
    (1, 8, 128, 1536, 2048),
    (1, 1, 1, 16, 32),
    (11, 8, 128, 1536, 256),
    (3, 5, 7, 80, 96),
    (16, 8, 128, 2048, 768),
    (16, 16, 16, 144, 2080),
    (64, 2, 8, 4096, 224),
    (256, 1, 3, 48, 64),
    (4, 2, 8, 28672, 512),
]


def problem(m: int, top_k: int, experts: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(m * k + n)

    def numbers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cuda", dtype=dtype)

    codes, qweight = numbers(-128, 128, m, k), numbers(0, 256, experts, n // 16, k // 32, 256, dtype=torch.uint8)
    # As a router gives them: no expert twice for a token, where there are enough.
    if top_k <= experts:
        expert = torch.rand(m, experts, generator=generator, device="cuda").argsort(-1)[:, :top_k].contiguous()
    else:
        expert = numbers(0, experts, m, top_k, dtype=torch.int64)
    scales = (torch.rand(shape, generator=generator, device="cuda") for shape in ((m,), (experts, n)))
    row_scale, weight_scale = scales
    return codes, row_scale, expert, qweight, weight_scale


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "-".join(map(str, size)))
def test_gemm(size: tuple[int, ...]) -> None:
    arguments = problem(*size)
    for dtype in HALVES:
        got = expert_gemm.expert_gemm_w4a4(*arguments, dtype)
        assert torch.equal(got, expert_gemm.reference(*arguments, dtype))


def test_gemm_where_all_go_to_one_expert_and_some_to_none() -> None:
    codes, row_scale, expert, qweight, weight_scale = problem(32, 4, 40, 96, 256)
    expert[:] = 7
    expert[3, 1], expert[31, 3] = -1, 40
    got = expert_gemm.expert_gemm_w4a4(codes, row_scale, expert, qweight, weight_scale, torch.float16)
    expected = expert_gemm.reference(codes, row_scale, expert, qweight, weight_scale, torch.float16)
    assert got[[13, 127]].isnan().all()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    expert[:] = 99
    got = expert_gemm.expert_gemm_w4a4(codes, row_scale, expert, qweight, weight_scale, torch.float16)
    assert got.isnan().all()


def test_gemm_recorded_follows_its_experts() -> None:
    arguments = problem(4, 8, 64, 256, 512)
    out = expert_gemm.expert_gemm_w4a4(*arguments, torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = expert_gemm.expert_gemm_w4a4(*arguments, torch.float16)
    for _ in range(3):
        arguments[2].random_(0, 64)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expert_gemm.reference(*arguments, torch.float16))


@pytest.mark.parametrize("top_k", [1, 8])
def test_gemm_looks_again_at_experts_chosen_right_before(top_k: int) -> None:
    """The kernel in front lets it start before it has written them."""
    codes, row_scale, _, qweight, weight_scale = problem(16 if top_k == 8 else 128, top_k, 64, 256, 512)
    logits = torch.randn(16, 64, device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        _, expert = expert_route(logits, 8, True, torch.float32)
        expert = expert.view(-1, top_k)
        return expert, expert_gemm.expert_gemm_w4a4(codes, row_scale, expert, qweight, weight_scale, torch.float16)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expert, out = step()
    for _ in range(20):
        logits.normal_()
        graph.replay()
        assert torch.equal(out, expert_gemm.reference(codes, row_scale, expert, qweight, weight_scale, torch.float16))


@pytest.mark.parametrize("experts", [4, 8, 33, 128, 160, 512])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_route(experts: int, dtype: torch.dtype) -> None:
    logits = torch.randn(19, experts, device="cuda").to(dtype)
    logits[3] = 0.5  # all equal
    logits[4, 1] = torch.nan
    logits[5, 2:] = -torch.inf
    for normalize in (True, False):
        weight, expert = expert_route(logits, min(8, experts), normalize, torch.float32)
        with reference_backend():
            expected, places = expert_route(logits, min(8, experts), normalize, torch.float32)
        assert torch.equal(expert, places)
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("width", [8, 768, 2048, 4104])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sum(width: int, dtype: torch.dtype) -> None:
    for top_k in (1, 2, 8, 11):
        x = torch.randn(5 * top_k, width, device="cuda").to(dtype)
        for kind in HALVES:
            weight = torch.rand(5, top_k, device="cuda").to(kind)
            got = expert_sum(x, weight)
            with reference_backend():
                assert torch.equal(got, expert_sum(x, weight))
