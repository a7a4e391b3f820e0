"""Runs one engine in this process as a job on stdin says, and prints what it did: `engines.run` starts it.

A process of its own for each engine: vLLM keeps global state, and which runner and which release is used is decided by what
is imported first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    os.environ["LILICORR_TRACE"] = job["trace"]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if job["runner"] == "v2":
        sys.path.insert(0, str(Path(__file__).parent))
        import interpreted

        interpreted.enable()
    began = time.time()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    if job.get("falsify"):
        _falsify()
    llm = LLM(**job["engine"])
    result: dict[str, Any] = {"start_seconds": time.time() - began, "phases": [], "first_request": []}
    counted = 0

    def params(values: dict[str, Any]) -> SamplingParams:
        values = dict(values)
        if "json_schema" in values:
            values["structured_outputs"] = StructuredOutputsParams(json=values.pop("json_schema"))
        return SamplingParams(**values)

    for phase in job["phases"]:
        if phase.get("reset_prefix_cache"):
            assert llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": ids} for ids in phase["prompts"]]
        given = phase["params"]
        each = [params(given[i] if isinstance(given, list) else given) for i in range(len(prompts))]
        folders = phase.get("adapters") or [None] * len(prompts)
        adapters = [LoRARequest("adapter", 1, folder) if folder else None for folder in folders]
        result["first_request"].append(counted)
        counted += len(prompts)
        began = time.time()
        if phase.get("serial"):
            outputs = [
                out
                for prompt, one, adapter in zip(prompts, each, adapters, strict=True)
                for out in llm.generate([prompt], one, use_tqdm=False, lora_request=adapter)
            ]
        else:
            outputs = llm.generate(prompts, each, use_tqdm=False, lora_request=adapters)
        result["phases"].append(
            {
                "seconds": time.time() - began,
                "tokens": [[list(one.token_ids) for one in out.outputs] for out in outputs],
                "text": [[one.text for one in out.outputs] for out in outputs],
                "cached": [out.num_cached_tokens for out in outputs],
            }
        )
    metrics = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            metrics[metric.name.removeprefix("vllm:spec_decode_")] = getattr(metric, "values", None) or metric.value
    result["metrics"] = metrics
    import vllm

    result["version"] = vllm.__version__
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    result["runner"], result["drafter"] = type(runner).__module__, type(drafter).__name__
    if getattr(drafter, "trace", None) is not None:
        drafter.trace.close()
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # the engine's own shutdown is not what is tested


def _falsify() -> None:
    """Hand the verifier another distribution than the one the drafts were drawn from: the same candidates, the scores negated."""
    import dataclasses

    from vllm_lilicorr.serving.head import DraftingHead

    honest = DraftingHead.propose

    def propose(self: Any, *args: Any, **options: Any) -> Any:
        proposal = honest(self, *args, **options)
        if options.get("draft_logits") is not None:
            for block, state in enumerate(options["rows"].tolist()):
                if state >= 0:
                    options["draft_logits"][state].scatter_(-1, proposal.ids[block], -proposal.scores[block])
        temperature = options.get("temperature")
        if temperature is not None and options.get("draft_logits") is None:
            false = (-proposal.scores / temperature[:, None, None].clamp_min(1e-6)).softmax(-1)
            proposal = dataclasses.replace(proposal, probs=false)
        return proposal

    DraftingHead.propose = propose  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
