#!/usr/bin/env bash
# From nothing to a trained GPT, on the hardware at hand:
#
#   bash speedrun.sh           environment -> corpus, tokenizer, shards -> train, evaluate, sample, report
#   bash speedrun.sh --plan    print what a run would do, its size, memory and time, and exit (installs the environment first)
#   bash speedrun.sh --matrix-lr 0.03   flags of scripts.base_train, except those that have a variable below
#
# Without a GPU it takes 3 to 14 minutes on two cores. SIGTERM, SIGHUP and Ctrl-C stop it; a run that has done a step saves first.
# Once training has begun, they end the script with exit code 75. The same command resumes the run. These variables change the run:
#
#   CORPUS=path:my_texts    another corpus: python, path:FILE_OR_FOLDER (absolute, or relative to this file), hf:ORG/NAME[:CONFIG]
#   VOCAB_SIZE=1024         a smaller vocabulary, for a small corpus
#   DEPTH=8                 another depth; width and heads follow, on a GPU also the batch
#   RUN=name                name of the run under $NANOMUON_BASE_DIR/runs
#   NANOMUON_BASE_DIR=...   where everything is written (~/.cache/nanomuon), except downloads from the hub (HF_HOME)
#   NANOMUON_PYTHON=...     an interpreter that already has every package (PyTorch 2.11 or newer); nothing is installed
#   NANOMUON_DEVICE=cpu     train on the CPU of a machine that has a GPU
set -euo pipefail
trap '' PIPE # if the terminal or the pipe that takes the output is gone, the run goes on, and no echo may end it
cd "$(dirname "$(readlink -f "$0")")"
HOME=${HOME:-~} # a service may have none
for flag in "$@"; do
    case ${flag%%=*} in
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' speedrun.sh; exit 0 ;;
        --run | --corpus | --depth | --vocab-size) # the other stages need these too
            variable=$(tr a-z- A-Z_ <<<"${flag%%=*}")
            echo "error: instead of ${flag%%=*}, set the variable: ${variable#__}=... bash speedrun.sh" >&2
            exit 2
            ;;
    esac
done
source scripts/setup.sh train

# Presets for the hardware that will train; a GPU that PyTorch cannot use is an error here
HARDWARE=$("$PYTHON" -c 'import scripts
scripts.begin()
from nanomuon import command, runtime
command.run_command(runtime.print_hardware)')
read -r GPUS DTYPE <<<"$HARDWARE"
FLAGS=(--eval-every 250 --save-every 500 --core-bundle https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip)
WEB=hf:karpathy/climbmix-400b-shuffle # or hf:HuggingFaceFW/fineweb-edu:sample-10BT
TRAIN=("$PYTHON" -m scripts.base_train)
case $GPUS in
    0)
        CORPUS=${CORPUS:-python} DEPTH=${DEPTH:-4}
        FLAGS=(--total-batch-size 4096 --eval-every 100 --eval-tokens 32768 --save-every 50)
        # As many steps as two cores can do in 3 to 14 minutes (docs/benchmarks.md), unless a flag sets the length
        [[ " ${*/=/ } " == *" --target-"* ]] ||
            FLAGS+=(--num-iterations "$([ "$DTYPE" = bfloat16 ] && echo 480 || echo 300)")
        ;;
    1) CORPUS=${CORPUS:-$WEB} DEPTH=${DEPTH:-12} ;;
    *)
        CORPUS=${CORPUS:-$WEB} DEPTH=${DEPTH:-24}
        # --local_addr, as not every container can resolve the machine's name. The last --, as torchrun has its own --run-path
        TRAIN=("$PYTHON" -m torch.distributed.run --standalone --local_addr=localhost --nproc_per_node="$GPUS"
            -m scripts.base_train --)
        export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300} # seconds to save
        # Without this, torchrun would end with the terminal even under nohup
        [ -z "$(trap -p HUP)" ] || export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGQUIT}
        ;;
esac
RUN=${RUN:-d$DEPTH-$(printf %s "$CORPUS" | tr -c 'A-Za-z0-9._-' '-')}
base_dir=${NANOMUON_BASE_DIR:-$HOME/.cache/nanomuon}
run_dir=${base_dir/#\~/$HOME}/runs/$RUN
exists=
if [ -e "$run_dir/settings.json" ]; then
    if [[ " ${*/=/ } " == *" --resume never "* ]]; then
        exists="; it exists, and would be deleted"
    else
        exists="; it exists, and resumes if it is not complete"
        FLAGS=() # it has recorded its own, perhaps with another length
    fi
fi
FLAGS+=(--run "$RUN" --corpus "$CORPUS" ${VOCAB_SIZE:+--vocab-size "$VOCAB_SIZE"} --depth "$DEPTH" "$@")
if [[ " $* " == *" --plan "* ]]; then
    echo "run        $run_dir, trained on $CORPUS$exists"
    exec "${TRAIN[@]}" "${FLAGS[@]}"
fi

# data_prep gets the training's flags, too: a wrong one ends it before it prepares any data
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
case $CORPUS in
    hf:*) # from the hub: prepared during training, which waits if necessary
        if ! mkdir -p "${run_dir%/*}" || ! : >"$run_dir.data_prep.log"; then
            echo "error: set NANOMUON_BASE_DIR to a folder that you can write to" >&2
            exit 2
        fi
        echo "data: $CORPUS, progress in $run_dir.data_prep.log" || true
        nice -n 10 "$PYTHON" -m scripts.data_prep -- "${FLAGS[@]}" >"$run_dir.data_prep.log" 2>&1 &
        data_prep=$!
        ;;
    *) "$PYTHON" -m scripts.data_prep -- "${FLAGS[@]}" ;;
esac

again="the same command"
[[ " $* " != *" --resume"* ]] || again+=" without --resume"
rm -f "$run_dir/stopped"
"${TRAIN[@]}" "${FLAGS[@]}" <&0 &
training=$! stopped=no code=0
# Without a trap, bash would die and leave the training running. A terminal sends INT, and often HUP, to the training as well
pass_on() {
    stopped=yes
    kill -TERM "$training" 2>/dev/null || true
}
trap pass_on TERM
trap stopped=yes INT HUP
# A terminal that closes may signal only its first process, perhaps this one. But torchrun takes a second signal for an order to
# end at once
[[ "${TRAIN[*]}" == *torch.distributed.run* ]] || trap pass_on HUP
while :; do # because a signal ends a wait, too
    code=0
    wait "$training" || code=$?
    kill -0 "$training" 2>/dev/null || break
done
# torchrun does not pass on the exit codes of its ranks, so they leave a file
if [ -e "$run_dir/stopped" ] || { [ "$stopped" = yes ] && [ "$code" -ne 0 ]; }; then
    echo "the run was stopped before its end: $again resumes it" || true
    exit 75
fi
if [ "$code" -ne 0 ] && [ -n "${data_prep:-}" ] && ! kill -0 "$data_prep" 2>/dev/null && ! wait "$data_prep"; then
    echo "data_prep failed: $(tail -n 1 "$run_dir.data_prep.log")" >&2 || true
fi
[ "$code" -ne 137 ] || echo "the training was killed, perhaps because memory ran out: $again resumes it" >&2 || true
[ "$code" -ne 0 ] || echo "done in $SECONDS s; samples are in $run_dir/report.md. More text: $PYTHON -m scripts.sample --run $(printf %q "$RUN") --seed 4" || true
exit "$code"
