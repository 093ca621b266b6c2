"""Qwen3-MoE: identical to Qwen3 except that the MLP of most layers is a mixture of experts in 3-D parameters."""

from quarot.architectures.record import Architecture, Experts

QWEN3_MOE = Architecture(
    family="qwen3_moe",
    model_class="Qwen3MoeForCausalLM",
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    experts=Experts(module="mlp.experts", router="mlp.gate"),
)
