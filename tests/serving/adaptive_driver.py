"""Runs one drafting step of the V2 speculator around each head, with vLLM's own acceptance estimator and sampler: for
`test_adaptive.py`.

No engine: the backbone's pass is replaced by random states. stdout: one `RESULT` line, {head: {predicted, and what decided},
"sampled": what DSpark drew and from what, "drawn": how often it drew what from one block}.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

ROWS = 8
PAST = 3  # the block that lies past the drafter's limit
DRAWS = 1000
CHECKED = (
    *(f"LILICORR_{name} cuda {mode}" for name in ("DEBUG", "PLAIN_HEAD", "TRACE") for mode in ("FULL", "FULL_AND_PIECEWISE")),
    *("LILICORR_DEBUG cuda NONE", "LILICORR_DEBUG cuda PIECEWISE", "LILICORR_DEBUG cpu FULL", "LILICORR_TIMING cuda FULL"),
)
"""A debugging variable, the device, and how it captures graphs."""


def main() -> None:
    import interpreted

    interpreted.enable()
    import numpy as np
    import torch
    from test_drafting import BLOCKS, HEADS, HIDDEN, SLOTS, VOCAB, Served
    from triton.runtime.interpreter import InterpreterBuilder
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    from vllm_lilicorr.errors import UserError
    from vllm_lilicorr.model import BlockStates
    from vllm_lilicorr.serving.head import Step
    from vllm_lilicorr.serving.v2 import DraftSpeculator, check_variables

    # The interpreter computes `block mask & scalar mask`, as vLLM's sampler writes it, in int32, and then refuses it as a mask.
    store = InterpreterBuilder.create_masked_store

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        mask.data = mask.data.astype(np.bool_)
        return store(self, pointers, value, mask, *options)

    InterpreterBuilder.create_masked_store = masked_store

    def build(served: Served, blocks: int = BLOCKS) -> Any:
        # The readable lattice heads: what is interpreted here is vLLM's, and the kernels of a slot.
        os.environ["LILICORR_PLAIN_HEAD"] = "0" if served.draft.head.shifted else "1"
        return served.drafting(blocks)

    def step(name: str) -> dict[str, Any]:
        served = Served(name)
        drafting = build(served)
        shifted = served.draft.head.shifted
        width = SLOTS + (0 if shifted else 1)
        rows = torch.tensor([3, 1, -1, 0, 5])
        states = torch.randn(BLOCKS, width, HIDDEN)
        ids = torch.randint(0, 96, (BLOCKS, width))
        speculator: Any = DraftSpeculator.__new__(DraftSpeculator)
        positions = torch.arange(1, SLOTS + 1).repeat(BLOCKS, 1) + 10
        positions[PAST] += 1000
        sampled = torch.arange(BLOCKS * width).view(BLOCKS, width)[:, width - SLOTS :]
        vars(speculator).update(
            num_speculative_steps=SLOTS, num_query_per_req=width, sample_from_anchor=shifted, limit=1000, max_model_len=1000,
            draft_kv_cache_group_ids=[], drafting=drafting, rule="greedy", parallel_drafting_token_id=96, use_fp64_gumbel=False,
            sample_indices=sampled.flatten(), sample_pos=positions.flatten(),
            sample_idx_mapping=rows.repeat_interleave(SLOTS), sample_col=torch.arange(SLOTS, dtype=torch.int32).repeat(BLOCKS),
            input_buffers=SimpleNamespace(input_ids=ids.flatten().int()), anchor_hidden=served.block.anchor_hidden,
            anchor_valid=served.block.anchor_valid, temperature=torch.full((ROWS,), 0.7), seeds=torch.arange(ROWS),
            draft_tokens=torch.zeros(ROWS, SLOTS, dtype=torch.int64), draft_logits=None, enable_adaptive_verification=True,
            use_acceptance_estimator=not drafting.has_confidence, draft_token_confidence_probs=torch.full((ROWS, SLOTS), -1.0),
            acceptance_estimator=OnlineAcceptanceEstimator(ROWS, SLOTS, torch.device("cpu")),
            _run_model=lambda *_: states.flatten(0, 1),
        )  # fmt: skip
        seen: dict[int | None, torch.Tensor] = {}
        predict = speculator._maybe_predict_acceptance

        def watched(scores: torch.Tensor, *args: Any) -> None:
            seen[len(seen)] = scores.clone()
            predict(scores, *args)

        speculator._maybe_predict_acceptance = watched
        speculator._generate_draft(BLOCKS, BLOCKS * width, None, None, None)
        result = {"rows": rows.tolist(), "past": PAST, "predicted": speculator.draft_token_confidence_probs.tolist()}
        result["features"] = speculator.acceptance_estimator.features.tolist()
        if drafting.has_confidence:
            previous = torch.cat((ids[:, :1], speculator.draft_tokens[:BLOCKS, :-1]), 1)
            hidden = states[:, width - SLOTS :]
            live = (rows >= 0) & (torch.arange(BLOCKS) != PAST)
            result["confidence"] = served.head.confidence(hidden[live], previous[live]).tolist()
        else:
            one = len(seen) == 1
            scores = seen[0].unflatten(0, (BLOCKS, SLOTS)) if one else torch.stack([seen[s] for s in range(SLOTS)], 1)
            result["scores"] = scores.tolist()
        return result

    def sampled() -> dict[str, Any]:
        """DSpark drawn by vLLM's own sampler, which writes the verifier's logits."""
        served = Served("dspark")
        rows = torch.tensor([3, 1, -1, 0, 5])
        table = torch.full((ROWS, SLOTS, VOCAB), -7.0)
        temperature = torch.tensor([0.0, 0.5, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0])  # by state: block 3 is greedy, and withheld
        tokens_out = torch.full((ROWS, SLOTS), -1)
        step = Step(withheld=torch.arange(BLOCKS) == PAST, null_token=96)
        tokens = build(served).propose(
            served.block, "sampled", step, rows=rows, temperature=temperature, seeds=torch.arange(ROWS), tokens_out=tokens_out,
            positions=torch.arange(SLOTS).expand(BLOCKS, -1), draft_logits=table,
        ).tokens  # fmt: skip
        previous = torch.cat((served.block.anchor_ids[:, None], tokens[:, :-1]), 1)
        logits = served.vocabulary.logits(served.block.slot_hidden) + served.head.bias(previous)
        results = {"rows": rows, "past": torch.tensor(PAST), "tokens": tokens, "tokens_out": tokens_out, "table": table}
        return {name: tensor.tolist() for name, tensor in (results | {"logits": logits}).items()}

    def drawn() -> dict[str, Any]:
        """Two slots of one block over and over at temperature 2, under other seeds and at other positions."""
        served = Served("dspark")
        one = BlockStates(*(getattr(served.block, field.name)[:1] for field in fields(BlockStates)))
        block = BlockStates(one.slot_hidden[:, :2].expand(DRAWS, -1, -1), *(
            getattr(one, field.name).expand(DRAWS, *getattr(one, field.name).shape[1:]) for field in fields(BlockStates)[1:]
        ))  # fmt: skip
        number = torch.arange(DRAWS)
        table = torch.full((DRAWS, 2, VOCAB), -7.0)
        tokens = build(served, DRAWS).propose(
            block, "sampled", rows=number, temperature=torch.full((DRAWS,), 2.0), seeds=number // 4, draft_logits=table,
            positions=number[:, None] % 4 + torch.arange(2),
        ).tokens  # fmt: skip
        logits = served.vocabulary.logits(one.slot_hidden[0, :2])
        first = (logits[0] + served.head.bias(one.anchor_ids)[0]).div(2).softmax(-1)
        then = (logits[1] + served.head.bias(torch.arange(VOCAB))).div(2).softmax(-1)  # by the token before
        counts = [torch.bincount(tokens[:, slot], minlength=VOCAB).tolist() for slot in range(2)]
        return {"counts": counts, "expected": [first.tolist(), (first @ then).tolist()]}

    def refused(name: str, device: str, mode: str) -> str | None:
        for other in ("LILICORR_DEBUG", "LILICORR_PLAIN_HEAD", "LILICORR_TRACE"):
            os.environ.pop(other, None)
        os.environ[name] = "1"
        try:
            check_variables(device, CUDAGraphMode[mode])
        except UserError as error:
            return str(error)
        return None

    results = {"sampled": sampled(), "drawn": drawn(), **{name: step(name) for name in HEADS}}
    results["refused"] = {name: refused(*name.split()) for name in CHECKED}
    print("RESULT " + json.dumps(results), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
