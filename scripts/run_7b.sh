#!/usr/bin/env bash
# scripts/run_7b.sh [FLAG...]   the paper's Llama-2 7B (arXiv 2506.19645): 160 billion tokens of RedPajama in 38,147 steps of 1024 x 4096.
#
# 64 GPUs as T = 8 x D = 8, p = 0.5: a tensor-parallel group is a node, over NVLink; gradients go between the nodes.
# 6.9e21 FLOPs: 76 hours on 64 H100 at 40% of their peak.
# One command on one machine starts one machine's ranks: on eight nodes use scripts/slurm/several_nodes.sbatch, or give mpirun the hosts:
#   LAUNCH='mpirun -n 64 --hostfile hosts --map-by ppr:8:node' scripts/run_7b.sh
# The reference code's cosine runs over 500,000 steps, so that the learning rate hardly decays: add --decay-steps 500000 for that.
# Other settings by environment: scripts/run.sh.
MODEL=7b STEPS=${STEPS:-38147} GPUS=${GPUS:-64} T=${T:-8} P=${P:-0.5} MICRO_BATCH=${MICRO_BATCH:-8} RECOMPUTE=${RECOMPUTE:-0} \
    exec "$(dirname "$0")/run.sh" "$@"
