#!/usr/bin/env bash
# scripts/run_130m.sh [FLAG...]   the paper's Llama 130M (arXiv 2506.19645): 7.8 billion tokens of RedPajama in 29,755 steps of 256 x 1024.
#
# 8 GPUs as T = 8, p = 0.5; P=1 is the baseline with all channels synchronised, T=1 P=1 the model without tensor parallelism.
# 5.6e18 FLOPs: half an hour on 8 H100 at 40% of their peak, which products of 96 columns (T = 8) will not reach.
# The reference code's cosine runs over 500,000 steps, so that the learning rate hardly decays: add --decay-steps 500000 for that.
# Other settings by environment: scripts/run.sh.
MODEL=130m STEPS=${STEPS:-29755} GPUS=${GPUS:-8} T=${T:-8} P=${P:-0.5} MICRO_BATCH=${MICRO_BATCH:-32} RECOMPUTE=${RECOMPUTE:-0} \
    exec "$(dirname "$0")/run.sh" "$@"
