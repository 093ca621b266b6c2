"""decode_attention on the GPU: within twice the error of eager fp16 on the dequantised cache, against float64.

Every pool starts as 0xFF bytes (NaN params, NaN raw values) and page tables as absurd ids, so whatever is read beyond
the tokens of a sequence shows.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

import pytest
import torch

from quarot.ops import begin_step as _begin_step  # noqa: F401  (registers the op that the last tests start with)
from quarot.ops import registry
from quarot.ops.kv_layout import KVLayout
from quarot.ops.quantize_per_token import DTYPE_CODES

decode_op = importlib.import_module("quarot.ops.decode_attention")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or registry.extension() is None, reason="needs a GPU and the compiled extension"
)

ABSURD_PAGE = 2147480000
BUILT_IN: tuple[int, ...] = ()


def clusters(size: int, warps: int = 0, stages: int = 0) -> tuple[int, ...]:
    """A tuning that takes clusters of ``size`` (1: none)."""
    return (warps, stages, 0, 0, False, 0, size)


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...] = (1, 63, 64, 65, 777, 1000, 2049, 129)
    form: tuple[int, int, int, int, int] = (128, 4, 4, 128, 128)
    heads: tuple[int, int] = (8, 2)  # query, kv
    tokens: int = 1
    page_size: int = 64
    window: int = 0
    causal: bool = True
    rotate: tuple[int, int] = (0, 0)
    dtype: torch.dtype = torch.float16
    q_scale: float = 1.0
    tuning: tuple[int, ...] = BUILT_IN


@dataclass
class Tensors:
    query: torch.Tensor
    pool: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor


def _build(case: Case, seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    dim = case.form[0]
    layout = KVLayout(*case.form)
    q_heads, kv_heads = case.heads
    pages = [-(-length // case.page_size) for length in case.lengths]
    total, widest = sum(pages), max(pages) + 3
    pool = torch.full(layout.pool_shape(total + 2, kv_heads, case.page_size), 255, dtype=torch.uint8, device="cuda")
    table = torch.full((len(pages), widest), ABSURD_PAGE, dtype=torch.int32)
    order = torch.randperm(total + 2)
    used = 0
    for row, count in enumerate(pages):
        table[row, :count] = order[used : used + count]
        table[row, count + 1 :] = -7
        used += count
    table = table.cuda()
    for row, length in enumerate(case.lengths):
        if length == 0:
            continue
        position = torch.arange(length, device="cuda")
        slots = table[row][position // case.page_size].long() * case.page_size + position % case.page_size
        key, value = (torch.randn(length, kv_heads, dim, device="cuda", dtype=torch.float32) for _ in range(2))
        key[:, :, 3] *= 8
        torch.ops.quarot.kv_append(
            pool, key.to(case.dtype), value.to(case.dtype), slots, *case.form[1:], 0.95, 0.95, *case.rotate
        )
    query = torch.randn(len(pages), case.tokens, q_heads, dim, device="cuda") * case.q_scale
    return Tensors(query.to(case.dtype), pool, table, torch.tensor(case.lengths, dtype=torch.int32, device="cuda"))


def _arguments(case: Case) -> tuple[object, ...]:
    return (*case.form[1:], case.form[0] ** -0.5, case.window, *case.rotate, case.causal)


def _run(case: Case, x: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    return decode_op.launch(x.query, x.pool, x.page_table, x.lengths, *_arguments(case), tuning=case.tuning)


def _eager(case: Case, x: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention in ``dtype`` on the dequantised cache; scores and lse are float32 or wider."""
    out = torch.zeros(x.query.shape, dtype=dtype, device="cuda")
    lse = torch.full(x.query.shape[:3], -torch.inf, dtype=torch.float64, device="cuda")
    q_heads, kv_heads = case.heads
    query = x.query.double()
    if case.rotate != (0, 0):
        query = decode_op.rotate_heads(query, *case.rotate)
    for row, length in enumerate(case.lengths):
        if length == 0:
            continue
        position = torch.arange(length, device="cuda")
        slots = x.page_table[row][position // case.page_size].long() * case.page_size + position % case.page_size
        raw = case.dtype if case.form[1] == 16 or case.form[2] == 16 else torch.float32
        key, value = torch.ops.quarot.kv_gather(x.pool, slots, *case.form[1:], raw)
        key, value = (t.to(dtype).repeat_interleave(q_heads // kv_heads, dim=1).transpose(0, 1) for t in (key, value))
        score = (query[row].to(dtype).transpose(0, 1) @ key.transpose(1, 2)).double() * case.form[0] ** -0.5
        end = length - case.tokens + 1 + torch.arange(case.tokens, device="cuda")[:, None]
        end = end if case.causal else torch.full_like(end, length)
        hidden = position >= end
        if case.window:
            hidden |= position < end - case.window
        score = score.masked_fill(hidden, -torch.inf)
        weight = torch.nan_to_num(torch.softmax(score, -1)).to(dtype)
        out[row] = (weight @ value).transpose(0, 1)
        lse[row] = (torch.logsumexp(score, -1) / torch.log(torch.tensor(2.0))).transpose(0, 1)
    return out, lse


def check(case: Case, seed: int = 0) -> None:
    x = _build(case, seed)
    out, lse = _run(case, x)
    exact, exact_lse = _eager(case, x, torch.float64)
    half = torch.bfloat16 if case.dtype == torch.bfloat16 else torch.float16
    eager, _ = _eager(case, x, half)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    assert (out[lse.isneginf()] == 0).all()
    # Row by row: one wrong sequence must not hide among long right ones.
    for row in range(len(case.lengths)):
        error = (out[row].double() - exact[row]).norm()
        allowed = 2 * (eager[row].double() - exact[row]).norm() + 1e-4 * exact[row].norm()
        assert error <= allowed, f"row {row} of length {case.lengths[row]}: error {error:.3e}, allowed {allowed:.3e}"
    seen = ~exact_lse.isneginf()
    if seen.any():
        assert (lse.double() - exact_lse)[seen].abs().max() < (0.05 if half == torch.bfloat16 else 0.01) * case.q_scale


FORMATS = {
    "groups_64": (128, 4, 4, 64, 64),
    "groups_32": (128, 4, 4, 32, 32),
    "int2": (128, 2, 2, 128, 128),
    "int3": (128, 3, 3, 128, 128),
    "int8": (128, 8, 8, 128, 128),
    "k4_v2": (128, 4, 2, 128, 128),
    "k4_v3": (128, 4, 3, 128, 128),
    "k8_v4": (128, 8, 4, 128, 128),
    "raw": (128, 16, 16, 128, 128),
    "d64": (64, 4, 4, 64, 64),
    "d64_groups_32": (64, 4, 4, 32, 32),
    "d64_int2": (64, 2, 2, 64, 64),
    "d64_int3": (64, 3, 3, 64, 64),
    "d64_int8": (64, 8, 8, 64, 64),
    "d64_raw": (64, 16, 16, 64, 64),
    "d80": (80, 4, 4, 80, 80),
    "d96": (96, 4, 4, 96, 96),
    "d96_int8": (96, 8, 8, 96, 96),
    "d192": (192, 4, 4, 192, 192),
    "d256": (256, 4, 4, 256, 256),
    "d256_groups_128": (256, 4, 4, 128, 128),
    "d256_int8": (256, 8, 8, 256, 256),
    # generic kernel
    "d32": (32, 4, 4, 32, 32),
    "k16_v4": (128, 16, 4, 128, 128),
    "d80_int2": (80, 2, 3, 80, 80),
    "d96_int3": (96, 3, 3, 32, 96),
    "d192_int8": (192, 8, 2, 64, 192),
}


@pytest.mark.parametrize(
    "heads", [(8, 2), (16, 2), (3, 3), (9, 3), (28, 4)], ids=["gqa4", "gqa8", "mha", "gqa3", "gqa7"]
)
@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128])
def test_ragged(heads: tuple[int, int], page_size: int) -> None:
    check(Case(heads=heads, page_size=page_size))


@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 511, 513])
def test_lengths(length: int) -> None:
    check(Case(lengths=(length,), tuning=clusters(1)))


def test_long_context() -> None:
    check(Case(lengths=(131072,), heads=(4, 1)))
    check(Case(lengths=(131072,), heads=(4, 1), tuning=clusters(1)))
    check(Case(lengths=(131071, 5, 0, 40000), heads=(4, 1), page_size=16))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_formats(name: str, dtype: torch.dtype) -> None:
    check(Case(form=FORMATS[name], dtype=dtype))
    check(Case(form=FORMATS[name], dtype=dtype, lengths=(700,), tuning=clusters(8)))
    check(Case(form=FORMATS[name], dtype=dtype, page_size=16, lengths=(33, 0, 300), tokens=2, window=40))


@pytest.mark.parametrize("name", FORMATS)
def test_generic_kernel(name: str) -> None:
    check(Case(form=FORMATS[name], tuning=(0, 0, 0, 0, True, 0)))
    check(Case(form=FORMATS[name], tuning=(0, 0, 0, 3, True, 0), tokens=3, window=100, page_size=32))


def test_float32_queries() -> None:
    check(Case(dtype=torch.float32))
    check(Case(dtype=torch.float32, rotate=(1, 128)))


@pytest.mark.parametrize(
    ("form", "rotate"),
    [
        ((128, 4, 4, 128, 128), (1, 128)),
        ((64, 4, 4, 32, 32), (1, 64)),
        ((256, 4, 4, 256, 256), (1, 256)),
        ((96, 4, 4, 96, 96), (12, 8)),
        ((80, 2, 3, 80, 80), (20, 4)),
    ],
)
def test_rotated_queries(form: tuple[int, int, int, int, int], rotate: tuple[int, int]) -> None:
    check(Case(form=form, rotate=rotate))
    check(Case(form=form, rotate=rotate, dtype=torch.bfloat16, tokens=2))


@pytest.mark.parametrize("tokens", [2, 3, 5, 8, 17])
@pytest.mark.parametrize("heads", [(8, 2), (3, 3), (16, 2)], ids=["gqa4", "mha", "gqa8"])
def test_several_tokens(tokens: int, heads: tuple[int, int]) -> None:
    check(Case(tokens=tokens, heads=heads, lengths=(1, tokens - 1, tokens, 64, 500, 0, 1029)))


@pytest.mark.parametrize("name", ["d128", "d64", "k16_v4"])
@pytest.mark.parametrize("tokens", [2, 17, 64])
def test_queries_that_are_not_in_the_cache(tokens: int, name: str) -> None:
    form = FORMATS.get(name, (128, 4, 4, 128, 128))
    check(Case(form=form, tokens=tokens, causal=False, lengths=(1, 0, 70, 1030)))
    check(Case(form=form, tokens=tokens, causal=False, lengths=(2000,), heads=(4, 1)))


@pytest.mark.parametrize("window", [1, 7, 64, 100, 1024])
@pytest.mark.parametrize("tokens", [1, 4])
def test_sliding_window(window: int, tokens: int) -> None:
    check(Case(window=window, tokens=tokens))


@pytest.mark.parametrize(
    "tuning", [(8, 2, 1, 1), (8, 3, 1, 16), (3, 2, 4, 4), (4, 1, 2, 3), (1, 2, 1, 2), (6, 2, 2, 64)]
)
def test_tunings(tuning: tuple[int, int, int, int]) -> None:
    check(Case(tuning=(*tuning, False, 0)))
    check(Case(tuning=(*tuning, False, 0), lengths=tuple(77 + 3 * i for i in range(70))))
    check(Case(tuning=(*tuning, False, 0), lengths=(9000,)))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_clusters(size: int) -> None:
    tuning = clusters(size)
    for heads in ((8, 2), (3, 3), (16, 2), (9, 3)):
        check(Case(lengths=(1, 777), heads=heads, tuning=tuning))
        check(Case(lengths=(5000,), heads=heads, tuning=tuning, page_size=16))
    check(Case(lengths=(1000, 5, 0), heads=(8, 2), tokens=3, window=100, tuning=tuning))
    # No longer: tensor cores truncate sums, which thousands of tokens a warp show.
    check(Case(lengths=(5000,), heads=(4, 1), tuning=clusters(size, warps=4, stages=3)))
    check(Case(lengths=(3000,), heads=(4, 1), page_size=48, rotate=(1, 128), tuning=tuning))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper")
def test_clusters_are_taken() -> None:
    """By default for one short sequence, and where a tuning asks: else the tests around would show nothing of them."""

    def cluster(batch: int, heads: tuple[int, int], tokens: int, tuning: tuple[int, ...] = BUILT_IN) -> int:
        shape = (DTYPE_CODES[torch.float16], batch, 1, *heads, tokens)
        return decode_op._plan(torch.cuda.current_device(), 128, 4, 4, 128, 128, *shape, *tuning)[8]

    assert cluster(1, (32, 8), 1024) == 8
    assert cluster(1, (32, 32), 1024) > 1
    assert cluster(1, (32, 8), 8192) == cluster(4, (32, 8), 1024) == cluster(1, (32, 8), 1024, clusters(1)) == 0
    assert [cluster(2, (8, 2), 4096, clusters(size)) for size in (2, 4, 8)] == [2, 4, 8]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 63, 64, 65, 255, 257, 1023, 1025, 2048, 4097, 8192])
def test_lengths_by_clusters(length: int) -> None:
    check(Case(lengths=(length,), tuning=clusters(8)))
    check(Case(lengths=(length,), heads=(4, 1), tuning=clusters(4), page_size=32, window=300))


def test_clusters_repeat_bit_for_bit() -> None:
    case = Case(lengths=(6000,), heads=(4, 1), tuning=clusters(8))
    x = _build(case)
    out, lse = _run(case, x)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip((out, lse), _run(case, x), strict=True))


def test_peaky_softmax() -> None:
    check(Case(q_scale=4.0))


def test_small_values_do_not_underflow() -> None:
    case = Case(form=(128, 8, 8, 128, 128), lengths=(4096,))
    x = _build(case)
    layout = KVLayout(*case.form)
    slots = x.page_table[0, :64].long().repeat_interleave(64) * 64 + torch.arange(64, device="cuda").repeat(64)
    codes, params = layout.read(x.pool, slots, "value")
    assert params is not None
    layout.write(x.pool, slots, "value", codes, params * 1e-2)
    out, _ = _run(case, x)
    exact, _ = _eager(case, x, torch.float64)
    assert (out.double() - exact).norm() < 1e-3 * exact.norm()


def test_row_equals_the_row_alone_and_runs_repeat() -> None:
    case = Case(lengths=(700, 64, 3000, 1))
    x = _build(case)
    out, lse = _run(case, x)
    for _ in range(3):
        again = _run(case, x)
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])
    fixed = replace(case, tuning=(8, 2, 1, 1, False, 0))  # the same split count: then bit-equal
    whole, _ = _run(fixed, x)
    for row in range(4):
        alone = Tensors(x.query[row : row + 1], x.pool, x.page_table[row : row + 1], x.lengths[row : row + 1])
        assert torch.equal(_run(fixed, alone)[0][0], whole[row])
        torch.testing.assert_close(_run(case, alone)[0][0], out[row], rtol=2e-3, atol=5e-4)


@pytest.mark.parametrize("tuning", [BUILT_IN, clusters(4)], ids=["list", "clusters"])
def test_graph_follows_growing_lengths(tuning: tuple[int, ...]) -> None:
    case = Case(lengths=(2000, 100, 640), tuning=tuning)
    x = _build(case)
    x.lengths.fill_(50)
    _run(case, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _lse = _run(case, x)
    for lengths in ((2000, 100, 640), (1, 64, 65), (0, 0, 3), (1999, 100, 17)):
        x.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        exact, _ = _eager(replace(case, lengths=lengths), x, torch.float64)
        torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("tuning", [BUILT_IN, clusters(4)], ids=["list", "clusters"])
def test_append_then_attend_in_one_graph(tuning: tuple[int, ...]) -> None:
    """The decode kernel prefetches before the append has finished: the newest token must still be seen."""
    case = Case(lengths=(1500, 65, 17, 4096), tuning=tuning)
    x = _build(case)
    exact, _ = _eager(case, x, torch.float64)
    rows = x.lengths.long() - 1
    slots = torch.stack([t[r // 64] * 64 + r % 64 for t, r in zip(x.page_table.long(), rows, strict=True)])
    key, value = torch.ops.quarot.kv_gather(x.pool, slots, *case.form[1:], torch.float16)
    scratch = torch.empty_like(x.lengths)

    def step() -> torch.Tensor:
        scratch.copy_(x.lengths)
        torch.ops.quarot.kv_append(x.pool, key, value, slots, *case.form[1:], 1.0, 1.0, 0, 0)
        return decode_op.launch(x.query, x.pool, x.page_table, scratch, *_arguments(case), tuning=case.tuning)[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(20):
        key.normal_(), value.normal_()
        x.pool.view(-1)[:1].add_(0)
        graph.replay()
        exact, _ = _eager(case, x, torch.float64)
        torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("batch", [2, 64, 70])
def test_lengths_from_the_kernel_before(batch: int) -> None:
    """It starts the kernel early and writes the lengths then: what was planned ahead of the wait does not hold."""
    case = Case(lengths=tuple(40 + 37 * i % 900 for i in range(batch)))
    x = _build(case)
    ids, positions = (torch.zeros(batch, 1, dtype=torch.int64, device="cuda") for _ in range(2))
    embedding, frequency = torch.zeros(4, 64, dtype=torch.float16, device="cuda"), torch.ones(32, device="cuda")
    before = x.lengths - 1

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        arguments = (ids, embedding, before, positions, x.page_table, frequency, 1.0, 64, True)
        lengths = torch.ops.quarot.begin_step(*arguments)[1]
        launched = decode_op.launch(x.query, x.pool, x.page_table, lengths, *_arguments(case), tuning=case.tuning)
        return lengths, launched[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lengths, out = step()
    for _ in range(8):
        before.copy_((x.lengths - 1) * torch.rand(batch, device="cuda"))
        out.fill_(torch.nan)
        graph.replay()
        exact, _ = _eager(replace(case, lengths=tuple(lengths.tolist())), x, torch.float64)
        torch.testing.assert_close(out.double(), exact, rtol=2e-3, atol=2e-3)


def test_side_streams() -> None:
    cases = [Case(lengths=(4000, 30)), Case(lengths=(100, 2500))]
    inputs = [_build(case, seed) for seed, case in enumerate(cases)]
    expected = [_run(case, x)[0] for case, x in zip(cases, inputs, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, case, x in zip(streams, cases, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(_run(case, x)[0])
        torch.cuda.synchronize()
        for result, reference in zip(results, expected, strict=True):
            assert torch.equal(result, reference)


def test_agrees_with_the_reference_op() -> None:
    for case in (
        Case(),
        Case(rotate=(1, 128), window=70, tokens=2),
        Case(form=(64, 16, 16, 64, 64), dtype=torch.bfloat16),
    ):
        x = _build(case)
        actual = torch.ops.quarot.decode_attention(x.query, x.pool, x.page_table, x.lengths, *_arguments(case))
        with registry.reference_backend():
            expected = torch.ops.quarot.decode_attention(x.query, x.pool, x.page_table, x.lengths, *_arguments(case))
        tolerance = 2e-2 if case.dtype == torch.bfloat16 else 3e-3
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)
