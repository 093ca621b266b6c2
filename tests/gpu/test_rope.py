"""The RoPE kernel against its reference in float64."""

import pytest
import torch

from quarot.ops.registry import device_reason
from quarot.ops.rope import _reference, rope

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or device_reason(0) is not None, reason="needs a GPU and the compiled extension"
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim", "norm"),
    [
        (1, 32, 32, 128, 128, False),
        (37, 9, 3, 64, 64, False),
        (130, 8, 2, 128, 128, True),
        (5, 4, 4, 96, 48, False),
        (3, 2, 1, 256, 128, True),
        (6, 17, 2, 256, 256, True),
    ],
    ids=["llama", "smollm2", "qwen3", "partial", "partial-norm", "wide-norm"],
)
def test_rope_matches_float64(dtype, tokens, heads, kv_heads, head_dim, rotary_dim, norm):
    generator = torch.Generator(device="cuda").manual_seed(0)
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(tokens, width + 8, generator=generator, device="cuda").to(dtype)[:, :width]
    angle = torch.randn(tokens, rotary_dim // 2, generator=generator, device="cuda")
    cos, sin = (torch.cat([t, t], -1).to(dtype) for t in (angle.cos(), angle.sin()))
    gains = (
        [1 + 0.1 * torch.randn(head_dim, generator=generator, device="cuda").to(dtype) for _ in range(2)]
        if norm
        else [None, None]
    )
    exact = qkv.double()
    _reference(exact, cos.double(), sin.double(), heads, kv_heads, head_dim, *gains, 1e-5)
    got = qkv.clone()
    rope(got, cos, sin, heads, kv_heads, head_dim, *gains, 1e-5)
    rounding = (exact.to(dtype).double() - exact).abs().max()
    assert (got.double() - exact).abs().max() <= 2 * rounding + 1e-6
    assert torch.equal(got[:, (heads + kv_heads) * head_dim :], qkv[:, (heads + kv_heads) * head_dim :])


@pytest.mark.parametrize("offset", [0, 1], ids=["vectors", "unaligned"])
def test_rows_of_a_batch_share_the_tables(offset):
    """Three rows of 11 tokens over tables of 11, also where no load can take 16 bytes."""
    qkv = torch.randn(33, 40 * 128 + 8, device="cuda", dtype=torch.float16)[:, : 40 * 128]
    cos, sin = (torch.randn(11, 128, device="cuda", dtype=torch.float16) for _ in range(2))
    want = qkv.clone()
    rope(want, cos.repeat(3, 1), sin.repeat(3, 1), 32, 4, 128, None, None, 1e-5)
    memory = torch.empty(33 * 40 * 128 + 8, device="cuda", dtype=torch.float16)
    got = memory[offset : offset + qkv.numel()].view(qkv.shape).copy_(qkv)
    rope(got, cos, sin, 32, 4, 128, None, None, 1e-5)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_no_tokens():
    rope(
        torch.empty(0, 64, device="cuda"),
        torch.empty(1, 16, device="cuda"),
        torch.empty(1, 16, device="cuda"),
        1,
        1,
        16,
        None,
        None,
        1e-5,
    )
