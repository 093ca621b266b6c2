"""``QuarotConfig``: all that decides what a quantised model is, frozen, validated, and what ``config.json`` stores."""

from __future__ import annotations

import copy
import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from quarot.field_types import check_seed, check_types
from quarot.rotation.plan import RotationPlan

FORMAT_VERSION = 1
"""Version of the checkpoint format; a larger one in a checkpoint is refused, never guessed at."""

_W_BITS = (2, 3, 4, 5, 6, 7, 8, 16)
_A_BITS = (4, 6, 8, 16)
_KV_BITS = (2, 3, 4, 8, 16)
_HEAD_BITS = (4, 8, 16)
_OVERRIDABLE = (
    "w_bits",
    "w_method",
    "w_group_size",
    "w_symmetric",
    "w_clip",
    "w_clip_norm",
    "a_bits",
    "a_clip",
    "a_group_size",
)


def _listed(value: Any) -> Any:
    """Sequences as fresh lists, sets as sorted ones, all the way down."""
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    return [_listed(one) for one in value] if isinstance(value, (list, tuple)) else value


def default_kv_clip(bits: int) -> float:
    """The clip ratio of keys or values of so many bits: the paper's 0.95, and none from 8 bits on, which lose by it."""
    return 1.0 if bits >= 8 else 0.95


def following_clip(clip: float, bits: int, other_bits: int) -> float:
    """The clip ratio of ``other_bits`` where ``clip`` belongs to ``bits``: one left at its default follows the bits."""
    return default_kv_clip(other_bits) if clip == default_kv_clip(bits) else clip


@dataclass(repr=False)
class QuarotConfig(QuantizationConfigMixin):
    """What to quantise, to how many bits, and how. The defaults are the paper's W4A4KV4 GPTQ recipe (sections 4 and 5).

    Attributes:
        w_bits: weight bits, 2-8; 16 leaves the weights in the model's dtype.
        w_method: ``"gptq"`` or ``"rtn"`` (round to nearest).
        w_group_size: inputs that share one weight scale; None = one scale per output channel (the paper).
        w_symmetric: symmetric codes ``-2^(b-1) .. 2^(b-1)-1`` (the paper), or asymmetric with a zero point.
        w_clip: search each scale's clip ratio over the error of the weights (the paper), or use the plain range.
        w_clip_norm: exponent of that error; the larger, the less is clipped. Default: 2 (the paper's text) for GPTQ,
            and 2.4 (its code) where weights are rounded to nearest and nothing makes up for what was clipped. GPTQ of a
            model that is not rotated, with outliers in its weights, wants 2.4 too.
        a_bits: activation bits per token, 4, 6 or 8; 16 leaves activations in the model's dtype.
        a_clip: constant clip ratio of the activations. Default: the paper's 0.9, and 1.0 at 8 bits, whose finer grid
            loses more by clipping than it gains.
        a_group_size: inputs that share one activation scale; None = one per token (the paper).
        k_bits, v_bits: bits of cached keys and values: 2, 3, 4, 8, or 16 for none.
        kv_group_size: channels of a head that share one scale and offset; reduced to head_dim where that is smaller.
        k_clip, v_clip: constant clip ratios of keys and of values. Default: the paper's 0.95, and 1.0 at 8 bits or more
            (in each layer, with ``kv_bits_by_layer``).
        gptq_damping: fraction of the mean Hessian diagonal added to it; grows tenfold until the factorisation succeeds.
        gptq_act_order: quantise input columns by falling Hessian diagonal.
        gptq_block_size: columns between two lazy updates.
        calibration_samples, calibration_length: token windows for calibration, tokens in each (the paper: 128 x 2048).
        seed: draws the calibration windows.
        ignore: names or ``re:`` regular expressions of linear modules left in the model's dtype.
        overrides: ``{regex: {field: value}}`` for single linear modules; later entries win.
        rotation: the :class:`~quarot.rotation.plan.RotationPlan` of the model, as JSON; None = not rotated.
        gptq_quantized_inputs: Hessians from activations quantised as at run time (the paper: from unquantised ones).
        gptq_asymmetric: fit each layer to the full-precision model's output, so that it also corrects the error made
            upstream (in the manner of GPTAQ); a second set of hidden states and a second copy of one decoder layer.
        gptq_weighted_clip: weigh the clip search by the Hessian's diagonal.
        gptq_clip_search: try several factors on the scales of each output channel and keep the one with which GPTQ ends
            at the least error of the layer's output; the clip search before it only knows the weights.
        gptq_relative_error: count the error of layers that write to the residual stream relative to the stream's size
            at each token, so that single tokens with massive activations do not dominate.
        gptq_bias_correction: add the mean error of a layer's output to its bias, where it has one.
        a_clip_search: choose the clip ratio of each layer's input by its output error on the calibration windows,
            instead of ``a_clip`` everywhere; the ratios found are stored as ``overrides``.
        tune_steps: steps of distillation from the full-precision model once everything is quantised
            (:mod:`quarot.tuning`); 0 for none (the paper).
        tune_learning_rate: of the weights, in steps of their grid.
        tune_batch_size: calibration windows in each step.
        tune_seconds: fewer tune_steps, and rotation_steps, where this time does not suffice for them (for either);
            results then depend on the machine.
        rotation_steps: steps of learning R1, R2 and the scales in front of R4 before anything is quantised
            (:mod:`quarot.rotation.learned`); 0 for none (the paper: random). There is nothing to learn, and no step is
            made, where only weights are rounded.
        layer_steps: steps of training codes, scales and clip ratios of one decoder layer at a time, once it is
            quantised, towards what the full-precision model has behind it (:mod:`quarot.tuning.layer`), with
            ``tune_learning_rate`` and ``tune_batch_size``; 0 for none (the paper). Layers with experts are left alone.
            A second set of hidden states, a second copy of one decoder layer, and 16 bytes for each of its weights.
        training_samples: token windows of the calibration text that rotations and codes are trained on, drawn apart
            from those of GPTQ. The last windows of the text are held out, and training keeps what did best on them.
        gptq_expert_tokens: an expert's projection of K inputs to which calibration routes fewer than this many times K
            tokens is calibrated on other tokens of its layer as well, until there are as many
            (:mod:`quarot.quantization.expert_moments`); 0 never adds any, and rounds experts without a token to
            nearest.
        w_bits_budget: average weight bits; then each layer gets those of ``w_bits_choices`` that serve calibration best
            (:mod:`quarot.quantization.bit_allocation`), stored as ``overrides``. Layers whose ``w_bits`` are overridden
            already keep theirs and do not count. None gives ``w_bits`` to every layer (the paper).
        w_bits_choices: bits that the budget is spent on; 4 and 8 have kernels of their own.
        kv_bits_budget: average bits of cached keys and values; then the keys and the values of each layer get those of
            ``kv_bits_choices`` that serve calibration best (:mod:`quarot.quantization.kv_bit_allocation`), unless
            ``kv_bits_by_layer`` is given. None gives ``k_bits`` and ``v_bits`` to every layer (the paper).
        kv_bits_choices: bits that this budget is spent on.
        kv_bits_by_layer: key and value bits of each decoder layer, given or found; empty: ``k_bits``, ``v_bits``.
        starved_experts: filled in by quantising: the tokens that calibration routed to each expert projection that had
            too few of them, by module name.
        lm_head_bits: 8 or 4 also rounds ``lm_head`` to nearest, one scale per output, its input to 8 bits per token;
            16 leaves it to ``ignore`` (the paper: full precision).
        kv_clip: ``k_clip`` and ``v_clip`` at once, in whose favour it is None afterwards.
    """

    quant_method: str = "quarot"  # type: ignore[assignment]
    format_version: int = FORMAT_VERSION
    w_bits: int = 4
    w_method: str = "gptq"
    w_group_size: int | None = None
    w_symmetric: bool = True
    w_clip: bool = True
    w_clip_norm: float = None  # type: ignore[assignment]  # chosen by w_method in __post_init__
    a_bits: int = 4
    a_clip: float = None  # type: ignore[assignment]  # chosen by a_bits in __post_init__
    a_group_size: int | None = None
    k_bits: int = 4
    v_bits: int = 4
    kv_group_size: int = 128
    k_clip: float = None  # type: ignore[assignment]  # chosen by the bits in __post_init__
    v_clip: float = None  # type: ignore[assignment]
    gptq_damping: float = 0.01
    gptq_act_order: bool = False
    gptq_block_size: int = 128
    calibration_samples: int = 128
    calibration_length: int = 2048
    seed: int = 0
    ignore: list[str] = field(default_factory=lambda: ["lm_head"])
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    rotation: dict[str, Any] | None = None
    gptq_quantized_inputs: bool = False
    gptq_asymmetric: bool = False
    gptq_weighted_clip: bool = False
    gptq_clip_search: bool = False
    gptq_bias_correction: bool = False
    gptq_relative_error: bool = False
    a_clip_search: bool = False
    tune_steps: int = 0
    tune_learning_rate: float = 0.002
    tune_batch_size: int = 8
    tune_seconds: float | None = None
    rotation_steps: int = 0
    layer_steps: int = 0
    training_samples: int = 256
    gptq_expert_tokens: int = 2
    starved_experts: dict[str, int] = field(default_factory=dict)
    w_bits_budget: float | None = None
    w_bits_choices: list[int] = field(default_factory=lambda: [3, 4, 6, 8])
    lm_head_bits: int = 16
    kv_bits_budget: float | None = None
    kv_bits_choices: list[int] = field(default_factory=lambda: [2, 3, 4, 8])
    kv_bits_by_layer: list[list[int]] = field(default_factory=list)
    kv_clip: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore", [self.ignore] if isinstance(self.ignore, str) else self.ignore)
        for name in ("ignore", "w_bits_choices", "kv_bits_choices", "kv_bits_by_layer"):
            object.__setattr__(self, name, _listed(getattr(self, name)))
        for name in ("overrides", "rotation", "starved_experts"):
            object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))  # the caller's may change later
        check_types(self)
        check_seed("seed", self.seed)
        self._one_of("quant_method", ("quarot",))
        self._one_of("w_bits", _W_BITS)
        self._one_of("w_method", ("gptq", "rtn"))
        self._one_of("a_bits", _A_BITS)
        self._one_of("k_bits", _KV_BITS)
        self._one_of("v_bits", _KV_BITS)
        self._one_of("lm_head_bits", _HEAD_BITS)
        for name, value in self._default_clips().items():
            if getattr(self, name) is None:
                both = self.kv_clip if name in ("k_clip", "v_clip") else None
                object.__setattr__(self, name, value if both is None else both)
        object.__setattr__(self, "kv_clip", None)
        for name in ("a_clip", "k_clip", "v_clip"):
            self._in_range(name, 0.0, 1.0)
        self._in_range("gptq_damping", 0.0, 1.0)
        self._in_range("w_clip_norm", 0.0, 16.0)
        for name in ("w_group_size", "a_group_size"):
            if getattr(self, name) is not None:
                self._positive(name)
        for name in ("tune_steps", "rotation_steps", "layer_steps", "gptq_expert_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be 0 or more")
        self._in_range("tune_learning_rate", 0.0, 1.0)
        for name in (
            "kv_group_size",
            "gptq_block_size",
            "tune_batch_size",
            "calibration_samples",
            "training_samples",
            "calibration_length",
            "format_version",
        ):
            self._positive(name)
        self._check_budget("w_bits", _W_BITS[:-1])
        self._check_budget("kv_bits", _KV_BITS[:-1])
        self._check_kv_bits_by_layer()
        if self.format_version > FORMAT_VERSION:
            raise ValueError(f"format_version={self.format_version}: this quarot writes up to {FORMAT_VERSION}")
        if self.rotation is not None:
            RotationPlan.from_dict(self.rotation)
        if self.tune_seconds is not None and not self.tune_seconds > 0:
            raise ValueError(f"tune_seconds={self.tune_seconds!r} must be positive, or None for no limit")
        for pattern, values in self.overrides.items():
            self._compile(pattern)
            unknown = sorted(set(values) - set(_OVERRIDABLE))
            if unknown:
                raise ValueError(
                    f"overrides[{pattern!r}]: {unknown} cannot be overridden; choose from {list(_OVERRIDABLE)}"
                )
            self.replace(overrides={}, **values)
        for entry in self.ignore:
            if entry.startswith("re:"):
                self._compile(entry[3:])
        object.__setattr__(self, "_frozen", True)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_frozen", False):
            raise AttributeError(f"QuarotConfig is frozen; use config.replace({name}={value!r})")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuarotConfig) and self.to_dict() == other.to_dict()

    def __deepcopy__(self, memo: dict[int, Any]) -> QuarotConfig:
        return type(self).from_dict(self.to_dict())

    def _one_of(self, name: str, allowed: tuple[Any, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ValueError(f"{name}={getattr(self, name)!r} is not supported; choose from {list(allowed)}")

    def _in_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low < value <= high:
            raise ValueError(f"{name}={value!r} must be above {low} and at most {high}")

    def _positive(self, name: str) -> None:
        value = getattr(self, name)
        if value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")

    def _check_budget(self, kind: str, allowed: tuple[int, ...]) -> None:
        """``w_bits_budget`` or ``kv_bits_budget`` and its choices, which end up sorted."""
        choices, budget = getattr(self, f"{kind}_choices"), getattr(self, f"{kind}_budget")
        if not choices or not set(choices) <= set(allowed):
            raise ValueError(f"{kind}_choices={choices!r} must be a list of some of {list(allowed)}")
        object.__setattr__(self, f"{kind}_choices", sorted(set(choices)))
        if budget is None:
            return
        self._in_range(f"{kind}_budget", 0.0, 8.0)
        if budget < min(choices):
            raise ValueError(
                f"{kind}_budget={budget} is below the fewest bits on offer: {kind}_choices={sorted(choices)}"
            )

    def _check_kv_bits_by_layer(self) -> None:
        pairs = self.kv_bits_by_layer
        if not all(len(pair) == 2 and set(pair) <= set(_KV_BITS) for pair in pairs):
            raise ValueError(f"kv_bits_by_layer={pairs} must hold a pair out of {list(_KV_BITS)} for each layer")
        average = sum(map(sum, pairs)) / max(2 * len(pairs), 1)
        if self.kv_bits_budget is not None and average > self.kv_bits_budget:
            raise ValueError(
                f"kv_bits_by_layer has {average:g} bits on average, more than kv_bits_budget={self.kv_bits_budget}: "
                "drop one of them"
            )

    @staticmethod
    def _compile(pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None

    def _default_clips(self) -> dict[str, float]:
        cache = {"k_clip": default_kv_clip(self.k_bits), "v_clip": default_kv_clip(self.v_bits)}
        weights = {"w_clip_norm": 2.4 if self.w_method == "rtn" else 2.0}
        return {"a_clip": 1.0 if self.a_bits == 8 else 0.9, **weights, **cache}

    def replace(self, **changes: Any) -> QuarotConfig:
        """A copy with some fields changed, validated again; clip ratios and w_clip_norm left at defaults follow."""
        unknown = sorted(set(changes) - {field.name for field in dataclasses.fields(self)})
        if unknown:
            known = sorted(field.name for field in dataclasses.fields(self))
            raise ValueError(f"QuarotConfig has no {', '.join(unknown)}; its fields are {', '.join(known)}")
        unset = {name: None for name, value in self._default_clips().items() if getattr(self, name) == value}
        if changes.get("kv_clip") is not None:
            unset |= dict.fromkeys(("k_clip", "v_clip"))
        return dataclasses.replace(self, **{**unset, **changes})

    @property
    def rounds_linears(self) -> bool:
        """Whether any linear layer may become an integer one (``ignore`` aside)."""
        return min(self.w_bits, self.a_bits, self.lm_head_bits) < 16 or bool(self.overrides)

    @property
    def finds_kv_bits(self) -> bool:
        """Whether ``kv_bits_budget`` is still to be spent: bits by layer, given or found, are kept."""
        return self.kv_bits_budget is not None and not self.kv_bits_by_layer

    @property
    def rounds_cache(self) -> bool:
        """Whether keys or values of any layer are quantised."""
        return min(self.k_bits, self.v_bits) < 16 or bool(self.kv_bits_by_layer) or self.kv_bits_budget is not None

    def cache_of_layer(self, layer: int | None) -> tuple[int, int, float, float]:
        """Bits of a decoder layer's cached keys and values, then their clip ratios; None: of ``k_bits``, ``v_bits``.

        A clip ratio left at its default follows the bits of the layer.
        """
        if layer is None or not self.kv_bits_by_layer:
            return self.k_bits, self.v_bits, self.k_clip, self.v_clip
        keys, values = self.kv_bits_by_layer[layer]
        clips = following_clip(self.k_clip, self.k_bits, keys), following_clip(self.v_clip, self.v_bits, values)
        return keys, values, *clips

    def ignores(self, module_name: str) -> bool:
        """Whether the linear module of this name stays in the model's dtype.

        A plain entry matches the whole name or its last components (``"lm_head"``, ``"mlp.down_proj"``); an entry that
        starts with ``re:`` is a regular expression for the whole name.
        """
        if self._is_rounded_head(module_name):
            return False
        for entry in self.ignore:
            if entry.startswith("re:"):
                if re.fullmatch(entry[3:], module_name):
                    return True
            elif module_name == entry or module_name.endswith("." + entry):
                return True
        return False

    def _is_rounded_head(self, module_name: str) -> bool:
        return self.lm_head_bits < 16 and module_name == "lm_head"

    def for_module(self, module_name: str) -> QuarotConfig:
        """The configuration of one linear module, with the matching overrides applied."""
        values = self.overridden(module_name)
        return self.replace(overrides={}, **values) if values else self

    def overridden(self, module_name: str) -> dict[str, Any]:
        """The fields that overrides set for one linear module."""
        values: dict[str, Any] = {}
        if self._is_rounded_head(module_name):
            values.update(w_bits=self.lm_head_bits, a_bits=8, w_method="rtn", w_group_size=None, a_group_size=None)
            values.update(w_symmetric=True, a_clip=None, a_clip_search=False)
        for pattern, override in self.overrides.items():
            if re.fullmatch(pattern, module_name):
                values.update(override)
        return values

    def to_dict(self) -> dict[str, Any]:
        """JSON form; what ``config.json`` stores under ``quantization_config``."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "kv_clip"}

    def to_diff_dict(self) -> dict[str, Any]:
        """All fields: a checkpoint states its settings in full, whatever later defaults are."""
        return self.to_dict()

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """Change nothing (the configuration is frozen) and hand every keyword back as unused."""
        return kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: a ``format_version`` newer than this library reads, or an unknown field.
        """
        data = dict(config_dict)
        version = data.get("format_version", FORMAT_VERSION)
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise ValueError(
                f"this checkpoint has quarot format_version {version};"
                f" this quarot reads up to {FORMAT_VERSION}: upgrade quarot"
            )
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"QuarotConfig: unknown fields {unknown}; known are {sorted(known)}")
        config = cls(**data)
        return (config, kwargs) if return_unused_kwargs else config
