#!/usr/bin/env bash
# scripts/run_1.1b.sh [FLAG...]   TinyLlama 1.1B as in the paper's sweep over T and p (arXiv 2506.19645): steps of 1024 x 2048 tokens.
#
# 8 GPUs as T = 8, p = 0.5. The paper gives no number of tokens: 10,000 steps are 21 billion, 19 a parameter, 13 hours on
# 8 H100 at 40% of their peak; STEPS changes that.
# P, T and GPUS make the sweep:   for p in 0 0.25 0.5 0.75 1; do P=$p scripts/run_1.1b.sh; done
# The preset has 8 KV heads, so that T = 8 divides them; TinyLlama itself has 4: T=4 scripts/run_1.1b.sh --kv-heads 4.
# --decay-steps 500000 stretches the cosine as the reference code does for 130M and 7B. Other settings by environment: scripts/run.sh.
MODEL=1.1b STEPS=${STEPS:-10000} GPUS=${GPUS:-8} T=${T:-8} P=${P:-0.5} MICRO_BATCH=${MICRO_BATCH:-16} RECOMPUTE=${RECOMPUTE:-0} \
    exec "$(dirname "$0")/run.sh" "$@"
