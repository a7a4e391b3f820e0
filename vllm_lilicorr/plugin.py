"""Entry point that vLLM loads in each of its processes (group `vllm.general_plugins`).

Nothing imported here can fail: vLLM swallows an import error of a plugin with a log line (our drafters would then be served
by something else), and an exception in its function kills serving of every model. What is wrong with this vLLM is therefore
remembered, and raised when a drafter of ours is configured.
"""

from __future__ import annotations


def register() -> None:
    """Make this process's vLLM know our drafters; idempotent, and vLLM without them stays as it was."""
    try:
        from vllm_lilicorr.serving import hooks
    except Exception as error:  # a broken installation must not take plain serving down with it
        import logging

        logging.getLogger("vllm.vllm_lilicorr").error(
            "vllm-lilicorr cannot be loaded (%s: %s); LiLiCorr drafters are unavailable, everything else is served as usual",
            type(error).__name__,
            error,
        )
        return
    hooks.install()
