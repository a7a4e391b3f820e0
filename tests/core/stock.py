"""vLLM's own LiLiCorr head, built outside an engine: the implementation that is not ours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from vllm_lilicorr.config import DraftConfig
from vllm_lilicorr.model import LiLiCorrHead


@contextlib.contextmanager
def vllm_parallel_state() -> Iterator[Any]:
    """Yield a VllmConfig under which vLLM's layers can be built, in a process group of one."""
    import socket

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    vllm_config = VllmConfig()
    # Eager: compiling the head would take minutes here and is what this comparison is not about.
    vllm_config.compilation_config.mode = 0
    with set_current_vllm_config(vllm_config):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}", backend="gloo"
        )
        parallel_state.initialize_model_parallel(1, 1)
        try:
            yield vllm_config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def stock_head(config: DraftConfig, ours: LiLiCorrHead) -> Any:
    """Return vLLM's head with our head's weights, in their dtype."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.models.lilicorr import LiLiCorrHead as StockHead

    dtype = ours.slot_embedding.dtype
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        stock = StockHead(
            model_hidden_size=config.hidden_size,
            block_size=config.block_size,
            rms_norm_eps=config.rms_norm_eps,
            config=config.to_dict()["dflash_config"],
        )
    finally:
        torch.set_default_dtype(previous)
    state = ours.state_dict()
    parameters = dict(stock.named_parameters())
    assert parameters.keys() == state.keys(), "the tensors' names differ from vLLM's"
    with torch.no_grad():
        for name, parameter in parameters.items():
            assert parameter.shape == state[name].shape, f"{name}: {parameter.shape} and {state[name].shape}"
            parameter.copy_(state[name])
    # Before the layers repack their weights, which the buffers are views and copies of.
    stock.materialize_inference_buffers(torch.device("cpu"), dtype)
    for module in stock.modules():
        if isinstance(module, LinearBase):
            module.quant_method.process_weights_after_loading(module)
    return stock.eval()
