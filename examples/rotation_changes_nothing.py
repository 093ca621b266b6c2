"""Rotating a model changes every weight and no logit.

python examples/rotation_changes_nothing.py --model smollm2
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

import quarot
from quarot.cli.models import resolve

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2")
options = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(resolve(options.model), dtype=torch.float32).eval()
ids = torch.randint(3, model.config.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0))

with torch.inference_mode():
    before = model(ids).logits
plan = quarot.rotate_model(model, seed=0)
with torch.inference_mode():
    after = model(ids).logits

print(plan.describe())
error = ((after - before).norm() / before.norm()).item()
print(f"relative difference of the logits in float32: {error:.1e}")
assert error < 1e-3, error
