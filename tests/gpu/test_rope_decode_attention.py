"""The kernel that stores the new token and attends, against the two ops it stands for."""

from __future__ import annotations

import pytest
import torch

from quarot.ops.decode_attention import decode_attention
from quarot.ops.kv_layout import KVLayout
from quarot.ops.registry import device_reason
from quarot.ops.rope_decode_attention import available, rope_decode_attention
from quarot.ops.rope_kv_append import rope_kv_append

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or device_reason(0) is not None, reason="needs a GPU and the compiled extension"
)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
PAGE = 64
# (head_dim, bits), query heads, kv heads, rotary dims, head norms
CASES = {
    "llama-2": ((128, 4), 32, 32, 128, False),
    "llama-3": ((128, 4), 32, 8, 128, False),
    "qwen3": ((128, 4), 16, 2, 128, True),
    "partial-8-bits": ((128, 8), 6, 2, 64, False),
    "smollm": ((64, 4), 9, 3, 64, False),
}


class Problem:
    """Rows of these lengths, the last token of each still missing from the cache."""

    def __init__(self, case: str, dtype: torch.dtype, lengths: list[int], steps: int = 1) -> None:
        (dim, bits), self.heads, kv_heads, rotary, norm = CASES[case]
        self.form = (bits, bits, dim, dim)
        layout = KVLayout(dim, *self.form)
        batch, pages = len(lengths), -(-(max(lengths) + steps) // PAGE)
        torch.manual_seed(batch)
        self.pool = torch.randint(0, 60, layout.pool_shape(batch * pages, kv_heads, PAGE), device="cuda").to(
            torch.uint8
        )
        order = torch.randperm(batch * pages, device="cuda").int()
        self.table = order.view(batch, pages)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.qkv = torch.randn(steps, batch, (self.heads + 2 * kv_heads) * dim, device="cuda").to(dtype)
        angle = torch.randn(steps, batch, rotary // 2, device="cuda").repeat(1, 1, 2)
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self.gains = [torch.rand(dim, device="cuda").to(dtype) + 0.5 if norm else None for _ in range(2)]
        self.rotation, self.scale = (1, dim), dim**-0.5

    def place(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = self.lengths + step
        page = self.table.gather(1, ((lengths.long() - 1) // PAGE)[:, None])[:, 0].long()
        return page * PAGE + (lengths.long() - 1) % PAGE, lengths

    def arguments(self, step: int, pool: torch.Tensor, window: int = 0) -> tuple:
        slots, lengths = self.place(step)
        start = (self.qkv[step], self.cos[step], self.sin[step], pool, slots, self.table, lengths, self.heads)
        return *start, *self.form, 0.95, 1.0, *self.rotation, *self.gains, 1e-6, self.scale, window

    def two_ops(self, step: int, pool: torch.Tensor, window: int = 0) -> torch.Tensor:
        slots, lengths = self.place(step)
        rest = (*self.form, 0.95, 1.0, *self.rotation, *self.gains, 1e-6)
        query = rope_kv_append(self.qkv[step], self.cos[step], self.sin[step], pool, slots, self.heads, *rest)
        how = (*self.form, self.scale, window, 0, 0)
        return decode_attention(query[:, None], pool, self.table, lengths, *how)[0].flatten(1)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # The two kernels may cut sequences differently: fp32 sums of other pieces, rounded to the dtype.
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    assert error < {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-3}[ours.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("lengths", [[1], [17], [64], [65], [1025], [8000], [1, 64, 500, 3], [300] * 20, [700] * 70])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_two_ops(case, lengths, dtype):
    problem = Problem(case, dtype, lengths)
    ours, theirs = problem.pool.clone(), problem.pool.clone()
    assert available(*problem.arguments(0, ours)) is None
    out, expected = rope_decode_attention(*problem.arguments(0, ours)), problem.two_ops(0, theirs)
    assert torch.equal(ours, theirs)
    close(out, expected)


def test_window():
    problem = Problem("llama-3", torch.float16, [1000, 70, 3])
    ours, theirs = problem.pool.clone(), problem.pool.clone()
    out = rope_decode_attention(*problem.arguments(0, ours, 128))
    close(out, problem.two_ops(0, theirs, 128))


@pytest.mark.parametrize("lengths", [[40], [1000], [5, 90, 200]])
def test_steps_back_to_back(lengths):
    """Each step attends to the token the one before stored; nothing waits for the device in between."""
    problem = Problem("llama-2", torch.float16, lengths, steps=80)
    ours, theirs = problem.pool.clone(), problem.pool.clone()
    arguments = [problem.arguments(step, ours) for step in range(80)]
    out = [rope_decode_attention(*a) for a in arguments]
    expected = [problem.two_ops(step, theirs) for step in range(80)]
    assert torch.equal(ours, theirs)
    close(torch.stack(out), torch.stack(expected))


def test_a_full_row_and_a_missing_slot_store_nothing():
    problem = Problem("llama-3", torch.float16, [100, 100])
    pool = problem.pool.clone()
    arguments = list(problem.arguments(0, pool))
    arguments[4] = torch.tensor([-1, -1], device="cuda")
    rope_decode_attention(*arguments)
    assert torch.equal(pool, problem.pool)


def test_what_has_no_kernel_is_named():
    problem = Problem("llama-3", torch.float16, [10])
    arguments = list(problem.arguments(0, problem.pool))
    arguments[1], arguments[2] = arguments[1][:, :48], arguments[2][:, :48]
    assert "R 48" in available(*arguments)
