"""From `--speculative-config` to vLLM's SpeculativeConfig: files, our keys, defaults, and every refusal that needs no weights.

vLLM's configuration classes forbid unknown keys and cannot tell which method a checkpoint of ours wants, so the raw
dictionary is read here, where it and the target's configuration are both at hand: before anything is loaded. Our own keys
travel to the workers inside the draft's Hugging Face configuration.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import HEAD_CONFIGS, DFlashConfig, DraftConfig
from ..errors import UserError, nearest
from . import hooks
from .methods import METHODS, PATH_RULES

logger = logging.getLogger("vllm.vllm_lilicorr")

BACKENDS = ("lilicorr", "stock")
# What runs the V1 proposer and the V2 speculator that ours derive from, whatever the head behind the block.
METHOD = "dflash"
DRAFT_DTYPES = ("auto", "bfloat16", "int8")
# None: a number, checked by itself.
OUR_KEYS = {"path_rule": PATH_RULES, "backend": BACKENDS, "draft_dtype": DRAFT_DTYPES, "confidence_threshold": None}

# Options of vLLM's that mean something else to a head than what they say, or nothing.
_REFUSED = {
    "use_local_argmax_reduction": "drafts with an argmax per slot, which a head does not",
    "use_heterogeneous_vocab": "maps vocabularies, but a drafter here has the target's own",
    "disable_padded_drafter_batch": "is not implemented by vLLM for block drafters",
}


def read(value: str) -> dict[str, Any]:
    """Return the speculative configuration given as inline JSON or as the path of a JSON file.

    A relative `model` in a file is taken from the file's folder where that names something. Raises UserError with line and
    column when it is no JSON, and when the file is missing or is no object.
    """
    text = value.strip()
    if text.startswith("{"):
        return _object(text, "--speculative-config")
    path = Path(value).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{value}: no such file; give --speculative-config a JSON file or an inline JSON object") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"{value}: cannot be read ({reason}); give --speculative-config a JSON file") from None
    config = _object(text, value)
    unknown = [key for key in map(_underscored, config) if key not in _known_keys()]
    if unknown:
        raise UserError(f"{value}: unknown key '{unknown[0]}'{nearest(unknown[0], _known_keys())}")
    model = config.get("model")
    if isinstance(model, str) and not Path(model).is_absolute() and (path.parent / model).exists():
        config["model"] = str((path.parent / model).resolve())
    return config


def _object(text: str, source: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{source}: is not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}); correct it there"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{source}: must hold a JSON object, got {json.dumps(value)[:40]}")
    return value


def _underscored(key: str) -> str:
    return key.replace("-", "_")


def _known_keys() -> list[str]:
    from vllm.config import SpeculativeConfig

    internal = ("target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config")
    names = [entry.name for entry in dataclasses.fields(SpeculativeConfig)]
    return sorted({*OUR_KEYS, *names} - set(internal))


def accept_files(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let `--speculative-config` take a file beside inline JSON; returns the parser."""
    for action in parser._actions:
        if action.dest == "speculative_config":
            stock = action.type

            def parse(value: str, stock: Callable[[str], Any] = stock) -> Any:  # type: ignore[assignment]
                if value in ("", "None"):
                    return stock(value)
                try:
                    return read(value)
                except UserError as error:
                    raise argparse.ArgumentTypeError(str(error)) from None

            action.type = parse
            action.help = f"{action.help or ''} A path of a JSON file is accepted too (docs/serving.md of vllm-lilicorr)."
    return parser


@dataclass(frozen=True)
class Plan:
    """What becomes of a speculative configuration that names a drafter of ours.

    stock: the keys for vLLM's own SpeculativeConfig; draft: the checkpoint's configuration, None where only vLLM can read it;
    backend, path_rule, draft_dtype, confidence_threshold: our keys.
    """

    stock: dict[str, Any]
    draft: DraftConfig | None
    backend: str
    path_rule: str
    draft_dtype: str = "auto"
    confidence_threshold: float = 0.0

    @property
    def served_here(self) -> bool:
        return self.backend == "lilicorr"


def plan(spec: Mapping[str, Any], target: Any) -> Plan | None:
    """Return the plan for `spec`, or None where the drafter is not of ours and vLLM is to proceed alone.

    target: vLLM's ModelConfig of the target. Raises UserError for everything that can be known before weights are loaded.
    """
    spec = {_underscored(key): value for key, value in spec.items()}
    model = spec.get("model")
    ours = sorted(OUR_KEYS.keys() & spec.keys())
    draft = _draft_config(model, spec.get("revision"), bool(ours)) if isinstance(model, str) else None
    if isinstance(draft, Foreign):
        return draft.plan(spec)
    if draft is None:
        if ours:
            bare = isinstance(model, str) and "/" not in model and not Path(model).exists()
            if bare and spec.get("method") in (None, METHOD, "dspark"):
                raise UserError(
                    f"--speculative-config: model {model} is neither a folder nor a hub id (owner/name); give the folder of a "
                    "drafter checkpoint"
                )
            names = ", ".join(HEAD_CONFIGS)
            raise UserError(
                f"--speculative-config: '{ours[0]}' is an option for drafters of this package ({names}), but model is {model!r}; "
                "remove the option or name such a drafter"
            )
        return None
    if isinstance(draft.head, DFlashConfig):
        return _plain_plan(spec, draft, target)
    hooks.require_supported_vllm()
    found = _checked_plan(dict(spec), draft, target)
    try:
        _check_tensors(found.stock["model"], draft)
    except UserError as error:
        # Drafters of others may carry their own embedding or output head, which vLLM's implementations read.
        unknown = f", unknown to a {draft.architecture};" in str(error)
        if ours or draft.architecture not in _SHARED_WITH_VLLM or not unknown:
            raise
        return Foreign(draft.architecture, error).plan(spec)
    return found


@dataclass(frozen=True)
class Foreign:
    """A drafter of an architecture that vLLM knows too, in a kind that this package cannot read, and the reason."""

    architecture: str
    reason: UserError

    def plan(self, spec: Mapping[str, Any]) -> Plan:
        """Return the plan that leaves it to vLLM, its method named: vLLM would take most of them for a whole draft model."""
        head = HEAD_CONFIGS[self.architecture]
        method = METHOD
        if head in METHODS:
            method = METHODS[head].stock or METHOD
            logger.warning("%s. The drafter is left to vLLM's own implementation of %s", self.reason, self.architecture)
        given = {key: value for key, value in spec.items() if value is not None}
        return Plan({"method": method} | given, None, "stock", "greedy")


def _draft_config(model: str, revision: str | None, insist: bool) -> DraftConfig | Foreign | None:
    """Return the configuration of the checkpoint `model` if it is one of ours to serve.

    vLLM knows DFlash, DFlash2 and DSpark too, in more kinds than are trained here; what this package cannot read is left to it,
    with a warning, unless the user asks for this package (`insist`) by one of its keys.
    """
    folder = Path(model)
    if folder.is_dir():
        try:
            values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            values = None
        source = str(folder / "config.json")
        if values is None:
            # A folder without a readable config.json: is it meant to be ours? Its tensors would say, vLLM will say it as well.
            return None
    elif "/" in model and not model.startswith(("/", ".")):
        try:
            from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

            values, source = get_hf_file_to_dict("config.json", model, revision), f"{model}/config.json"
        except Exception:  # offline, private, not there: vLLM's own message about the model is the better one
            return None
    elif model.startswith(("/", ".")):
        raise UserError(f"--speculative-config: model {model} does not exist; give the folder of a drafter checkpoint")
    else:
        return None
    names = values.get("architectures") if isinstance(values, dict) else None
    if not isinstance(names, list) or not names or names[0] not in HEAD_CONFIGS:
        return None
    if names[0] == DFlashConfig.architecture and (values.get("dflash_config") or {}).get("projector_type"):
        return DraftConfig.from_dict(values, source)  # a head hidden behind the plain name is an error whoever serves
    try:
        draft = DraftConfig.from_dict(values, source)
        _refuse_variants(draft, values)
    except UserError as error:
        if insist or names[0] not in _SHARED_WITH_VLLM:
            raise
        return Foreign(names[0], error)
    return draft


_SHARED_WITH_VLLM = ("DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel")


def _refuse_variants(draft: DraftConfig, values: Mapping[str, Any]) -> None:
    """Raise UserError for the kinds of a method that vLLM tells by keys this package's format does not have."""
    method = METHODS.get(type(draft.head))
    for key, neutral in (method.variants if method else {}).items():
        value = (values.get("dflash_config") or {}).get(key, values.get(key))
        if value is not None and value not in neutral:
            raise UserError(f"{draft.source}: {key} is {json.dumps(value)}, a kind of drafter this package does not have")


def _plain_plan(spec: dict[str, Any], draft: DraftConfig, target: Any) -> Plan:
    """A plain DFlash drafter is vLLM's to serve, unless a head is hidden in it; only what is left out is filled in."""
    if Path(spec["model"]).is_dir():
        refuse_hidden_head(spec["model"], draft)
    for key in OUR_KEYS.keys() & spec.keys():
        if spec.pop(key) not in ("greedy", "stock", "auto", 0):
            raise UserError(f"--speculative-config: {key} is an option of heads, {draft.architecture} has none; remove it")
    spec.setdefault("method", METHOD)
    spec.setdefault("num_speculative_tokens", draft.num_slots)
    return Plan(spec, draft, "stock", "greedy")


def _checked_plan(spec: dict[str, Any], draft: DraftConfig, target: Any) -> Plan:
    where = "--speculative-config"
    for key, choices in OUR_KEYS.items():
        if choices is not None and key in spec and spec[key] not in choices:
            hint = nearest(str(spec[key]), choices)
            raise UserError(f"{where}: {key} must be one of {', '.join(choices)}, got {json.dumps(spec[key])}{hint}")
    unknown = [key for key in spec if key not in _known_keys() and not key.startswith("target_")]
    if unknown:
        raise UserError(f"{where}: unknown key '{unknown[0]}'{nearest(unknown[0], _known_keys())}")
    offered = METHODS[type(draft.head)]
    backend, rule = spec.pop("backend", "lilicorr"), spec.pop("path_rule", "greedy")
    if rule not in offered.path_rules:
        rules = ", ".join(offered.path_rules)
        raise UserError(f"{where}: path_rule '{rule}' walks a lattice, which {draft.architecture} has not; it offers {rules}")
    if backend == "stock" and offered.stock is None:
        raise UserError(f'{where}: vLLM has no {draft.architecture} of its own; remove "backend": "stock"')
    dtype, threshold = spec.pop("draft_dtype", "auto"), spec.pop("confidence_threshold", 0.0)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold < 1:
        raise UserError(f"{where}: confidence_threshold must be at least 0 and below 1, got {json.dumps(threshold)}")
    for key, asked in (("draft_dtype", dtype != "auto"), ("confidence_threshold", threshold > 0)):
        if asked and "exact" not in offered.path_rules:
            raise UserError(f"{where}: {key} is for heads with candidates, {draft.architecture} has none; remove it")
        if asked and backend == "stock":
            raise UserError(f'{where}: backend "stock" has no {key}; remove one of them')
    if dtype == "int8":
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            raise UserError(f"{where}: draft_dtype int8 takes products of vLLM's CPU build; set bfloat16 or remove it")
    known = {METHOD, offered.stock} - {None}
    if spec.get("method", METHOD) not in known:
        names = " or ".join(f'"{name}"' for name in sorted(filter(None, known)))
        raise UserError(
            f"{where}: method is '{spec['method']}', but {draft.architecture} drafts by {names}; correct it or leave it out"
        )
    spec["method"] = METHOD if backend == "lilicorr" else offered.stock

    slots = spec.setdefault("num_speculative_tokens", draft.num_slots)
    if not isinstance(slots, int) or isinstance(slots, bool) or not 1 <= slots <= draft.num_slots:
        raise UserError(
            f"{where}: num_speculative_tokens must lie in 1..{draft.num_slots}, the slots {draft.source} was trained with, got "
            f"{json.dumps(slots)}"
        )
    for key, reason in _REFUSED.items():
        if spec.get(key):
            raise UserError(f"{where}: {key} {reason}; remove it")
    for key in offered.stock_keys if backend == "lilicorr" else ():
        if spec.get(key) is not None:
            raise UserError(
                f'{where}: {key} is an option of vLLM\'s own {draft.architecture}; remove it or use "backend": "stock"'
            )
    sampled = spec.get("draft_sample_method") == "probabilistic"
    if sampled and not offered.sampled:
        raise UserError(
            f'{where}: draft_sample_method "probabilistic" needs a proposal distribution, which {draft.architecture} has not; '
            'use "greedy"'
        )
    if rule != "greedy" and sampled:
        raise UserError(
            f"{where}: path_rule '{rule}' picks one path and has no proposal distribution, but draft_sample_method is "
            '"probabilistic"; use path_rule "greedy" with it, or draft_sample_method "greedy"'
        )
    if backend == "stock" and rule != "greedy":
        raise UserError(f"{where}: backend \"stock\" walks greedily only; remove path_rule '{rule}' or the backend")

    _check_target(draft, target)
    return Plan(spec, draft, backend, rule, dtype, float(threshold))


def _check_target(draft: DraftConfig, target: Any) -> None:
    from ..target import TargetShape, check_fits, load_tokenizer

    name = Path(str(target.model)).name
    shape = TargetShape(name, target.get_hidden_size(), target.get_vocab_size(), target.get_total_num_hidden_layers())
    tokenizer = None if getattr(target, "skip_tokenizer_init", False) else load_tokenizer(target.tokenizer or target.model)
    for warning in check_fits(draft, shape, tokenizer):
        logger.warning(warning)


def _check_tensors(model: str, draft: DraftConfig) -> None:
    if Path(model).is_dir():
        from ..model.checkpoint import check_tensors

        check_tensors(model, draft)


def refuse_hidden_head(folder: str, draft: DraftConfig) -> None:
    """Raise UserError when a plain drafter's file holds the tensors of a head, which engines would silently ignore."""
    from ..model.checkpoint import check_tensors

    try:
        check_tensors(folder, draft)
    except UserError as error:
        # Drafters of others may carry tensors this package has no name for (an embedding, say); those are vLLM's business.
        if "silently ignore" in str(error):
            raise


def create_speculative_config(stock: Callable[..., Any], args: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
    """Return vLLM's SpeculativeConfig for engine arguments `args`; `stock` is vLLM's own method."""
    given = args.speculative_config
    if isinstance(given, str):
        args.speculative_config = read(given)
    flags = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}
    # A release that we do not know may lack one of them, and reads on without us where no drafter is ours.
    flags = {key: value for key, name in flags.items() if (value := getattr(args, name, None)) is not None}
    spec = {**(args.speculative_config or {}), **flags}
    found = plan(spec, target_model_config) if spec else None
    if found is None:
        return stock(args, target_model_config, target_parallel_config)
    asked = args.speculative_config
    # vLLM refuses a key that is given twice, and it adds to the dictionary; the user's own is kept for a second call.
    args.speculative_config = {key: value for key, value in found.stock.items() if key not in flags}
    try:
        config = stock(args, target_model_config, target_parallel_config)
    finally:
        args.speculative_config = asked
    return _finish(config, found)


def _finish(config: Any, found: Plan) -> Any:
    if found.served_here and getattr(config, "rejection_sample_method", None) == "fly":
        logger.warning("rejection_sample_method 'fly' is vLLM's lossy acceptance: outputs may differ from the target's")
    draft_model, target = config.draft_model_config, config.target_model_config
    hf_config = draft_model.hf_config
    if found.draft is not None and found.served_here:
        hf_config.dflash_config = dict(hf_config.dflash_config) | {
            "vllm_lilicorr": {
                "path_rule": found.path_rule,
                "draft_dtype": found.draft_dtype,
                "confidence_threshold": found.confidence_threshold,
                "max_len": draft_model.max_model_len,
                "draft": found.draft.to_dict(),
            }
        }
        hf_config.architectures = [hooks.SERVED_ARCHITECTURE]
        config.update_arch_()
        # The rotary table must reach every position the target can: context keys are written for all of them, also past
        # `max_len`, where drafting stops. Plain rotary embeddings are the only kind a drafter here has, so a longer table
        # holds the same values in front.
        longest = target.max_model_len + config.num_speculative_tokens + 1
        hf_config.max_position_embeddings = max(hf_config.max_position_embeddings, longest)
    return config
