#!/usr/bin/env bash
# Trains the six arms of the paper's comparison for SmolLM2-135M-Instruct, and measures them side by side.
#
#   [STEPS=n] trainer/recipes/comparison.sh
#
# After trainer/recipes/smollm2-135m.sh, whose corpus and states all arms see in the same order. Two cores, an arm on each. Started
# again after an interruption, it continues.
set -euo pipefail
cd "$(dirname "$0")/../.."
source trainer/recipes/arms.sh

# DSpark and Domino predict from the anchor's position too: blocks of 7 draft as many tokens as the others' of 8.
shifted="draft.block_size=7"
train_arms runs/comparison \
    "domino draft.head=domino $shifted" \
    "dspark draft.head=dspark $shifted" \
    "lilicorr+conv draft.head=lilicorr draft.conv=true" \
    "dflash2 draft.head=dflash2" \
    "lilicorr draft.head=lilicorr" \
    "dflash draft.head=dflash"
$PYTHON -m vllm_lilicorr.bench run --config configs/bench/comparison.yaml
