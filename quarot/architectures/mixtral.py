"""Mixtral: identical to Mistral except that every MLP is a mixture of experts in 3-D parameters."""

from quarot.architectures.record import Architecture, Experts

MIXTRAL = Architecture(
    family="mixtral",
    model_class="MixtralForCausalLM",
    experts=Experts(
        module="mlp.experts",
        router="mlp.gate",
        stored_block="block_sparse_moe",
        stored=("w1", "w3", "w2"),
        float32_weights=True,
    ),
)
