#!/usr/bin/env bash
# dev/test/run_tests.sh   every test that needs no GPU: installs what the tests need, builds, runs; the last line is 'N passed, N failed'.
#
# 1. unit tests (ops against naive loops, the laws of CAAT-Net, data, checkpoints, collectives)
# 2. goldens of an independent float64 program, at several T and p, as threads and under mpirun; those of ../shared where it is there
# 3. the programs as a user runs them (dev/test/e2e*.py)
# 4. the CUDA build run by the emulator: its kernels against the CPU loops, the whole trainer against goldens and the CPU build; compiled by nvcc.
#    Both need NVIDIA's toolkit, and it is said where they are skipped
# 5. the same unit tests under the address and undefined-behaviour sanitizers, the in-process ranks under the thread sanitizer
# 6. the kernels and the goldens under the emulator's checker: every access, races, what was never written
# 7. every parser of foreign files, fed with anything for a moment (dev/fuzz/run.sh)
set -uo pipefail
cd "$(dirname "$0")/../.."
passed=0 failed=0
jobs=$(nproc)
log=build/test.log
# Only tests force these on Open MPI: root in a container.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mkdir -p build && : > "$log"

say() { printf '[%d:%02d] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }
verdict() {  # passed failed name: adds to the count; where something failed, shows the end of the log
    passed=$((passed + $1)) failed=$((failed + $2))
    if [ "$2" -gt 0 ]; then
        say "FAIL $3 ($2 of $(($1 + $2)))"
        tail -n 60 build/last.log
    else
        say "ok   $3 ($1)"
    fi
    cat build/last.log >> "$log"
}
build() {  # name, make's arguments
    local name=$1
    shift
    say "build: $name"
    if make -j"$jobs" WERROR=1 "$@" > build/last.log 2>&1; then verdict 1 0 "build $name"; else verdict 0 1 "build $name"; fi
}
one() {  # name, command: passes if it exits with 0
    local name=$1
    shift
    if "$@" > build/last.log 2>&1; then verdict 1 0 "$name"; else verdict 0 1 "$name"; fi
}
gtest() {  # name, command: counts GoogleTest's tests
    local name=$1
    shift
    "$@" > build/last.log 2>&1
    local code=$? good bad
    good=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' build/last.log | tail -n 1)
    bad=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test.*/\1/p' build/last.log | tail -n 1)
    if [ $code -ne 0 ] && [ -z "$bad" ]; then bad=1; fi  # a crash, or a sanitizer's report
    verdict "${good:-0}" "${bad:-0}" "$name"
}

suite() {  # name, command that ends with 'N passed, N failed' and shows how it goes on
    local name=$1 good bad
    shift
    "$@" 2>&1 | tee build/last.log
    good=$(sed -n '$s/^\([0-9]*\) passed, [0-9]* failed$/\1/p' build/last.log)
    bad=$(sed -n '$s/^[0-9]* passed, \([0-9]*\) failed$/\1/p' build/last.log)
    verdict "${good:-0}" "${bad:-1}" "$name"
}

scripts/install.sh build test || exit 1

build 'programs and unit tests' all unit_tests build/step_ops build/bench_stack build/bench_limit

# Meanwhile: the same under sanitizers. Plain loops for the products: the library's own threads and code would be reported, not ours.
rm -f build/address.done build/thread.done build/check.done
cuda=${CUDA:-/usr/local/cuda}
headers=$([ -e "$cuda/include/cuda_runtime.h" ] && echo yes || true)
sanitized() {  # folder, -fsanitize=, programs
    nice make -j"$jobs" SANITIZE="$2" GEMM=plain MPI=0 BUILD="build/$1" ${3//@/build/$1} > "build/$1.log" 2>&1 && touch "build/$1.done"
}
checked() {  # the kernels under the checker
    [ -z "$headers" ] || { nice make -j"$jobs" WERROR=1 simt_check > build/check.log 2>&1 && touch build/check.done; }
}
(sanitized address address,undefined "@/unit_tests @/test_comm @/test_launch${headers:+ @/simt/tests}"; sanitized thread thread '@/rank_tests @/test_comm @/test_launch'; checked; nice dev/fuzz/run.sh 0) &

gtest 'unit tests' build/unit_tests
gtest 'collectives' build/test_comm
gtest 'launch' build/test_launch

for flags in '' '--recompute 0' '--recompute 2 --zero 1' '--dtype bf16' '--dtype bf16 --grad-dtype bf16'; do
    # shellcheck disable=SC2086
    one "goldens $flags" ./test_gpt $flags
done
OMP_NUM_THREADS=1 one 'goldens, OMP_NUM_THREADS=1' ./test_gpt
for dir in dev/golden/*_tp*; do
    ranks=${dir##*_tp} ranks=${ranks%%_*}
    one "golden $(basename "$dir") under mpirun -n $ranks" mpirun --oversubscribe -n "$ranks" ./test_gpt --golden "$dir"
done
if [ -d ../shared/golden ]; then
    for dir in ../shared/golden/*; do
        model=../shared/data/stories260k
        ranks=${dir##*/tp} ranks=${ranks%%_*}
        for launcher in '' "mpirun --oversubscribe -n $ranks"; do
            # shellcheck disable=SC2086
            one "$dir ${launcher%% *}" $launcher ./test_gpt --golden "$dir" --init-from $model/hf --batch $model/golden/batch_4x65.i32
        done
    done
fi

suite 'end to end' dev/test/e2e.py
suite 'end to end, training data' dev/test/e2e_loader.py
suite 'end to end, data' dev/test/e2e_data.py
suite 'scripts of data/sets' dev/test/data_sets.py
suite 'scripts of real runs' dev/test/run_scripts.py
suite 'roofline' dev/test/test_roofline.py
suite 'workings of gpu_check' dev/test/test_gpu_check.py
suite 'bench_wire' dev/bench/bench_wire.py --quick
suite 'bench' dev/bench/bench.py --quick --no-peer --rows 130m,gpt2,tp2,gen-130m-bf16,prefill-130m-bf16,start

# The CUDA build.
if [ "$headers" ]; then
    build 'the CUDA build for the emulator' simt simt_tests kernels_lab build/simt/step_ops build/simt/bench_attention
    gtest 'emulator, and kernels in it' build/simt/tests
    one 'kernel experiments' build/simt/lab 64 96
    for flags in '' '--recompute 2 --zero 1' '--recompute 0 --dtype bf16 --grad-dtype bf16'; do
        # shellcheck disable=SC2086
        one "goldens in the emulator $flags" ./test_gpt_simt $flags
    done
    SIMT_DEVICES=4 one 'goldens in the emulator, a GPU for each rank' ./test_gpt_simt
    for dir in ../shared/golden/*; do
        model=../shared/data/stories260k
        [ ! -d "$dir" ] || one "$dir in the emulator" ./test_gpt_simt --golden "$dir" --init-from $model/hf --batch $model/golden/batch_4x65.i32
    done
    suite 'end to end, the CUDA build in the emulator' dev/test/e2e_simt.py
    one 'gpu_check.sh, in the emulator' dev/gpu_check.sh --simt --no-build
else
    say "SKIPPED: the CUDA build in the emulator: no CUDA headers in $cuda (make CUDA=folder names another)"
fi
if [ -x "$cuda/bin/nvcc" ]; then
    build 'the CUDA build by nvcc' kernels cuda build/cuda/tests build/cuda/step_ops build/cuda/lab
    suite 'attention by cuDNN' dev/test/cudnn.sh
else
    say "SKIPPED: the CUDA build by nvcc: there is none in $cuda"
fi

# The sanitized builds, made in the background above.
wait
for sanitizer in address thread; do
    folder=build/$sanitizer
    cp "build/$sanitizer.log" build/last.log
    if [ -f "$folder.done" ]; then verdict 1 0 "build $sanitizer sanitizer"; else verdict 0 1 "build $sanitizer sanitizer"; fi
    export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
    if [ $sanitizer = thread ]; then
        gtest 'in-process ranks, thread sanitizer' "$folder/rank_tests" --gtest_filter='-*Kill*:*FiniteDifferences*:*Drift*:Flags*'
    else
        gtest 'unit tests, address and undefined' "$folder/unit_tests" --gtest_filter='-*FiniteDifferences*:*Drift*'
        if [ "$headers" ]; then gtest 'kernels in the emulator, address and undefined' "$folder/simt/tests" --gtest_filter='-*ManyRows*'; fi
    fi
    gtest "collectives, $sanitizer" "$folder/test_comm"
    gtest "launch, $sanitizer" "$folder/test_launch"
done

if [ "$headers" ]; then
    cp build/check.log build/last.log
    if [ -f build/check.done ]; then verdict 1 0 'build the checker'; else verdict 0 1 'build the checker'; fi
    gtest 'kernels under the checker' build/check/simt/tests
    one 'goldens under the checker' build/check/simt/test_gpt
    SIMT_DEVICES=4 one 'goldens under the checker, a GPU for each rank' build/check/simt/test_gpt --recompute 2 --zero 1 --dtype bf16 --grad-dtype bf16
fi

one 'fuzz targets, two seconds each' dev/fuzz/run.sh 2

say "everything that was printed: $log"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
