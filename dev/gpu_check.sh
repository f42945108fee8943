#!/usr/bin/env bash
# dev/gpu_check.sh [--simt] [--no-build] [--seconds 480]   what there is to know of a GPU, in one command: is the CUDA build right on it, how fast is it?
#
# Stages: build; kernels against the CPU loops; goldens; each op's time at the shapes of 1.1B, 7B and 130M; tokens/s and share of the peak with and
# without recomputation; our attention against cuDNN's (where scripts/cudnn_frontend.sh was run); the trainer itself; T = 8 on one GPU; decoding;
# kernel experiments; compute-sanitizer. Each has a time limit. One that fails does not stop the others, but the exit code is 1. Results:
# out/gpu_check/report.json and report.txt, each stage's output beside them.
#
#   --simt      the same in the emulated build at tiny sizes (out/gpu_check_simt): proves this script, says nothing of speed
#   --no-build  with what was built elsewhere
#   --seconds   for all of it; stages that no time is left for are named, and count as failed
exec python3 "$(dirname "$0")/roofline/gpu_check.py" "$@"
