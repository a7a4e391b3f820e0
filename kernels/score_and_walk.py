"""From out and in vectors to committed tokens: normalisation, pair scores, the walk and the proposal, one launch.

    scores[0, :, k'] = sigma <o_anchor, i_{0,k'}>          scores[s, k, k'] = sigma <o_{s-1,k}, i_{s,k'}>,  s = 1..S-1
    z_s = scores[s, k_{s-1}]                               k_s by the rule                       (paper, Sections 3.2 and 3.5)

One program scores one slot of one block; the last of a block's programs to finish walks it. Which one that is changes nothing: it reads
what all of them wrote. So the scores use as many multiprocessors as there are slots, and no second launch waits for them.

A score that is NaN counts as -inf; a slot without any other score takes rank 0, with the whole proposal on it. So a broken row stays
its own block's affair, and what the verifier gets is a distribution whatever happens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ._triton import check_shape, dot, next_power_of_2, tl, triton, use_triton

RULES = ("greedy", "sampled", "exact", "exact-normalized")

_BLOCK_DIM = 128
_DOMAIN = 0x4C694C69  # Philox counter word: keeps these draws apart from any other use of the same (seed, position)
_UNIFORM_SCALE = 4.6566127342e-10  # just below 2**-31: the largest draw stays below 1


class Randomness(NamedTuple):
    """What "sampled" draws from: uniforms [N, S] float32 in [0, 1), or Philox under seeds [R] int64 (by state row) at positions [N, S] int64."""

    uniforms: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    positions: torch.Tensor | None = None


NO_RANDOMNESS = Randomness()


class DraftLogits(NamedTuple):
    """A proposal table in the V2 rejection sampler's layout: table [R, S, >=V] float32, all -inf at first, and cached_ids [R, S, K] int64, zeros at
    first: the ids whose entries the last call wrote."""

    table: torch.Tensor
    cached_ids: torch.Tensor


class Walked(NamedTuple):
    """Outputs of `score_and_walk`: tokens, index [N, S] int64, scores, probs [N, S, K] float32, pair_scores [N, S, K, K] float32, and
    arrivals [N] int32, which must be zero before the first call and is zero after each."""

    tokens: torch.Tensor
    index: torch.Tensor
    scores: torch.Tensor
    probs: torch.Tensor
    pair_scores: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def empty(cls, n: int, slots: int, topk: int, device: torch.device | str | None = None) -> Walked:
        """Returns uninitialised outputs for n blocks (arrivals zeroed)."""
        ids = {"dtype": torch.int64, "device": device}
        reals = {"dtype": torch.float32, "device": device}
        return cls(
            torch.empty(n, slots, **ids), torch.empty(n, slots, **ids),
            torch.empty(n, slots, topk, **reals), torch.empty(n, slots, topk, **reals),
            torch.empty(n, slots, topk, topk, **reals), torch.zeros(n, dtype=torch.int32, device=device),
        )  # fmt: skip


@triton.jit
def _log_softmax(scores):
    """Log-softmax over the last dimension of [K, K]; a row with nothing finite stays -inf."""
    top = tl.max(scores, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(scores - shift[:, None]), axis=1)
    return scores - shift[:, None] - tl.where(total > 0, tl.log(total), 0.0)[:, None]


@triton.jit
def _uniform(seed, position):
    """A float32 in [0, 1) for (seed, position)."""
    key = seed.to(tl.uint64)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    bits, _, _, _ = tl.philox(key, low, high, zero + 0x4C694C69, zero)
    bits = bits.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -bits - 1, bits).to(tl.float32) * 4.6566127342e-10


@triton.jit
def _score_and_walk_kernel(
    out_ptr, in_ptr, vector_stride, anchor_ptr, anchor_stride, ids_ptr, rows_ptr, rows_stride,
    temperature_ptr, uniforms_ptr, uniforms_stride, seeds_ptr, positions_ptr, positions_stride,
    tokens_ptr, index_ptr, scores_ptr, probs_ptr, pair_scores_ptr, arrivals_ptr, tokens_out_ptr, tokens_out_stride,
    table_ptr, table_row_stride, table_slot_stride, cached_ids_ptr, dim, sigma, eps,
    SLOTS: tl.constexpr, SLOT_PAD: tl.constexpr, K: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, RULE: tl.constexpr, HAS_ROWS: tl.constexpr,
    HAS_UNIFORMS: tl.constexpr, HAS_TOKENS_OUT: tl.constexpr, HAS_TABLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot, block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = block
    if HAS_ROWS:
        row = tl.load(rows_ptr + block * rows_stride).to(tl.int64)
        if row < 0:
            return

    # Scores of this slot's candidates after each candidate of the slot before; after the anchor, all rows are the anchor's.
    pad, column = tl.arange(0, PAD), tl.arange(0, BLOCK)
    node = (block * SLOTS + slot) * K
    if slot == 0:
        before_ptr, before_stride = anchor_ptr + block * anchor_stride, 0
    else:
        before_ptr, before_stride = out_ptr + (node - K) * vector_stride, vector_stride
    acc = tl.zeros([PAD, PAD], tl.float32)
    before_norm, after_norm = tl.zeros([PAD], tl.float32), tl.zeros([PAD], tl.float32)
    for start in range(0, dim, BLOCK):
        mask = (pad[:, None] < K) & (start + column[None, :] < dim)
        before = tl.load(before_ptr + pad[:, None] * before_stride + start + column[None, :], mask=mask, other=0.0)
        after = tl.load(in_ptr + (node + pad[:, None]) * vector_stride + start + column[None, :], mask=mask, other=0.0)
        acc += dot(before, tl.trans(after), PRECISION)
        before_norm += tl.sum(before.to(tl.float32) * before.to(tl.float32), axis=1)
        after_norm += tl.sum(after.to(tl.float32) * after.to(tl.float32), axis=1)
    # l2norm(v) = v / max(||v||, eps), applied to the product: the vectors are never rounded again.
    acc = sigma * acc / tl.maximum(tl.sqrt(before_norm), eps)[:, None] / tl.maximum(tl.sqrt(after_norm), eps)[None, :]
    real = (pad[:, None] < K) & (pad[None, :] < K)
    pair_scores_ptr += block * SLOTS * K * K
    tl.store(pair_scores_ptr + slot * K * K + pad[:, None] * K + pad[None, :], acc, mask=real)

    # All of this program's stores come before its arrival, and the last arrival comes after all stores of the block.
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr + block, 1, sem="acq_rel", scope="gpu") != SLOTS - 1:
        return
    tl.store(arrivals_ptr + block, 0)

    # From here on all slots at once, [SLOT_PAD, K(, K)]. Only the path itself is followed step by step, over a table of successors.
    slots, rank = tl.arange(0, SLOT_PAD), tl.arange(0, K)
    real_slot = slots < SLOTS
    at = slots[:, None, None] * K * K + rank[None, :, None] * K + rank[None, None, :]
    scores = tl.load(pair_scores_ptr + at, mask=real_slot[:, None, None], other=float("-inf"), cache_modifier=".cg")
    scores = tl.where(scores == scores, scores, float("-inf"))
    path, before = tl.zeros([SLOT_PAD], tl.int32), tl.zeros([SLOT_PAD], tl.int32)  # taken here, and in the slot before
    if RULE == 0 or RULE == 1:
        top = tl.max(scores, axis=2)
        scores = tl.where(top[:, :, None] == float("-inf"), tl.where(rank[None, None, :] == 0, 0.0, float("-inf")), scores)
        top = tl.where(top == float("-inf"), 0.0, top)
        successor = tl.min(tl.where(scores == top[:, :, None], rank[None, None, :], K - 1), axis=2)
        if RULE == 1:
            temperature = tl.load(temperature_ptr + row).to(tl.float32)
            warm = temperature > 0
            weights = tl.exp((scores - top[:, :, None]) / tl.where(warm, temperature, 1.0))
            probs = weights / tl.sum(weights, axis=2)[:, :, None]
            if HAS_UNIFORMS:
                u = tl.load(uniforms_ptr + block * uniforms_stride + slots, mask=real_slot, other=0.0)
            else:
                u = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + block * positions_stride + slots, mask=real_slot, other=0))
            # Inverse of the cumulative distribution. A draw that rounding puts at the total takes the most probable one.
            cumulative = tl.cumsum(probs, axis=2)
            total = tl.max(cumulative, axis=2)
            pick = tl.sum((cumulative <= (u[:, None] * total)[:, :, None]).to(tl.int32), axis=2)
            probs = tl.where(warm, probs, tl.where(rank[None, None, :] == successor[:, :, None], 1.0, 0.0))
            successor = tl.where(warm, tl.where(pick < K, pick, successor), successor)
        previous = 0
        for s in range(SLOTS):
            here = tl.sum(tl.where(slots[:, None] == s, successor, 0), axis=0)
            index = tl.sum(tl.where(rank == previous, here, 0), axis=0)
            before = tl.where(slots == s, previous, before)
            path = tl.where(slots == s, index, path)
            previous = index
    else:
        # Viterbi. back[s, k]: the best predecessor, in slot s-1, of candidate k of slot s.
        back = tl.zeros([SLOT_PAD, K], tl.int32)
        best = tl.zeros([K], tl.float32)
        for s in range(SLOTS):
            patch = tl.sum(tl.where(slots[:, None, None] == s, scores, 0.0), axis=0)
            if RULE == 3:
                patch = _log_softmax(patch)
            through = best[:, None] + patch  # slot 0's rows are alike, so its first is as good as any
            best = tl.max(through, axis=0)
            from_ = tl.min(tl.where(through == best[None, :], rank[:, None], K - 1), axis=0)
            back = tl.where(slots[:, None] == s, tl.where(s == 0, 0, from_)[None, :], back)
        index = tl.min(tl.where(best == tl.max(best, axis=0), rank, K - 1), axis=0)
        for t in range(SLOTS):
            s = SLOTS - 1 - t
            here = tl.sum(tl.where(slots[:, None] == s, back, 0), axis=0)
            previous = tl.sum(tl.where(rank == index, here, 0), axis=0)
            before = tl.where(slots == s, previous, before)
            path = tl.where(slots == s, index, path)
            index = previous

    z = tl.sum(tl.where(rank[None, :, None] == before[:, None, None], scores, 0.0), axis=1)
    z = tl.where((tl.max(z, axis=1) == float("-inf"))[:, None], tl.where(rank[None, :] == 0, 0.0, float("-inf")), z)
    taken = rank[None, :] == path[:, None]
    # The verifier divides the entries by the temperature and normalises them. A committed argmax is a point mass.
    entries = tl.where(taken, 0.0, float("-inf"))
    if RULE == 1:
        entries = z
        probs = tl.sum(tl.where(rank[None, :, None] == before[:, None, None], probs, 0.0), axis=1)
    else:
        probs = tl.where(taken, 1.0, 0.0)

    slot_at = block * SLOTS + slots
    at, mask = slot_at[:, None] * K + rank[None, :], real_slot[:, None] & (rank[None, :] < K)
    ids = tl.load(ids_ptr + at, mask=mask, other=0)
    tokens = tl.sum(tl.where(taken, ids, 0), axis=1)
    tl.store(tokens_ptr + slot_at, tokens, mask=real_slot)
    tl.store(index_ptr + slot_at, path.to(tl.int64), mask=real_slot)
    tl.store(scores_ptr + at, z, mask=mask)
    tl.store(probs_ptr + at, probs, mask=mask)
    if HAS_TOKENS_OUT:
        tl.store(tokens_out_ptr + block * tokens_out_stride + slots, tokens, mask=real_slot)
    if HAS_TABLE:
        cached_at = cached_ids_ptr + (row * SLOTS + slots[:, None]) * K + rank[None, :]
        old = tl.load(cached_at, mask=mask, other=0)
        # An id both old and new is not cleared, so no address is written twice and the order of the stores is free.
        kept = tl.sum((old[:, :, None] == ids[:, None, :]).to(tl.int32), axis=2)
        # Equal ids share an address: each writes the greatest of their entries.
        entries = tl.max(tl.where(ids[:, :, None] == ids[:, None, :], entries[:, None, :], float("-inf")), axis=2)
        table_at = table_ptr + row * table_row_stride + slots[:, None] * table_slot_stride
        tl.store(table_at + old, float("-inf"), mask=mask & (kept == 0))
        tl.store(table_at + ids, entries, mask=mask)
        tl.store(cached_at, ids, mask=mask)


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _score_and_walk_triton(out, incoming, anchor, ids, rule, sigma, eps, result, rows, temperature, random, tokens_out, draft_logits):
    n, slots, topk = ids.shape
    table, cached_ids = (None, None) if draft_logits is None else draft_logits
    unused = result.tokens
    _score_and_walk_kernel[(slots, n)](
        out, incoming, out.stride(0), anchor, anchor.stride(0), ids, unused if rows is None else rows, _stride(rows),
        unused if temperature is None else temperature, unused if random.uniforms is None else random.uniforms, _stride(random.uniforms),
        unused if random.seeds is None else random.seeds, unused if random.positions is None else random.positions,
        _stride(random.positions), *result, unused if tokens_out is None else tokens_out, _stride(tokens_out),
        unused if table is None else table, _stride(table), 0 if table is None else table.stride(1),
        unused if cached_ids is None else cached_ids, out.shape[1], sigma, eps,
        SLOTS=slots, SLOT_PAD=next_power_of_2(slots), K=topk, PAD=16, BLOCK=_BLOCK_DIM, RULE=RULES.index(rule), HAS_ROWS=rows is not None,
        HAS_UNIFORMS=random.uniforms is not None, HAS_TOKENS_OUT=tokens_out is not None, HAS_TABLE=table is not None,
        PRECISION="ieee" if out.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return result


def philox_torch(key: tuple[torch.Tensor, torch.Tensor], counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Returns the four output words of Philox-4x32-10 (Salmon et al., 2011), all words int64 tensors in 0..2**32-1."""
    word = 0xFFFFFFFF
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        # Signed 64-bit products wrap, but their bits are those of the unsigned ones.
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((right >> 32) & word) ^ c1 ^ k0, right & word, ((left >> 32) & word) ^ c3 ^ k1, left & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c0, c1, c2, c3


def uniforms_torch(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns the kernel's draws in [0, 1), float32, for seeds and positions (int64, broadcast together): Philox with the seed as key and
    (position, domain) as counter."""
    word = 0xFFFFFFFF
    seeds, positions = torch.broadcast_tensors(seeds, positions)
    domain, zero = torch.full_like(positions, _DOMAIN), torch.zeros_like(positions)
    bits = philox_torch((seeds & word, (seeds >> 32) & word), (positions & word, (positions >> 32) & word, domain, zero))[0]
    return torch.where(bits > 0x7FFFFFFF, word - bits, bits).float() * _UNIFORM_SCALE


def _pick(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns table [N, S, K, ..] at index [N, S] of its third dimension."""
    tail = table.shape[3:]
    return table.gather(2, index.view(*index.shape, *[1] * (1 + len(tail))).expand(-1, -1, 1, *tail))[:, :, 0]


def _successors_torch(scores: torch.Tensor, rule: str, temperature, uniforms) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what each candidate would be followed by, [N, S, K] int64, and the distribution that is drawn from, [N, S, K, K]."""
    top, successor = scores.max(-1)
    probs = torch.zeros_like(scores).scatter_(-1, successor[..., None], 1.0)
    if rule == "greedy":
        return successor, probs
    warm = ((scores - top[..., None]) / temperature[:, None, None, None]).softmax(-1)
    drawn = (temperature > 0)[:, None, None] & (top > -torch.inf)
    cumulative = warm.cumsum(-1)
    pick = (cumulative <= uniforms[:, :, None, None] * cumulative[..., -1:]).sum(-1)
    successor = torch.where(drawn & (pick < scores.shape[-1]), pick, successor)
    return successor, torch.where(drawn[..., None], warm, probs)


def _follow(successor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ranks walked through [N, S], one behind and as they are; the first slot's predecessor has rank 0."""
    paths = []
    for block in successor.tolist():  # a few numbers, which an operation a slot would take longer over
        path = [0]
        for slot in block:
            path.append(slot[path[-1]])
        paths.append(path)
    walked = torch.tensor(paths, dtype=torch.int64, device=successor.device).view(len(successor), successor.shape[1] + 1)
    return walked[:, :-1], walked[:, 1:]


def _viterbi_torch(scores: torch.Tensor, rule: str) -> torch.Tensor:
    """Returns the path [N, S] of greatest total score."""
    if rule == "exact-normalized":
        scores = scores - scores.logsumexp(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    best, back = scores[:, 0, 0], []
    for s in range(1, scores.shape[1]):
        best, pointer = (best[:, :, None] + scores[:, s]).max(1)
        back.append(pointer)
    path = [best.argmax(-1, keepdim=True)]
    for pointer in reversed(back):
        path.append(pointer.gather(1, path[-1]))
    return torch.cat(path[::-1], 1)


def score_and_walk_torch(
    out, incoming, anchor, ids, rule, sigma, eps, result, rows=None, temperature=None, random=NO_RANDOMNESS, tokens_out=None, draft_logits=None
):  # fmt: skip
    """`score_and_walk` in torch operations."""
    n, slots, topk = ids.shape
    o, i, a = (x.float() for x in (out, incoming, anchor))
    o_norm, i_norm, a_norm = (torch.linalg.vector_norm(x, dim=-1).clamp_min(eps) for x in (o, i, a))
    o, i = o.view(n, slots, topk, -1), i.view(n, slots, topk, -1)
    scores = torch.empty(n, slots, topk, topk, device=out.device)
    scores[:, 0] = (i[:, 0] @ a[..., None] / a_norm[:, None, None])[:, None, :, 0]
    torch.div(o[:, :-1] @ i[:, 1:].transpose(-1, -2), o_norm.view(n, slots, topk, 1)[:, :-1], out=scores[:, 1:])
    scores *= sigma / i_norm.view(n, slots, 1, topk)

    live = slice(None) if rows is None else (rows >= 0).nonzero()[:, 0]
    scores, ids = scores[live], ids[live]
    n = len(scores)
    row: Any = slice(n) if rows is None else rows[live].long()
    usable = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if rule.startswith("exact"):
        path = _viterbi_torch(usable, rule)
        before = torch.nn.functional.pad(path[:, :-1], (1, 0))
        probs = torch.nn.functional.one_hot(path, topk).float()
    else:
        uniforms = None
        if rule == "sampled":
            temperature = temperature.float()[row]
            drawn = random.uniforms is None
            uniforms = uniforms_torch(random.seeds[row, None], random.positions[live]) if drawn else random.uniforms[live]
        successor, probs = _successors_torch(usable, rule, temperature, uniforms)
        before, path = _follow(successor)
        probs = _pick(probs, before)
    z = _pick(usable, before)
    z[..., :1].masked_fill_(z.amax(-1, keepdim=True) == -torch.inf, 0.0)
    tokens = _pick(ids, path)
    for buffer, value in zip(result, (tokens, path, z, probs, scores)):
        buffer[live] = value
    if tokens_out is not None:
        tokens_out[live] = tokens
    if draft_logits is not None:
        table, cached_ids = draft_logits
        slot = torch.arange(slots, device=ids.device)[:, None]
        row = torch.arange(n, device=ids.device) if rows is None else row
        table[row[:, None, None], slot, cached_ids[row]] = -torch.inf
        entries = z if rule == "sampled" else probs.log()
        entries = entries[..., None, :].where(ids[..., None] == ids[..., None, :], -torch.inf).amax(-1)  # as the kernel, for equal ids
        table[row[:, None, None], slot, ids] = entries
        cached_ids[row] = ids
    return result


def score_and_walk(
    out: torch.Tensor,
    incoming: torch.Tensor,
    anchor: torch.Tensor,
    ids: torch.Tensor,
    rule: str,
    sigma: float,
    eps: float,
    result: Walked | None = None,
    rows: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    random: Randomness = NO_RANDOMNESS,
    tokens_out: torch.Tensor | None = None,
    draft_logits: DraftLogits | None = None,
) -> Walked:
    """Returns `result` filled with what N blocks commit to under `rule`.

    out, incoming [N*S*K, d]  the candidates' vectors before normalisation, alike in memory; anchor [N, d]; rows at any stride
    ids [N, S, K] int64       candidate token ids, contiguous
    rule                      "greedy" | "sampled" | "exact" (Viterbi) | "exact-normalized" (the same on row-log-softmaxed scores); ties go to
                              the lower rank
    sigma, eps                the cosine's scale, and the least norm a vector is divided by
    rows [N] int              each block's state row (any stride); where it is -1 the block is inert: nothing of it is written
    temperature [R] float32, random   by state row, for "sampled": softmax(z / T); a row with T = 0 is greedy
    tokens_out [.., S] int64  a second place for the tokens, by block
    draft_logits              the proposal, by state row: z under "sampled" (before temperature), else 0 at the token; -inf elsewhere.
                              Candidates of equal id (a caller may repeat one) share the greatest of their entries

    result.scores holds z and result.probs the proposal; pair_scores the scores themselves, NaN included.
    Raises ValueError on shapes that do not fit, an unknown rule, or "sampled" without temperature and draws. Paper, Sections 3.2 and 3.5.
    """
    n, slots, topk = ids.shape
    check_shape("out", out, n * slots * topk, -1)
    check_shape("incoming", incoming, *out.shape)
    check_shape("anchor", anchor, n, out.shape[1])
    if rule not in RULES:
        raise ValueError(f"unknown rule '{rule}'; known are {', '.join(RULES)}")
    if topk not in (1, 2, 4, 8, 16):
        raise ValueError(f"a slot must have 1, 2, 4, 8 or 16 candidates, got {topk}")
    if out.stride() != incoming.stride() or out.stride(1) != 1 or anchor.stride(1) != 1 or not ids.is_contiguous():
        raise ValueError("out and incoming must lie alike in memory with contiguous rows, and ids must be contiguous")
    if rows is not None:
        check_shape("rows", rows, n)
    if rule == "sampled":
        if temperature is None:
            raise ValueError("the sampled rule needs temperature [R]")
        check_shape("temperature", temperature, -1)
        if random.uniforms is not None:
            check_shape("uniforms", random.uniforms, n, slots)
        elif random.seeds is None or random.positions is None:
            raise ValueError("the sampled rule needs uniforms [N, S], or seeds [R] and positions [N, S]")
        else:
            check_shape("seeds", random.seeds, -1)
            check_shape("positions", random.positions, n, slots)
    given = {"temperature": temperature, **random._asdict(), "tokens_out": tokens_out}
    for name, tensor in given.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")
    if draft_logits is not None:
        check_shape("draft_logits.table", draft_logits.table, -1, slots, -1)
        check_shape("draft_logits.cached_ids", draft_logits.cached_ids, draft_logits.table.shape[0], slots, topk)
        if draft_logits.table.stride(2) != 1 or not draft_logits.cached_ids.is_contiguous():
            raise ValueError("draft_logits.table must be contiguous over the vocabulary and cached_ids contiguous")
    if tokens_out is not None:
        check_shape("tokens_out", tokens_out, -1, slots)
    result = Walked.empty(n, slots, topk, out.device) if result is None else result
    run = _score_and_walk_triton if use_triton(out) else score_and_walk_torch
    return run(out, incoming, anchor, ids, rule, sigma, eps, result, rows, temperature, random, tokens_out, draft_logits)
