"""The model vLLM loads for a drafter of this package: its own DFlash backbone, the convolution where there is one, our head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as operators
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3DecoderLayer, DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.platforms import current_platform

from ..config import DraftConfig
from ..errors import UserError
from ..kernels.linear import PackedLinear
from ..model.checkpoint import canonical_name
from ..model.heads import build_head
from .conv import RowConv
from .hooks import served_options
from .methods import METHODS


def served_draft(hf_config: Any, source: str = "config.json") -> DraftConfig:
    """Return the drafter's configuration from what the workers were given."""
    return DraftConfig.from_dict(served_options(hf_config)["draft"], source)


class NarrowLinear(UnquantizedLinearMethod):
    """One of vLLM's linear layers by a bfloat16 copy of its weight: x W^T is taken in bfloat16, and handed on in x's dtype."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._product = PackedLinear(layer.weight.detach().to(torch.bfloat16), None)
        layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self._product(x.flatten(0, -2).to(torch.bfloat16)).to(x.dtype).unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias


class Int8Linear:
    """x W^T by an int8 copy of W [out, in] and vLLM's oneDNN product: one scale a row of W, one a row of x, found as it comes.

    Reads a quarter of a float32 weight's memory. Raises UserError where vLLM was built without that product.
    """

    def __init__(self, weight: Tensor) -> None:
        if not hasattr(torch.ops._C, "create_onednn_scaled_mm_handler"):
            raise UserError("draft_dtype: int8 needs the oneDNN products of vLLM's CPU build; set bfloat16 or remove it")
        self.out_features = len(weight)
        self._scales = scales = weight.new_empty(self.out_features, 1, dtype=torch.float32)
        rows = torch.empty_like(weight, dtype=torch.int8)
        for part in torch.arange(self.out_features, device=weight.device).split(1 << 14):
            values = weight[part].float()
            scales[part] = values.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
            rows[part] = (values / scales[part]).round().to(torch.int8)
        # The product packs the rows into memory of its own, but reads the scales where they are. Up to 32 numbers of rows of x
        # keep the code that was made for them.
        self._product = operators.create_onednn_scaled_mm(rows.t(), scales.view(1, -1), torch.bfloat16, True, False, 32)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T [n, out] in bfloat16, of x [n, in] in bfloat16."""
        quantised, scale, _ = operators.onednn_scaled_int8_quant(x)
        out = x.new_empty(len(x), self.out_features)
        operators.onednn_scaled_mm(self._product, quantised, out, scale, None, None, None)
        return out


class ServedLayer(DFlashQwen3DecoderLayer):
    """vLLM's layer; with a convolution around attention and MLP where the drafter has one (`model.backbone.DraftLayer`)."""

    def __init__(self, vllm_config: VllmConfig, *, config: Any, layer_idx: int, **options: Any) -> None:
        super().__init__(vllm_config, config=config, layer_idx=layer_idx, **options)
        conv = served_draft(config).conv
        self.attention_conv = RowConv(config.hidden_size, conv).requires_grad_(False) if conv else None
        self.mlp_conv = RowConv(config.hidden_size, conv).requires_grad_(False) if conv else None
        # A tensor, not a number: dynamic speculation changes the width between steps, and neither a compiled graph nor a
        # captured one would see a number change.
        self.register_buffer("block_width", torch.ones((), dtype=torch.int64), persistent=False)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.attention_conv is None or self.mlp_conv is None:
            return super().forward(positions, hidden_states, residual)
        if residual is None:
            residual, x = hidden_states, self.input_layernorm(hidden_states)
        else:
            x, residual = self.input_layernorm(hidden_states, residual)
        before, behind = self.attention_conv.coefficients(x).unbind(-3)
        x = self.attention_conv.convolve_rows(x, before, self.block_width)
        x = self.self_attn(positions=positions, hidden_states=x)
        x = self.attention_conv.convolve_rows(x, behind, self.block_width)
        x, residual = self.post_attention_layernorm(x, residual)
        before, behind = self.mlp_conv.coefficients(x).unbind(-3)
        x = self.mlp(self.mlp_conv.convolve_rows(x, before, self.block_width))
        return self.mlp_conv.convolve_rows(x, behind, self.block_width), residual


def without_adapter(layer: Any) -> Any:
    """Return the layer that vLLM's LoRA wrapper stands around: a drafter embeds and draws with the target's own weights, for
    tokens of which the wrapper knows no adapter."""
    return getattr(layer, "base_layer", layer)


class ServedBackbone(DFlashQwen3Model):
    """vLLM's backbone, its context keys normed by each layer's own weight on the CPU too."""

    decoder_layer_cls = ServedLayer

    def _normalize_context_k(self, all_k: Tensor) -> Tensor:
        if not current_platform.is_cpu():
            return super()._normalize_context_k(all_k)
        # vLLM norms all layers in one call with a weight row per layer. Its CPU operator takes the first row for all of
        # them, so that every layer but the first would see wrong keys.
        return torch.stack([layer.self_attn.k_norm(k) for layer, k in zip(self.layers, all_k, strict=True)])


class ServedDraft(DFlashQwen3ForCausalLM):
    """Paged context, tensor parallelism and the block's forward pass are vLLM's; `head` is the class the trainer trains."""

    model_cls = ServedBackbone

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.draft = served_draft(self.config, f"{self.draft_model_config.model}/config.json")
        if self.draft_id_to_target_id is not None:
            raise UserError(f"{self.draft.source}: draft_vocab_size is reduced; candidates need the target's full vocabulary")
        self.head = build_head(self.draft).requires_grad_(False)
        # The features are log-probabilities under the raw output head: no scale and no cap of the target's apply.
        self.candidate_logits = LogitsProcessor(self.config.vocab_size)
        self._draft_dtype = served_options(self.config)["draft_dtype"]
        self._narrow_head: Callable[[Tensor], Tensor] | None = None
        if self._draft_dtype != "auto":
            for layer in self.model.modules():
                plain = isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod)
                if plain and layer.weight.dtype != torch.bfloat16:
                    layer.quant_method = NarrowLinear()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = self._own_tensors()
        found: dict[str, Tensor] = {}

        def backbone() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                name = canonical_name(name)
                # Some heads' names have no common prefix (DSpark, Domino); with one, whatever carries it is the head's.
                if name in own or (self.head.prefix and name.startswith(self.head.prefix)):
                    found[name] = tensor
                else:
                    yield name, tensor

        super().load_weights(backbone())
        for kind, names in (("lacks", own.keys() - found.keys()), ("holds unknown", found.keys() - own.keys())):
            if names:
                raise UserError(f"{self.draft.source}: the checkpoint {kind} {sorted(names)[0]}; copy it again")
        for name, tensor in found.items():
            if tensor.shape != own[name].shape:
                shapes = f"{list(tensor.shape)}, expected {list(own[name].shape)}"
                raise UserError(f"{self.draft.source}: the checkpoint's {name} has shape {shapes}; copy it again")
            own[name].copy_(tensor)

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return what vLLM's loader has no part in, by its name in a checkpoint: the head's weights and the convolutions'."""
        head = {self.head.prefix + name: tensor for name, tensor in self.head.state_dict().items()}
        return head | {name: tensor for name, tensor in self.model.state_dict().items() if "_conv." in name}

    def set_block_width(self, width: int) -> None:
        """Say how many query rows a block has: what the convolution stops at."""
        for layer in self.model.layers:
            layer.block_width.fill_(width)

    def context_feature(self, combined: Tensor) -> Tensor:
        """Return c [..., H] from rows of `combine_hidden_states`, which stops before the norm."""
        return self.model.hidden_norm(combined)

    def shard_logits(self, slot_hidden: Tensor) -> Tensor:
        """Return [rows, C] of this rank's vocabulary shard; columns from `shard_size` on are padding."""
        if self._narrow_head is not None:
            return self._narrow_head(slot_hidden.to(torch.bfloat16))
        return self.candidate_logits(self.lm_head, slot_hidden, skip_gather=True)

    def lay_out_products(self) -> None:
        """Copy the target's output head to what `draft_dtype` asks for, and let the head compute in bfloat16.

        With a float32 target on a CPU, reading weights is most of drafting. Drafts are what changes; the target verifies them in
        its own precision.
        """
        if self._draft_dtype == "auto":
            return
        plain = isinstance(self.lm_head.quant_method, UnquantizedEmbeddingMethod)
        if not plain or getattr(self.lm_head, "bias", None) is not None:
            raise UserError("draft_dtype: the target's output head is quantised or has a bias; remove draft_dtype")
        weight = self.lm_head.weight.detach()
        if self._draft_dtype == "int8":
            self._narrow_head = Int8Linear(weight)
        elif weight.dtype != torch.bfloat16:
            self._narrow_head = PackedLinear(weight.to(torch.bfloat16), None)

    @property
    def head_dtype(self) -> torch.dtype | None:
        """What the head is to compute in; None: as its weights are."""
        return None if self._narrow_head is None else torch.bfloat16

    def full_logits(self, slot_hidden: Tensor) -> Tensor:
        """Return [rows, V], gathered over the ranks: what a head over the whole vocabulary needs."""
        return self.candidate_logits(self.lm_head, slot_hidden)

    @property
    def shard_size(self) -> int:
        shard = self.lm_head.shard_indices
        return shard.num_org_elements

    @property
    def shard_start(self) -> int:
        return self.lm_head.shard_indices.org_vocab_start_index

    @property
    def tp_size(self) -> int:
        return get_tensor_model_parallel_world_size()

    @staticmethod
    def gather_shards(packed: Tensor) -> Tensor:
        """Return [ranks, rows, n] of every rank's packed candidates [rows, n]: K candidates a row, never the logits."""
        rows, n = packed.shape
        gathered = tensor_model_parallel_all_gather(packed, dim=-1)
        return gathered.view(rows, -1, n).transpose(0, 1).contiguous()

    def plain_embedding(self) -> Tensor | None:
        """Return the target's input embedding [>=V, H] if its rows can be gathered here, else None (sharded, quantised, LoRA)."""
        embedding = self.model.embed_tokens
        # Some quantised embeddings have a floating-point weight too (fp8), and an adapter's wrapper hands out the one it wraps.
        plain = isinstance(embedding, VocabParallelEmbedding) and isinstance(embedding.quant_method, UnquantizedEmbeddingMethod)
        return embedding.weight if plain and self.tp_size == 1 else None

    def embed_candidates(self, ids: Tensor) -> Tensor:
        """Return the target's input embeddings [..., H] of token ids [...], under any sharding."""
        return self.model.embed_tokens(ids)

    def check_vocabulary(self, target: nn.Module) -> None:
        """Raise UserError unless the embedding and the output head are the target's own, without added vocabulary."""
        language_model = target.get_language_model() if hasattr(target, "get_language_model") else target
        inner = getattr(language_model, "model", language_model)
        theirs = getattr(inner, "embed_tokens", None)
        theirs = without_adapter(getattr(inner, "embedding", None) if theirs is None else theirs)
        # A hub's checkpoint is first read here; of a folder the configuration has seen every tensor's name.
        for what, own in (
            ("input embedding", self.has_own_embed_tokens and self.model.embed_tokens is not theirs),
            ("output head", self.has_own_lm_head and self.lm_head is not getattr(language_model, "lm_head", None)),
        ):
            if own:
                mend = 'use "backend": "stock"' if METHODS[type(self.draft.head)].stock else "export it without"
                raise UserError(f"{self.draft.source}: the checkpoint carries its own {what}, not the target's; {mend}")
        if self.model.embed_tokens is not theirs or not isinstance(theirs, VocabParallelEmbedding):
            raise UserError(
                "the drafter's pipeline stage has no input embedding of the target's, which the head's candidates need; "
                "serve without pipeline parallelism"
            )
        if not isinstance(self.lm_head, VocabParallelEmbedding):
            raise UserError(f"the target's output head is a {type(self.lm_head).__name__}, from which no candidates can be drawn")
        for part in (theirs, self.lm_head):
            if part.shard_indices.num_added_elements:
                raise UserError(
                    f"the target has {part.shard_indices.num_added_elements} tokens of added vocabulary, which the drafter was "
                    "not trained with; serve it without them"
                )
