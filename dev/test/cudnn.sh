#!/usr/bin/env bash
# dev/test/cudnn.sh   does attention by cuDNN compile and link, and are its graphs right? Computed on the CPU; cuDNN's own kernels need a GPU.
#
# Without nvcc, cuDNN, or the headers of cudnn-frontend (scripts/cudnn_frontend.sh, by pip) it says SKIPPED, and exits with 0. The last line is
# 'N passed, N failed'.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
cuda=${CUDA:-/usr/local/cuda}

skipped() {
    echo "SKIPPED: attention by cuDNN: $1"
    echo '0 passed, 0 failed'
    exit 0
}
[ -e "$cuda/include/cudnn.h" ] || skipped "there is no cudnn.h in $cuda/include"
scripts/cudnn_frontend.sh || skipped 'the headers of cudnn-frontend cannot be had'

passed=0 failed=0
one() {  # name, command
    local name=$1
    shift
    if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)) && echo "FAIL $name"; fi
}
one 'build the test of the graphs' make WERROR=1 build/cuda/test_attention_cudnn
one 'graphs' build/cuda/test_attention_cudnn --gtest_brief=1
if [ -x "$cuda/bin/nvcc" ]; then one 'link with it' make WERROR=1 CUDNN=1 build/cuda/bench_attention; fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
