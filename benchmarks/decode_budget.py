"""What each part of a decode step costs: the recorded step, and the step without that part.

The difference is what the part adds to the chain of kernels, overlaps and waits included, which neither a profile
(kernels overlap) nor a kernel timed alone (nothing before it delays its start) shows. A part is left out by handing on
its first result again and again.

    python -m benchmarks.decode_budget --model llama-2-7b --batch 1 --context 1024
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.shapes import SHAPES
from quarot.bench import subjects
from quarot.bench.shapes import config_of
from quarot.bench.subjects import PackedDecode, Quantized, filled_packed_cache
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import QuantLinear
from quarot.runtime import decode_step, linear_group
from quarot.runtime.boundary import Boundary
from quarot.runtime.linear_group import LinearGroup

_ROUNDS, _REPLAYS = 9, 8


def kept(call: Callable[..., Any], skip: Callable[..., bool] = lambda *a: True) -> Callable[..., Any]:
    """``call``, but where ``skip`` says so only once for each combination of shapes."""
    results: dict[Any, Any] = {}

    def again(*args: Any, **kwargs: Any) -> Any:
        if not skip(*args):
            return call(*args, **kwargs)
        key = tuple(tuple(a.shape) if isinstance(a, torch.Tensor) else None for a in args)
        if key not in results:
            results[key] = call(*args, **kwargs)
        return results[key]

    return again


def parts(model: Any) -> dict[str, tuple[Any, str, Callable[..., bool]]]:
    """Owner and name of the function behind each part, and which of its calls belong to it."""
    layer = vars(model.model)["quarot_fused"].layers[0]
    groups = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
    head = model.get_output_embeddings()
    always = lambda *a: True  # noqa: E731

    def group(name: str, method: str) -> tuple[Any, str, Callable[..., bool]]:
        like = groups[name]
        shape = (like.out_features, like.first.in_features)
        return LinearGroup, method, lambda self, *a: (self.out_features, self.first.in_features) == shape

    return {
        "norm, qkv": group("qkv", "after_norm"),
        "RoPE + R3 + append": (decode_step, "rope_kv_append", always),
        "attention": (decode_step, "decode_attention", always),
        "head Hadamard, o": group("o", "after_rotation"),
        "norm, gate_up": group("gate_up", "after_norm"),
        "SiLU + R4, down": group("down", "after_gate"),
        # Zero where they are part of the GEMM behind them.
        "norm + quantise (2), if alone": (linear_group, "add_rms_norm_quantize", always),
        "head Hadamard + quantise, if alone": (QuantLinear, "quantize_input", lambda self, *a: self is not head),
        "SiLU + R4 + quantise, if alone": (linear_group, "silu_mul_hadamard_quantize", always),
        "begin_step": (Boundary, "begin", always),
        "final norm": (Boundary, "finish", always),
        "head": (type(head), "forward", lambda self, *a: self is head),
        "greedy choice": (subjects, "argmax_rows", always),
    }


@contextlib.contextmanager
def without(part: tuple[Any, str, Callable[..., bool]] | None) -> Iterator[None]:
    """Leave the part out of what is recorded inside."""
    if part is None:
        yield
        return
    owner, name, belongs = part
    original = getattr(owner, name)
    setattr(owner, name, kept(original, belongs))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _microseconds(graphs: dict[str, Any]) -> dict[str, float]:
    """Median time of each graph, all taking turns, so that clocks that drift favour none."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_ROUNDS):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(_REPLAYS):
                graph.step()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / _REPLAYS)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="llama-2-7b", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16, help="enough that no weight stays in L2")
    options = parser.parse_args()
    shape, batch = SHAPES[options.model], options.batch
    with torch.inference_mode():
        config, recipe = config_of(shape, options.layers), QuarotConfig(w_method="rtn")
        model = Quantized.random_codes(config, recipe, torch.float16, "cuda").model
        room = 2 * _ROUNDS * _REPLAYS  # every replay of a graph appends a token
        cache = filled_packed_cache(model, batch, options.context, room)
        graphs = {}
        for name, part in {"whole": None, **parts(model)}.items():
            with without(part):
                graphs[name] = PackedDecode(model, cache, batch, options.context)
                graphs[name].step()
        times = _microseconds(graphs)
    whole = times.pop("whole")
    sizes = f"{options.layers} layers, batch {batch}, {options.context} cached tokens"
    print(f"{torch.cuda.get_device_name()}: {options.model}, {sizes}")
    print(f"{'whole step':34s} {whole:8.1f} us")
    for name, value in times.items():
        print(f"{name:34s} {whole - value:8.1f} us {(whole - value) / options.layers:8.2f} a layer")


if __name__ == "__main__":
    main()
