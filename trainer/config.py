"""A training run's configuration: every section's type, and how it becomes the drafter's.

Each section's class stands beside what it configures; this module joins them, reads YAML with command-line overrides,
and derives from the target what the file leaves to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vllm_lilicorr.config import ConvConfig, DraftConfig, default_target_layer_ids
from vllm_lilicorr.errors import UserError, nearest
from vllm_lilicorr.yaml_files import read_yaml

from .data import DataConfig
from .evaluation import EvaluationConfig
from .objectives import OBJECTIVES, HeadSettings, ObjectiveConfig
from .optim import OptimizerConfig, ScheduleConfig
from .settings import apply_overrides, digest, parse, require, to_dict


@dataclass(frozen=True)
class TargetConfig:
    """path: the target's Hugging Face folder; its embedding, lm_head and (online) its layers are read from there."""

    path: str


@dataclass(frozen=True)
class DraftSettings:
    """The drafter's geometry. What is null is the target's: widths, heads, RoPE base, tapped layers by the usual rule.

    head: which head is trained; its own keys stand in the section `head.NAME`. mask_token_id: an id that no text contains.
    block_size: the anchor and the positions behind it; dspark and domino draft that many tokens, the others one fewer.
    conv: the grouped convolution around every sublayer (taps, channels a group); null: only where the head requires it.
    freeze_backbone: train the head alone, on the backbone of run.warm_start. without: layers and tables of the head, by their
    names in it, that are zero and stay so; what is exported is an ordinary checkpoint.
    """

    head: str
    num_layers: int
    block_size: int
    mask_token_id: int
    num_taps: int = 5
    target_layer_ids: tuple[int, ...] | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int | None = None
    conv: bool | None = None
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    freeze_backbone: bool = False
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.head in OBJECTIVES,
            "head",
            f"must be one of {', '.join(OBJECTIVES)}, got '{self.head}'{nearest(self.head, OBJECTIVES)}",
        )
        require(self.num_layers >= 1, "num_layers", f"must be at least 1, got {self.num_layers}")
        for name in ("num_taps", "conv_kernel_size", "conv_group_size"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        require(
            self.conv is not False or not OBJECTIVES[self.head].head_config.needs_conv,
            "conv",
            f"cannot be false: {self.head} has the convolution in its backbone; set it to true, or null for the head's own",
        )

    def conv_config(self) -> ConvConfig | None:
        """Return the backbone's convolution, or None without one."""
        wanted = OBJECTIVES[self.head].head_config.needs_conv if self.conv is None else self.conv
        return ConvConfig(self.conv_kernel_size, self.conv_group_size) if wanted else None


@dataclass(frozen=True)
class RunConfig:
    """output: folder of everything the run writes. batch_size: conversations an optimizer step, over all ranks;
    micro_batch_size: conversations a rank takes at a time (what is left is gradient accumulation).

    max_steps: null for the paper's rule, floor(N / batch_size) * epochs. stop_after: stop cleanly after this step, with the
    schedule of max_steps. save_every, keep_last: optimizer steps between checkpoints (and how many stay). precision:
    bf16 computes in bf16 over fp32 master weights. warm_start: a checkpoint to begin from, with any head.
    """

    output: str
    seed: int = 0
    epochs: int = 6
    batch_size: int = 64
    micro_batch_size: int = 1
    max_steps: int | None = None
    stop_after: int | None = None
    save_every: int = 1000
    keep_last: int = 2
    precision: Literal["bf16", "fp32"] = "bf16"
    activation_checkpointing: bool = False
    warm_start: str | None = None
    tensorboard: bool = True
    wandb: str | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "micro_batch_size", "save_every", "keep_last"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        for name in ("max_steps", "stop_after"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, f"must be at least 1 or null, got {value}")
        require(self.seed >= 0, "seed", f"must not be negative, got {self.seed}")


@dataclass(frozen=True)
class DeepSpeedConfig:
    """config: the DeepSpeed JSON file, relative to the working directory or to the configuration file.

    universal: a checkpoint converted to DeepSpeed's universal format may be resumed from (after a change of rank count).
    """

    config: str
    universal: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """One run. `resolved()` is what is saved with every checkpoint, `hash()` its name."""

    target: TargetConfig
    data: DataConfig
    draft: DraftSettings
    head: HeadSettings  # type: ignore[valid-type]
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    evaluation: EvaluationConfig
    run: RunConfig
    deepspeed: DeepSpeedConfig

    def __post_init__(self) -> None:
        head = getattr(self.head, self.draft.head)
        OBJECTIVES[self.draft.head].check(self.objective, head)
        every = self.evaluation.every
        require(
            not every or self.data.holdout > 0,
            "evaluation.every",
            f"is {every}, but data.holdout is 0 and there is nothing to evaluate on; raise data.holdout, or set this to 0",
        )
        frozen, field = self.draft.freeze_backbone, "draft.freeze_backbone"
        require(not frozen or self.draft.head != "dflash", field, "leaves dflash nothing to train; set it to false")
        require(
            not frozen or self.run.warm_start is not None,
            field,
            "would keep the backbone at random weights; give run.warm_start a checkpoint",
        )

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
        """Return the configuration in YAML file `path` with "key.sub=value" overrides; raises UserError on anything amiss."""
        values = apply_overrides(read_yaml(path, "configs/smollm2-135m.yaml"), overrides or [])
        config = parse(cls, values, str(path))
        file = Path(config.deepspeed.config)
        if not file.exists() and (Path(path).parent / file).exists():
            config = replace(config, deepspeed=replace(config.deepspeed, config=str(Path(path).parent / file)))
        return config

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value, defaults included, and the DeepSpeed file's contents."""
        return to_dict(self) | {"deepspeed_json": self.deepspeed_json()}

    def hash(self) -> str:
        """Return 16 hex digits that name what decides the numbers of a run: not where it is written, nor when it pauses."""
        return digest(identity(self.resolved()))

    def deepspeed_json(self) -> dict[str, Any]:
        """Return the DeepSpeed file's contents; raises UserError when it cannot be read or sets what the run decides."""
        path = Path(self.deepspeed.config)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"deepspeed.config: {path} cannot be read ({error.strerror}); see configs/deepspeed/") from None
        except ValueError as error:
            raise UserError(f"{path}: is not valid JSON ({error})") from None
        decided = {
            "train_batch_size": "run.batch_size",
            "train_micro_batch_size_per_gpu": "run.micro_batch_size",
            "gradient_accumulation_steps": "run.batch_size",
            "gradient_clipping": "optimizer.clip",
            "optimizer": "the section optimizer",
            "scheduler": "the section schedule",
            "fp16": "run.precision",
        }
        for key, ours in decided.items():
            if key in values:
                raise UserError(f"{path}: {key} is decided by {ours} of the run's configuration; remove it here")
        return values

    def draft_config(self, target: dict[str, Any], target_name: str, tokenizer_hash: str) -> DraftConfig:
        """Return the drafter's configuration for a target whose decoded `config.json` is `target`."""
        draft = self.draft
        layers = target["num_hidden_layers"]
        heads = draft.num_attention_heads or target["num_attention_heads"]
        head_config = OBJECTIVES[draft.head].head_config
        head = getattr(self.head, draft.head)
        if head is None:
            try:
                head = head_config()
            except TypeError:
                raise UserError(f"head.{draft.head} is missing, and draft.head is '{draft.head}'; add the section") from None
        config = DraftConfig(
            hidden_size=target["hidden_size"],
            num_hidden_layers=draft.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=draft.num_key_value_heads or target.get("num_key_value_heads") or heads,
            head_dim=draft.head_dim or target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"],
            intermediate_size=draft.intermediate_size or target["intermediate_size"],
            vocab_size=target["vocab_size"],
            rms_norm_eps=target["rms_norm_eps"],
            max_position_embeddings=draft.max_position_embeddings or target["max_position_embeddings"],
            rope_theta=_rope_theta(target),
            attention_bias=False,
            block_size=draft.block_size,
            num_target_layers=layers,
            mask_token_id=draft.mask_token_id,
            target_layer_ids=draft.target_layer_ids or default_target_layer_ids(layers, draft.num_taps),
            head=head,
            conv=draft.conv_config(),
            target_name=target_name,
            tokenizer_hash=tokenizer_hash,
        )
        return DraftConfig.from_dict(config.to_dict(), "the configuration's sections draft and head")


def completed(resolved: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a resolved configuration that an earlier version wrote, with the keys it did not know at their defaults."""
    sections = {name: section for name, section in resolved.items() if name != "deepspeed_json"}
    return to_dict(parse(TrainConfig, sections, source)) | {"deepspeed_json": resolved["deepspeed_json"]}


def identity(resolved: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a resolved configuration that decides the numbers of a run."""
    passing = {
        "run": ("output", "stop_after", "save_every", "keep_last", "tensorboard", "wandb"),
        "deepspeed": ("config", "universal"),
    }
    kept = {name: section for name, section in resolved.items() if name != "evaluation"}
    others = OBJECTIVES.keys() - {kept["draft"]["head"]}
    for name in ("head", "objective"):
        kept[name] = {key: value for key, value in kept[name].items() if key not in others}
    for name, keys in passing.items():
        kept[name] = {key: value for key, value in kept[name].items() if key not in keys}
    return kept


def _rope_theta(target: dict[str, Any]) -> float:
    theta = target.get("rope_theta") or (target.get("rope_parameters") or {}).get("rope_theta")
    if theta is None:
        raise UserError("the target's config.json has neither rope_theta nor rope_parameters.rope_theta; add its RoPE base")
    return float(theta)
