"""What a model family looks like to rotation and quantisation, as data.

Paths of the model (``embed``, ``layers``, ``final_norm``, ``lm_head``) start at the causal-LM model, all others at one
decoder layer. A :class:`Projection` names the parts that its output rows hold, in order, so that fused and separate
weights need no branch. Whether a projection has a bias is read from the model, never declared.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Projection:
    """A linear layer and what its output rows are.

    Attributes:
        path: where it is inside a decoder layer.
        parts: names of its row blocks in order: ``q``, ``k``, ``v``, ``o``, ``gate``, ``up``, ``down``.
    """

    path: str
    parts: tuple[str, ...]

    @property
    def role(self) -> str:
        """``q``, ``k``, ``v``, ``qkv``, ``o``, ``gate``, ``up``, ``gate_up`` or ``down``."""
        return "qkv" if self.parts == ("q", "k", "v") else "_".join(self.parts)


@dataclass(frozen=True)
class Experts:
    """Where a mixture-of-experts block keeps its router and its expert weights.

    Attributes:
        module: the module that holds the 3-D expert parameters.
        router: the router's module; its ``weight`` [experts, hidden] reads the residual stream.
        gate_up: parameter of ``module``, [experts, 2 * intermediate, hidden], gate rows first.
        down: parameter of ``module``, [experts, hidden, intermediate].
        stored_block: what checkpoints call the MLP of a decoder layer.
        stored: what they call the gate, up and down projections of an expert, which they keep one by one.
        float32_weights: whether the router leaves the weights of a token's experts in float32.
    """

    module: str
    router: str
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    stored_block: str = "mlp"
    stored: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    float32_weights: bool = False


def _separate(prefix: str, *parts: str) -> tuple[Projection, ...]:
    return tuple(Projection(f"{prefix}.{part}_proj", (part,)) for part in parts)


@dataclass(frozen=True)
class Architecture:
    """One decoder-only family of pre-norm RMSNorm models with a gated MLP; the defaults are Llama's.

    Attributes:
        family: short name for messages and the record of a rotation.
        model_class: class name of the causal-LM model in transformers; subclasses count.
        embed, layers, final_norm, lm_head: paths inside the model.
        attention, mlp: the two blocks of a decoder layer.
        attn_norm, mlp_norm: the RMSNorm in front of each block.
        attn_in, attn_out, mlp_in, mlp_out: the linear layers that read from, and write to, the residual stream.
        head_norms: norms over head_dim between projection and RoPE (Qwen3); they stay as they are.
        norm_gain_offset: a norm multiplies by ``norm_gain_offset + weight`` (Gemma: 1).
        experts: the mixture-of-experts block that some or all layers have in place of ``mlp_in`` and ``mlp_out``.
    """

    family: str
    model_class: str
    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    attention: str = "self_attn"
    mlp: str = "mlp"
    attn_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attn_in: tuple[Projection, ...] = _separate("self_attn", "q", "k", "v")
    attn_out: Projection = Projection("self_attn.o_proj", ("o",))
    mlp_in: tuple[Projection, ...] = _separate("mlp", "gate", "up")
    mlp_out: Projection = Projection("mlp.down_proj", ("down",))
    head_norms: tuple[str, ...] = ()
    norm_gain_offset: float = 0.0
    experts: Experts | None = None

    @property
    def slots(self) -> dict[str, tuple[Projection, ...]]:
        """The linear layers of a decoder layer by how they meet the residual stream, in the order data passes them."""
        return {
            "attn_in": self.attn_in,
            "attn_out": (self.attn_out,),
            "mlp_in": self.mlp_in,
            "mlp_out": (self.mlp_out,),
        }

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Every linear layer of a decoder layer, in the order in which data passes them."""
        return (*self.attn_in, self.attn_out, *self.mlp_in, self.mlp_out)
