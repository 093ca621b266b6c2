"""Time a model here: prefill and decode, weight and cache memory.

quarot bench llama-w4a4kv4 --peer meta-llama/Llama-2-7b-hf --batch 16 --prompt-tokens 2048
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quarot.cli import models
from quarot.cli.generate import has_fused_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_model_arguments(parser)
    parser.add_argument("--peer", metavar="MODEL", help="another model to compare with, e.g. the full-precision one")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="rows (default 1)")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="(default 512)")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="tokens decoded (default 32)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs; the median is printed (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as JSON as well")


def run(options: argparse.Namespace) -> int:
    for name in ("batch", "prompt_tokens", "new_tokens", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    results = [_one(name, options) for name in (options.model, options.peer) if name]
    if len(results) == 2:
        mine, peer = results
        for step in ("prefill_ms", "decode_ms_per_token", "weight_bytes", "cache_bytes"):
            print(f"{step}: {peer[step] / mine[step]:.2f} times less than {options.peer}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def _one(name: str, options: argparse.Namespace) -> dict[str, Any]:
    model = models.load(models.resolve(name), options)
    result = {"model": name, "batch": options.batch, "prompt_tokens": options.prompt_tokens, **measure(model, options)}
    print(
        f"{name}: prefill {result['prefill_ms']:.1f} ms, decode {result['decode_ms_per_token']:.2f} ms a token, "
        f"weights {models.megabytes(result['weight_bytes'])}, cache {models.megabytes(result['cache_bytes'])}"
        + (f", peak {models.megabytes(result['peak_bytes'])}" if result["peak_bytes"] else "")
    )
    return result


def measure(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Times in milliseconds (median over the repeats, after one warm-up) and sizes in bytes."""
    import torch

    device = model.get_input_embeddings().weight.device
    cuda = device.type == "cuda"
    shape = (options.batch, options.prompt_tokens)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, shape, device=device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        step = _fast_run if cuda and has_fused_path(model) else _plain_run
        runs = [step(model, ids, options.new_tokens, cuda) for _ in range(options.repeats + 1)]
    return {
        "prefill_ms": statistics.median(prefill for prefill, _, _ in runs[1:]),
        "decode_ms_per_token": statistics.median(decode for _, decode, _ in runs[1:]),
        "weight_bytes": models.weight_bytes(model),
        "cache_bytes": runs[-1][2],
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
    }


def _plain_run(model: Any, ids: Any, count: int, cuda: bool) -> tuple[float, float, int]:
    """Milliseconds of the prefill and of a decoded token, and bytes of the cache: one forward after the other."""
    cache = _new_cache(model)
    prefill = _milliseconds(lambda: model(ids, past_key_values=cache, logits_to_keep=1), cuda)

    def decode() -> None:
        for _ in range(count):
            model(ids[:, :1], past_key_values=cache)

    return prefill, _milliseconds(decode, cuda) / count, _cache_bytes(cache)


def _fast_run(model: Any, ids: Any, count: int, cuda: bool) -> tuple[float, float, int]:
    """The same for ``quarot.generate``: what ``count`` more tokens cost beyond the first."""
    import quarot

    options: dict[str, Any] = {"eos_token_id": ()}
    # The long run first: its cache then serves the short one too.
    whole = _milliseconds(lambda: quarot.generate(model, ids, max_new_tokens=count + 1, **options), cuda)
    prefill = _milliseconds(lambda: quarot.generate(model, ids, max_new_tokens=1, **options), cuda)
    session = vars(getattr(model, model.base_model_prefix))["quarot_fused"].session
    return prefill, max(whole - prefill, 0.0) / count, _cache_bytes(session.cache)


def _new_cache(model: Any) -> Any:
    from transformers import DynamicCache

    from quarot.nn.quant_kv_cache import QuantKVCache

    if model.config._attn_implementation == "quarot":
        return QuantKVCache(model.config)
    return DynamicCache(config=model.config)


def _cache_bytes(cache: Any) -> int:
    if hasattr(cache, "memory_footprint"):
        return int(cache.memory_footprint())
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def _milliseconds(call: Callable[[], Any], cuda: bool) -> float:
    import torch

    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3
