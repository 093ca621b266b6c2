"""What the documents promise exists: links, subcommands, environment variables, public names, scripts."""

import re
import subprocess
from pathlib import Path

import pytest

import quarot
from quarot.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "csrc", "benchmarks", "examples")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_resolve(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_subcommand_in_the_documents_exists():
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCUMENTS)
    named = set(re.findall(r"(?:^|`)quarot ([a-z]+)\b", text, re.MULTILINE))
    assert named <= set(COMMANDS), named - set(COMMANDS)
    missing = [name for name in COMMANDS if f"quarot {name}" not in text and f"| {name}" not in text]
    assert not missing


def test_every_environment_variable_is_real():
    sources = [*(ROOT / "quarot").rglob("*.py"), *(ROOT / "build_cuda").rglob("*.py"), *(ROOT / "scripts").iterdir()]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for name in re.findall(
        r"^\| `([A-Z_]+)`", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.MULTILINE
    ):
        assert name in code, name


def test_the_reference_names_everything_public():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for name in quarot.__all__:
        assert name == "__version__" or f"quarot.{name}" in text, name


def test_the_readmes_names_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"quarot\.([a-zA-Z_]+)\(", text):
        assert name in quarot.__all__, name


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test", "scripts/environment.sh", ".ci/run"])
def test_scripts_parse_and_the_commands_can_be_run(script):
    path = ROOT / script
    if not path.exists():
        pytest.skip("not part of an sdist")
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.suffix == ".sh" or path.stat().st_mode & 0o111


def test_the_changelog_knows_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"[{quarot.__version__}]" in text or "[Unreleased]" in text


def test_what_to_install_is_named_as_an_index_has_it():
    """quarot is installed from a checkout, so an error must not send anyone to an index for its extras."""
    sources = [*(ROOT / "quarot").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    assert not [path for path in sources if re.search(r"pip install '?\"?quarot", path.read_text(encoding="utf-8"))]
