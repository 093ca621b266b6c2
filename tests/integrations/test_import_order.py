"""Any module of quarot may be the first thing a process imports."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "first",
    [
        "quarot.integrations.transformers.quantizer",
        "quarot.integrations.transformers.attention",
        "quarot.runtime.synthetic",
        "quarot.nn.quant_kv_cache",
        "quarot.quantization.quantize_model",
    ],
)
def test_module_can_be_imported_first(first):
    code = f"import {first}; from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as m; assert 'quarot' in m"
    subprocess.run([sys.executable, "-c", code], check=True)
