"""Run as a script: vLLM's own DFlash on the V1 runner, without this package's plugin; writes what it drafted where.

    python stock_engine.py TARGET DRAFT PROMPTS.json OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(target: str, draft: str, prompts: str, out: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.spec_decode.dflash import DFlashProposer

    drafts: list[dict] = []
    anchors: list[int] = []
    inputs, propose = DFlashProposer.set_inputs_first_pass, DFlashProposer.propose

    def record_anchor(self, *args, **kwargs):
        names = ("target_token_ids", "next_token_ids", "target_positions", "target_hidden_states", "at", "cad", "rejected")
        given = dict(zip(names, args)) | {"cad": kwargs.get("cad", args[5] if len(args) > 5 else None)}
        given |= {"positions": kwargs.get("target_positions", given.get("target_positions"))}
        rejected = kwargs.get("num_rejected_tokens_gpu", given.get("rejected"))
        last = int(given["cad"].query_start_loc[1]) - 1 - (int(rejected[0]) if rejected is not None else 0)
        anchors.append(int(given["positions"][last]) + 1)
        return inputs(self, *args, **kwargs)

    def record_drafts(self, *args, **kwargs):
        tokens = propose(self, *args, **kwargs)
        drafts.append({"anchor": anchors[-1], "tokens": tokens[0].tolist()})
        return tokens

    DFlashProposer.set_inputs_first_pass, DFlashProposer.propose = record_anchor, record_drafts
    slots = json.loads((Path(draft) / "config.json").read_text())["block_size"] - 1
    engine = LLM(
        model=target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=1,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        speculative_config={"method": "dflash", "model": draft, "num_speculative_tokens": slots},
    )
    results = []
    for prompt in json.loads(Path(prompts).read_text()):
        drafts.clear()
        params = SamplingParams(temperature=0.0, max_tokens=24, detokenize=False, ignore_eos=True)
        (output,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        results.append({"output_ids": list(output.outputs[0].token_ids), "drafts": list(drafts)})
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
