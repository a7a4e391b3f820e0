"""Load a drafter with SGLang's own model classes: `python sglang_loader.py SGLANG EXPORT` prints one JSON object.

SGLANG is an unpacked wheel. Its model files are imported as they are; packages they import and do not need for this are stood
in for. "unplaced" names every tensor of the export that, loaded alone, does not set as many values as it has.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch
import transformers
from safetensors.torch import load_file

ABSENT = {"orjson", "IPython", "torchvision"}
MODULES = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash",
    "LiLiCorrDraftModel": "lilicorr",
    "Qwen3DSparkModel": "dspark",
}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Make packages that are not installed importable; all that they have is a mock."""

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: MagicMock(name=name)
        return module

    def exec_module(self, module):
        pass


def main(sglang: str, export: str) -> None:
    # transformers looks for torchvision once; it must not find the stand-in
    importlib.import_module("transformers.models.auto.processing_auto")
    config = transformers.AutoConfig.from_pretrained(export)
    sys.path.insert(0, sglang)
    sys.meta_path.append(StandIns())
    os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"  # where DSpark's confidence head is used
    architecture = config.architectures[0]
    module = importlib.import_module(f"sglang.srt.models.{MODULES[architecture]}")
    context = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    with context.override(tp_size=1, tp_rank=0, attn_tp_size=1, attn_tp_rank=0), torch.no_grad():
        model = getattr(module, architecture)(config)
        tensors = load_file(Path(export) / "model.safetensors")
        model.bfloat16()
        parameters = dict(model.named_parameters())
        unplaced = []
        for name, tensor in tensors.items():
            forget(parameters)
            try:
                model.load_weights([(name, tensor)])
            except ValueError:
                pass  # that all the others are missing
            if sum(int((~parameter.isnan()).sum()) for parameter in parameters.values()) != tensor.numel():
                unplaced.append(name)
        forget(parameters)
        model.load_weights(tensors.items())
        attention = model.layers[0].self_attn
        read = {
            "tensors": sorted(tensors),
            "parameters": {name: list(parameter.shape) for name, parameter in parameters.items()},
            "unfilled": [name for name, parameter in parameters.items() if parameter.isnan().any()],
            "unplaced": unplaced,
            "rope_theta": attention.rotary_emb.base,
            "attention": attention.attn_type.name,
        }
        if architecture == "LiLiCorrDraftModel":
            read["score_difference"] = score_difference(model.lilicorr.float(), export)
    print(json.dumps(read))


def forget(parameters: dict[str, torch.Tensor]) -> None:
    for parameter in parameters.values():
        parameter.fill_(float("nan"))


def score_difference(theirs, export: str) -> float:
    """Return the largest difference of a score of their head and of ours, on a random lattice, one block without context."""
    from vllm_lilicorr.model.checkpoint import load_draft

    draft = load_draft(export, dtype=torch.float32)
    top_k, slots, hidden = draft.config.head.candidate_topk, draft.config.block_size - 1, draft.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    embeddings = 0.1 * torch.randn(4, slots, top_k, hidden, generator=generator)
    log_probs = torch.log_softmax(3 * torch.randn(4, slots, 64, generator=generator), -1).topk(top_k).values
    states, anchors = torch.randn(4, slots, hidden, generator=generator), torch.randn(4, hidden, generator=generator)
    valid = torch.tensor([True, False, True, True])
    theirs.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    start, pair = theirs.log_factors(
        *theirs.score(
            token_embeddings=embeddings[:, None],
            candidate_log_probs=log_probs[:, None],
            pass_hidden=states[:, None],
            anchor_hidden=anchors[:, None],
            anchor_valid=valid[:, None],
        )
    )
    our_start, our_pair = draft.head(embeddings, log_probs, states, anchors, valid)
    return max(float((start[:, 0] - our_start).abs().max()), float((pair[:, 0] - our_pair).abs().max()))


if __name__ == "__main__":
    main(*sys.argv[1:])
