#!/usr/bin/env bash
# dev/fuzz/run.sh [SECONDS [TARGET...]]   feeds every parser of foreign bytes with anything, SECONDS (60) a target; see fuzz.cpp.
# dev/fuzz/run.sh 0                       only builds
#
# With clang and its libFuzzer (scripts/install.sh fuzz) what is found grows build/fuzz/corpus; with g++ alone seeds are only mutated. Both
# under the address and undefined-behaviour sanitizers. A find is kept in build/fuzz/finds, and the exit code is 1; to run it again:
#     FUZZ=TARGET build/fuzz/fuzz FILE
set -uo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-60}
shift

compiler=g++ sanitize=address,undefined
if echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
    clang++ -x c++ -fsanitize=fuzzer,address - -o /dev/null 2> /dev/null; then
    compiler=clang++ sanitize=fuzzer,address,undefined
fi
mkdir -p build/fuzz/finds
make -j"$(nproc)" CXX=$compiler SANITIZE=$sanitize GEMM=plain MPI=0 BUILD=build/fuzz build/fuzz/fuzz > build/fuzz/build.log 2>&1 || {
    tail -n 40 build/fuzz/build.log
    exit 1
}
[ "$seconds" -gt 0 ] || exit 0

export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
targets=$(FUZZ_SEEDS=build/fuzz/seeds build/fuzz/fuzz) || exit 1
fuzz() {  # target
    local log=$PWD/build/fuzz/$1.log
    mkdir -p "build/fuzz/corpus/$1"
    if (cd build/fuzz/finds && FUZZ=$1 ../fuzz -max_total_time="$seconds" -entropic=0 -timeout=20 -rss_limit_mb=2048 -max_len=16384 -artifact_prefix="$1-" \
        "../corpus/$1" "../seeds/$1" > "$log" 2>&1); then
        printf '%-16s %s\n' "$1" "$(grep -a '^Done' "$log" | tail -n 1)"
    else
        printf '%-16s FIND\n%s\n' "$1" "$(grep -a -v '^#\|^INFO\|NEW_FUNC' "$log" | tail -n 40)"
        return 1
    fi
}
export -f fuzz
export seconds
# shellcheck disable=SC2086
printf '%s\n' ${@:-$targets} | xargs -P "$(nproc)" -I{} bash -c 'fuzz {}'
