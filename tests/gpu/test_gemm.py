"""The integer GEMM kernels against float64: every result must be equal, not close.

The reference sums the integer products in float64 (exact below 2^53), rounds once to float32 and then follows the op's
order of float32 operations.
"""

import pytest
import torch

from quarot.ops import gemm_launch, registry
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.gemm_w8a8 import gemm_w8a8
from quarot.ops.int4_rows import tiles_to_int4_rows
from quarot.ops.registry import device_reason
from quarot.quantization.packing import pack_int4_tiles, pack_int8, pack_nibbles

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or device_reason(0) is not None, reason="needs a GPU and the compiled extension"
)
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="sm_90a kernels"
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TOKENS = [1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 127, 129, 257, 513]
# kernel, a, b, c as in csrc/gemm/dispatch.h: every instantiation there is.
SKINNY = [(0, 8, 16, 1), (0, 8, 16, 2), (0, 8, 32, 1), (0, 16, 16, 1), (0, 32, 16, 1), (0, 32, 8, 1)]
ONE_ROW = [(0, 1, 16, 1), (0, 1, 32, 1)]
RING = [
    *((7, 64 * strips, tokens, 0) for tokens in (32, 64, 128) for strips in (1, 2, 3)),
    *((7, 64 * strips, 64, 0) for strips in (5, 6)),
    (7, 128, 256, 0),
]
RING_PAIRS = [(7, 64, 32, 2), (7, 64, 64, 2), (7, 192, 32, 2)]  # two blocks share the K of a tile
TILE = [(4, 0, 0, 0)]
WIDE_GROUPS = [(6, 128, 128, 0), (6, 64, 128, 0), (6, 64, 64, 0), (6, 64, 32, 0)]
SKINNY_INT8 = [(0, 8, 16, 2), (0, 16, 16, 1), (0, 32, 16, 1)]
WIDE_INT8 = [(1, 128, 256, 0), (1, 128, 128, 0)]
SPLIT_INT8 = [(5, *tile, parts) for tile in ((64, 64), (128, 64)) for parts in (1, 2, 3, 4)]  # parts of K
INT4_CORES = [(3, 64, 128, 0), (3, 128, 128, 0), (3, 128, 256, 0)]


def problem(m, n, k, *, low=-8, high=8, w_low=-8, w_high=8, groups=0, seed=0):
    """Random integers and scales; codes and weights padded to 32 columns as the ops expect."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def integers(rows, lowest, end):
        return torch.randint(lowest, end, (rows, k), generator=generator, device="cuda", dtype=torch.int8)

    codes, weight = pack_int8(integers(m, low, high)), pack_int8(integers(n, w_low, w_high))
    row_scale = torch.rand(m, generator=generator, device="cuda") * 0.1
    shape = (n, groups) if groups else (n,)
    # The scales stand at the end of a buffer of NaN: reading past them would show.
    weight_scale = torch.full((n * max(groups, 1) + 64,), float("nan"), device="cuda")[: n * max(groups, 1)].view(shape)
    weight_scale.copy_(torch.rand(shape, generator=generator, device="cuda") * 0.01)
    bias = torch.randn(n, generator=generator, device="cuda")
    return codes, row_scale, weight, weight_scale, bias


def pairs(m, n, k):
    """Those of RING_PAIRS that serve the size: both blocks of every tile run at once, each with a chunk of K."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return [t for t in RING_PAIRS if k > 128 and 2 * -(-n // t[1]) * -(-m // t[2]) <= processors]


def exact(codes, row_scale, weight, weight_scale, bias, dtype):
    """The op's definition, from float64."""
    if weight_scale.ndim == 1:
        out = (codes.double() @ weight.double().T).float() * row_scale[:, None] * weight_scale
    else:
        groups = weight_scale.shape[1]
        out = torch.zeros(len(codes), len(weight), device=codes.device)
        for c, w, s in zip(codes.chunk(groups, 1), weight.chunk(groups, 1), weight_scale.unbind(1), strict=True):
            out += (c.double() @ w.double().T).float() * s
        out *= row_scale[:, None]
    return (out if bias is None else out + bias.float()).to(dtype)


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1040, 4128), (1037, 1000), (10, 40), (48, 32), (3072, 11008)])
@pytest.mark.parametrize("m", TOKENS)
def test_w4a4_every_size(m, n, k):
    codes, row_scale, weight, weight_scale, bias = problem(m, n, k, seed=m)
    qweight = pack_int4_tiles(weight)
    for dtype in DTYPES:
        for b in (None, bias, bias.half()):
            got = gemm_w4a4(codes, row_scale, qweight, weight_scale, b, dtype, False)
            assert got.is_contiguous()
            assert torch.equal(got, exact(codes, row_scale, weight, weight_scale, b, dtype))


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1037, 1000), (24, 64), (3072, 11008)])
@pytest.mark.parametrize("m", TOKENS)
def test_w8a8_every_size(m, n, k):
    codes, row_scale, weight, weight_scale, bias = problem(m, n, k, low=-128, high=128, w_low=-128, w_high=128, seed=m)
    for dtype in DTYPES:
        got = gemm_w8a8(codes, row_scale, weight, weight_scale, bias, dtype)
        assert torch.equal(got, exact(codes, row_scale, weight, weight_scale, bias, dtype))


@pytest.mark.parametrize("m", [1, 5, 8, 33, 130, 300])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(4096, 4096, 128), (1037, 1152, 96), (64, 64, 32), (272, 8192, 4096), (1037, 1216, 64)]
)
def test_groups(m, n, k, group):
    for bits in (4, 8):
        limit = 1 << (bits - 1)
        codes, row_scale, weight, weight_scale, bias = problem(
            m, n, k, low=-128, high=128, w_low=-limit, w_high=limit, groups=k // group
        )
        want = exact(codes, row_scale, weight, weight_scale, bias, torch.float16)
        if bits == 4:
            got = gemm_w4a4(codes, row_scale, pack_int4_tiles(weight), weight_scale, bias, torch.float16, False)
        else:
            got = gemm_w8a8(codes, row_scale, weight, weight_scale, bias, torch.float16)
        assert torch.equal(got, want)


@hopper
@pytest.mark.parametrize("k", [32, 224, 4096, 4128, 8192, 8224, 11008, 28672, 32768])
def test_one_row(k):
    for n in (10, 1037, 22016):
        codes, row_scale, weight, weight_scale, bias = problem(1, n, k, low=-128, high=128, seed=n)
        qweight = pack_int4_tiles(weight)
        for dtype in (torch.float16, torch.bfloat16):
            for b in (None, bias):
                want = exact(codes, row_scale, weight, weight_scale, b, dtype)
                for tactic in ONE_ROW:
                    got = gemm_launch.launch(
                        codes, row_scale, qweight, weight_scale, b, dtype, weight_format=0, tactic=tactic
                    )
                    assert torch.equal(got, want), (n, tactic, dtype)


def test_one_row_too_long_for_its_kernel():
    codes, row_scale, weight, weight_scale, bias = problem(1, 64, 40000)
    got = gemm_w4a4(codes, row_scale, pack_int4_tiles(weight), weight_scale, bias, torch.float16, False)
    assert torch.equal(got, exact(codes, row_scale, weight, weight_scale, bias, torch.float16))


@hopper
@pytest.mark.parametrize("m", [1, 8, 19, 64, 129, 300])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1040, 4128), (10000, 1024)])
def test_every_kernel(m, n, k):
    codes, row_scale, weight, weight_scale, bias = problem(m, n, k, low=-128, high=128)
    qweight = pack_int4_tiles(weight)
    for dtype in (torch.float16, torch.bfloat16):
        want = exact(codes, row_scale, weight, weight_scale, bias, dtype)
        split_int8 = [t for t in SPLIT_INT8 if k % (32 * t[3]) == 0]
        for tactic in SKINNY + RING + pairs(m, n, k) + TILE:
            got = gemm_launch.launch(
                codes, row_scale, qweight, weight_scale, bias, dtype, weight_format=0, tactic=tactic
            )
            assert torch.equal(got, want), tactic
        for tactic in SKINNY_INT8 + WIDE_INT8 + split_int8:
            got = gemm_launch.launch(
                codes, row_scale, weight, weight_scale, bias, dtype, weight_format=1, tactic=tactic
            )
            assert torch.equal(got, want), tactic


@hopper
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (70, 10, 40),
        (64, 1037, 1000),
        (257, 48, 32),
        (513, 22016, 160),
        (900, 10000, 96),
        (256, 28672, 416),
        (2000, 4100, 352),
        (64, 4096, 11008),
        (33, 1000, 288),
        (16, 4096, 160),
        (5, 72, 4128),
    ],
)
def test_ring_with_every_kind_of_end(m, n, k):
    """One chunk of K, odd numbers of them and part of one; strips that no consumer has; several tiles a block."""
    codes, row_scale, weight, weight_scale, bias = problem(m, n, k, low=-128, high=128)
    qweight = pack_int4_tiles(weight)
    for dtype, b in ((torch.float16, bias), (torch.bfloat16, None)):
        want = exact(codes, row_scale, weight, weight_scale, b, dtype)
        for tactic in RING + pairs(m, n, k):
            poison = torch.full((m, -(-n // 8) * 8), float("nan"), dtype=dtype, device="cuda")
            del poison  # the output is allocated where it was
            got = gemm_launch.launch(codes, row_scale, qweight, weight_scale, b, dtype, weight_format=0, tactic=tactic)
            assert torch.equal(got, want), tactic


@hopper
@pytest.mark.parametrize("m", [1, 19, 33, 129, 300])
@pytest.mark.parametrize(
    ("n", "k", "group"),
    [(4096, 4096, 128), (1037, 1216, 64), (200, 1152, 192), (10, 128, 128), (1037, 4096, 256), (272, 8192, 4096)],
)
def test_every_kernel_with_groups(m, n, k, group):
    for bits in (4, 6, 8):
        limit = 1 << (bits - 1)
        codes, row_scale, weight, weight_scale, bias = problem(m, n, k, low=-limit, high=limit, groups=k // group)
        qweight = pack_int4_tiles(weight)
        for dtype, b in ((torch.float16, bias), (torch.bfloat16, None)):
            want = exact(codes, row_scale, weight, weight_scale, b, dtype)
            for tactic in (WIDE_GROUPS if m > 32 or n % 8 == 0 else []) + TILE:
                poison = torch.full((m, -(-n // 8) * 8), float("nan"), dtype=dtype, device="cuda")
                del poison  # the output is allocated where it was
                got = gemm_launch.launch(
                    codes, row_scale, qweight, weight_scale, b, dtype, weight_format=0, tactic=tactic
                )
                assert torch.equal(got, want), tactic


@hopper
@pytest.mark.parametrize("m", [40, 600])
def test_group_scales_of_any_size(m):
    codes, row_scale, weight, weight_scale, bias = problem(m, 256, 512, groups=4)
    qweight = pack_int4_tiles(weight)
    for value in (0.0, 1e30, 1e-36, float("inf"), float("nan")):
        weight_scale[3, 1] = value
        want = exact(codes, row_scale, weight, weight_scale, bias, torch.bfloat16)
        got = gemm_w4a4(codes, row_scale, qweight, weight_scale, bias, torch.bfloat16, False)
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
        assert not got[:, 4:].isnan().any()


@hopper
@pytest.mark.parametrize("m", [40, 200])
def test_blocks_that_share_a_tile_meet_again_and_again(m):
    """Counters are left zero: by every launch of a chain, on two streams at once, and by the replays of a graph."""
    codes, row_scale, weight, weight_scale, bias = problem(m, 512, 4096)
    want = exact(codes, row_scale, weight, weight_scale, bias, torch.float16)

    def run(tactic):
        return gemm_launch.launch(
            codes, row_scale, weight, weight_scale, bias, torch.float16, weight_format=1, tactic=tactic
        )

    parted = [tactic for tactic in SPLIT_INT8 if tactic[3] in (2, 4)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs += [run(tactic) for tactic in parted]
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run(tactic) for _ in range(3) for tactic in parted]
    for _ in range(3):
        for out in outs:
            out.zero_()
        graph.replay()
        assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("m", [1, 30, 64, 129, 300])
@pytest.mark.parametrize(("n", "k"), [(1024, 1024), (1037, 4128)])
def test_int4_tensor_cores(m, n, k):
    """The kernels of sm_80/86/89; a newer GPU runs the same code, compiled for it or from PTX, without INT4 cores."""
    codes, row_scale, weight, weight_scale, bias = problem(m, n, k)
    rows, packed = tiles_to_int4_rows(pack_int4_tiles(weight)), pack_nibbles(codes)
    for dtype in (torch.float16, torch.bfloat16):
        want = exact(codes, row_scale, weight, weight_scale, bias, dtype)
        for tactic in INT4_CORES:
            got = gemm_launch.launch(
                packed, row_scale, rows, weight_scale, bias, dtype, weight_format=0, packed=True, tactic=tactic
            )
            assert torch.equal(got, want), tactic


@hopper
def test_int4_kernels_compiled_from_ptx_by_the_driver():
    """The code of compute_80 itself, which is what Ampere and Ada run, on a Hopper GPU: bit for bit the reference."""
    if registry.extension().int4_code_versions() != (80, 90):
        pytest.skip("INT4 kernels are not PTX of compute_80 here; build with QUAROT_CUDA_ARCHS='80+PTX;90a'")
    for m, n, k in ((1, 1024, 1024), (130, 1037, 4128), (300, 80, 11008)):
        codes, row_scale, weight, weight_scale, bias = problem(m, n, k)
        rows, packed = tiles_to_int4_rows(pack_int4_tiles(weight)), pack_nibbles(codes)
        want = exact(codes, row_scale, weight, weight_scale, bias, torch.float16)
        for tactic in INT4_CORES:
            got = gemm_launch.launch(
                packed, row_scale, rows, weight_scale, bias, torch.float16, weight_format=0, packed=True, tactic=tactic
            )
            assert torch.equal(got, want), tactic


def test_packed_activations_through_the_op():
    codes, row_scale, weight, weight_scale, bias = problem(37, 200, 96)
    got = gemm_w4a4(pack_nibbles(codes), row_scale, pack_int4_tiles(weight), weight_scale, bias, torch.float16, True)
    assert torch.equal(got, exact(codes, row_scale, weight, weight_scale, bias, torch.float16))


@pytest.mark.parametrize("m", [1, 40, 130])
@pytest.mark.parametrize(("code", "w"), [(-128, -8), (127, -8), (-128, 7), (127, 7)])
@pytest.mark.parametrize("k", [65536, 131040])
def test_largest_sums_do_not_overflow(m, code, w, k):
    n = 256
    codes = torch.full((m, k), code, dtype=torch.int8, device="cuda")
    qweight = pack_int4_tiles(torch.full((n, k), w, dtype=torch.int8, device="cuda"))
    ones = torch.ones(n, device="cuda")
    got = gemm_w4a4(codes, ones[:1].expand(m), qweight, ones, None, torch.float32, False)
    assert torch.equal(got, torch.full_like(got, float(code) * w * k))
    sixteen_bit = gemm_w4a4(codes, torch.full((m,), 2.0**-20, device="cuda"), qweight, ones, None, torch.float16, False)
    assert torch.equal(sixteen_bit, (got * 2.0**-20).half())


def test_w8a8_largest_sums():
    codes = torch.full((20, 65536), -128, dtype=torch.int8, device="cuda")
    ones = torch.ones(64, device="cuda")
    got = gemm_w8a8(codes, ones[:20], codes[:1].expand(64, -1).contiguous(), ones, None, torch.float32)
    assert torch.equal(got, torch.full_like(got, 2.0**30))


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 2048)])
def test_result_of_a_row_does_not_depend_on_the_others_or_on_the_run(n, k):
    codes, row_scale, weight, weight_scale, bias = problem(600, n, k)
    qweight = pack_int4_tiles(weight)
    whole = gemm_w4a4(codes, row_scale, qweight, weight_scale, bias, torch.float16, False)
    for m in (*range(1, 35), 64, 65, 128, 200, 400):
        start = 600 - m
        part = gemm_w4a4(codes[start:], row_scale[start:], qweight, weight_scale, bias, torch.float16, False)
        assert torch.equal(part, whole[start:]), m
    for m in (1, 16, 64, 600):
        runs = [
            gemm_w4a4(codes[:m], row_scale[:m], qweight, weight_scale, bias, torch.float16, False) for _ in range(20)
        ]
        assert all(torch.equal(run, whole[:m]) for run in runs), m


@pytest.mark.parametrize("m", [3, 40, 200])
def test_scales_of_any_size_stay_in_their_row(m):
    codes, row_scale, weight, weight_scale, bias = problem(m, 512, 256)
    qweight = pack_int4_tiles(weight)
    for value in (0.0, 1e30, 1e-38, 1e-45, float("inf"), float("nan")):
        row_scale[1] = value
        for dtype in DTYPES:
            got = gemm_w4a4(codes, row_scale, qweight, weight_scale, bias, dtype, False)
            want = exact(codes, row_scale, weight, weight_scale, bias, dtype)
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
            assert torch.equal(got.isnan(), want.isnan())
            assert not got[0].isnan().any()
            assert not got[2:].isnan().any()


def test_no_tokens():
    _, _, weight, weight_scale, bias = problem(1, 64, 64)
    codes, none = torch.empty(0, 64, dtype=torch.int8, device="cuda"), torch.empty(0, device="cuda")
    assert gemm_w4a4(codes, none, pack_int4_tiles(weight), weight_scale, bias, torch.float16, False).shape == (0, 64)
    assert gemm_w8a8(codes, none, weight, weight_scale, bias, torch.bfloat16).shape == (0, 64)


@pytest.mark.parametrize("m", [1, 40])
def test_no_inputs(m):
    """Sums of nothing: the bias is what is left."""
    codes, rows = torch.empty(m, 0, dtype=torch.int8, device="cuda"), torch.ones(m, device="cuda")
    scale, bias = torch.ones(64, device="cuda"), torch.randn(64, device="cuda")
    tiles = torch.empty(4, 0, 256, dtype=torch.uint8, device="cuda")
    weight = torch.empty(64, 0, dtype=torch.int8, device="cuda")
    for got in (
        gemm_w4a4(codes, rows, tiles, scale, bias, torch.float16),
        gemm_w8a8(codes, rows, weight, scale, bias, torch.float16),
    ):
        assert torch.equal(got, bias.half().expand(m, -1))


@pytest.mark.parametrize("m", [5, 100])
def test_views_of_the_inputs(m):
    codes, row_scale, weight, weight_scale, bias = problem(m, 512, 256)
    qweight = pack_int4_tiles(weight)
    want = exact(codes, row_scale, weight, weight_scale, bias, torch.float16)
    wide = torch.full((m + 3, 300), 55, dtype=torch.int8, device="cuda")
    wide[3:, 7:263] = codes  # neither contiguous nor aligned
    scales = torch.full((m, 2), float("nan"), device="cuda")
    scales[:, 1] = row_scale
    shifted = torch.full((m * 256 + 1,), 55, dtype=torch.int8, device="cuda")[1:].view(m, 256)
    shifted.copy_(codes)
    for view in (wide[3:, 7:263], shifted):
        got = gemm_w4a4(view, scales[:, 1], qweight, weight_scale, bias, torch.float16, False)
        assert torch.equal(got, want)


@hopper
@pytest.mark.parametrize("m", [33, 100, 130, 300])
def test_memory_behind_the_tokens_is_read_and_does_not_matter(m):
    codes, row_scale, weight, weight_scale, bias = problem(m, 1040, 1024)
    qweight = pack_int4_tiles(weight)
    want = exact(codes, row_scale, weight, weight_scale, bias, torch.float16)
    for rows in (m, m + 7, 512):
        longer = torch.full((rows, 1024), 99, dtype=torch.int8, device="cuda")
        longer[:m] = codes
        for form, w, tactics in ((0, qweight, RING), (1, weight, WIDE_INT8 + SPLIT_INT8)):
            for tactic in tactics:
                if tactic[0] == 5 and 1024 % (32 * tactic[3]):
                    continue
                got = gemm_launch.launch(
                    longer[:m], row_scale, w, weight_scale, bias, torch.float16, weight_format=form, tactic=tactic
                )
                assert torch.equal(got, want), (rows, form, tactic)


@pytest.mark.parametrize("m", [1, 24, 100, 600])
def test_side_stream_and_graph(m):
    codes, row_scale, weight, weight_scale, bias = problem(m, 4096, 4096)
    qweight = pack_int4_tiles(weight)
    want = exact(codes, row_scale, weight, weight_scale, bias, torch.float16)
    side = torch.cuda.Stream()
    buffer = torch.zeros_like(codes)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)  # the copy comes late: a launch on another stream would see zeros
        buffer.copy_(codes)
        got = gemm_w4a4(buffer, row_scale, qweight, weight_scale, bias, torch.float16, False)
    side.synchronize()
    assert torch.equal(got, want)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemm_w4a4(buffer, row_scale, qweight, weight_scale, bias, torch.float16, False)
    for seed in (1, 2):
        fresh = problem(m, 4096, 4096, seed=seed)[0]
        buffer.copy_(fresh)
        graph.replay()
        assert torch.equal(out, exact(fresh, row_scale, weight, weight_scale, bias, torch.float16))


def test_chain_of_early_launches():
    """Each launch may start before its predecessor ends (PDL); the output of one is the input of the next."""
    size, rounds = 1024, 200
    codes, _row_scale, weight, _weight_scale, _ = problem(4, size, size)
    qweight = pack_int4_tiles(weight)
    scale = torch.full((4,), 1.0 / 64, device="cuda")
    unit = torch.ones(size, device="cuda")

    def chain():
        x = codes
        for _ in range(rounds):
            x = gemm_w4a4(x, scale, qweight, unit, None, torch.float16, False).clamp(-8, 7).to(torch.int8)
        return x

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = chain()
    graph.replay()
    x = codes
    for _ in range(rounds):
        x = exact(x, scale, weight, unit, None, torch.float16).clamp(-8, 7).to(torch.int8)
    assert torch.equal(last, x)


def test_compile_and_opcheck():
    codes, row_scale, weight, weight_scale, bias = problem(12, 512, 256)
    qweight = pack_int4_tiles(weight)
    w4 = (codes, row_scale, qweight, weight_scale, bias, torch.float16, False)
    w8 = (codes, row_scale, weight, weight_scale, bias, torch.float16)
    torch.library.opcheck(torch.ops.quarot.gemm_w4a4.default, w4)
    torch.library.opcheck(torch.ops.quarot.gemm_w8a8.default, w8)
    compiled = torch.compile(lambda c: gemm_w4a4(c, *w4[1:]) * 2, fullgraph=True)
    assert torch.equal(compiled(codes), gemm_w4a4(*w4) * 2)


@hopper
@pytest.mark.parametrize("m", [5, 40, 130])
def test_operands_at_odd_places(m):
    """Weights at any byte, scales and biases at any element, in every kernel."""
    codes, row_scale, weight, weight_scale, bias = problem(m, 1040, 1024)
    qweight = pack_int4_tiles(weight)
    want = exact(codes, row_scale, weight, weight_scale, bias, torch.float16)

    def moved(tensor, offset):
        place = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device="cuda")[offset:]
        return place.view(tensor.shape).copy_(tensor)

    for offset in (1, 3):
        vectors = [moved(t, offset) for t in (weight_scale, bias)]
        rows = moved(row_scale, offset)
        int4, int8 = SKINNY + RING + TILE, SKINNY_INT8 + WIDE_INT8
        for form, w, tactics in ((0, qweight, int4), (1, weight, int8)):
            for tactic in tactics:
                got = gemm_launch.launch(
                    codes, rows, moved(w, offset), *vectors, torch.float16, weight_format=form, tactic=tactic
                )
                assert torch.equal(got, want), (offset, form, tactic)


@hopper
def test_a_busy_gpu_changes_nothing():
    """Two hundred times kernels of 17 to 513 tokens, into poisoned outputs, beside a stream whose kernels take SMs."""
    cases = []
    for m in (17, 33, 64, 513):
        codes, row_scale, weight, weight_scale, bias = problem(m, 4096, 4096, seed=m)
        qweight = pack_int4_tiles(weight)
        want = exact(codes, row_scale, weight, weight_scale, bias, torch.float16)
        cases.append(((codes, row_scale, qweight, weight_scale, bias, torch.float16), want))
    pair = problem(33, 2048, 4096)  # two blocks a tile
    packed = (*pair[:2], pack_int4_tiles(pair[2]), *pair[3:], torch.float16)
    pair_want = exact(*pair, torch.float16)
    noise, side = torch.randn(4096, 4096, device="cuda", dtype=torch.float16), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(200):
        with torch.cuda.stream(side):
            noise = (noise @ noise).tanh_()
        for operands, want in cases:
            out = gemm_w4a4(*operands, False)
            wrong += (out != want).sum()
            out.fill_(torch.nan)  # the next one is allocated here
        for tactic in RING_PAIRS:
            out = gemm_launch.launch(*packed, weight_format=0, tactic=tactic)
            wrong += (out != pair_want).sum()
            out.fill_(torch.nan)
    assert wrong.item() == 0


def test_shapes_that_do_not_fit_are_refused():
    codes, row_scale, weight, weight_scale, bias = problem(4, 64, 64)
    with pytest.raises(ValueError, match="do not fit"):
        gemm_w4a4(codes[:, :32], row_scale, pack_int4_tiles(weight), weight_scale, bias, torch.float16, False)
    with pytest.raises(ValueError, match="row_scale"):
        gemm_w8a8(codes, row_scale[:2], weight, weight_scale, bias, torch.float16)


def test_operands_of_another_kind_are_refused():
    codes, row_scale, weight, weight_scale, bias = problem(4, 64, 64)
    tiles = pack_int4_tiles(weight)
    good = {"codes": codes, "row_scale": row_scale, "qweight": tiles, "weight_scale": weight_scale, "bias": bias}
    both = [
        ("codes", codes[0], "do not fit"),
        ("codes", codes.view(torch.uint8), "uint8"),
        ("codes", codes.short(), "int16"),
        ("codes", codes.cpu(), "cpu"),
        ("row_scale", row_scale[:3], "one per row"),
        ("row_scale", row_scale[:, None], "one per row"),
        ("row_scale", row_scale.double(), "float64"),
        ("row_scale", row_scale.cpu(), "cpu"),
        ("weight_scale", weight_scale.half(), "float16"),
        ("weight_scale", weight_scale[0], "do not fit"),
        ("weight_scale", weight_scale.cpu(), "cpu"),
        ("bias", bias[:3], "must be"),
        ("bias", bias.cpu(), "on cpu"),
    ]
    only_tiles = [
        ("qweight", tiles[..., :128], "do not fit"),
        ("qweight", tiles[0], "do not fit"),
        ("qweight", tiles.view(torch.int8), "int8"),
        ("qweight", tiles.cpu(), "cpu"),
    ]
    only_rows = [("qweight", weight[:, :32], "do not fit"), ("qweight", weight.view(torch.uint8), "uint8")]
    for name, value, told in both + only_tiles:
        with pytest.raises(ValueError, match=told):
            gemm_w4a4(*{**good, name: value}.values(), torch.float16, False)
    for name, value, told in both + only_rows:
        with pytest.raises(ValueError, match=told):
            gemm_w8a8(*{**good, "qweight": weight, name: value}.values(), torch.float16)
    with pytest.raises(ValueError, match="packed"):
        gemm_w4a4(codes, row_scale, torch.cat((tiles, tiles), 1), weight_scale, bias, torch.float16, True)
