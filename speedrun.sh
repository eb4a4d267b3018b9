#!/usr/bin/env bash
# From nothing to a trained GPT, on the hardware at hand:
#
#   bash speedrun.sh           environment -> corpus, tokenizer, shards -> train, evaluate, sample, report
#   bash speedrun.sh --plan    print what would be done, with sizes, memory and time, and stop
#   bash speedrun.sh --matrix-lr 0.03   any other flag goes to scripts.base_train, after those of the preset
#
# Without a GPU it takes seven to twelve minutes, more steps on a CPU that multiplies bfloat16 natively than on another
# (--dtype float32 takes the other's). Stages whose output is complete are skipped, so the same command carries on after
# an interruption: SIGTERM, SIGHUP and Ctrl-C end it, the training saves first, and the exit code is 75 then.
# Override with
#
#   CORPUS=path:my_texts    another corpus: python, path:FILE_OR_FOLDER, hf:ORG/NAME[:CONFIG]
#   VOCAB_SIZE=1024         a smaller vocabulary, for a small corpus
#   DEPTH=8                 a deeper (and wider) or smaller model
#   RUN=name                name of the run under $NANOMUON_BASE_DIR/runs
#   NANOMUON_BASE_DIR=...   where everything is written (~/.cache/nanomuon)
#   NANOMUON_PYTHON=...     an interpreter that has every package already, PyTorch 2.11 or newer; nothing is installed then
#   NANOMUON_DEVICE=cpu     train on the CPU of a machine that has a GPU
set -euo pipefail
cd "$(dirname "$0")"
case "${1:-}" in
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "${0##*/}"; exit 0 ;;
esac
for flag in "$@"; do # the other stages need these, too
    case ${flag%%=*} in
        --run | --corpus | --depth | --vocab-size)
            variable=$(tr a-z- A-Z_ <<<"${flag%%=*}")
            echo "error: ${flag%%=*} is the variable ${variable#__} here: ${variable#__}=... bash speedrun.sh" >&2
            exit 2
            ;;
    esac
done

# Seconds since the machine was started; bash's own SECONDS go back where somebody sets the clock back
now() {
    local uptime=$SECONDS # where there is no /proc
    [ ! -r /proc/uptime ] || read -r uptime _ </proc/uptime
    echo "${uptime%.*}"
}

began=$(now)
source scripts/setup.sh train
environment_seconds=$(($(now) - began))

# Presets by hardware
# Those that training will compute on: one that is there and cannot be used ends it here, with a line on what helps
GPUS=$("$PYTHON" -c 'from nanomuon.runtime import print_usable_gpus, run_command; run_command(print_usable_gpus)')
CORE=https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip # the tasks of CORE, docs/evaluation.md
WEB=hf:karpathy/climbmix-400b-shuffle # or hf:HuggingFaceFW/fineweb-edu:sample-10BT
case $GPUS in
    0)
        CORPUS=${CORPUS:-python} DEPTH=${DEPTH:-4}
        # Threads that sleep instead of spin: 2% slower alone, a third faster beside another busy process (docs/log.md)
        export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
        FLAGS=(--max-seq-len 256 --device-batch-size 16 --total-batch-size 4096
            --eval-every 100 --eval-tokens 32768 --save-every 50)
        ;;
    1)
        CORPUS=${CORPUS:-$WEB} DEPTH=${DEPTH:-12}
        FLAGS=(--eval-every 250 --save-every 500 --core-bundle "$CORE")
        ;;
    *)
        CORPUS=${CORPUS:-$WEB} DEPTH=${DEPTH:-24}
        FLAGS=(--eval-every 250 --save-every 500 --core-bundle "$CORE")
        ;;
esac
RUN=${RUN:-d$DEPTH-$(printf %s "$CORPUS" | tr -c 'A-Za-z0-9._-' '-')}
if [ "$GPUS" -eq 0 ]; then # as many steps as end within eight minutes on two quiet cores (docs/log.md)
    case " ${*/=/ } " in
        *" --dtype float32 "*) DTYPE=float32 ;;
        *" --dtype bfloat16 "*) DTYPE=bfloat16 ;;
        *) DTYPE=$("$PYTHON" -c 'from sys import argv; from nanomuon.run_folder import print_cpu_dtype; print_cpu_dtype(argv[1])' \
            "$RUN") ;;
    esac
    if [ "$DTYPE" = bfloat16 ]; then STEPS=480; else STEPS=300; fi
    FLAGS+=(--dtype "$DTYPE")
    case " ${*/=/ } " in
        *" --num-iterations "* | *" --target-flops "* | *" --target-param-data-ratio "*) ;; # says how long itself
        *) FLAGS+=(--num-iterations "$STEPS") ;;
    esac
fi
DATA=(--corpus "$CORPUS" ${VOCAB_SIZE:+--vocab-size "$VOCAB_SIZE"})
FLAGS+=(--run "$RUN" "${DATA[@]}" --depth "$DEPTH" "$@")
TRAIN=("$PYTHON" -m scripts.base_train)
if [ "$GPUS" -gt 1 ]; then
    # --local_addr: else ranks look for each other by the machine's name, which not every container resolves.
    # The last -- keeps torchrun from taking --run for its own --run-path
    TRAIN=("$PYTHON" -m torch.distributed.run --standalone --local_addr=localhost --nproc_per_node="$GPUS"
        -m scripts.base_train --)
    # After a signal torchrun kills ranks that are not done in 30 s, and a large checkpoint may take longer to write
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
    if [ -n "$(trap -p HUP)" ]; then # ignored, as nohup has it: torchrun by itself would end all the same
        export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGQUIT}
    fi
fi
base_dir=${NANOMUON_BASE_DIR:-$HOME/.cache/nanomuon}
run_dir=${base_dir/#\~/$HOME}/runs/$RUN

if [[ " $* " == *" --plan "* ]]; then
    echo "stages     environment -> corpus $CORPUS -> tokenizer -> shards -> train -> evaluate -> sample -> report"
    echo "run        $run_dir"
    exec "${TRAIN[@]}" "${FLAGS[@]}"
fi

# record STAGE SECONDS: base_train puts these into the report's table of times
record() {
    mkdir -p "$run_dir"
    echo "{\"stage\": \"$1\", \"seconds\": $2}" >>"$run_dir/stages.jsonl"
}

stage=$(now)
data_prep= # its process, where it works beside the training
case $CORPUS in
    python | path:*) "$PYTHON" -m scripts.data_prep "${DATA[@]}" ;;
    *) # from the hub: what the run needs is downloaded and tokenized beside the training, which waits where it must
        # With one row: to find how many fit takes GPUs minutes, and makes no difference to the tokens
        tokens=$("${TRAIN[@]}" --device-batch-size 1 "${FLAGS[@]}" --plan |
            sed -n 's/^training .* = \([0-9,]*\) tokens.*/\1/p' | tr -d ,)
        mkdir -p "${run_dir%/*}"
        echo "data: ${tokens:?} tokens of $CORPUS, progress in $run_dir.data_prep.log"
        rm -f "$run_dir.data_prep.log" # it may be a link
        trap 'kill $(jobs -p) 2>/dev/null || true' EXIT # it may have ended
        # nice: training comes first where both want a core
        nice -n 10 "$PYTHON" -m scripts.data_prep "${DATA[@]}" --max-tokens "$tokens" >"$run_dir.data_prep.log" 2>&1 &
        data_prep=$!
        ;;
esac
if [ ! -e "$run_dir/stages.jsonl" ] && [ ! -L "$run_dir/stages.jsonl" ]; then # through a link nothing is written
    record environment "$environment_seconds"
    record "corpus, tokenizer, shards" $(($(now) - stage))
fi

rm -f "$run_dir/stopped"
"${TRAIN[@]}" "${FLAGS[@]}" <&0 &
training=$! asked=no
# Without a trap bash would die and leave the training at work; from a terminal the training gets the other two itself
trap 'asked=yes; kill -TERM "$training" 2>/dev/null || true' TERM
trap asked=yes INT HUP
while :; do
    code=0
    wait "$training" || code=$?
    kill -0 "$training" 2>/dev/null || break # else a signal has ended the wait, and not the training
done
# torchrun does not hand on the exit code of its ranks; they leave a file
stopped=no
if [ -e "$run_dir/stopped" ]; then stopped=yes; fi
if [ "$asked" = yes ] && [ "$code" -ne 0 ]; then stopped=yes; fi
if [ "$stopped" = yes ]; then
    echo "the run was stopped before its end: bash speedrun.sh carries on"
    exit 75
fi
if [ "$code" -ne 0 ]; then
    if [ -n "$data_prep" ] && ! kill -0 "$data_prep" 2>/dev/null && ! wait "$data_prep"; then
        echo "data_prep has failed: $(tail -n 1 "$run_dir.data_prep.log")" >&2
    fi
    exit "$code"
fi
echo "done in $(($(now) - began)) s. More text: $PYTHON -m scripts.sample --run $RUN"
