"""The model card written beside a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict

from ..config import DraftConfig

SERVING = "lilicorr.json"
"""The file of serving options that may stand in a checkpoint's folder; its `model` is the folder itself."""


def model_card(
    config: DraftConfig, parameters: dict[str, int], drafts: int | None = None, sections: str = "", threshold: float = 0
) -> str:
    """Return README.md of a checkpoint: method, target, geometry, `sections` of Markdown on its making, how to serve.

    drafts, threshold: num_speculative_tokens and confidence_threshold of the SERVING file beside it; None where there is none.
    """
    target = config.target_name or "TARGET"
    method = config.architecture.removesuffix("DraftModel")
    geometry = "\n".join(f"| {key} | {value} |" for key, value in asdict(config.head).items())
    head = f"\nHead:\n\n| field | value |\n|---|---|\n{geometry}\n" if geometry else ""
    options = json.dumps({"model": "PATH/OF/THIS/FOLDER", "num_speculative_tokens": config.num_slots}, indent=2)
    written = f"`{SERVING}`:\n\n```json\n{options}\n```\n\n```\nvllm serve {target} --speculative-config {SERVING}\n```"
    beside = (
        f"`{SERVING}` beside this file asks for {drafts} of the {config.num_slots} tokens a block"
        f"{f', at a confidence threshold of {threshold}' if threshold else ''}:\n\n"
        f"```\nvllm serve {target} --speculative-config PATH/OF/THIS/FOLDER/{SERVING}\n```"
    )
    serve = written if drafts is None else beside
    sections = f"\n{sections}\n" if sections else ""
    return f"""---
library_name: vllm-lilicorr
tags: [speculative-decoding, draft-model]
---

# {method} drafter for {target}

A {method} speculative-decoding drafter. It proposes {config.num_slots} tokens a block for the target named above, which
verifies them: the served text is the target's own.

| field | value |
|---|---|
| target | {config.target_name or "not recorded"} |
| target's tokenizer (SHA-256) | {config.tokenizer_hash or "not recorded"} |
| tapped target layers | {", ".join(map(str, config.target_layer_ids))} of {config.num_target_layers} |
| block size | {config.block_size} ({config.num_slots} drafted) |
| layers, width | {config.num_hidden_layers}, {config.hidden_size} |
| parameters | backbone {parameters["backbone"]:,}, head {parameters["head"]:,} |
{head}{sections}
## Serve

{serve}
"""
