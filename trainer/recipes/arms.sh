# Sourced by comparison.sh and ablations.sh: trains arms of configs/smollm2-135m.yaml on what smollm2-135m.sh made, the corpus and
# the target's states. All have the same steps, seed, data order and first backbone; an arm's line says in what it differs.
PYTHON=${PYTHON:-.venv/bin/python}
DATA=${DATA:-data/smollm2-135m}
TARGET=models/smollm2-135m-instruct
# As in smollm2-135m.sh: bfloat16 where the processor multiplies it.
if grep -q -m1 -E 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo; then PRECISION=bf16; else PRECISION=fp32; fi
export DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
[ -e "$DATA/corpus/states/states.json" ] || { echo "error: $DATA/corpus holds no states; run trainer/recipes/smollm2-135m.sh first" >&2; exit 1; }

free=(0 1) failed=0
declare -A core_of=() run_of=() # by process
# However the script ends, its trainers end too, after the step they are at and with a checkpoint.
trap 'kill "${!core_of[@]}" 2>/dev/null || true; wait' EXIT

train_arms() { # folder, then an arm a line: NAME overrides... (the longest first: a core takes the next as soon as it is free)
    local line words run command
    for line in "${@:2}"; do
        read -r -a words <<<"$line"
        run=$1/${words[0]}
        command=("$PYTHON" trainer/main.py --config configs/smollm2-135m.yaml target.path="$TARGET" data.path="$DATA/corpus"
            run.precision="$PRECISION" ${STEPS:+run.max_steps="$STEPS"} run.output="$run" "${words[@]:1}")
        if finished "$run" "${command[@]}"; then
            echo "$run: finished before"
            continue
        fi
        [ ${#free[@]} -gt 0 ] || next_free
        echo "$run: begins on core ${free[0]}; $run.log"
        mkdir -p "$1"
        OMP_NUM_THREADS=1 taskset -c "${free[0]}" "${command[@]}" >"$run.log" 2>&1 &
        core_of[$!]=${free[0]} run_of[$!]=$run
        free=("${free[@]:1}")
    done
    while [ ${#core_of[@]} -gt 0 ]; do next_free; done
    return $failed
}

next_free() { # waits for one trainer; the others go on where it has failed
    local pid status=0
    wait -n -p pid "${!core_of[@]}" || status=$?
    # A trainer that a signal stopped ends with status 0, before its export.
    if [ $status != 0 ] || [ ! -d "${run_of[$pid]}/export" ]; then
        echo "error: ${run_of[$pid]}: not finished (status $status); its log says why: ${run_of[$pid]}.log" >&2
        failed=1
    fi
    free+=("${core_of[$pid]}")
    unset "core_of[$pid]"
}

finished() { # folder, command: exported, under the configuration that the command would train. Any other is the trainer's to judge.
    [ -d "$1/export" ] && [ "$("${@:2}" --print-config | tail -n 1)" = "$(tail -n 1 "$1/config.yaml")" ]
}
