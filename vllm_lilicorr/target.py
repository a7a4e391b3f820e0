"""The frozen target in plain transformers: loading it, tapping its layers, checking that a drafter fits it."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .chat import render
from .config import DraftConfig
from .errors import UserError
from .hub import local_folder
from .model import TargetVocabulary

WHAT = "the target's Hugging Face folder, or its hub id (owner/name)"


def target_folder(path: str | Path) -> Path:
    """Return the local folder of a target; raises UserError when it is neither a folder nor to be had from the hub."""
    return local_folder(path, WHAT)


@dataclass(frozen=True)
class TargetShape:
    """What a drafter must agree on with its target, read from the target's `config.json` without loading a weight."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def load(cls, folder: str | Path) -> TargetShape:
        """Return the shape of the target in `folder`; raises UserError naming what is missing."""
        named, folder = folder, target_folder(folder)
        path = folder / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values = values.get("text_config") or values
            sizes = [values[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers")]
        except OSError:
            raise UserError(f"{folder}: has no readable config.json; give {WHAT}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: is not a language model's config.json ({error}); give {WHAT}") from None
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise UserError(f"{path}: hidden_size, vocab_size and num_hidden_layers must be positive integers, got {sizes}")
        return cls(Path(named).resolve().name if Path(named).exists() else Path(named).name, *sizes)


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the SHA-256 of a tokenizer's vocabulary: which string each id stands for, added tokens included.

    `tokenizer` is a transformers tokenizer. Formatting of tokenizer.json and the chat template do not enter, so the same
    vocabulary saved by another release has the same hash.
    """
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\t{token}\n".encode())
    return digest.hexdigest()


def load_tokenizer(folder: str | Path) -> Any:
    """Return the tokenizer in `folder`; raises UserError when there is none."""
    from transformers import AutoTokenizer

    local = target_folder(folder)
    try:
        # Refused outright: left open, transformers asks the terminal whether to run what the folder brings.
        return AutoTokenizer.from_pretrained(str(local), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many unrelated kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{folder}: its tokenizer cannot be loaded ({reason}); give {WHAT}") from None


def check_fits(config: DraftConfig, target: TargetShape, tokenizer: Any | None = None) -> list[str]:
    """Return warnings (sentences) after checking that the drafter fits the target.

    Compared are hidden size, vocabulary, number of layers, tapped layers; with `tokenizer` also that the mask token never
    occurs in text and, where the checkpoint records it, the tokenizer's hash. A different target name is a warning.
    Raises UserError on anything else that differs.
    """
    pairs = (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    )
    for key, ours, theirs in pairs:
        if ours != theirs:
            raise UserError(
                f"{config.source}: {key} is {ours}, but the target {target.name} has {theirs}; "
                "the drafter was made for another target"
            )
    if config.target_layer_ids[-1] >= target.num_layers:
        raise UserError(
            f"{config.source}: dflash_config.target_layer_ids reaches {config.target_layer_ids[-1]}, but the target "
            f"{target.name} has layers 0..{target.num_layers - 1}"
        )
    if tokenizer is not None:
        _check_tokenizer(config, target, tokenizer)
    if config.target_name is not None and Path(config.target_name).name != target.name:
        return [f"{config.source}: the drafter was trained for {config.target_name}, the target here is named {target.name}"]
    return []


_SMALL_TALK = [{"role": role, "content": "Hello."} for role in ("user", "assistant", "user")]


def _check_tokenizer(config: DraftConfig, target: TargetShape, tokenizer: Any) -> None:
    mask = config.mask_token_id
    if mask < len(tokenizer):
        special = mask in tokenizer.all_special_ids or mask in tokenizer.added_tokens_decoder
        if not special or mask == tokenizer.eos_token_id:
            token = tokenizer.convert_ids_to_tokens(mask)
            raise UserError(
                f"{config.source}: dflash_config.mask_token_id {mask} is {token!r} in {target.name}'s vocabulary, a token that "
                "occurs in text; it must be a reserved one"
            )
    if getattr(tokenizer, "chat_template", None) and mask in render(tokenizer, _SMALL_TALK):
        raise UserError(
            f"{config.source}: dflash_config.mask_token_id {mask} is {tokenizer.convert_ids_to_tokens(mask)!r}, which "
            f"{target.name}'s chat template writes; it must be a token that no conversation holds"
        )
    if config.tokenizer_hash is not None and config.tokenizer_hash != tokenizer_hash(tokenizer):
        raise UserError(
            f"{config.source}: the drafter was trained with another tokenizer than {target.name}'s (its recorded hash differs); "
            "use the target it was trained for"
        )


@dataclass(frozen=True)
class TargetStates:
    """One forward pass over [n, q] tokens: taps [n, q, n_taps*H], the tapped decoder layers' outputs side by side;
    final [n, q, H], the final-normed hidden states lm_head reads."""

    taps: Tensor
    final: Tensor


class Target:
    """A causal language model with its decoder layers tapped. `tapped_layers` are zero-based decoder layer indices."""

    def __init__(self, model: Any, tapped_layers: Sequence[int] = ()) -> None:
        self.model = model.eval().requires_grad_(False)
        self.decoder = model.get_decoder()
        self.tapped_layers = tuple(tapped_layers)
        self._tapped: dict[int, Tensor] = {}
        # A hook, because the last entry of transformers' `hidden_states` is the normed one and not the layer's output.
        for index in self.tapped_layers:
            self.decoder.layers[index].register_forward_hook(self._tap(index))

    def _tap(self, index: int) -> Any:
        def keep(module: Any, args: Any, output: Any) -> None:
            self._tapped[index] = output[0] if isinstance(output, tuple) else output

        return keep

    @property
    def vocabulary(self) -> TargetVocabulary:
        return TargetVocabulary(self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight)

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def max_positions(self) -> int:
        return int(self.model.config.max_position_embeddings)

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None, cache: Any | None = None) -> TargetStates:
        """Return the states of ids [n, q] at absolute positions [n, q].

        mask [n, 1, q, cached + q] bool, True where a token may look; None for plain causal. The cache, if given, is
        extended by the q tokens.
        """
        out = self.decoder(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=cache is not None
        )
        taps = [self._tapped.pop(index) for index in self.tapped_layers]
        return TargetStates(torch.cat(taps, -1) if taps else out.last_hidden_state[..., :0], out.last_hidden_state)

    def logits(self, final: Tensor) -> Tensor:
        """Return next-token logits [..., V] of final-normed states [..., H]."""
        return self.model.get_output_embeddings()(final)


def load_target(
    folder: str | Path, tapped_layers: Sequence[int] = (), dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Target:
    """Return the target in `folder`, frozen and tapped; raises UserError when it cannot be loaded."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    local = target_folder(folder)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # sdpa takes the boolean masks of batched decoding as they are.
            model, report = AutoModelForCausalLM.from_pretrained(
                str(local),
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises many unrelated kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{folder}: the target cannot be loaded ({reason}); give a Hugging Face folder") from None
    # transformers fills what a file lacks with random numbers and goes on.
    absent = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in report.get(kind) or ())
    if absent:
        raise UserError(f"{folder}: its weights lack {absent[0]} (of {len(absent)} missing or misshapen); copy the target again")
    return Target(model.to(device), tapped_layers)
