"""``FusedDecoder``: the decoder of a quantised model on fused ops, behind the model's own ``forward``.

The model stays an ordinary transformers model: only the inner decoder's ``forward`` is replaced on the instance, and it
hands over to the original wherever the fused path cannot serve (hooks inside layers, recorded hidden states or
attention weights, ``torch.compile``), saying so once at log level info.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, getitem, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quarot.architectures import architecture_of, decoder_layers, geometry
from quarot.memory import out_of_memory
from quarot.nn.expert_list import ExpertList
from quarot.nn.expert_stack import ExpertStack
from quarot.nn.hooks import HookWatch, hooking
from quarot.nn.quant_kv_cache import QuantKVCache
from quarot.nn.quant_linear import QuantLinear
from quarot.nn.settings import SettingsWatch
from quarot.ops.inference_only import refuse_gradient
from quarot.runtime.boundary import Boundary
from quarot.runtime.decode_step import DecodeStep
from quarot.runtime.fused_experts import FusedExperts
from quarot.runtime.fused_layer import FusedLayer, norm_eps
from quarot.runtime.gains import Gains
from quarot.runtime.linear_group import LinearGroup

logger = logging.getLogger("quarot")

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "smollm3")
"""Families whose layers are exactly norm, attention, add, norm, SiLU-gated MLP (or experts that are such), add."""

_RECORDING = ("output_hidden_states", "output_attentions", "output_router_logits")


def install(model: Any) -> str | None:
    """Give a quantised model the fused path; returns the reason when it cannot have one (then nothing changes)."""
    uninstall(model)
    try:
        fused = FusedDecoder(model)
    except NotImplementedError as error:
        logger.info("the fused decoder path is off: %s", error)
        return str(error)
    decoder = fused.decoder
    decoder.quarot_fused = fused
    decoder.forward = functools.partial(fused_forward, decoder)  # unlike a bound method, it can be pickled
    return None


def uninstall(model: Any) -> None:
    """Undo :func:`install`."""
    decoder = getattr(model, model.base_model_prefix)
    for name in ("quarot_fused", "forward"):
        vars(decoder).pop(name, None)


def fused_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the inner decoder's ``forward``; same arguments and result."""
    if torch.compiler.is_compiling():  # it traces the model's own layers, and would trip over the log below
        return type(self).forward(self, *args, **kwargs)
    fused: FusedDecoder = vars(self)["quarot_fused"]
    reason = fused.obstacle(args, kwargs)
    if reason is not None:
        _say_once(reason)
        return type(self).forward(self, *args, **kwargs)
    with torch.no_grad(), out_of_memory(f"a forward of {_size(kwargs)}", _LOWER):
        output = fused.forward(**kwargs)
    wanting = fused.wanting(kwargs) if torch.is_grad_enabled() else None
    if wanting is not None:
        output.last_hidden_state = refuse_gradient("a quantised model", wanting, output.last_hidden_state)
    return output


_LOWER = "the batch, or the tokens at once (quarot.generate's prefill_chunk, generate()'s prefill_chunk_size)"


def _size(kwargs: dict[str, Any]) -> str:
    """``64 x 2048 tokens``."""
    given = kwargs.get("input_ids")
    given = kwargs.get("inputs_embeds") if given is None else given
    return "nothing" if given is None else f"{given.shape[0]} x {given.shape[1]} tokens"


@functools.cache
def _say_once(reason: str) -> None:
    logger.info("this forward takes the unfused path: %s", reason)


class _Look(NamedTuple):
    """Where the experts were when there had been so many moves (:attr:`QuantLinear.moves`)."""

    moves: int
    replaced: bool
    taken: nn.Module | None
    devices: set[torch.device]
    addresses: tuple[int, ...]


def _modules(places: list[dict[str, nn.Module]]) -> list[nn.Module]:
    return list(chain.from_iterable(map(dict.values, places)))


def _devices(parameters: list[dict[str, Tensor]]) -> set[torch.device]:
    return set(map(attrgetter("device"), map(itemgetter("qweight"), parameters)))


def _addresses(parameters: list[dict[str, Tensor]]) -> Iterator[int]:
    """Of codes and scales."""
    tensors = (map(itemgetter(name), parameters) for name in ("qweight", "weight_scale"))
    return map(Tensor.data_ptr, chain.from_iterable(tensors))


class FusedDecoder:
    """Embedding, fused layers and final norm of one model.

    Raises:
        NotImplementedError: a family or a layer the fused ops do not cover.
    """

    def __init__(self, model: Any) -> None:
        architecture, sizes = architecture_of(model), geometry(model)
        if architecture.family not in FAMILIES:
            raise NotImplementedError(f"family {architecture.family} is not among {', '.join(FAMILIES)}")
        activation = getattr(model.config, "hidden_act", None)
        if activation not in ("silu", "swish"):
            raise NotImplementedError(f"activation {activation!r} is not SiLU")
        self.decoder: nn.Module = getattr(model, model.base_model_prefix)
        self.config = self.decoder.config
        self.embed = model.get_submodule(architecture.embed)
        self.rotary: Any = self.decoder.rotary_emb
        final_norm = model.get_submodule(architecture.final_norm)
        self.boundary = Boundary(self.embed, self.rotary, final_norm, norm_eps(final_norm))
        layers = [layer for _, layer in decoder_layers(model)]
        heads = (sizes.heads, sizes.kv_heads)
        self.layers = [FusedLayer(layer, architecture, self.config, heads) for layer in layers]
        self.output = BaseModelOutputWithPast if architecture.experts is None else MoeModelOutputWithPast
        self.session: Any = None  # of quarot.runtime.generate
        self._experts: _Look | None = None
        self._devices: set[torch.device] = set()
        self._places_of_codes: list[int] = []
        self.gains = Gains(norm for layer in self.layers for norm in (layer.attn_norm, layer.mlp_norm))
        self.settings = SettingsWatch(model.modules())
        lists = [module for layer in layers for module in layer.modules() if isinstance(module, ExpertList)]
        experts = [module for one in lists for module in one.modules()]
        known = set(map(id, experts))
        others = [module for module in self.decoder.modules() if id(module) not in known]
        inside = (module for layer in layers for module in layer.modules() if id(module) not in known)
        self.watch, self.watch_experts = HookWatch(inside), HookWatch(experts)
        self._places, self._places_of_experts = ([m._modules for m in some if m._modules] for some in (others, experts))
        self._built_of = _modules(self._places), _modules(self._places_of_experts)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, of the model starts without the recorded graphs, which belong to this one's memory."""
        state = vars(self) | {"session": None, "_experts": None, "_places_of_codes": []}
        for name in ("_parameters", "_of_experts", "_biased", "_others"):
            state.pop(name, None)
        return state

    # Every token of ``model.generate`` looks through these. They are dictionaries, since a look into a module runs
    # Python code: for hundreds of modules that took longer than a decode step.
    @functools.cached_property
    def _parameters(self) -> list[dict[str, Tensor]]:
        """Of every linear layer that is no expert."""
        groups = (group for group in self._groups() if isinstance(group, LinearGroup))
        return [member._parameters for group in groups for member in group.members]  # type: ignore[misc]

    @functools.cached_property
    def _of_experts(self) -> list[dict[str, Tensor]]:
        """Of every expert's linear layers."""
        groups = (group for group in self._groups() if isinstance(group, ExpertStack))
        return [member._parameters for group in groups for member in group.members]  # type: ignore[misc]

    @functools.cached_property
    def _biased(self) -> list[dict[str, Tensor]]:
        return [parameters for parameters in self._parameters if parameters.get("bias") is not None]

    @functools.cached_property
    def _others(self) -> tuple[list[dict[str, Tensor]], list[str]]:
        """Where parameters and buffers of every other module are, and their names: embedding, rotary tables, norms,
        routers."""
        modules = (module for module in self.decoder.modules() if not isinstance(module, QuantLinear))
        places = [tensors for m in modules for tensors in (m._parameters, m._buffers)]
        found = [(tensors, name) for tensors in places for name, tensor in tensors.items() if tensor is not None]
        return [tensors for tensors, _ in found], [name for _, name in found]  # type: ignore[misc]

    def _groups(self) -> Iterator[LinearGroup | ExpertStack]:
        return (group for layer in self.layers for group in layer.groups())

    def obstacle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why this call must go through the model's own layers (None when it need not)."""
        if args:
            return "positional arguments"
        for name in _RECORDING:
            wanted = kwargs.get(name)
            if wanted or (wanted is None and getattr(self.config, name, False)):
                return f"{name}=True"
        if self.decoder.training:
            return "the model is in training mode"
        if self.config._attn_implementation not in ALL_ATTENTION_FUNCTIONS:  # eager is a function of each model file
            return f"attention is {self.config._attn_implementation!r}"
        ids = kwargs.get("input_ids")
        if ids is None or ids.shape[1] > 1:  # a prompt: who knows what happened since the last one
            self._experts = None
        look = self._look_at_experts()
        hooked = self.watch.find() or look.taken or self.watch_experts.find(attributes=False)
        if hooked is not None:
            return hooking(hooked)
        if look.replaced or _modules(self._places) != self._built_of[0]:
            return "a module was replaced, added or removed since the model was quantised"
        if not self.settings.are_kept():
            return "a_clip, or another setting of a layer's inputs, was set since the model was quantised"
        if not self.gains.are_ones():
            return "an RMSNorm gain is no longer 1"
        places = [self.embed.weight.data_ptr(), *map(Tensor.data_ptr, map(itemgetter("qweight"), self._parameters))]  # type: ignore[operator]
        if places != self._places_of_codes:  # addresses are quicker to compare than devices
            self._devices, self._places_of_codes = _devices(self._parameters), places
        if self._devices | look.devices != {self.embed.weight.device}:
            return "the layers are on several devices"
        return None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | MoeModelOutputWithPast:
        """As the decoder's own forward."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        shape = torch.Size(input_ids.shape if input_ids is not None else inputs_embeds.shape[:2])  # type: ignore[union-attr]
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            quantizes = getattr(self.layers[0].attention, "quarot_kv_format", None) is not None
            # Nobody said what the cache is for: logits are those of the quantised model, as without a cache.
            past_key_values = (
                QuantKVCache(self.config, prefill="quantized") if quantizes else DynamicCache(config=self.config)
            )
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(shape[1], device=self.embed.weight.device) + past)[None]  # type: ignore[arg-type]
        step = DecodeStep.begin(past_key_values, shape, attention_mask, self.config)
        out = None
        if step is not None and input_ids is not None:
            out = step.run_graph(self, input_ids, position_ids)
        if out is None:
            hidden: Tensor = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
            if step is not None:
                out = step.run(self, hidden, position_ids)
            else:
                out = self._attend_through_model(hidden, position_ids, attention_mask, past_key_values, kwargs)
        return self.output(last_hidden_state=out, past_key_values=past_key_values if use_cache else None)

    def join(self) -> None:
        """Put the weights where forwards will look for them, which the first forward does otherwise."""
        for group in self._groups():
            group.tensors()

    def addresses(self) -> tuple[Any, ...]:
        """Changes whenever the model is moved, cast or given other tensors, or another number of experts a token: what
        was recorded, or allocated for it, no longer fits then.

        Thousands of experts are looked at only when a layer was moved or a parameter assigned since, and with every
        prompt. So one ``parameter.data = ..`` of an expert, or its own ``forward``, counts from the next prompt on;
        writing into a parameter (``copy_``) and hooks always do.
        """
        weight: Tensor = self.embed.weight  # type: ignore[assignment]
        biases = map(Tensor.data_ptr, map(itemgetter("bias"), self._biased))
        others = map(Tensor.data_ptr, map(getitem, *self._others))
        routing = [layer.mlp.routing() for layer in self.layers if isinstance(layer.mlp, FusedExperts)]
        experts = self._look_at_experts().addresses
        kind = weight.dtype, weight.device, self.boundary.gain.are_ones()
        return *kind, *_addresses(self._parameters), *biases, *others, *routing, experts

    def _look_at_experts(self) -> _Look:
        if self._experts is None or self._experts.moves != QuantLinear.moves:
            parameters, moves = self._of_experts, QuantLinear.moves
            replaced = _modules(self._places_of_experts) != self._built_of[1]
            places = _devices(parameters), tuple(_addresses(parameters))
            self._experts = _Look(moves, replaced, self.watch_experts.find(), *places)
        return self._experts

    def wanting(self, kwargs: dict[str, Any]) -> Tensor | None:
        """What a backward through the decoder would reach that wants a gradient: the embeddings, given or not."""
        given = kwargs.get("inputs_embeds")
        source: Tensor = self.embed.weight if given is None else given  # type: ignore[assignment]
        return source if source.requires_grad else None

    def run_layers(self, residual: Tensor, attend: Any) -> Tensor:
        """Residual stream [M, hidden] through all layers and the final norm."""
        delta: Any = None
        for layer in self.layers:
            residual, delta = layer.forward(residual, delta, attend)
        return self.boundary.finish(residual, delta)

    def _attend_through_model(
        self, hidden: Tensor, position_ids: Tensor, mask: Any, cache: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """Any cache and attention function, as the model's own attention modules call them."""
        batch, count, _ = hidden.shape
        cos, sin = (t.reshape(-1, t.shape[-1]) for t in self.rotary(hidden, position_ids=position_ids))
        masks = self._masks(hidden, mask, cache, position_ids)
        interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]

        def attend(layer: FusedLayer, qkv: Tensor) -> Tensor:
            layer.rotate_positions(qkv, cos, sin)
            query, key, value = layer.split(qkv, batch)
            if cache is not None:
                key, value = cache.update(key, value, layer.index)
            out, _ = interface(
                layer.attention,
                query,
                key,
                value,
                masks[layer.window],
                dropout=0.0,
                scaling=layer.scaling,
                sliding_window=layer.window or None,
                position_ids=position_ids,
                **kwargs,
            )
            return out.reshape(batch * count, -1)

        return self.run_layers(hidden.flatten(0, 1), attend).view(hidden.shape)

    def _masks(self, hidden: Tensor, mask: Any, cache: Any, position_ids: Tensor) -> dict[int, Tensor | None]:
        """The attention mask of every window size among the layers (0: none)."""
        made = {}
        for window in {layer.window for layer in self.layers}:
            if isinstance(mask, dict):
                made[window] = mask["sliding_attention" if window else "full_attention"]
                continue
            make = create_sliding_window_causal_mask if window else create_causal_mask
            made[window] = make(
                config=self.config,
                inputs_embeds=hidden,
                attention_mask=mask,
                past_key_values=cache,
                position_ids=position_ids,
            )
        return made
