#!/usr/bin/env bash
# Makes the drafter in vllm_lilicorr/assets/smollm2-135m: corpus, states, both arms, acceptance on held-out rows.
#
#   PROMPTS=DIR [STEPS=n] [MORE=n] [FROM=CKPT] [MAX_TOKENS=n] [ROWS=n] trainer/recipes/smollm2-135m.sh
#
# PROMPTS holds aime25, arena-hard-v2, gsm8k, humaneval, livecodebench and mt-bench as NAME.jsonl; the last 20 rows of each are
# held out. MORE: after STEPS, both arms train as many steps more, with a new schedule and other anchors. FROM: both arms begin with
# the backbone of this checkpoint, and LiLiCorr with its head, in place of new weights. Started again after an interruption, it
# continues: every step keeps what it has finished. Two cores, one arm on each.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${PROMPTS:?names the folder of benchmark prompts}"
PYTHON=${PYTHON:-.venv/bin/python}
DATA=${DATA:-data/smollm2-135m}
RUNS=${RUNS:-runs/smollm2-135m}
TARGET=models/smollm2-135m-instruct
# What the machine multiplies fast: bfloat16 where the processor has it, else float32 (without it, bfloat16 is emulated).
if grep -q -m1 -E 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo; then DTYPE=bfloat16 PRECISION=bf16 NARROW=bfloat16; else DTYPE=float32 PRECISION=fp32 NARROW=auto; fi
if [ $NARROW = bfloat16 ] && grep -q -m1 -E 'amx_int8|avx512_vnni|avx_vnni' /proc/cpuinfo; then NARROW=int8; fi
export DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

$PYTHON -m vllm_lilicorr.smollm2 $TARGET
$PYTHON trainer/split_prompts.py --prompts "$PROMPTS" --also trainer/prompts --out "$DATA/prompts"
answer() { # prompts, corpus, further options
    VLLM_CPU_KVCACHE_SPACE=4 VLLM_CPU_OMP_THREADS_BIND=0-1 $PYTHON trainer/regenerate.py --target $TARGET --prompts "$1" --out "$2" \
        --max-tokens "${MAX_TOKENS:-256}" --max-model-len 2048 --dtype $DTYPE --enforce-eager "${@:3}"
}
answer "$DATA/prompts/heldout" "$DATA/heldout"
answer "$DATA/prompts/train.jsonl" "$DATA/corpus" ${ROWS:+--limit "$ROWS"}

config=(--config configs/smollm2-135m.yaml target.path=$TARGET data.path="$DATA/corpus" run.precision=$PRECISION evaluation.every=1000 ${STEPS:+run.max_steps=$STEPS})
export OMP_NUM_THREADS=1 # one process a core: two threads that wait for each other lose more than they share
taskset -c 0 $PYTHON trainer/cache.py --dtype $DTYPE --shard 0/2 "${config[@]}" &
other=$!
trap 'kill $other 2>/dev/null || true' EXIT
taskset -c 1 $PYTHON trainer/cache.py --dtype $DTYPE --shard 1/2 "${config[@]}"
wait $other
# One process an arm: its two conversations go through in one piece, and ZeRO would have nothing to partition.
train=($PYTHON trainer/main.py "${config[@]}" run.micro_batch_size=2 deepspeed.config=configs/deepspeed/zero0.json)
LILICORR=$RUNS/lilicorr DFLASH=$RUNS/dflash
taskset -c 0 "${train[@]}" ${FROM:+run.warm_start="$FROM"} run.output="$LILICORR" &
other=$!
taskset -c 1 "${train[@]}" ${FROM:+run.warm_start="$FROM"} draft.head=dflash run.output="$DFLASH"
wait $other
if [ -n "${MORE:-}" ]; then
    train+=(run.max_steps="$MORE" run.seed=1 evaluation.every=2000)
    taskset -c 0 "${train[@]}" run.warm_start="$LILICORR/export" run.output="$LILICORR-more" &
    other=$!
    taskset -c 1 "${train[@]}" draft.head=dflash run.warm_start="$DFLASH/export" run.output="$DFLASH-more"
    wait $other
    LILICORR+=-more DFLASH+=-more
fi
trap - EXIT
$PYTHON -m vllm_lilicorr.bench acceptance --target $TARGET --draft lilicorr="$LILICORR/export" dflash="$DFLASH/export" \
    --prompts-dir "$DATA/prompts/heldout" \
    --max-tokens "${MAX_TOKENS:-256}" --temperature 0 --processes 2 --output "$RUNS/acceptance"

# How many tokens to draft, and from which confidence on to verify them, is chosen by speed, on conversations that were neither
# trained on nor are what the drafter is judged by. Seven servers at once.
unset OMP_NUM_THREADS
$PYTHON trainer/held_out_prompts.py "${config[@]}" --prompts "$DATA/prompts/train.jsonl" --out "$DATA/prompts/development/development.jsonl"
systems=()
for threshold in 0.05 0.1 0.2 0.3; do systems+=("t$threshold=$LILICORR/export,draft_dtype=$NARROW,num_speculative_tokens=7,confidence_threshold=$threshold"); done
systems+=("n3=$LILICORR/export,draft_dtype=$NARROW,num_speculative_tokens=3")
$PYTHON -m vllm_lilicorr.bench serve --target $TARGET --prompts-dir "$DATA/prompts/development" --num-prompts 8 --max-tokens 64 \
    --systems "${systems[@]}" --concurrency 1 --repeats 2 --dtype float32 \
    --max-model-len 2048 --together --output "$RUNS/lengths"
ASSETS=${ASSETS:-vllm_lilicorr/assets/smollm2-135m}
rm -rf "$ASSETS" && cp -r "$LILICORR/export" "$ASSETS"
$PYTHON -m vllm_lilicorr.bench card "$ASSETS" --run "$LILICORR" --beside "$DFLASH" --results "$RUNS/acceptance" \
    --lengths "$RUNS/lengths" --made-by "PROMPTS=DIR${FROM:+ FROM=$FROM}${STEPS:+ STEPS=$STEPS}${MORE:+ MORE=$MORE} trainer/recipes/smollm2-135m.sh"
