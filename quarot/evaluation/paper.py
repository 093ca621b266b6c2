"""The paper's accuracy experiments as data: settings, and the figures the paper prints (arXiv 2404.00456 v2)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Experiment:
    """One row of a table.

    Attributes:
        setting: its name in results.
        rotate: keywords of :func:`quarot.rotate_model`; None leaves the model unrotated.
        quantize: keywords of :func:`quarot.quantize_model`; None leaves it in full precision.
        paper: WikiText-2 perplexity in the paper, by model.
        paper_tasks: zero-shot accuracies in the paper, in the order of :data:`TASKS`, and their average, by model.
        residual_bits: bits of the residual stream (:mod:`quarot.evaluation.residual_stream`); None leaves it.
        half_hadamard: online transforms in fp16 (:mod:`quarot.evaluation.half_hadamard`).
    """

    setting: str
    rotate: dict[str, Any] | None = field(default_factory=dict)
    quantize: dict[str, Any] | None = None
    paper: dict[str, float] = field(default_factory=dict)
    paper_tasks: dict[str, tuple[float, ...]] = field(default_factory=dict)
    residual_bits: int | None = None
    half_hadamard: bool = False

    @property
    def random(self) -> bool:
        """Whether a seed changes anything."""
        if self.quantize is None:
            return self.rotate is not None and self.residual_bits is not None
        rounds = self.quantize.get("w_bits", 4) == 16 or self.quantize.get("w_method") == "rtn"
        return self.rotate is not None or not rounds


@dataclass(frozen=True)
class Table:
    """A table of the paper: what it shows, and its rows."""

    title: str
    experiments: tuple[Experiment, ...]
    zero_shot: bool = False


MODELS = {
    "llama-2-7b": ("Llama-2-7b-hf", "Llama-2-7b"),
    "llama-2-13b": ("Llama-2-13b-hf", "Llama-2-13b"),
    "llama-2-70b": ("Llama-2-70b-hf", "Llama-2-70b"),
    "llama-3-8b": ("Meta-Llama-3-8B",),
    "llama-3-70b": ("Meta-Llama-3-70B",),
    "phi-3-mini": ("Phi-3-mini-4k-instruct",),
}
"""Last components of the names under which the paper's models go."""


def paper_model(name: str) -> str | None:
    """The paper's model behind a hub id or folder; None for any other."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return next((model for model, names in MODELS.items() if last in {n.lower() for n in names}), None)


def _bits(w: int, a: int, k: int, v: int, **fields: Any) -> dict[str, Any]:
    return {"w_bits": w, "a_bits": a, "k_bits": k, "v_bits": v, **fields}


TASKS = ("piqa", "winogrande", "hellaswag", "arc_easy", "arc_challenge", "lambada")
"""The paper's zero-shot tasks, in the order of its tables."""


def _llama2(small: float | None, middle: float | None, large: float | None) -> dict[str, float]:
    figures = {"llama-2-7b": small, "llama-2-13b": middle, "llama-2-70b": large}
    return {model: figure for model, figure in figures.items() if figure is not None}


_RTN: dict[str, Any] = {"w_method": "rtn"}
_FULL = Experiment(
    "full precision",
    None,
    None,
    _llama2(5.47, 4.88, 3.32) | {"llama-3-8b": 6.14, "llama-3-70b": 2.86, "phi-3-mini": 6.35},
)
_MAIN = Experiment(
    "w4a4kv4-gptq",
    quantize=_bits(4, 4, 4, 4),
    paper=_llama2(6.10, 5.40, 3.79) | {"llama-3-8b": 8.16, "llama-3-70b": 6.66, "phi-3-mini": 7.85},
)


_RTN_4_PAPER = _llama2(8.37, 6.09, 4.14) | {"phi-3-mini": 11.69}


def _grouped(size: int, paper: dict[str, float]) -> Experiment:
    fields = {"w_group_size": size, "a_group_size": size}
    return Experiment(f"w4a4kv4-gptq-g{size}", quantize=_bits(4, 4, 4, 4, **fields), paper=paper)


def _uniform(bits: int, method: str, paper: dict[str, float], average: dict[str, float] | None = None) -> Experiment:
    # The cache has no 6-bit codes; 8 are what the next larger ones cost.
    kv = bits if bits != 6 else 8
    fields = _bits(bits, bits, kv, kv, **({"w_method": method} if method != "gptq" else {}))
    tasks: dict[str, tuple[float, ...]] = {model: (figure,) for model, figure in (average or {}).items()}
    return Experiment(f"w{bits}a{bits}kv{kv}-{method}", quantize=fields, paper=paper, paper_tasks=tasks)


def _cache(k: int, v: int, *paper: float) -> Experiment:
    return Experiment(f"k{k}v{v}", quantize=_bits(16, 16, k, v), paper=_llama2(*paper))


def _weights(bits: int, method: str, rotated: bool, *paper: float | None) -> Experiment:
    name = f"w{bits}a16-{method}" + ("" if rotated else "-unrotated")
    quantize = _bits(bits, 16, 16, 16, w_method=method, w_symmetric=False)
    if not rotated:  # the original's exponent, which weights with outliers need whatever rounds them
        quantize["w_clip_norm"] = 2.4
    return Experiment(name, {} if rotated else None, quantize, _llama2(*paper))


def _budget(bits: float, a_bits: int, choices: list[int] | None = None) -> Experiment:
    fields: dict[str, Any] = {"w_bits_budget": bits} | ({"w_bits_choices": choices} if choices else {})
    kv = a_bits
    name = f"w{bits:g}a{a_bits}" + ("" if kv == 16 else f"kv{kv}") + "-gptq-budget"
    suffix = "" if choices is None else "-of-" + "-".join(map(str, choices))
    return Experiment(name + suffix, quantize=_bits(4, a_bits, kv, kv, **fields))


def _best(a: int, kv: int) -> Experiment:
    """The trained preset; in the names of settings a cache of 16 bits is left out."""
    name = f"w4a{a}" + ("" if kv == 16 else f"kv{kv}") + "-best"
    return Experiment(name, quantize=_bits(4, a, kv, kv, preset="best"))


def _clips() -> tuple[Experiment, ...]:
    inputs = {1.0: 5.938, 0.95: 5.910, 0.9: 5.828, 0.85: 5.850}
    caches = {1.0: 5.513, 0.95: 5.510, 0.9: 5.517, 0.85: 5.532}
    one = [
        Experiment(f"a4-clip{clip}", quantize=_bits(16, 4, 16, 16, a_clip=clip), paper={"llama-2-7b": ppl})
        for clip, ppl in inputs.items()
    ]
    two = [
        Experiment(f"kv4-clip{clip}", quantize=_bits(16, 16, 4, 4, kv_clip=clip), paper={"llama-2-7b": ppl})
        for clip, ppl in caches.items()
    ]
    return (_FULL, *one, *two)


_TASKS_FULL: dict[str, tuple[float, ...]] = {
    "llama-2-7b": (79.11, 69.06, 75.99, 74.58, 46.25, 73.90, 69.82),
    "llama-2-13b": (80.47, 72.22, 79.39, 77.48, 49.23, 76.75, 72.59),
    "llama-2-70b": (82.70, 77.98, 83.84, 80.98, 57.34, 79.58, 77.07),
    "llama-3-8b": (80.74, 72.77, 79.06, 77.82, 53.33, 75.63, 73.22),
    "llama-3-70b": (84.66, 80.51, 84.89, 85.86, 64.25, 79.47, 79.94),
    "phi-3-mini": (80.47, 73.72, 78.45, 80.13, 57.51, 68.37, 73.11),
}
_TASKS_RTN: dict[str, tuple[float, ...]] = {
    "llama-2-7b": (72.09, 60.69, 65.40, 58.88, 35.24, 57.27, 58.26),
    "llama-2-13b": (77.37, 67.32, 73.11, 70.83, 43.69, 70.66, 67.16),
    "llama-2-70b": (80.69, 75.14, 79.63, 77.57, 51.71, 77.02, 73.63),
    "phi-3-mini": (56.12,),
}
_TASKS_GPTQ: dict[str, tuple[float, ...]] = {
    "llama-2-7b": (76.77, 63.77, 72.16, 69.87, 40.87, 70.39, 65.64),
    "llama-2-13b": (78.89, 70.24, 76.37, 72.98, 46.59, 73.67, 69.79),
    "llama-2-70b": (82.43, 76.24, 81.82, 80.43, 56.23, 78.73, 75.98),
    "llama-3-8b": (75.14, 65.82, 72.94, 68.01, 43.34, 65.81, 65.18),
    "llama-3-70b": (78.07, 69.30, 77.33, 73.44, 47.53, 69.57, 69.21),
    "phi-3-mini": (75.35, 67.88, 72.95, 72.98, 48.12, 60.78, 66.34),
}
_AVERAGES: tuple[tuple[int, str, dict[str, float]], ...] = (
    (6, "rtn", _llama2(69.42, 72.56, 77.21) | {"phi-3-mini": 71.98}),
    (6, "gptq", _llama2(69.77, 72.60, 77.02) | {"phi-3-mini": 72.67}),
    (8, "rtn", _llama2(69.65, 72.46, 77.17) | {"phi-3-mini": 73.02}),
    (8, "gptq", _llama2(69.81, 72.49, 77.28) | {"phi-3-mini": 73.18}),
)

_TRAINED = (
    _FULL,
    _MAIN,
    _best(4, 4),
    Experiment("w4a8kv4-gptq", quantize=_bits(4, 8, 4, 4)),
    _best(8, 4),
    Experiment("w4a16-gptq-symmetric", quantize=_bits(4, 16, 16, 16)),
    _best(16, 16),
)

TABLES: dict[str, Table] = {
    "main": Table(
        "Tables 1, 4, 11: 4-bit weights, activations and cache",
        (
            _FULL,
            _uniform(4, "rtn", _RTN_4_PAPER),
            _MAIN,
            _grouped(256, _llama2(5.98, 5.28, 3.63)),
            _grouped(128, _llama2(5.93, 5.26, 3.61) | {"llama-3-8b": 7.36, "llama-3-70b": 5.51}),
            _grouped(64, _llama2(5.88, 5.25, 3.58)),
        ),
    ),
    "bits": Table(
        "Tables 3, 9, 13: round to nearest and GPTQ at 4, 6 and 8 bits",
        (
            _FULL,
            _uniform(4, "rtn", _RTN_4_PAPER),
            _MAIN,
            _uniform(6, "rtn", _llama2(5.56, 4.95, 3.36) | {"phi-3-mini": 6.78}),
            _uniform(6, "gptq", _llama2(5.52, 4.92, 3.35) | {"phi-3-mini": 6.63}),
            _uniform(8, "rtn", _llama2(5.50, 4.90, 3.33) | {"phi-3-mini": 6.58}),
            _uniform(8, "gptq", _llama2(5.50, 4.90, 3.33) | {"phi-3-mini": 6.58}),
        ),
    ),
    "clips": Table("Table 5: clip ratios of activations and of the cache", _clips()),
    "kv": Table(
        "Table 6: bits of keys and values",
        (
            _FULL,
            _cache(4, 4, 5.51, 4.91, 3.33),
            _cache(4, 3, 5.54, 4.93, 3.35),
            _cache(4, 2, 5.75, 5.09, 3.43),
            _cache(3, 4, 5.65, 5.01, 3.38),
            _cache(3, 3, 5.68, 5.02, 3.39),
            _cache(3, 2, 5.93, 5.21, 3.48),
            _cache(2, 4, 8.06, 6.42, 3.89),
            _cache(2, 3, 8.18, 6.50, 3.92),
            _cache(2, 2, 9.23, 7.07, 4.13),
        ),
    ),
    "weights": Table(
        "Table 7: weights only, asymmetric, with and without rotation",
        (
            _FULL,
            _weights(4, "rtn", False, 6.99, 6.32, 4.45),
            _weights(3, "rtn", False, None, None, 42.11),
            _weights(2, "rtn", False, None, None, None),
            _weights(4, "gptq", False, 8.25, 5.65, 3.87),
            _weights(3, "gptq", False, None, 9.51, 5.91),
            _weights(2, "gptq", False, None, None, 25.30),
            _weights(4, "rtn", True, 6.76, 5.48, 3.66),
            _weights(3, "rtn", True, None, 48.89, 5.25),
            _weights(2, "rtn", True, None, None, None),
            _weights(4, "gptq", True, 5.60, 5.00, 3.41),
            _weights(3, "gptq", True, 6.09, 5.37, 3.72),
            _weights(2, "gptq", True, 22.07, 10.41, 5.60),
        ),
    ),
    "orthogonal": Table(
        "Table 8: a random orthogonal matrix in place of the Hadamard matrix",
        (
            _FULL,
            Experiment("w4a4kv4-gptq-orthogonal", {"r1": "orthogonal"}, _bits(4, 4, 4, 4), _llama2(7.45, 5.84, 4.07)),
            _MAIN,
        ),
    ),
    "hadamard-precision": Table(
        "Table 10: online Hadamard transforms in fp32 and in fp16",
        (
            _FULL,
            _MAIN,
            Experiment(
                "w4a4kv4-gptq-fp16-hadamard",
                quantize=_bits(4, 4, 4, 4),
                paper=_llama2(6.08, 5.40, None),
                half_hadamard=True,
            ),
        ),
    ),
    "residual": Table(
        "Beyond the paper: the residual stream in 8, 6 and 4 bits per token",
        (
            _FULL,
            *(Experiment(f"residual{bits}", residual_bits=bits) for bits in (8, 6, 4)),
            *(Experiment(f"residual{bits}-unrotated", None, residual_bits=bits) for bits in (8, 4)),
            _MAIN,
            Experiment("w4a4kv4-gptq-residual8", quantize=_bits(4, 4, 4, 4), residual_bits=8),
        ),
    ),
    "budget": Table(
        "Beyond the paper: bits of weights, or of keys and values, layer by layer under a budget of average bits",
        (
            _FULL,
            Experiment("w4a16-gptq-symmetric", quantize=_bits(4, 16, 16, 16)),
            _budget(4.0, 16),
            _budget(3.5, 16),
            _MAIN,
            _budget(4.0, 4),
            _budget(4.5, 4, [4, 8]),
            *(Experiment(f"kv{b:g}-budget", quantize=_bits(16, 16, 4, 4, kv_bits_budget=b)) for b in (4.0, 3.0, 2.5)),
        ),
    ),
    "best": Table('Beyond the paper: 8-bit activations and `preset="best"`', _TRAINED),
    "zero-shot": Table(
        "Tables 2, 3, 9, 12, 13: zero-shot accuracy",
        (
            dataclasses.replace(_FULL, paper_tasks=_TASKS_FULL),
            Experiment("w4a4kv4-rtn", quantize=_bits(4, 4, 4, 4, **_RTN), paper_tasks=_TASKS_RTN),
            dataclasses.replace(_MAIN, paper_tasks=_TASKS_GPTQ),
            *(_uniform(bits, method, {}, average) for bits, method, average in _AVERAGES),
        ),
        zero_shot=True,
    ),
    "best-zero-shot": Table(
        'Beyond the paper: zero-shot accuracy, 8-bit activations and `preset="best"`', _TRAINED, zero_shot=True
    ),
}
