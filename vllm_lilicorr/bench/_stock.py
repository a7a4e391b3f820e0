"""vLLM's own LiLiCorr head, built outside an engine, to be timed beside ours."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import torch

from vllm_lilicorr.errors import UserError
from vllm_lilicorr.model.heads.lilicorr import LiLiCorrHead


class StockHeads(contextlib.ExitStack):
    """A context in which vLLM's layers can be built (a configuration, and a process group of one); calling it builds a head.

    Raises UserError where vLLM is not installed or has no LiLiCorr head.
    """

    def __enter__(self) -> StockHeads:
        super().__enter__()
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        try:
            import vllm.model_executor.models.lilicorr  # noqa: F401
            from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
            from vllm.distributed import parallel_state
        except ImportError as error:
            raise UserError(f"--compare-vllm needs vLLM 0.32 or 0.33 in this environment ({error}); install the extra serve-cpu") from error
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # Eager, as its CPU engine could run it at best: stock vLLM refuses this head on a CPU.
        self.enter_context(set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))))
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}", backend="gloo"
        )
        self.callback(parallel_state.destroy_distributed_environment)
        parallel_state.initialize_model_parallel(1, 1)
        self.callback(parallel_state.destroy_model_parallel)
        return self

    def __call__(self, head: LiLiCorrHead) -> Any:
        """Returns vLLM's head with the weights of ours, in their dtype, its linears' weights packed as its engine packs them."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.models.lilicorr import LiLiCorrHead as StockHead

        config, dtype = head.config, head.slot_embedding.dtype
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            stock = StockHead(
                model_hidden_size=head.pass_hidden_proj.in_features,
                block_size=head.block_size,
                rms_norm_eps=head.output_norm.eps,
                config=config.write(),
            )
        finally:
            torch.set_default_dtype(previous)
        with torch.no_grad():
            parameters = dict(stock.named_parameters())
            for name, value in head.state_dict().items():
                parameters[name].copy_(value)
        # Before the linears repack their weights, which the buffers are copies of.
        stock.materialize_inference_buffers(torch.device("cpu"), dtype)
        for module in stock.modules():
            if isinstance(module, LinearBase):
                module.quant_method.process_weights_after_loading(module)
        return stock.eval()
