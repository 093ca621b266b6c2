"""A checkpoint quantised layer by layer from disk equals, bit for bit, the model quantised in memory and saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import quarot
from quarot.quantization.layer import LayerQuantizer
from quarot.streaming.checkpoint import CannotStream

WINDOWS = torch.randint(3, 128, (3, 32), generator=torch.Generator().manual_seed(5))
FIELDS: dict[str, Any] = {"calibration": WINDOWS, "progress": False}


@pytest.fixture
def source(tiny_model: Callable[..., nn.Module], tmp_path: Path) -> Callable[..., Path]:
    """``source(family, **config)``: the folder of a tiny model, in several shards."""

    def build(family: str, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
        tiny_model(family, dtype=dtype, **config).save_pretrained(tmp_path / family, max_shard_size="100KB")
        return tmp_path / family

    return build


def in_memory(path: Path, out: Path, rotation: dict[str, Any] | None, **fields: Any) -> Path:
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    if rotation is not None:
        quarot.rotate_model(model, progress=False, **rotation)
    quarot.quantize_model(model, **fields)
    model.save_pretrained(out)
    return out


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same(first: Path, second: Path) -> None:
    # transformers saves Mixtral's tensors under older names, and reads both.
    one, two = ({k.replace("block_sparse_moe", "mlp"): t for k, t in tensors(f).items()} for f in (first, second))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype and torch.equal(tensor, two[name]), name
    for name in ("config.json", "generation_config.json"):
        assert json.loads((first / name).read_text()) == json.loads((second / name).read_text()), name


def test_every_dense_family(source: Callable[..., Path], tmp_path: Path, family: str) -> None:
    path = source(family)
    quarot.quantize_checkpoint(path, tmp_path / "streamed", **FIELDS)
    assert_same(tmp_path / "streamed", in_memory(path, tmp_path / "whole", {}, **FIELDS))
    assert {file.name[0] for file in tmp_path.iterdir()} & {"."} == set()
    ids = WINDOWS[:1, :9]
    streamed, whole = (quarot.load(tmp_path / name) for name in ("streamed", "whole"))
    assert torch.equal(streamed(ids).logits, whole(ids).logits)


@pytest.mark.parametrize("rotation", [{}, {"r4": False}, None])
def test_mixtures_of_experts(
    source: Callable[..., Path], tmp_path: Path, moe_family: str, rotation: dict[str, Any] | None
) -> None:
    path = source(moe_family)
    quarot.quantize_checkpoint(path, tmp_path / "streamed", rotation=rotation, **FIELDS)
    assert_same(tmp_path / "streamed", in_memory(path, tmp_path / "whole", rotation, **FIELDS))
    ids = WINDOWS[:1, :9]
    streamed, whole = (quarot.load(tmp_path / name) for name in ("streamed", "whole"))
    assert torch.equal(streamed(ids).logits, whole(ids).logits)


@pytest.mark.parametrize(
    ("rotation", "fields"),
    [
        ({}, {"w_method": "rtn"}),
        ({"seed": 3, "o_proj_online": "none", "r1": "orthogonal"}, {"w_bits": 8, "w_symmetric": False}),
        (None, {"w_group_size": 32, "w_bits": 3}),
        ({}, {"a_clip_search": True, "gptq_asymmetric": True, "gptq_bias_correction": True, "ignore": []}),
        ({}, {"w_bits": 16, "a_bits": 16}),
        ({}, {"lm_head_bits": 8}),
        ({}, {"preset": "layerwise", "layer_steps": 3}),
        ({}, {"preset": "layerwise", "a_bits": 8}),
        ({}, {"layer_steps": 3, "lm_head_bits": 8}),
    ],
    ids=[
        "rtn",
        "8 bits",
        "unrotated groups",
        "everything calibrated",
        "cache only",
        "head",
        "layerwise",
        "W4A8",
        "trained",
    ],
)
def test_every_kind_of_recipe(
    source: Callable[..., Path], tmp_path: Path, rotation: dict[str, Any] | None, fields: dict[str, Any]
) -> None:
    path = source("llama", tie_word_embeddings="ignore" not in fields)
    quarot.quantize_checkpoint(path, tmp_path / "streamed", rotation=rotation, **FIELDS, **fields)
    assert_same(tmp_path / "streamed", in_memory(path, tmp_path / "whole", rotation, **FIELDS, **fields))


def test_rotation_alone(source: Callable[..., Path], tmp_path: Path) -> None:
    path, sixteen = source("qwen2"), dict.fromkeys(("w_bits", "a_bits", "k_bits", "v_bits"), 16)
    quarot.quantize_checkpoint(path, tmp_path / "streamed", progress=False, **sixteen)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    quarot.rotate_model(model, progress=False)
    model.save_pretrained(tmp_path / "whole")
    assert_same(tmp_path / "streamed", tmp_path / "whole")


def test_one_layer_is_in_memory_at_a_time(
    source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc

    alive: list[int] = []
    quantize = LayerQuantizer.quantize

    def in_memory() -> int:
        gc.collect()
        parameters = (o for o in gc.get_objects() if isinstance(o, nn.Parameter))
        return sum(1 for o in parameters if o.shape == (192, 128) and not o.is_meta)

    others = in_memory()  # what tests before this one still hold

    def counted(self: LayerQuantizer) -> None:
        alive.append(in_memory() - others)
        quantize(self)

    monkeypatch.setattr(LayerQuantizer, "quantize", counted)
    quarot.quantize_checkpoint(source("llama", num_hidden_layers=4), tmp_path / "out", w_method="rtn", progress=False)
    assert alive == [2, 2, 2, 2]  # gate and up of one layer


@pytest.mark.parametrize("last", [0, 2, 3])
@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_an_interrupted_run_continues(
    source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, last: int
) -> None:
    path = source("qwen2", num_hidden_layers=4)
    fields = {**FIELDS, "w_method": method, "a_clip_search": method == "gptq", "gptq_bias_correction": True}
    out, visited = tmp_path / "out", []
    quantize = LayerQuantizer.quantize

    def stopping(self: LayerQuantizer) -> None:
        visited.append(self.index)
        if self.index == last and len(visited) == last + 1:
            raise KeyboardInterrupt
        quantize(self)

    monkeypatch.setattr(LayerQuantizer, "quantize", stopping)
    with pytest.raises(KeyboardInterrupt):
        quarot.quantize_checkpoint(path, out, **fields)
    assert not out.exists()
    with pytest.raises(ValueError, match="holds a run with w_bits=4 instead of 8; delete it"):
        quarot.quantize_checkpoint(path, out, **fields, w_bits=8)
    with pytest.raises(ValueError, match=r"holds a run with rotation\.seed=0 instead of 3; delete it"):
        quarot.quantize_checkpoint(path, out, **fields, rotation={"seed": 3})
    visited[:] = [-1] * 9
    quarot.quantize_checkpoint(path, out, **fields)
    assert visited[9:] == list(range(last, 4))
    assert not list(tmp_path.glob(".*"))
    assert_same(out, in_memory(path, tmp_path / "whole", {}, **fields))


def test_an_old_checkpoint_is_replaced_at_the_end(source: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    quarot.quantize_checkpoint(source("qwen2"), out, w_method="rtn", progress=False)
    (out / "notes.txt").write_text("kept")
    path = source("llama")
    quarot.quantize_checkpoint(path, out, w_method="rtn", progress=False)
    assert_same(out, in_memory(path, tmp_path / "whole", {}, w_method="rtn", progress=False))
    assert (out / "notes.txt").read_text() == "kept"
    assert not [file for file in out.iterdir() if file.name.startswith(".") or file.name == "fingerprint.json"]


def test_interrupted_while_replacing_an_old_checkpoint(
    source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of one run is not taken for a beginning of another."""
    path, out = source("qwen2", num_hidden_layers=4), tmp_path / "out"
    quarot.quantize_checkpoint(path, out, w_method="rtn", progress=False)
    replace = os.replace

    def stopping(old: Path, new: Path) -> None:
        if Path(new).parent == out and Path(old).name.startswith("model-00002"):
            raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr(os, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        quarot.quantize_checkpoint(path, out, w_method="rtn", w_bits=8, progress=False)
    monkeypatch.undo()
    assert not (out / "config.json").exists()
    with pytest.raises(ValueError, match="w_bits=8 instead of 4; delete it"):
        quarot.quantize_checkpoint(path, out, w_method="rtn", progress=False)
    quarot.quantize_checkpoint(path, out, w_method="rtn", w_bits=8, progress=False)
    assert_same(out, in_memory(path, tmp_path / "whole", {}, w_method="rtn", w_bits=8, progress=False))
    assert not [file for file in out.iterdir() if file.name.startswith(".") or file.name == "fingerprint.json"]


def test_a_target_that_is_a_file_is_refused_first(source: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a note")
    with pytest.raises(FileExistsError, match="out is a file"):
        quarot.quantize_checkpoint(source("qwen2"), tmp_path / "out", w_method="rtn", progress=False)


def test_what_cannot_be_streamed_says_why(source: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = source("qwen3_moe")
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("experts.3.up_proj", "experts.3.u_proj"))
    with pytest.raises(CannotStream, match=r"stores no model\.layers\.0\.mlp\.experts\.3\.up_proj"):
        quarot.quantize_checkpoint(path, out, **FIELDS)
    with pytest.raises(CannotStream, match=r"kv_bits_budget=4\.0 measures the whole model"):
        quarot.quantize_checkpoint(source("llama"), out, kv_bits_budget=4.0, **FIELDS)
    with pytest.raises(CannotStream, match="tune_steps=3 trains the whole model"):
        quarot.quantize_checkpoint(source("llama"), out, tune_steps=3, **FIELDS)
    (tmp_path / "llama" / "model.safetensors.index.json").unlink()
    with pytest.raises(CannotStream, match=r"has no model\.safetensors"):
        quarot.quantize_checkpoint(tmp_path / "llama", out, **FIELDS)
    assert not out.exists()
    found = {"kv_bits_budget": 4.0, "kv_bits_by_layer": [[4, 2], [2, 8]], "w_method": "rtn"}
    assert not quarot.quantize_checkpoint(source("llama"), out, **found, progress=False).finds_kv_bits


def test_damage_is_named(source: Callable[..., Path], tmp_path: Path, tiny_model: Callable[..., nn.Module]) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight holds NaN"):
        quarot.quantize_checkpoint(tmp_path / "nan", tmp_path / "out", w_method="rtn", progress=False)
    path = source("qwen2")
    shard = sorted(path.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-500])
    with pytest.raises(ValueError, match=f"{shard.name} is corrupt or truncated"):
        quarot.quantize_checkpoint(path, tmp_path / "out2", w_method="rtn", progress=False)
    with pytest.raises(ValueError, match="already quantised by quarot"):
        quarot.quantize_checkpoint(in_memory(source("llama"), tmp_path / "q", {}, w_method="rtn"), tmp_path / "out3")


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from safetensors.torch import save_file
from quarot.streaming import shards
import quarot

def dying(tensors, path, metadata):
    save_file(tensors, path, metadata=metadata)
    if "00003-of" in str(path):
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

shards.save_file = dying
windows = torch.randint(3, 128, (3, 32), generator=torch.Generator().manual_seed(5))
quarot.quantize_checkpoint({path!r}, {out!r}, calibration=windows, progress=False)
"""


def test_killed_while_writing_a_shard(source: Callable[..., Path], tmp_path: Path) -> None:
    path, out = source("llama", num_hidden_layers=4), tmp_path / "out"
    code = KILLED.format(tests=str(Path(__file__).parent.parent), path=str(path), out=str(out))
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    work = tmp_path / ".out.unfinished"
    assert sorted(file.name for file in work.glob("*.safetensors")) == [
        f"model-0000{i}-of-00005.safetensors" for i in (1, 2)
    ]
    with pytest.raises(ValueError, match="a folder without config"):
        quarot.load(work)
    quarot.quantize_checkpoint(path, out, **FIELDS)
    assert_same(out, in_memory(path, tmp_path / "whole", {}, **FIELDS))
    assert not work.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "gpt2"}, "tokenizer='gpt2' has no save_pretrained"),
        ({"rotation": "hadamard"}, "rotation='hadamard' must be a dict"),
        ({"rotation": {"r5": True}}, r"rotation={'r5': True} must be a dict with some of \['seed', 'r1'"),
        ({"rotation": {"device": "cpu"}}, "must be a dict with some of"),
        ({"rotation": {"seed": 1 << 70}}, "seed=1180591620717411303424 must be a number of 64 bits"),
        ({"rotation": {"down_proj_block": "a"}}, "down_proj_block='a' must be an int"),
        ({"device": "gpu"}, "device='gpu' cannot be used here"),
        ({"seed": 1 << 70}, "seed=1180591620717411303424 must be a number of 64 bits"),
    ],
    ids=str,
)
def test_wrong_arguments_are_told_before_the_work(
    options: dict[str, Any], message: str, source: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        quarot.quantize_checkpoint(source("llama"), tmp_path / "out", w_method="rtn", progress=False, **options)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_the_original_is_not_overwritten(source: Callable[..., Path], tmp_path: Path) -> None:
    folder = source("llama")
    (tmp_path / "link").symlink_to(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for out in (folder, tmp_path / "link", f"{folder}/../{folder.name}"):
        with pytest.raises(ValueError, match="is the folder of the original model; write to another one"):
            quarot.quantize_checkpoint(folder, out, w_method="rtn", progress=False)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
