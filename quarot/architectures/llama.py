"""Llama 1-3.x: the reference case; attention and MLP may have biases, RoPE may be scaled (Llama 3)."""

from quarot.architectures.record import Architecture

LLAMA = Architecture(family="llama", model_class="LlamaForCausalLM")
