"""The drafter's configuration: one frozen object, read once from a checkpoint's `config.json`.

The file is the public Hugging Face layout (docs/checkpoint-format.md): the Qwen3 keys of the drafter at the top level,
and under `dflash_config` what block drafting and the head need. No geometry has a default: a missing field is an error
that names it, because some of them (`lilicorr_logit_scale`, `lilicorr_vector_eps`) change scores and no shape.
This module imports no torch, so that a server can refuse a wrong file before it loads anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from .errors import UserError, nearest

MAX_TOPK = 16
# Beyond any model: what exceeds these is a damaged file, and building it would end in a traceback or not at all.
_LARGEST_SIZE = 2**31 - 1
_LARGEST = {"num_hidden_layers": 4096, "num_target_layers": 4096, "block_size": 4096, "hidden_size": 2**20, "head_dim": 2**16}
_LARGEST |= {"intermediate_size": 2**24, "vocab_size": 2**28, "num_attention_heads": 2**16, "num_key_value_heads": 2**16}
_LARGEST_HEAD_SIZE = 2**20


class FieldReader:
    """Typed access to one JSON object; every error is one sentence naming the file and the field."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values, self.source, self.prefix = values, source, prefix

    def error(self, key: str, problem: str) -> UserError:
        return UserError(f"{self.source}: {self.prefix}{key} {problem}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, kind: type) -> Any:
        """Return `values[key]` as `kind` (int, float, str, bool, list, dict); an int is a valid float, a bool no int."""
        if not self.has(key):
            hint = nearest(key, self.values)
            raise self.error(key, f"is missing and has no default; add it to the file{hint}")
        value = self.values[key]
        accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"must be {_KIND_NAMES[kind]}, got {json.dumps(value, default=str)}")
        if kind is float:
            try:
                number = float(self.values[key])
            except OverflowError:
                number = math.inf
            if not math.isfinite(number):
                raise self.error(key, f"must be a finite number, got {number}")
            return number
        return value

    def positive(self, key: str, kind: type = int) -> Any:
        value = self.get(key, kind)
        if value <= 0:
            raise self.error(key, f"must be positive, got {value}")
        largest = _LARGEST.get(key, _LARGEST_SIZE)
        if kind is int and value > largest:
            raise self.error(key, f"must be at most {largest}, got {str(value)[:20]}")
        return value

    def section(self, key: str) -> FieldReader:
        return FieldReader(self.get(key, dict), self.source, f"{self.prefix}{key}.")


_KIND_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class HeadConfig:
    """What a head declares about itself. Subclasses are the registry's entries; their fields are the JSON keys, behind
    `prefix`, in `dflash_config` or, with `top_level`, beside it.

    `architecture` and `projector_type` choose the head in a checkpoint. `shifted` is its layout: False, the anchor's
    position predicts nothing and a block of B positions drafts B-1 tokens; True, it predicts the first, and it drafts B.
    """

    architecture: ClassVar[str]
    projector_type: ClassVar[str | None] = None
    prefix: ClassVar[str] = ""
    top_level: ClassVar[bool] = False
    shifted: ClassVar[bool] = False
    needs_conv: ClassVar[bool] = False

    @classmethod
    def read(cls, top: FieldReader, dflash: FieldReader) -> HeadConfig:
        """Return the head's configuration from the file's sections; raise UserError on anything amiss."""
        reader = top if cls.top_level else dflash
        kinds = {"int": int, "float": float, "bool": bool}
        known = {cls.prefix + entry.name for entry in fields(cls)} | cls.flags().keys()
        if cls.prefix:
            for key in reader.values:
                if key.startswith(cls.prefix) and key not in known:
                    raise reader.error(key, f"is no option of {cls.architecture}{nearest(key, known)}")
        for key, value in cls.flags().items():
            if reader.has(key) and reader.values[key] != value:
                raise reader.error(key, f"is {json.dumps(reader.values[key])}, but {cls.architecture} needs {json.dumps(value)}")
        head = cls(**{entry.name: reader.get(cls.prefix + entry.name, kinds[str(entry.type)]) for entry in fields(cls)})
        head.validate(reader)
        return head

    @classmethod
    def flags(cls) -> dict[str, Any]:
        """Return the constant keys that mark this head; where the file has one, it must have this value."""
        return {} if cls.projector_type is None else {"projector_type": cls.projector_type}

    def write(self) -> dict[str, Any]:
        """Return this head's keys."""
        return self.flags() | {self.prefix + entry.name: getattr(self, entry.name) for entry in fields(self)}

    def validate(self, reader: FieldReader) -> None:
        """Raise UserError for values no head of this kind can have: as a rule, sizes that are not positive."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not isinstance(value, bool) and (value < 0 or (value == 0 and entry.name not in self.may_be_zero())):
                raise reader.error(self.prefix + entry.name, f"must be positive, got {value}")
            if value > _LARGEST_HEAD_SIZE or (entry.name == "num_layers" and value > _LARGEST["num_hidden_layers"]):
                raise reader.error(self.prefix + entry.name, f"must be at most {_LARGEST_HEAD_SIZE}, got {str(value)[:20]}")

    @classmethod
    def may_be_zero(cls) -> tuple[str, ...]:
        return ()


def _check_topk_fits(head: type[HeadConfig], dflash: FieldReader, vocab_size: int) -> None:
    for key in ("lilicorr_candidate_topk", "selector_top_k"):
        if key.startswith(head.prefix or "-") and dflash.has(key) and dflash.get(key, int) > vocab_size:
            raise dflash.error(key, f"must be at most vocab_size {vocab_size}, got {dflash.get(key, int)}")


def _check_topk(reader: FieldReader, key: str, topk: int) -> None:
    if topk & (topk - 1) or topk > MAX_TOPK:
        raise reader.error(key, f"must be a power of two of at most {MAX_TOPK}, got {topk}")


@dataclass(frozen=True)
class DFlashConfig(HeadConfig):
    """The plain drafter: no head, argmax per slot."""

    architecture: ClassVar[str] = "DFlashDraftModel"


@dataclass(frozen=True)
class LiLiCorrConfig(HeadConfig):
    """LiLiCorr's geometry (paper, Table 4): K, W, layers, heads, MLP ratio, d_e, the normalisation's eps, sigma."""

    architecture: ClassVar[str] = "LiLiCorrDraftModel"
    projector_type: ClassVar[str | None] = "lilicorr"
    prefix: ClassVar[str] = "lilicorr_"

    candidate_topk: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_ratio: float
    factor_dim: int
    vector_eps: float
    logit_scale: float

    @classmethod
    def flags(cls) -> dict[str, Any]:
        return super().flags() | {"lilicorr_enabled": True}

    @property
    def mlp_hidden_size(self) -> int:
        return int(self.hidden_size * self.mlp_ratio)

    @classmethod
    def may_be_zero(cls) -> tuple[str, ...]:
        return ("num_layers",)

    def validate(self, reader: FieldReader) -> None:
        super().validate(reader)
        _check_topk(reader, "lilicorr_candidate_topk", self.candidate_topk)
        if self.hidden_size % self.num_heads:
            raise reader.error(
                "lilicorr_hidden_size",
                f"must be divisible by lilicorr_num_heads, got {self.hidden_size} and {self.num_heads}",
            )
        if self.hidden_size * self.mlp_ratio != self.mlp_hidden_size:
            raise reader.error(
                "lilicorr_mlp_ratio",
                f"times lilicorr_hidden_size must be an integer, got {self.mlp_ratio} x {self.hidden_size}",
            )


@dataclass(frozen=True)
class DFlash2Config(HeadConfig):
    """DFlash2's selector: rank of the two codebooks, candidates a slot. Its backbone has the convolution."""

    architecture: ClassVar[str] = "DFlash2DraftModel"
    prefix: ClassVar[str] = "selector_"
    needs_conv: ClassVar[bool] = True

    rank: int
    top_k: int

    def validate(self, reader: FieldReader) -> None:
        super().validate(reader)
        _check_topk(reader, "selector_top_k", self.top_k)


@dataclass(frozen=True)
class DSparkConfig(HeadConfig):
    """DSpark's Markov head, and whether a confidence head stands beside it and sees the Markov embedding."""

    architecture: ClassVar[str] = "Qwen3DSparkModel"
    top_level: ClassVar[bool] = True
    shifted: ClassVar[bool] = True

    markov_rank: int
    enable_confidence_head: bool
    confidence_head_with_markov: bool

    @classmethod
    def flags(cls) -> dict[str, Any]:
        return {"markov_head_type": "vanilla", "sample_from_anchor": True}


@dataclass(frozen=True)
class DominoConfig(HeadConfig):
    """Domino's recurrent corrector: the GRU's width, the bottleneck to the vocabulary, and how many leading slots it leaves
    as the backbone drafted them."""

    architecture: ClassVar[str] = "DominoDraftModel"
    projector_type: ClassVar[str | None] = "domino"
    shifted: ClassVar[bool] = True

    gru_hidden_dim: int
    emb_dim: int
    pure_draft_prefix_len: int

    @classmethod
    def flags(cls) -> dict[str, Any]:
        return super().flags() | {"shift_label": True}

    @classmethod
    def may_be_zero(cls) -> tuple[str, ...]:
        return ("pure_draft_prefix_len",)


HEAD_CONFIGS: dict[str, type[HeadConfig]] = {
    head.architecture: head for head in (DFlashConfig, LiLiCorrConfig, DFlash2Config, DSparkConfig, DominoConfig)
}
"""Every head this package has, by the name that stands in a checkpoint's `architectures`."""


@dataclass(frozen=True)
class ConvConfig:
    """The grouped causal convolution around the backbone's sublayers: taps and channels a group."""

    kernel_size: int
    group_size: int


# Variants of the block drafter that other engines know and this backbone is not: a checkpoint that asks for one would
# draft wrongly here without a shape to tell.
_UNSUPPORTED_TOP: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3",),
    "use_sliding_window": (False,),
    "is_causal": (False,),
    "is_neox_style": (True,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (),
    "dtype": ("bfloat16", "float16", "float32"),
    "torch_dtype": ("bfloat16", "float16", "float32"),
}
_UNSUPPORTED_DFLASH: dict[str, tuple[Any, ...]] = {
    "use_swa": (False,),
    "causal": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1, 1.0),
}


@dataclass(frozen=True)
class DraftConfig:
    """Everything a checkpoint's `config.json` says about a drafter, validated."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    attention_bias: bool
    block_size: int
    num_target_layers: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    head: HeadConfig
    conv: ConvConfig | None = None
    target_name: str | None = None
    tokenizer_hash: str | None = None
    source: str = field(default="config.json", compare=False, repr=False)

    @property
    def architecture(self) -> str:
        return self.head.architecture

    @property
    def num_slots(self) -> int:
        """Slots a block drafts (S): B-1, or B in the shifted layout."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The block position that predicts the first drafted token: 1, or 0 in the shifted layout."""
        return 0 if self.head.shifted else 1

    @classmethod
    def load(cls, folder: str | Path) -> DraftConfig:
        """Return the configuration of the checkpoint in `folder`.

        Raises UserError (one sentence, file and field named) when the folder or file is missing or not JSON, and for
        every inconsistency `from_dict` finds.
        """
        folder = Path(folder)
        path = folder / "config.json"
        if not folder.is_dir():
            what = "is a file, not a folder" if folder.exists() else "does not exist"
            raise UserError(f"{folder}: {what}; give the folder that holds config.json and model.safetensors")
        try:
            values = json.loads(path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise UserError(f"{folder}: has no config.json; give the folder of a drafter checkpoint") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); mend its permissions or copy it again") from None
        except (ValueError, RecursionError) as error:
            where = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
            raise UserError(f"{path}: is not valid JSON{where}; copy the checkpoint again") from None
        return cls.from_dict(values, str(path))

    @classmethod
    def from_dict(cls, values: Any, source: str = "config.json") -> DraftConfig:
        """Return the configuration held by the decoded JSON object `values`; `source` names it in errors."""
        if not isinstance(values, Mapping):
            raise UserError(f"{source}: must hold a JSON object, got {type(values).__name__}")
        top = FieldReader(values, source)
        head_type = _head_type(top)
        dflash = top.section("dflash_config")
        _refuse_variants(top, dflash)

        block_size = _block_size(top, dflash)
        hidden_size = top.positive("hidden_size")
        vocab_size = top.positive("vocab_size")
        num_target_layers = top.positive("num_target_layers")
        num_heads, num_kv_heads = top.positive("num_attention_heads"), top.positive("num_key_value_heads")
        if num_heads % num_kv_heads:
            raise top.error(
                "num_attention_heads", f"must be a multiple of num_key_value_heads, got {num_heads} and {num_kv_heads}"
            )
        head_dim = top.positive("head_dim")
        if head_dim % 2:
            raise top.error("head_dim", f"must be even for rotary embeddings, got {head_dim}")
        _check_topk_fits(head_type, dflash, vocab_size)
        mask_token_id = dflash.get("mask_token_id", int)
        if not 0 <= mask_token_id < vocab_size:
            raise dflash.error("mask_token_id", f"must lie in the vocabulary 0..{vocab_size - 1}, got {mask_token_id}")
        return cls(
            hidden_size=hidden_size,
            num_hidden_layers=top.positive("num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=top.positive("intermediate_size"),
            vocab_size=vocab_size,
            rms_norm_eps=top.positive("rms_norm_eps", float),
            max_position_embeddings=top.positive("max_position_embeddings"),
            rope_theta=_rope_theta(top),
            attention_bias=top.get("attention_bias", bool),
            block_size=block_size,
            num_target_layers=num_target_layers,
            mask_token_id=mask_token_id,
            target_layer_ids=_target_layer_ids(dflash, num_target_layers),
            head=head_type.read(top, dflash),
            conv=_conv(dflash, block_size, hidden_size, head_type),
            target_name=dflash.get("target_name", str) if dflash.has("target_name") else None,
            tokenizer_hash=dflash.get("tokenizer_hash", str) if dflash.has("tokenizer_hash") else None,
            source=source,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the public `config.json` object; the RoPE base stands in both spellings engines read."""
        dflash: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "block_size": self.block_size,
        } | ({} if self.head.top_level else self.head.write())
        if self.conv is not None:
            dflash |= {"conv_kernel_size": self.conv.kernel_size, "conv_group_size": self.conv.group_size}
        if self.target_name is not None:
            dflash["target_name"] = self.target_name
        if self.tokenizer_hash is not None:
            dflash["tokenizer_hash"] = self.tokenizer_hash
        top = {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "tie_word_embeddings": False,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dtype": "bfloat16",
        }
        return top | (self.head.write() if self.head.top_level else {}) | {"dflash_config": dflash}

    def to_json(self) -> str:
        """Return `to_dict` as text; reading it and writing it again gives the same bytes."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def default_target_layer_ids(num_target_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """Return the tapped decoder layers (zero-based) of an L-layer target: round(1 + i*(L-4)/(n-1)), or [L//2] for one.

    Raises UserError where the target has too few layers for that many different ones.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    layers = tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    if layers[0] < 0 or any(a >= b for a, b in zip(layers, layers[1:])):
        raise UserError(
            f"a target of {num_target_layers} layers is too shallow for {num_taps} taps; choose target_layer_ids by hand"
        )
    return layers


def _head_type(top: FieldReader) -> type[HeadConfig]:
    names = top.get("architectures", list)
    if len(names) != 1 or not isinstance(names[0], str):
        raise top.error("architectures", f"must hold exactly one name, got {json.dumps(names)}")
    name = names[0]
    if name not in HEAD_CONFIGS:
        raise top.error(
            "architectures", f"names '{name}', which is unknown; known are {', '.join(HEAD_CONFIGS)}{nearest(name, HEAD_CONFIGS)}"
        )
    head_type = HEAD_CONFIGS[name]
    section = top.values.get("dflash_config")
    projector = section.get("projector_type") if isinstance(section, Mapping) else None
    if projector is not None and projector != head_type.projector_type:
        wanted = [other.architecture for other in HEAD_CONFIGS.values() if other.projector_type == projector]
        mend = f'set architectures to ["{wanted[0]}"]' if wanted else "correct one of the two"
        raise top.error(
            "architectures",
            f"is {name} while dflash_config.projector_type is {json.dumps(projector)}: engines choose by architectures and "
            f"would silently ignore the head; {mend}",
        )
    return head_type


def _refuse_variants(top: FieldReader, dflash: FieldReader) -> None:
    top.get("model_type", str)
    for reader, variants in ((top, _UNSUPPORTED_TOP), (dflash, _UNSUPPORTED_DFLASH)):
        for key, accepted in variants.items():
            if reader.has(key) and reader.values[key] not in accepted:
                raise reader.error(key, f"is {json.dumps(reader.values[key])}, a kind of drafter this package does not have")
    if top.has("layer_types") and any(kind != "full_attention" for kind in top.get("layer_types", list)):
        raise top.error("layer_types", "asks for attention other than full_attention, which this package does not have")
    if top.get("hidden_act", str) != "silu":
        raise top.error("hidden_act", f'must be "silu", got {json.dumps(top.values["hidden_act"])}')
    if top.has("target_hidden_size") and top.values["target_hidden_size"] != top.values.get("hidden_size"):
        raise top.error("target_hidden_size", "differs from hidden_size; a drafter here has the target's width")
    for reader in (top, dflash):
        if reader.has("draft_vocab_size") and reader.values["draft_vocab_size"] != top.values.get("vocab_size"):
            raise reader.error(
                "draft_vocab_size",
                f"is {json.dumps(reader.values['draft_vocab_size'])}, a reduced draft vocabulary, which is not supported: "
                "candidates are drawn from the full target vocabulary",
            )


def _block_size(top: FieldReader, dflash: FieldReader) -> int:
    given = [reader.get("block_size", int) for reader in (top, dflash) if reader.has("block_size")]
    if not given:
        raise top.error("block_size", "is missing and has no default; add it to the file")
    if given[0] != given[-1]:
        raise top.error("block_size", f"is {given[0]} but dflash_config.block_size is {given[-1]}; make them equal")
    if given[0] < 2:
        raise top.error("block_size", f"must be at least 2 (the anchor and one slot), got {given[0]}")
    return given[0]


def _rope_theta(top: FieldReader) -> float:
    """transformers 4 writes `rope_theta`, transformers 5 `rope_parameters.rope_theta`; both must agree where both stand."""
    given = [top.positive("rope_theta", float)] if top.has("rope_theta") else []
    for key in ("rope_parameters", "rope_scaling"):
        if not top.has(key):
            continue
        rope = top.section(key)
        kind = rope.values.get("rope_type", rope.values.get("type", "default"))
        if kind != "default":
            raise rope.error("rope_type", f'is {json.dumps(kind)}; a drafter here has plain rotary embeddings ("default")')
        if rope.has("rope_theta"):
            given.append(rope.positive("rope_theta", float))
    if not given:
        raise top.error(
            "rope_theta", "is missing and has no default (engines would assume 1e6); write the base the drafter was trained with"
        )
    if len(set(given)) > 1:
        other = next(value for value in given if value != given[0])
        raise top.error(
            "rope_theta", f"is given as {given[0]} and, in rope_parameters or rope_scaling, as {other}; make them equal"
        )
    return given[0]


def _target_layer_ids(dflash: FieldReader, num_target_layers: int) -> tuple[int, ...]:
    ids = dflash.get("target_layer_ids", list)
    if not ids or any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        raise dflash.error("target_layer_ids", f"must be a non-empty list of integers, got {json.dumps(ids)}")
    if any(not 0 <= i < num_target_layers for i in ids):
        raise dflash.error("target_layer_ids", f"must lie in 0..{num_target_layers - 1} (num_target_layers), got {ids}")
    if any(a >= b for a, b in zip(ids, ids[1:])):
        raise dflash.error("target_layer_ids", f"must increase from left to right, got {ids}")
    return tuple(ids)


def _conv(dflash: FieldReader, block_size: int, hidden_size: int, head: type[HeadConfig]) -> ConvConfig | None:
    keys = ("conv_kernel_size", "conv_group_size")
    # Zero is how some exporters spell "no convolution".
    present = [key for key in keys if dflash.has(key) and dflash.get(key, int) != 0]
    if not present:
        if head.needs_conv:
            raise dflash.error(keys[0], f"is missing and has no default; {head.architecture} has a convolution in its backbone")
        return None
    if len(present) == 1:
        absent = keys[1 - keys.index(present[0])]
        raise dflash.error(
            absent, f"is missing while {present[0]} is set; a convolution needs both, a drafter without one neither"
        )
    taps, group = dflash.positive(keys[0]), dflash.positive(keys[1])
    if taps >= block_size:
        raise dflash.error("conv_kernel_size", f"must be smaller than block_size {block_size}, got {taps}")
    if hidden_size % group:
        raise dflash.error("conv_group_size", f"must divide hidden_size {hidden_size}, got {group}")
    return ConvConfig(taps, group)
