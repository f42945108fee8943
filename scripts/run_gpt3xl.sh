#!/usr/bin/env bash
# scripts/run_gpt3xl.sh [FLAG...]   the paper's GPT-3 XL 1.3B (arXiv 2506.19645): 50 billion tokens in 47,684 steps of 512 x 2048.
#
# 8 GPUs as T = 8, p = 0.5: 4.1e20 FLOPs, 36 hours on H100 at 40% of their peak. LayerNorm, GELU, biases, tied head; rotary positions as in
# the paper, where its code has learned ones: --positions learned. Other settings by environment: scripts/run.sh.
MODEL=gpt3-xl STEPS=${STEPS:-47684} GPUS=${GPUS:-8} T=${T:-8} P=${P:-0.5} MICRO_BATCH=${MICRO_BATCH:-16} RECOMPUTE=${RECOMPUTE:-0} \
    exec "$(dirname "$0")/run.sh" "$@"
