"""Phi-3 and Phi-4: identical to Llama except fused qkv and gate_up projections; RoPE may be partial."""

from quarot.architectures.record import Architecture, Projection

PHI3 = Architecture(
    family="phi3",
    model_class="Phi3ForCausalLM",
    attn_in=(Projection("self_attn.qkv_proj", ("q", "k", "v")),),
    mlp_in=(Projection("mlp.gate_up_proj", ("gate", "up")),),
)
