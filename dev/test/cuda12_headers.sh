#!/usr/bin/env bash
# dev/test/cuda12_headers.sh [FOLDER]   does the host code of the CUDA build, and the emulator, compile against CUDA 12's headers as well?
#
# The toolkit's headers come from NVIDIA's Python wheels (about 560 MB, of which the headers are kept): into FOLDER, default
# build/cuda12; they are taken from there the next time. Without pip or a network it says SKIPPED, and exits with 0. Nothing is linked and
# nothing runs. Kernels are compiled as the emulator compiles them: nvcc of CUDA 12 has no wheel. The last line is 'N passed, N failed'.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
headers=${1:-build/cuda12}
WHEELS='nvidia-cuda-runtime-cu12==12.4.127 nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cublas-cu12==12.4.5.8 nvidia-nccl-cu12==2.21.5'

fetch() {
    local wheels
    wheels=$(mktemp -d) || return 1
    # shellcheck disable=SC2064
    trap "rm -rf '$wheels'" RETURN
    # shellcheck disable=SC2086
    python3 -m pip download -q --no-deps --only-binary :all: -d "$wheels" $WHEELS || return 1
    rm -rf "$headers.part"
    python3 - "$headers.part" "$wheels"/*.whl << 'END' || return 1
import pathlib, sys, zipfile
for wheel in sys.argv[2:]:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inside = name.partition("/include/")[2]
            if inside and not inside.endswith("/"):
                path = pathlib.Path(sys.argv[1], inside)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))
END
    mv "$headers.part" "$headers"
}
if [ ! -d "$headers" ] && ! fetch; then
    echo "SKIPPED: CUDA 12's headers cannot be had (python3 -m pip download)"
    exit 0
fi

passed=0 failed=0
mpi=$(mpicxx --showme:compile 2> /dev/null) || mpi=-DLLMC_MPI=0
compiles() {  # file, further flags
    local file=$1
    shift
    # shellcheck disable=SC2086
    if g++ -std=c++20 -march=native -fsyntax-only -Wall -Wextra -Wno-restrict -Werror -DLLMC_CUDA -I. -isystem "$headers" $mpi "$@" -x c++ "$file"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $file"
    fi
}
simt='-include llmc/simt/simt.h'
for file in train_gpt.cu test_gpt.cu llmc/*.cpp dev/test/test_*kernels.cpp dev/test/test_{gemm_cuda,nccl}.cpp; do compiles "$file"; done
# shellcheck disable=SC2086
for file in llmc/ops.cu dev/test/test_simt.cpp; do compiles "$file" $simt; done
# shellcheck disable=SC2086
for file in llmc/simt/*.cpp; do compiles "$file" $simt -DSIMT_CHECK; done
grep '#define CUDART_VERSION' "$headers/cuda_runtime_api.h"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
