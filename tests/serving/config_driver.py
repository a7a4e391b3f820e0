"""Runs cases of vLLM engine configuration in one process, without loading a weight: `test_configuration.py` starts it.

stdin: [[name, {engine arguments}], ...]; stdout: one `RESULT` line, {name: {"ok": {...}} or {"error": [class, text]}}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    cases = json.load(sys.stdin)
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def outcome(arguments: Any) -> dict[str, Any]:
        if isinstance(arguments, list):  # a command line
            parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
            arguments = {"speculative_config": parser.parse_args(arguments).speculative_config}
            return {"parsed": arguments["speculative_config"]}
        options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
        config = EngineArgs(**(options | arguments)).create_engine_config()
        spec = config.speculative_config
        if spec is None:
            return {"speculative": None}
        hf_config = spec.draft_model_config.hf_config
        return {
            "method": spec.method,
            "num_speculative_tokens": spec.num_speculative_tokens,
            "architectures": hf_config.architectures,
            "options": hf_config.dflash_config.get("vllm_lilicorr"),
            "max_position_embeddings": hf_config.max_position_embeddings,
            "draft_max_model_len": spec.draft_model_config.max_model_len,
            "model": spec.model,
            "v2": config.use_v2_model_runner,
        }

    results: dict[str, Any] = {}
    for name, arguments in cases:
        try:
            results[name] = {"ok": outcome(arguments)}
        except SystemExit as error:
            results[name] = {"error": ["SystemExit", str(error.code)]}
        except Exception as error:
            results[name] = {"error": [type(error).__name__, str(error)]}
    print("RESULT " + json.dumps(results), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
