"""Qwen3: identical to Llama except norms over head_dim on q and k, before RoPE; head_dim is independent of hidden."""

from quarot.architectures.record import Architecture

QWEN3 = Architecture(
    family="qwen3",
    model_class="Qwen3ForCausalLM",
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
)
