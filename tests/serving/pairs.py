"""Small targets and drafters that are right often, made in seconds: what serving is tested with."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from make_vllm033 import alone, cache_folder
from torch import Tensor

import vllm_lilicorr.model
from vllm_lilicorr.config import (
    ConvConfig,
    DFlash2Config,
    DFlashConfig,
    DominoConfig,
    DraftConfig,
    DSparkConfig,
    HeadConfig,
    LiLiCorrConfig,
    default_target_layer_ids,
)
from vllm_lilicorr.model import BlockStates, TargetVocabulary
from vllm_lilicorr.model.checkpoint import save_draft
from vllm_lilicorr.model.draft import Draft
from vllm_lilicorr.model.lattice import top_candidates
from vllm_lilicorr.target import load_target, load_tokenizer, tokenizer_hash

HIDDEN, LAYERS, HEAD_DIM, VOCAB, MASK = 64, 6, 32, 320, 300
CONV = ConvConfig(kernel_size=2, group_size=16)
CHAT_TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"


def _prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = _prompts(40, 70, 6, 100, 50, 31, 33, 20, 12, 64, 27, 45)
"""What the tests prompt with, and the drafter is trained on the continuations of; by length."""


def make_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: every text is encodable, structured output included."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>"]})
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def make_target(folder: Path, *, vocab: int = VOCAB, max_positions: int = 512, seed: int = 0, sharpness: float = 8.0) -> Path:
    """A random Llama whose next token is mostly decided by the last few: sharp logits, strong residual embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS, head_dim=HEAD_DIM,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=max_positions, rope_theta=10000.0,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=256 if vocab > 256 else None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                std = 1.0 if "embed" in name else 0.6 / weight.shape[1] ** 0.5
                weight.normal_(0, std)
        model.lm_head.weight.normal_(0, sharpness / HIDDEN**0.5)
        # Ids without a token (the mask among them) and special tokens are never the most probable.
        model.lm_head.weight[256:] = 0
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if vocab == VOCAB:
        make_tokenizer(folder)
    return folder


def lilicorr_head(topk: int = 4) -> LiLiCorrConfig:
    return LiLiCorrConfig(
        candidate_topk=topk, hidden_size=64, num_layers=2, num_heads=4, mlp_ratio=2.0, factor_dim=64, vector_eps=1e-4,
        logit_scale=8.0,
    )  # fmt: skip


HEADS: dict[str, tuple[HeadConfig, ConvConfig | None]] = {
    "lilicorr": (lilicorr_head(), None),
    "lilicorr-conv": (lilicorr_head(), CONV),
    "dflash2": (DFlash2Config(rank=24, top_k=4), CONV),
    "dspark": (DSparkConfig(markov_rank=24, enable_confidence_head=True, confidence_head_with_markov=True), None),
    "domino": (DominoConfig(gru_hidden_dim=48, emb_dim=24, pure_draft_prefix_len=1), None),
    "dflash": (DFlashConfig(), None),
}
"""Every kind of drafter that is served."""


def draft_config(target: Path, head: str | HeadConfig = "lilicorr", *, slots: int = 7, max_positions: int = 512) -> DraftConfig:
    values = json.loads((target / "config.json").read_text())
    layers, hidden, vocab = values["num_hidden_layers"], values["hidden_size"], values["vocab_size"]
    theta = values.get("rope_theta") or values["rope_parameters"]["rope_theta"]
    hashed = tokenizer_hash(load_tokenizer(target)) if (target / "tokenizer.json").exists() else None
    kind, conv = HEADS[head] if isinstance(head, str) else (head, None)
    return DraftConfig(
        hidden_size=hidden, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=HEAD_DIM,
        intermediate_size=2 * hidden, vocab_size=vocab, rms_norm_eps=1e-6, max_position_embeddings=max_positions,
        rope_theta=theta, attention_bias=False, block_size=slots if kind.shifted else slots + 1, num_target_layers=layers,
        mask_token_id=min(MASK, vocab - 1), target_layer_ids=default_target_layer_ids(layers, 2),
        head=kind, conv=conv, target_name=target.name, tokenizer_hash=hashed,
    )  # fmt: skip


@torch.no_grad()
def continued(target: Path, prompts: list[list[int]], length: int) -> Tensor:
    """Return [prompts, length] token ids: each prompt and the target's own greedy continuation."""
    from transformers import DynamicCache

    loaded = load_target(target)
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    starts = torch.tensor([len(prompt) for prompt in prompts])
    cache = DynamicCache(config=loaded.model.config)
    for position in range(length - 1):
        where = torch.full((len(prompts), 1), position)
        logits = loaded.logits(loaded.forward(ids[:, position : position + 1], where, cache=cache).final)[:, 0]
        ids[:, position + 1] = torch.where(position + 1 >= starts, logits.argmax(-1), ids[:, position + 1])
    return ids


def _lattice_loss(draft: Draft, block: BlockStates, gold: Tensor, logits: Tensor, vocabulary: TargetVocabulary) -> Tensor:
    """Cross-entropy along the lattice on the oracle prefix."""
    topk = getattr(draft.config.head, "candidate_topk", None) or draft.config.head.top_k
    candidates, _ = top_candidates(logits.detach(), topk)
    log_probs = logits.log_softmax(-1).gather(-1, candidates)
    if isinstance(draft.config.head, DFlash2Config):
        start, pair = draft.head(candidates, log_probs, block.slot_hidden, block.anchor_ids)
    else:
        embeddings = vocabulary.embed(candidates)
        start, pair = draft.head(embeddings, log_probs, block.slot_hidden, block.anchor_hidden, block.anchor_valid)
    match = candidates == gold[..., None]
    label, prefix = match.long().argmax(-1), match.any(-1).long().cumprod(-1).bool()
    rows_of = pair.gather(2, label[:, :-1, None, None].expand(-1, -1, 1, pair.shape[-1]))[:, :, 0]
    scores = torch.cat((start[:, None], rows_of), 1)
    return 0.25 * torch.nn.functional.cross_entropy(scores[prefix], label[prefix]) if prefix.any() else scores.sum() * 0


def _sequential_loss(draft: Draft, block: BlockStates, gold: Tensor, logits: Tensor, vocabulary: TargetVocabulary) -> Tensor:
    """Cross-entropy of the corrected logits, given the tokens before each slot."""
    head, losses = draft.head, []
    state = head.begin(block, vocabulary)
    for slot in range(gold.shape[1]):
        added = head.correction(state, slot, block)
        row = logits[:, slot] if added is None else logits[:, slot] + added
        losses.append(torch.nn.functional.cross_entropy(row, gold[:, slot]))
        state = head.read(state, gold[:, slot], vocabulary)
    return torch.stack(losses).mean()


def _no_loss(draft: Draft, block: BlockStates, gold: Tensor, logits: Tensor, vocabulary: TargetVocabulary) -> Tensor:
    return logits.sum() * 0


LOSSES = {
    LiLiCorrConfig: _lattice_loss, DFlash2Config: _lattice_loss, DSparkConfig: _sequential_loss, DominoConfig: _sequential_loss,
    DFlashConfig: _no_loss,
}  # fmt: skip


def train_draft(target: Path, folder: Path, config: DraftConfig, *, steps: int = 150, seed: int = 0, length: int = 160) -> Path:
    """Train a drafter on the target's continuations of `PROMPTS`: cross-entropy per slot, and the head's own. It need not
    generalise: it is to be right often where the tests look, and wrong at times."""
    torch.manual_seed(seed)
    ids = continued(target, [p for p in PROMPTS if max(p) < config.vocab_size], length)
    count = len(ids)
    loaded = load_target(target, config.target_layer_ids)
    positions = torch.arange(length).expand(count, -1)
    taps = loaded.forward(ids, positions).taps
    vocabulary = loaded.vocabulary
    draft = Draft(config)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    slots, blocks, rows = config.num_slots, 12, len(ids)
    for _ in range(steps):
        anchors = torch.randint(4, length - slots - 1, (rows, blocks))
        features = draft.backbone.context_features(taps)
        context = draft.backbone.context_kv(features, positions)
        visible = positions[:, None] < anchors[..., None]
        anchor_ids = ids.gather(1, anchors)
        hidden = draft.slot_hidden(anchor_ids, anchors, context, visible, vocabulary).flatten(0, 1)
        gold = ids[torch.arange(rows)[:, None, None], anchors[..., None] + 1 + torch.arange(slots)].flatten(0, 1)
        logits = vocabulary.logits(hidden)
        before = (anchors - 1)[..., None].expand(-1, -1, features.shape[-1])
        anchor_hidden = features.gather(1, before).flatten(0, 1)
        valid = torch.ones(len(gold), dtype=torch.bool)
        block = BlockStates(hidden, anchor_hidden, valid, anchor_ids.flatten())
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), gold.flatten())
        loss = loss + LOSSES[type(config.head)](draft, block, gold, logits, vocabulary)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    save_draft(draft.eval(), folder)
    return folder


def cached_pair(head: str = "lilicorr") -> tuple[Path, Path]:
    """Return (target, drafter), from an earlier run if neither this file nor the model has changed since."""
    digest = hashlib.sha256()
    model = Path(vllm_lilicorr.model.__file__).parent
    names = ("backbone.py", "draft.py", "lattice.py", *(f"heads/{path.name}" for path in sorted((model / "heads").glob("*.py"))))
    for path in (Path(__file__), *(model / name for name in names)):
        digest.update(path.read_bytes())
    root = cache_folder().parent / f"pair-{digest.hexdigest()[:16]}"
    target = _made(root / "target", make_target)
    return target, _made(root / head, lambda folder: train_draft(target, folder, draft_config(target, head)))


def _made(folder: Path, make: Callable[[Path], Path]) -> Path:
    """Return `folder`, which `make` fills unless it is there already."""
    with alone(folder):
        if folder.exists():
            return folder
        scratch = folder.with_name(f".{folder.name}")
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            make(scratch)
        finally:
            torch.set_num_threads(threads)
        scratch.rename(folder)
    return folder


def with_config(draft: Path, folder: Path, **changes: object) -> Path:
    """Return a copy of the checkpoint in `folder` with top-level keys of its config.json changed."""
    shutil.copytree(draft, folder)
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder


if __name__ == "__main__":
    from vllm_lilicorr.model.checkpoint import load_draft
    from vllm_lilicorr.reference import ReferenceDecoder, acceptance_length

    torch.set_num_threads(1)
    for name in sys.argv[1:] or HEADS:
        began = time.time()
        target, folder = cached_pair(name)
        print(f"{name}: made in {time.time() - began:.1f} s")
        draft = load_draft(folder, dtype=torch.float32)
        loaded = load_target(target, draft.config.target_layer_ids)
        for rule in dict.fromkeys((draft.head.rules[0], "argmax")):
            decoded = ReferenceDecoder(loaded, draft, rule).decode(PROMPTS, 48)
            print(rule, acceptance_length([a for one in decoded for a in one.accepted]))
