"""A packed 4-bit KV cache on an otherwise unquantised model, over two turns.

python examples/packed_kv_cache.py --model smollm2
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import quarot
from quarot.cli.models import resolve

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2")
parser.add_argument("--tokens", type=int, default=64)
options = parser.parse_args()

path = resolve(options.model)
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
ids = tokenizer("A rotation is a change of basis. " * 4, return_tensors="pt").input_ids

plain = DynamicCache(config=model.config)
with torch.inference_mode():
    model(ids, past_key_values=plain)
full = sum(t.numel() * t.element_size() for layer in plain.layers for t in (layer.keys, layer.values))

quarot.rotate_model(model)  # R2 makes the values easy to quantise; the cache itself rotates the keys
quarot.quantize_model(model, w_bits=16, a_bits=16, k_bits=4, v_bits=4)
cache = quarot.QuantKVCache(model.config)
for _ in range(2):
    ids = model.generate(ids, past_key_values=cache, max_new_tokens=options.tokens // 2, do_sample=False)

print(cache)
print(f"{ids.shape[1]} tokens in {cache.memory_footprint()} bytes of pages")
print(f"full precision needs {full * ids.shape[1] // plain.get_seq_length()} bytes for them")
