#!/usr/bin/env bash
# Trains LiLiCorr for SmolLM2-135M-Instruct with one thing changed at a time (docs/ablations.md), and measures what is accepted.
#
#   [STEPS=n] trainer/recipes/ablations.sh
#
# After trainer/recipes/comparison.sh of as many steps, whose LiLiCorr drafter is what the others differ from and whose DFlash
# drafter is the frozen backbone. Two cores, an arm on each. Started again after an interruption, it continues.
set -euo pipefail
cd "$(dirname "$0")/../.."
source trainer/recipes/arms.sh
RUNS=runs/ablations
RECIPE=runs/comparison/lilicorr
BACKBONE=runs/comparison/dflash/export
for made in $RECIPE/export $BACKBONE; do
    [ -d $made ] || { echo "error: $made is missing; run trainer/recipes/comparison.sh first" >&2; exit 1; }
done

arms=(
    "topk-16 head.lilicorr.candidate_topk=16"
    "lambda-0 objective.lambd=0"
    "gamma-0.01 objective.gamma=0.01"
    "gamma-0.25 objective.gamma=0.25"
    "topk-4 head.lilicorr.candidate_topk=4"
    "frozen draft.freeze_backbone=true run.warm_start=$BACKBONE"
    "no-tower head.lilicorr.num_layers=0"
    "token-and-confidence head.lilicorr.num_layers=0 draft.without=[pass_hidden_proj,slot_embedding,rank_embedding,context_proj]"
    "token-only head.lilicorr.num_layers=0 draft.without=[pass_hidden_proj,feature_mlp,slot_embedding,rank_embedding,context_proj]"
)
train_arms $RUNS "${arms[@]}"
drafts=(recipe=$RECIPE/export) # the first is what the others are compared with
for arm in "${arms[@]}"; do
    drafts+=("${arm%% *}=$RUNS/${arm%% *}/export")
done
$PYTHON -m vllm_lilicorr.bench acceptance --target $TARGET --draft "${drafts[@]}" --prompts-dir "$DATA/prompts/heldout" \
    --temperature 0 --num-prompts 6 --max-tokens 96 --max-prompt-tokens 1024 --batch-size 6 --processes 2 --output docs/benchmarks/ablations
$PYTHON -m vllm_lilicorr.bench report docs/benchmarks/ablations
