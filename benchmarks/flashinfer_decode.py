"""FlashInfer's paged decode as a peer: its best back end for a shape, captured in graphs like our own kernel."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.timing import Call, measure

PAGE = 64
_BACKENDS = (("fa2", True), ("fa2", False))  # tensor cores, CUDA cores; "auto" picks a prefill kernel on Hopper: slower


def available() -> bool:
    """Whether flashinfer can be imported (it compiles its kernels at first use)."""
    return importlib.util.find_spec("flashinfer") is not None


def _make(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, backend: str, cores: bool
) -> Any:
    import flashinfer

    pages = [-(-length // PAGE) for length in lengths]
    total = sum(pages)
    indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
    indices = torch.randperm(total, dtype=torch.int32).cuda()
    last = torch.tensor([(length - 1) % PAGE + 1 for length in lengths], dtype=torch.int32)
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=cores,
        paged_kv_indptr_buffer=indptr.cuda(),
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last.cuda(),
        backend=backend,
    )
    kv_dtype = {"kv_data_type": dtype, "q_data_type": torch.float16}
    wrapper.plan(indptr, indices, last, heads, kv_heads, head_dim, PAGE, **kv_dtype)
    query = torch.randn(len(lengths), heads, head_dim, device="cuda", dtype=torch.float16)
    out = torch.empty_like(query)

    def make() -> Call:
        cache = torch.empty(total, 2, kv_heads, PAGE, head_dim, dtype=torch.float16, device="cuda").normal_().to(dtype)
        return lambda: wrapper.run(query, cache, out=out)

    return make


def decode_us(lengths: list[int], heads: int, kv_heads: int, head_dim: int) -> Iterator[tuple[str, float]]:
    """(peer name, microseconds) of the fastest back end for fp16 and for fp8 caches; nothing where none runs."""
    for name, dtype in (("flashinfer_fp16", torch.float16), ("flashinfer_fp8", torch.float8_e4m3fn)):
        nbytes = 2 * sum(lengths) * kv_heads * head_dim * dtype.itemsize
        best: float | None = None
        for backend, cores in _BACKENDS:
            if dtype != torch.float16 and not cores:
                continue
            make = _make(lengths, heads, kv_heads, head_dim, dtype, backend, cores)
            us = measure(make, nbytes, replays=10)
            best = us if best is None else min(best, us)
        if best is not None:
            yield name, best
