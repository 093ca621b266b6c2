"""Save, load, kill, corrupt: a model comes back bit-equal or not at all."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import quarot
from quarot.nn.quant_linear import QuantLinear
from quarot.nn.rotated_linear import RotatedLinear

QUIET = {"progress": False}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(changes)
    path.write_text(json.dumps(config))


def test_save_load_save_load_is_bit_equal(family, quantized_model, logits, token_ids, tmp_path):
    model = quantized_model(family)
    expected = logits(model, token_ids)
    model.save_pretrained(tmp_path / "a")
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    first.save_pretrained(tmp_path / "b", max_shard_size="40KB")
    second = quarot.load(tmp_path / "b")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 2
    assert torch.equal(logits(first, token_ids), expected)
    assert torch.equal(logits(second, token_ids), expected)
    assert torch.equal(second.generate(token_ids, max_new_tokens=5), model.generate(token_ids, max_new_tokens=5))
    assert second.config.quantization_config == model.config.quantization_config


def test_rotated_only_model_comes_back(family, tiny_model, logits, token_ids, tmp_path):
    model = tiny_model(family)
    plan = quarot.rotate_model(model, **QUIET)
    expected = logits(model, token_ids)
    model.save_pretrained(tmp_path)
    loaded = quarot.load(tmp_path)
    assert torch.equal(logits(loaded, token_ids), expected)
    assert loaded.config._attn_implementation == model.config._attn_implementation == "sdpa"
    assert any(isinstance(module, RotatedLinear) for module in loaded.modules())
    assert quarot.RotationPlan.from_dict(loaded.config.quantization_config.rotation) == plan
    quarot.quantize_model(loaded, w_method="rtn", **QUIET)
    quarot.quantize_model(model, w_method="rtn", **QUIET)
    assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))


def test_rotated_only_model_may_be_cast(tiny_model):
    model = tiny_model("llama")
    quarot.rotate_model(model, **QUIET)
    assert model.half().dtype == torch.float16
    assert model.float().dtype == torch.float32


def test_new_process_gives_the_same_bits(quantized_model, logits, token_ids, tmp_path):
    model = quantized_model("qwen2", model_options={"tie_word_embeddings": True})
    model.save_pretrained(tmp_path / "m")
    torch.save(token_ids, tmp_path / "ids.pt")
    script = f"""
        import torch, quarot
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "m")!r})
        ids = torch.load({str(tmp_path / "ids.pt")!r})
        with torch.no_grad():
            torch.save((model(ids, use_cache=False).logits, model.lm_head.weight), {str(tmp_path / "out.pt")!r})
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment(), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    out, head = torch.load(tmp_path / "out.pt")
    assert torch.equal(out, logits(model, token_ids))
    assert torch.equal(head, model.lm_head.weight)
    assert "shared" not in run.stderr.lower()


def test_remote_code_loads_where_quarot_was_not_imported(quantized_model, logits, token_ids, tmp_path):
    model = quantized_model()
    model.save_pretrained(tmp_path / "m", remote_code=True)
    torch.save(token_ids, tmp_path / "ids.pt")
    script = f"""
        import torch
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "m")!r}, trust_remote_code=True)
        ids = torch.load({str(tmp_path / "ids.pt")!r})
        with torch.no_grad():
            torch.save(model(ids, use_cache=False).logits, {str(tmp_path / "out.pt")!r})
    """
    home = {"HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    run = subprocess.run(command, env=environment() | home, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert torch.equal(torch.load(tmp_path / "out.pt"), logits(model, token_ids))
    assert torch.equal(logits(quarot.load(tmp_path / "m"), token_ids), logits(model, token_ids))


def environment() -> dict[str, str]:
    root = str(Path(quarot.__file__).parents[1])
    return os.environ | {"PYTHONPATH": root + os.pathsep + os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_device_map_and_disk_offload(place, quantized_model, logits, token_ids, tmp_path):
    model = quantized_model()
    model.save_pretrained(tmp_path / "m")
    device_map = {"": "cpu"}
    if place == "disk":
        device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
        device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    loaded = quarot.load(tmp_path / "m", device_map=device_map, offload_folder=tmp_path / "offload")
    assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))
    assert torch.equal(loaded.generate(token_ids, max_new_tokens=4), model.generate(token_ids, max_new_tokens=4))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(quarot.load(tmp_path / "again"), token_ids), logits(model, token_ids))


def test_deepcopy_is_a_whole_model(quantized_model, logits, token_ids, tmp_path):
    model = quantized_model()
    twin = copy.deepcopy(model)
    expected = logits(model, token_ids)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    assert torch.equal(logits(twin, token_ids), expected)
    assert twin.generate(token_ids, max_new_tokens=3).shape == (2, 20)
    twin.save_pretrained(tmp_path)
    assert torch.equal(logits(quarot.load(tmp_path), token_ids), expected)


def test_casting_keeps_codes_and_scales(quantized_model, token_ids):
    model = quantized_model()
    model.to(torch.bfloat16)
    layer = model.model.layers[0].mlp.down_proj
    assert (layer.weight_scale.dtype, layer.qweight.dtype) == (torch.float32, torch.uint8)
    with torch.no_grad():
        assert model(token_ids, use_cache=False).logits.dtype == torch.bfloat16
    assert model.generate(token_ids, max_new_tokens=3).shape == (2, 20)


@pytest.mark.parametrize("as_dict", [False, True])
def test_quantizing_at_load(as_dict, tiny_model, logits, token_ids, tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "fp")
    config = quarot.QuarotConfig(w_method="rtn")
    asked = {"quant_method": "quarot", "w_method": "rtn"} if as_dict else config
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp", quantization_config=asked)
    quarot.rotate_model(model, **QUIET)
    quarot.quantize_model(model, config, **QUIET)
    assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))
    loaded.save_pretrained(tmp_path / "q")
    assert torch.equal(logits(quarot.load(tmp_path / "q"), token_ids), logits(model, token_ids))


def test_gptq_at_load_is_recorded_as_what_it_is(tiny_model, tmp_path, caplog):
    tiny_model("llama").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quarot.QuarotConfig())
    assert loaded.config.quantization_config.w_method == "rtn"
    assert "quantize_model for GPTQ" in caplog.text


def test_ignored_and_overridden_modules_come_back_as_they_were(quantized_model, logits, token_ids, tmp_path):
    model = quantized_model(
        ignore=["lm_head", "re:model.layers.0.*"],
        overrides={r".*\.up_proj": {"w_bits": 8}, r".*\.v_proj": {"w_bits": 16, "a_bits": 16}},
    )
    model.save_pretrained(tmp_path)
    loaded = quarot.load(tmp_path)
    kinds = {name: type(module) for name, module in loaded.named_modules()}
    assert kinds == {name: type(module) for name, module in model.named_modules()}
    assert kinds["model.layers.0.mlp.down_proj"] is RotatedLinear
    assert kinds["model.layers.0.mlp.up_proj"] is kinds["model.layers.1.self_attn.v_proj"] is nn.Linear
    assert loaded.model.layers[1].mlp.up_proj.w_bits == 8
    assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))


def test_four_bit_file_is_as_small_as_its_tensors(quantized_model, tmp_path):
    model = quantized_model(model_options={"hidden_size": 256, "intermediate_size": 512})
    model.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size < 1.03 * sum(p.numel() * p.element_size() for p in model.parameters())
    layers = [m for m in model.modules() if isinstance(m, QuantLinear)]
    packed = sum(m.qweight.numel() for m in layers)
    assert packed < 1.03 * sum(m.in_features * m.out_features / 2 for m in layers)


def test_dequantize_gives_a_plain_model(family, tiny_model, logits, token_ids, tmp_path):
    model = tiny_model(family)
    expected = logits(model, token_ids)
    quarot.rotate_model(model, **QUIET)
    model.dequantize()
    assert {type(m) for m in model.modules() if "Linear" in type(m).__name__} == {nn.Linear}
    assert (logits(model, token_ids) - expected).abs().max() < 1e-4 * expected.abs().max()
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), token_ids), logits(model, token_ids))


def test_dequantized_weights_are_the_codes(quantized_model, logits, token_ids):
    model = quantized_model(a_bits=16, k_bits=16, v_bits=16)
    plain = copy.deepcopy(model).dequantize()
    error = (logits(plain, token_ids) - logits(model, token_ids)).abs().max()
    assert error < 1e-4 * logits(model, token_ids).abs().max()
    assert not plain.is_quantized
    plain.half()


def test_newer_format_is_refused(quantized_model, tmp_path):
    quantized_model().save_pretrained(tmp_path)
    edit_config(tmp_path, format_version=99)
    with pytest.raises(ValueError, match="format_version 99"):
        quarot.load(tmp_path)


def test_truncated_checkpoint_is_refused(quantized_model, tmp_path):
    quantized_model().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    for size in (weights.stat().st_size - 1, 1000, 4, 0):
        os.truncate(weights, size)
        with pytest.raises(ValueError, match="corrupt or truncated"):
            quarot.load(tmp_path)


def test_corrupt_json_is_refused(quantized_model, tmp_path):
    quantized_model().save_pretrained(tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    whole = index.read_text()
    index.write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"index\.json is corrupt"):
        quarot.load(tmp_path)
    index.write_text(whole)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        quarot.load(tmp_path)


def test_missing_tensors_and_shards_are_refused(quantized_model, tmp_path):
    model = quantized_model()
    model.save_pretrained(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.qweight"]
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 tensor: model.layers.1.mlp.down_proj.qweight; it is incomplete"):
        quarot.load(tmp_path / "a")
    model.save_pretrained(tmp_path / "b", max_shard_size="40KB")
    next((tmp_path / "b").glob("model-00002*")).unlink()
    with pytest.raises(OSError, match=r"names a file that is missing .*model-00002.*save the checkpoint again"):
        quarot.load(tmp_path / "b")


def test_missing_expert_is_refused(moe_family, tiny_model, logits, token_ids, tmp_path):
    model = tiny_model(moe_family)
    quarot.rotate_model(model, **QUIET)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(quarot.load(tmp_path), token_ids), logits(model, token_ids))
    tensors = load_file(tmp_path / "model.safetensors")
    victims = [name for name in tensors if "experts" in name]
    kept = {name: tensor for name, tensor in tensors.items() if name not in victims}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks .* tensors?: .*experts"):
        quarot.load(tmp_path)


def test_config_of_another_checkpoint_is_refused(quantized_model, tmp_path):
    quantized_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt"})  # without the note on the settings
    edit_config(tmp_path, w_group_size=32)
    with pytest.raises(ValueError, match="of shape"):
        quarot.load(tmp_path)


def test_plain_checkpoint_is_refused_by_load(tiny_model, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not a quarot checkpoint"):
        quarot.load(tmp_path)


def test_a_path_without_a_model_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", str(tmp_path / "missing"), "./missing", "~/missing", ""):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            quarot.load(path)
    with pytest.raises(ValueError, match="is a file; give the folder"):
        quarot.load(tmp_path / "file")
    with pytest.raises(ValueError, match=r"folder without config\.json"):
        quarot.load(tmp_path)
    with pytest.raises(TypeError, match="not None"):
        quarot.load(None)


@pytest.mark.parametrize("dtype", ["half2", torch.int8, torch.float8_e4m3fn, 16])
def test_a_dtype_that_no_model_computes_in_is_refused(dtype, quantized_model, tmp_path):
    quantized_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"dtype={dtype!r} must be 'auto', or a torch.dtype"):
        quarot.load(tmp_path, dtype=dtype)
    assert quarot.load(tmp_path, dtype="float16").dtype == torch.float16


def test_tensor_parallel_is_refused(quantized_model):
    from transformers.distributed.configuration_utils import DistributedConfig

    model = quantized_model()
    model.config.distributed_config = DistributedConfig(tp_size=2)
    with pytest.raises(NotImplementedError, match="tensor parallel"):
        model.hf_quantizer.update_tp_plan(model.config)


def test_disk_full_leaves_the_old_checkpoint(quantized_model, logits, token_ids, tmp_path, monkeypatch):
    model = quantized_model()
    model.save_pretrained(tmp_path / "m", max_shard_size="40KB")
    before = files(tmp_path / "m")
    import transformers.modeling_utils

    written = []

    def full(tensors, filename, **kwargs):
        if len(written) == 2:
            Path(filename).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        written.append(filename)
        save_file(tensors, filename, **kwargs)

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full)
    for target in ("m", "new"):
        written.clear()
        with pytest.raises(OSError, match="No space"):
            quantized_model(w_bits=8).save_pretrained(tmp_path / target, max_shard_size="40KB")
    assert files(tmp_path / "m") == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert not [path for path in (tmp_path / "m").iterdir() if path.is_dir()]


def test_overwriting_keeps_other_files_and_drops_old_shards(quantized_model, logits, token_ids, tmp_path):
    quantized_model(w_bits=8).save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / "tokenizer.json").write_text("{}")
    model = quantized_model()
    model.save_pretrained(tmp_path)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(files(tmp_path))
    assert not list(tmp_path.glob("model-0*")) + list(tmp_path.glob("*.index.json"))
    assert torch.equal(logits(quarot.load(tmp_path), token_ids), logits(model, token_ids))


def test_killed_while_saving(quantized_model, logits, token_ids, tmp_path):
    model = quantized_model()
    target = tmp_path / "m"
    model.save_pretrained(target)
    script = f"""
        import time, torch, quarot, transformers.modeling_utils as modeling
        model = quarot.load({str(target)!r})
        plain = modeling.safe_save_file
        def slow(*args, **kwargs):
            plain(*args, **kwargs)
            print("written", flush=True)
            time.sleep(60)
        modeling.safe_save_file = slow
        model.save_pretrained({str(target)!r}, max_shard_size="40KB")
    """
    before = files(target)
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "written\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert files(target) == before
    partial = [path for path in target.iterdir() if path.is_dir()]
    assert len(partial) == 1
    with pytest.raises((OSError, ValueError)):
        quarot.load(partial[0])
    assert torch.equal(logits(quarot.load(target), token_ids), logits(model, token_ids))
    model.save_pretrained(target)
    assert not [path for path in target.iterdir() if path.is_dir()]
    assert torch.equal(logits(quarot.load(target), token_ids), logits(model, token_ids))


@pytest.mark.parametrize("done", [0, 1, 2])
def test_interrupted_amid_the_renames(quantized_model, logits, token_ids, tmp_path, monkeypatch, done):
    """Neither the old nor the new checkpoint, but never a mixture that loads; the next save repairs it."""
    quantized_model(w_bits=8).save_pretrained(tmp_path, max_shard_size="40KB")
    model, replace, moved = quantized_model(), os.replace, []

    def interrupted(source, target):
        if len(moved) == done:
            raise KeyboardInterrupt
        moved.append(Path(target).name)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.save_pretrained(tmp_path)
    assert moved == ["generation_config.json", "model.safetensors"][:done]
    with pytest.raises(ValueError, match=r"config\.json"):
        quarot.load(tmp_path)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(quarot.load(tmp_path), token_ids), logits(model, token_ids))


def test_save_to_a_file_is_refused(quantized_model, tmp_path):
    (tmp_path / "m").write_text("")
    with pytest.raises(FileExistsError):
        quantized_model().save_pretrained(tmp_path / "m")


def test_import_is_cheap_and_registration_happens_later():
    script = """
        import sys, quarot
        assert not {"torch", "transformers", "datasets", "lm_eval", "flashinfer"} & set(sys.modules)
        assert quarot.__version__ and "load" in dir(quarot)
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
        assert "quarot" in AUTO_QUANTIZER_MAPPING
        from transformers import AttentionInterface
        assert "quarot" in AttentionInterface._global_mapping
        assert not {"datasets", "lm_eval", "flashinfer", "compressed_tensors"} & set(sys.modules)
        from quarot.integrations import register
        register(); register()
        assert not [f for f in sys.meta_path if type(f).__module__.startswith("quarot")]
    """
    start = time.time()
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment(), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert time.time() - start < 120
