"""Peak memory of a process that loads a quantised checkpoint, or makes one: never that of the full-precision model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

import quarot
from quarot.runtime.synthetic import random_quantized_model

SIZES = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
WEIGHTS = 12 * (4 * 512 * 512 + 3 * 512 * 2048)  # 50 million: 200 MB in fp32, 25 MB packed

# Growth of the peak over that of a process which has everything imported, in MB.
MEASURED = """
import torch, quarot
from transformers import AutoModelForCausalLM, LlamaConfig
import transformers.models.llama.modeling_llama, quarot.integrations.transformers.quantizer
import quarot.streaming.quantize_checkpoint, quarot.quantization.quantize_model
torch.set_num_threads(1)
def peak():  # not getrusage: there a process begins with the peak of the one that started it
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
before = peak()
{work}
print(peak() - before)
"""


def growth(work: str) -> float:
    # Freed tensors go back to the system at once, as those of a real layer, which are larger, do anyway.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    code = MEASURED.format(work=work)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return float(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    random_quantized_model(LlamaConfig(**SIZES, **HEADS), dtype=torch.float32, device="cpu").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", ["", ", device_map='cpu', dtype=torch.bfloat16"])
def test_a_checkpoint_loads_straight_into_packed_weights(packed: Path, options: str) -> None:
    megabytes = sum(file.stat().st_size for file in packed.glob("*.safetensors")) / 1e6
    assert megabytes < WEIGHTS * 0.55 / 1e6
    # Every weight is touched, so that pages that are mapped only count as well.
    touch = "print(sum(int(p.view(torch.uint8).sum()) for p in model.parameters()))"
    grown = growth(f"model = quarot.load({str(packed)!r}{options}); {touch}")
    assert grown < 2 * megabytes + 20  # the file, mapped, and the weights; in fp32 they are 200 MB


def test_streaming_holds_one_layer(tiny_model: Callable[..., nn.Module], tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    tiny_model("llama", **SIZES, **HEADS).save_pretrained(source)
    call = f"({str(source)!r}, {str(out)!r}, w_method='rtn', w_clip=False, progress=False)"
    streamed = growth(f"quarot.quantize_checkpoint{call}")
    assert streamed < 150  # 85 here: a layer of 17 MB, one weight of it in float64, codes, and what gets imported
    load = f"model = AutoModelForCausalLM.from_pretrained({str(source)!r}); quarot.rotate_model(model, progress=False)"
    assert growth(load) > 200
    assert isinstance(quarot.load(out).model.layers[0].mlp.up_proj, quarot.QuantLinear)
