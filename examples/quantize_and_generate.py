"""Rotate, quantise, save, load in a fresh model, generate.

python examples/quantize_and_generate.py --model smollm2 --out smollm2-w4a8kv4
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

import quarot
from quarot.cli.models import resolve
from quarot.evaluation import load_text

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2")
parser.add_argument("--out", required=True)
parser.add_argument("--calibration", default="pydoc", help="wikitext2, pydoc or a text file")
parser.add_argument("--samples", type=int, default=16)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--prompt", default="The capital of France is")
options = parser.parse_args()

path = resolve(options.model)
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")

plan = quarot.rotate_model(model)
print(plan.describe())

# 8-bit activations cost next to nothing on Hopper and keep a small model's sentences sane; the paper has a_bits=4.
quarot.quantize_model(
    model,
    a_bits=8,
    tokenizer=tokenizer,
    calibration=load_text(options.calibration, "train"),
    calibration_samples=options.samples,
    calibration_length=options.length,
)
model.save_pretrained(options.out)
tokenizer.save_pretrained(options.out)

model = quarot.load(options.out)
print(model.model.layers[0].mlp.down_proj)
ids = tokenizer(options.prompt, return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=20, do_sample=False)[0]))
