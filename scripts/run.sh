#!/usr/bin/env bash
# scripts/run.sh [FLAG...]   starts or goes on with a real run; scripts/run_130m.sh and the others call it with the paper's settings.
#
# FLAGs go to ./train_gpt after those below, and win. Settings by environment, with defaults:
#   MODEL        preset of ./train_gpt: it sets the shape, S, the global batch, the peak learning rate, warm-up and Adam's epsilon
#   STEPS        optimiser steps
#   GPUS, T, P   GPUs in all (a rank each), tensor-parallel ranks, sync factor. GPUS/T data-parallel ranks
#   GPUS_PER_NODE=8
#   MICRO_BATCH, RECOMPUTE, ZERO=1
#   TRAIN, VAL   data (--train, --val); VAL= trains without validation
#   TOKENIZER    where it is set, a sample of text is written now and then
#   OUT          folder for checkpoints, out/runs/MODEL-tT-pP; log.jsonl in it. Where it holds a checkpoint the run goes on from there
#   SAVE_EVERY=500 VAL_EVERY=500 KEEP=3
#   TRAIN_GPT    the program: ./train_gpt_cuda where it was built, else ./train_gpt
#   LAUNCH       what starts GPUS ranks: mpirun -n GPUS; scripts/slurm sets srun. LAUNCH= (empty): the ranks are threads of one process
#   DEVICE=h100  (a100, h100, h200), UTILISATION=0.4: for the arithmetic of memory and hours alone
#
# SIGUSR1 to this process (it becomes the launcher) saves and ends the run with exit code 138; the same command goes on from there.
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    printf 'run.sh: %s\n' "$1" "HINT: $2" >&2
    exit 2
}
: "${MODEL:?a preset; scripts/run_130m.sh and the others set it}" "${STEPS:?}" "${GPUS:?}" "${T:?}" "${P:?}"
for count in "$GPUS" "$T"; do
    [[ $count =~ ^[1-9][0-9]*$ ]] || die "GPUS is '$GPUS', T is '$T': wanted whole numbers from 1" 'GPUS=8 T=8'
done
[ $((GPUS % T)) -eq 0 ] || die "GPUS is $GPUS and T is $T: wanted a multiple of T" "GPUS=$(((GPUS / T + 1) * T))"
if [ -z "${TRAIN_GPT:-}" ]; then
    TRAIN_GPT=./train_gpt
    [ ! -x ./train_gpt_cuda ] || TRAIN_GPT=./train_gpt_cuda
fi
export TRAIN_GPT
[ -x "$TRAIN_GPT" ] || die "there is no $TRAIN_GPT" 'make cuda (GPUs), or make'
out=${OUT:-out/runs/$MODEL-t$T-p$P}
mkdir -p "$out"

flags=(--model "$MODEL" --steps "$STEPS" --tp "$T" --dp $((GPUS / T)) --sync-factor "$P" --zero "${ZERO:-1}" --dtype bf16
    --micro-batch "${MICRO_BATCH:-4}" --recompute "${RECOMPUTE:-1}")
run_flags=(--train "${TRAIN:-@data/redpajama-1t.mix}" --out "$out" --resume
    --save-every "${SAVE_EVERY:-500}" --keep "${KEEP:-3}" --log "$out/log.jsonl")
val=${VAL-out/data/redpajama_1t/*_val_*.bin}
[ -z "$val" ] || run_flags+=(--val "$val" --val-every "${VAL_EVERY:-500}")
[ -z "${TOKENIZER:-}" ] || run_flags+=(--tokenizer "$TOKENIZER" --sample-every "${SAMPLE_EVERY:-1000}")

scripts/presets.py plan --device "${DEVICE:-h100}" --gpus-per-node "${GPUS_PER_NODE:-8}" --utilisation "${UTILISATION:-0.4}" \
    "${flags[@]}" "$@"
launch=${LAUNCH-mpirun -n $GPUS}
# Words of LAUNCH are words of the command.
# shellcheck disable=SC2086
exec $launch "$TRAIN_GPT" "${flags[@]}" "${run_flags[@]}" "$@"
