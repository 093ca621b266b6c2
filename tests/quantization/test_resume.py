"""A run that is killed in the middle continues, and ends with the codes of an uninterrupted one."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quarot.quantization.quantize_model import quantize_model

TOKENS = torch.randint(3, 128, (2000,), generator=torch.Generator().manual_seed(5))
FIELDS: dict[str, Any] = {"calibration_samples": 4, "calibration_length": 32, "progress": False, "a_clip_search": True}

RUN = textwrap.dedent(
    """
    import sys, time, torch
    torch.set_num_threads(1)
    sys.path.insert(0, {tests!r})
    from conftest import build_model
    from quarot.quantization import quantize_model as module
    from quarot.quantization.layer import LayerQuantizer
    slow = {slow}
    quantize = LayerQuantizer.quantize
    def delayed(self):
        if self.index >= 1 and slow:
            print("waiting", flush=True)
            time.sleep(600)
        quantize(self)
    LayerQuantizer.quantize = delayed
    tokens = torch.randint(3, 128, (2000,), generator=torch.Generator().manual_seed(5))
    model = build_model("llama", num_hidden_layers=3)
    module.quantize_model(model, calibration=tokens, resume_dir={folder!r}, **{fields!r})
    from safetensors.torch import save_file
    save_file({{k: v.contiguous() for k, v in model.state_dict().items()}}, {out!r})
    """
)


def run(folder: Path, out: Path, slow: bool) -> subprocess.Popen[str]:
    tests = str(Path(__file__).parent.parent)
    code = RUN.format(tests=tests, slow=slow, folder=str(folder), out=str(out), fields=FIELDS)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ})


def test_killed_in_the_middle(tmp_path: Path, tiny_model: Callable[..., nn.Module]) -> None:
    folder, out = tmp_path / "progress", tmp_path / "out.safetensors"
    first = run(folder, out, slow=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "waiting\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    finished = sorted(path.name for path in folder.iterdir())
    assert finished == ["fingerprint.json", "model.layers.0.safetensors"]
    written = (folder / finished[1]).stat().st_mtime_ns
    time.sleep(0.02)
    assert run(folder, out, slow=False).wait() == 0
    assert (folder / finished[1]).stat().st_mtime_ns == written
    straight = quantize_model(tiny_model("llama", num_hidden_layers=3), calibration=TOKENS, **FIELDS)
    resumed = load_file(out)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed[name]), name


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"gptq_damping": 0.02}, "gptq_damping=0.01 instead of 0.02"),
        ({"kv_clip": 0.9}, "k_clip=0.95 instead of 0.9, v_clip=0.95 instead of 0.9"),
        ({"calibration": TOKENS[:900]}, "another calibration text"),
    ],
)
def test_another_run_is_not_mixed_in(
    tmp_path: Path, tiny_model: Callable[..., nn.Module], change: dict[str, Any], what: str
) -> None:
    arguments = {"calibration": TOKENS, "resume_dir": tmp_path, **FIELDS}
    quantize_model(tiny_model("llama"), **arguments)
    with pytest.raises(ValueError, match=f"holds a run with {what}; delete it"):
        quantize_model(tiny_model("llama"), **{**arguments, **change})
    with pytest.raises(ValueError, match="another model"):
        quantize_model(tiny_model("llama", seed=1), **arguments)


def test_rtn_resumes_too(tmp_path: Path, tiny_model: Callable[..., nn.Module]) -> None:
    first = quantize_model(tiny_model("llama"), w_method="rtn", w_symmetric=False, resume_dir=tmp_path, progress=False)
    again = quantize_model(tiny_model("llama"), w_method="rtn", w_symmetric=False, resume_dir=tmp_path, progress=False)
    for (name, a), (_, b) in zip(first.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", ["fingerprint.json", "model.layers.1.safetensors"])
@pytest.mark.parametrize("content", [b"", b"{", b"[3]", b"\x02\x00\x00\x00\x00\x00\x00\x00{}"])
def test_damaged_files_are_named(
    tmp_path: Path, tiny_model: Callable[..., nn.Module], name: str, content: bytes
) -> None:
    rtn: dict[str, Any] = {"w_method": "rtn", "resume_dir": tmp_path, "progress": False}
    first = quantize_model(tiny_model("llama"), **rtn)
    (tmp_path / name).write_bytes(content)
    whose = "its folder" if name == "fingerprint.json" else "it"
    with pytest.raises(ValueError, match=f"{name} is damaged .*delete {whose} and run again"):
        quantize_model(tiny_model("llama"), **rtn)
    for path in [tmp_path / name] if whose == "it" else list(tmp_path.iterdir()):
        path.unlink()
    again = quantize_model(tiny_model("llama"), **rtn)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))


def test_finished_layers_of_an_unknown_run_are_not_taken(tmp_path: Path, tiny_model: Callable[..., nn.Module]) -> None:
    quantize_model(tiny_model("llama"), w_method="rtn", resume_dir=tmp_path, progress=False)
    (tmp_path / "fingerprint.json").unlink()
    with pytest.raises(ValueError, match=r"weight files but no fingerprint\.json: it is not that of an unfinished run"):
        quantize_model(tiny_model("llama", seed=3), w_method="rtn", resume_dir=tmp_path, progress=False)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match=r"resume_dir .*file is a file"):
        quantize_model(tiny_model("llama"), w_method="rtn", resume_dir=tmp_path / "file", progress=False)
