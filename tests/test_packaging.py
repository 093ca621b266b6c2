"""How the extension is compiled, without compiling it: architectures by folder, flags, refusals, reports."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import quarot  # noqa: E402
from build_cuda import architectures, backend, checked_nvcc, command, compile, ninja_file, toolkit  # noqa: E402
from build_cuda.architectures import Selection, gencode, parse  # noqa: E402
from build_cuda.toolkit import BuildError, Toolkit  # noqa: E402


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("QUAROT_CUDA", "QUAROT_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST", "QUAROT_STRICT", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)


def codes(source: str, chosen: Selection) -> list[str]:
    return [flag.rsplit("code=", 1)[1] for flag in gencode(PurePosixPath(source), chosen)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("csrc/gemm/sm90/a.cu", ["sm_90a"]),
        ("csrc/gemm/sm80/a.cu", ["sm_80", "sm_86", "sm_89", "compute_80"]),
        ("csrc/quantize/a.cu", ["sm_80", "sm_86", "sm_89", "sm_90a", "compute_90"]),
    ],
)
def test_the_folder_decides_the_architectures(source, expected):
    assert codes(source, Selection()) == expected


@pytest.mark.parametrize(
    ("text", "source", "expected"),
    [
        ("80;90a", "csrc/quantize/a.cu", ["sm_80", "sm_90a"]),
        ("80;90a", "csrc/gemm/sm80/a.cu", ["sm_80"]),
        ("90a", "csrc/gemm/sm80/a.cu", ["sm_90"]),  # has to link; mma.sync code runs on Hopper
        ("80", "csrc/gemm/sm90/a.cu", ["sm_90a"]),
        ("8.0 8.6+PTX", "csrc/quantize/a.cu", ["sm_80", "sm_86", "compute_86"]),
        ("10.0", "csrc/quantize/a.cu", ["sm_100"]),
    ],
)
def test_a_list_narrows_them(text, source, expected):
    assert codes(source, parse(text)) == expected


@pytest.mark.parametrize(("text", "message"), [("7.5", "7.5 is not supported"), ("hopper", "not a GPU architecture")])
def test_architectures_that_cannot_be(text, message):
    with pytest.raises(BuildError, match=message):
        parse(text)


def test_torchs_list_is_honoured_where_it_can_be(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0 8.0 9.0+PTX")
    assert architectures.selection() == Selection((80, 90), (90,), narrowed=True)
    monkeypatch.setenv("QUAROT_CUDA_ARCHS", "86")
    assert architectures.selection().cubins == (86,)


PTXAS = """ptxas info    : Function properties for _Z4fastv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for _Z4slowv
    40 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
"""


def test_spills_are_found_by_function():
    assert checked_nvcc.spills(PTXAS) == ["_Z4slowv: 16 bytes stored, 24 loaded"]


def compile_with(tmp_path, log, *, strict=False, source="int x;", status=0):
    """Run checked_nvcc on a compiler that only prints ``log``; returns (status, whether the object is there)."""
    compiler, unit, target = tmp_path / "compiler.py", tmp_path / "a.cu", tmp_path / "a.o"
    compiler.write_text(f"import sys; open({str(target)!r}, 'w'); sys.stderr.write({log!r}); sys.exit({status})")
    unit.write_text(source)
    flags = ["--strict"] if strict else []
    return checked_nvcc.main([*flags, str(unit), str(target), sys.executable, str(compiler)]), target.exists()


@pytest.mark.parametrize(("kind", "code"), [("warning", "C7510"), ("info   ", "C7513"), ("info   ", "C7514")])
def test_serialised_wgmma_fails_and_leaves_no_object(tmp_path, capsys, kind, code):
    log = f"ptxas {kind} : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
    assert compile_with(tmp_path, log) == (1, False)
    assert code in capsys.readouterr().out


def test_spills_fail_in_strict_builds_only(tmp_path):
    assert compile_with(tmp_path, PTXAS) == (0, True)
    assert compile_with(tmp_path, PTXAS, strict=True) == (1, False)
    assert compile_with(tmp_path, PTXAS, strict=True, source="// spills: cold path, runs once") == (0, True)


def test_a_compilers_error_is_passed_on(tmp_path, capsys):
    assert compile_with(tmp_path, "a.cu(3): error: no\n", status=2)[0] == 2
    assert "a.cu(3): error: no" in capsys.readouterr().out


def test_the_ninja_file_has_every_source_once():
    pytest.importorskip("pybind11")
    layout = ninja_file.Layout(ROOT, Selection())
    kit = Toolkit("/somewhere/with space/nvcc", (13, 0), Path("/cutlass"))
    text = ninja_file.render(layout, kit, strict=True, output="quarot/_C.so")
    for source in [*layout.sources("*.cu"), *layout.sources("*.cpp")]:
        assert len(re.findall(rf"^build \S+: (?:cuda|binding) {re.escape(str(source))}$", text, re.MULTILINE)) == 1
    assert "BIND(quantize)" in text
    assert "BIND(module)" not in text
    assert '"/somewhere/with space/nvcc"' in text


def test_ninja_accepts_it(tmp_path):
    pytest.importorskip("pybind11")
    pytest.importorskip("ninja")
    manifest = tmp_path / "a.ninja"
    kit = Toolkit("nvcc", (13, 0), Path("/cutlass"))
    manifest.write_text(ninja_file.render(ninja_file.Layout(ROOT, Selection()), kit, strict=False, output="x.so"))
    result = subprocess.run(
        [compile._ninja(), "-f", manifest, "-t", "targets"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "x.so: link" in result.stdout


@pytest.mark.slow
def test_the_module_compiles_for_several_architectures(tmp_path):
    """The one file that the build's own definitions shape, through the real nvcc, as ninja would call it."""
    pytest.importorskip("pybind11")
    nvcc = toolkit.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc")
    layout = ninja_file.Layout(ROOT, Selection())
    text = ninja_file.render(layout, Toolkit(nvcc, (13, 0), Path("/cutlass")), strict=False, output="x.so")
    rule = re.search(r"rule binding\n  command = (.*)", text)[1]
    defines = re.search(r"bindings/module\.cpp\n  defines = (.*)", text)[1]
    command = rule.replace("$defines", defines).replace("-MD -MF $out.d -MT $out ", "")
    command = command.replace("$in", "csrc/bindings/module.cpp").replace("$out", str(tmp_path / "module.o"))
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_jobs_follow_max_jobs(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert compile.jobs() == 3
    monkeypatch.delenv("MAX_JOBS")
    assert compile.jobs() >= 1


def no_nvcc(monkeypatch):
    monkeypatch.setattr(toolkit, "find_nvcc", lambda: None)


def test_without_nvcc_the_build_is_pure_and_says_why(monkeypatch):
    no_nvcc(monkeypatch)
    extensions, reason = command.plan()
    assert extensions == []
    assert "nvcc was not found" in reason


def test_quarot_cuda_1_without_nvcc_fails(monkeypatch):
    no_nvcc(monkeypatch)
    monkeypatch.setenv("QUAROT_CUDA", "1")
    with pytest.raises(SystemExit, match="QUAROT_CUDA=1, but nvcc was not found"):
        command.plan()


def test_quarot_cuda_0_never_builds(monkeypatch):
    monkeypatch.setenv("QUAROT_CUDA", "0")
    assert command.plan() == ([], "QUAROT_CUDA=0 was set when it was installed")


def test_quarot_cuda_must_be_a_known_word(monkeypatch):
    monkeypatch.setenv("QUAROT_CUDA", "yes")
    with pytest.raises(SystemExit, match="not one of auto, 1, 0"):
        command.plan()


def test_an_old_nvcc_is_named(monkeypatch, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("QUAROT_NVCC", str(nvcc))
    with pytest.raises(BuildError, match=r"nvcc 11\.8 is too old"):
        toolkit.find_toolkit()


def test_build_requirements_only_where_the_extension_is_built(monkeypatch):
    monkeypatch.setenv("QUAROT_CUDA", "0")
    assert backend.requirements() == []
    monkeypatch.setenv("QUAROT_CUDA", "1")
    assert "nvidia-cutlass>=4.2" in backend.requirements()


def test_a_pure_wheel_has_everything_and_its_reason(tmp_path):
    """Built as pip would, in a copy of the tree so that nothing is written here."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools.__version__} is older than the build needs")
    import shutil

    copy = tmp_path / "copy"
    skip = shutil.ignore_patterns("__pycache__", "*.so", "_build_info.py")
    for name in ("quarot", "build_cuda"):
        shutil.copytree(ROOT / name, copy / name, ignore=skip)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    code = f"import os; os.chdir({str(copy)!r}); from build_cuda import backend; backend.build_wheel({str(tmp_path)!r})"
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(copy)!r}); {code}"],
        env={"QUAROT_CUDA": "0", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "WITHOUT the CUDA extension: QUAROT_CUDA=0" in run.stdout
    wheel = next(tmp_path.glob("*.whl"))
    assert wheel.name == f"quarot-{quarot.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = archive.read("quarot/_build_info.py").decode()
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "quarot").rglob("*.py") if p.name != "_build_info.py"}
    assert sources <= names
    assert "quarot/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "build_cuda", "benchmarks"))]
    facts: dict = {}
    exec(info, facts)
    assert (facts["cuda"], facts["reason"]) == (False, "QUAROT_CUDA=0 was set when it was installed")
