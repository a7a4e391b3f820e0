"""The model vLLM loads for a LiLiCorr checkpoint: its own DFlash drafter with this package's head beside it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.platforms import current_platform

from ..config import DraftConfig
from ..errors import UserError
from ..model.checkpoint import canonical_name
from ..model.heads.lilicorr import LiLiCorrHead
from .hooks import served_options


class ServedBackbone(DFlashQwen3Model):
    """vLLM's backbone, its context keys normed by each layer's own weight on the CPU too."""

    def _normalize_context_k(self, all_k: Tensor) -> Tensor:
        if not current_platform.is_cpu():
            return super()._normalize_context_k(all_k)
        # vLLM norms all layers in one call with a weight row per layer. Its CPU operator takes the first row for all of
        # them, so that every layer but the first would see wrong keys.
        return torch.stack([layer.self_attn.k_norm(k) for layer, k in zip(self.layers, all_k, strict=True)])


class ServedLiLiCorr(DFlashQwen3ForCausalLM):
    """Paged context, tensor parallelism and the block's forward pass are vLLM's; `head` is the class the trainer trains."""

    model_cls = ServedBackbone

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.draft = DraftConfig.from_dict(served_options(self.config)["draft"], f"{self.draft_model_config.model}/config.json")
        if self.draft_id_to_target_id is not None:
            raise UserError(f"{self.draft.source}: draft_vocab_size is reduced; candidates need the target's full vocabulary")
        self.head = LiLiCorrHead(self.draft).requires_grad_(False)
        # The features are log-probabilities under the raw output head: no scale and no cap of the target's apply.
        self.candidate_logits = LogitsProcessor(self.config.vocab_size)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        head: dict[str, Tensor] = {}

        def backbone() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                name = canonical_name(name)
                if name.startswith(self.head.prefix):
                    head[name.removeprefix(self.head.prefix)] = tensor
                else:
                    yield name, tensor

        super().load_weights(backbone())
        expected = self.head.state_dict()
        for kind, names in (("lacks", expected.keys() - head.keys()), ("holds unknown", head.keys() - expected.keys())):
            if names:
                raise UserError(f"{self.draft.source}: the checkpoint {kind} {self.head.prefix}{sorted(names)[0]}; copy it again")
        self.head.load_state_dict(head)

    def context_feature(self, combined: Tensor) -> Tensor:
        """Return c [..., H] from rows of `combine_hidden_states`, which stops before the norm."""
        return self.model.hidden_norm(combined)

    def shard_logits(self, slot_hidden: Tensor) -> Tensor:
        """Return [rows, C] of this rank's vocabulary shard; columns from `shard_size` on are padding."""
        return self.candidate_logits(self.lm_head, slot_hidden, skip_gather=True)

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
        """Return the target's input embedding [>=V, H] if its rows can be gathered here, else None (sharded, quantised)."""
        embedding = self.model.embed_tokens
        weight = getattr(embedding, "weight", None)
        plain = self.tp_size == 1 and isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.ndim == 2
        return weight if plain else None

    def embed_candidates(self, ids: Tensor) -> Tensor:
        """Return the target's input embeddings [..., H] of token ids [...], under any sharding."""
        return self.model.embed_tokens(ids)

    def check_vocabulary(self, target: nn.Module) -> None:
        """Raise UserError unless the embedding and the output head are the target's own, without added vocabulary."""
        language_model = target.get_language_model() if hasattr(target, "get_language_model") else target
        inner = getattr(language_model, "model", language_model)
        theirs = getattr(inner, "embed_tokens", None)
        theirs = getattr(inner, "embedding", None) if theirs is None else theirs
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
