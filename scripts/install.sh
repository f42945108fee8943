#!/usr/bin/env bash
# scripts/install.sh [build] [demo] [test] [fuzz]   installs from Debian what is missing, and says what and why.
#
# What is there already, from wherever, is found by looking for it (a command, a header, a Python module), and then nothing is done:
# no root, no network. Debian 12 and 13 and their derivatives; on other systems it lists what to install.
set -euo pipefail

# package           how to see that it is there           why
BUILD='
g++                 command g++                           compiles everything (C++20)
make                command make                          runs the build
libdnnl-dev         header oneapi/dnnl/dnnl.hpp           oneDNN: matrix products on the CPU
libopenmpi-dev      command mpicxx                        ranks as processes, also on several machines
openmpi-bin         command mpirun                        starts them
libsentencepiece-dev header sentencepiece_trainer.h       tokenizers
libxxhash-dev       header xxhash.h                       checksums of checkpoints and shards
nlohmann-json3-dev  header nlohmann/json.hpp              logs, checkpoint indices, Hugging Face files
libcli11-dev        header CLI/CLI.hpp                    command lines
libsimdjson-dev     header simdjson.h                     reads JSON Lines in ./tokenize
libzstd-dev         header zstd.h                         reads .zst in ./tokenize
libisal-dev         header isa-l/igzip_lib.h              reads .gz in ./tokenize
'
DEMO='
bible-kjv           command bible                         English text to train on
python3-matplotlib  python matplotlib                     draws the loss curves
'
TEST='
libgtest-dev        header gtest/gtest.h                  unit tests
zlib1g-dev          header zlib.h                         unit tests: packs what ./tokenize unpacks
python3             command python3                       end-to-end tests
python3-matplotlib  python matplotlib                     the test of the loss curves
bible-kjv           command bible                         the test of data/sets/debian_texts.sh
fortunes            file /usr/share/games/fortunes        the test of data/sets/debian_texts.sh
curl                command curl                          the tests of data/sets
zstd                command zstd                          the tests of data/sets
locales             file /usr/share/i18n/locales/de_DE    a locale with a decimal comma
procps              command pgrep                         tests look for processes that must have ended
'
FUZZ='
clang               command clang++                       dev/fuzz: the compiler that has libFuzzer
libclang-rt-dev     fuzzer clang++                        dev/fuzz: libFuzzer itself
'

fail() {
    printf 'install.sh: %s\n' "$@" >&2
    exit 1
}

there() {  # kind name
    case $1 in
        command) command -v "$2" > /dev/null ;;
        file) [ -e "$2" ] ;;
        header) command -v g++ > /dev/null &&
            printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$2" | g++ -x c++ -fsyntax-only - 2> /dev/null ;;
        fuzzer) echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
            "$2" -x c++ -fsanitize=fuzzer - -o /dev/null 2> /dev/null ;;
        # Debian's Python: the scripts run with it, whatever other Python comes first in the PATH.
        python) /usr/bin/python3 -c "import importlib.util as u, sys; sys.exit(u.find_spec('$2') is None)" 2> /dev/null ;;
    esac
}

wanted=
for group in "${@:-all}"; do
    case $group in
        build) wanted+=$BUILD ;;
        demo) wanted+=$DEMO ;;
        test) wanted+=$TEST ;;
        fuzz) wanted+=$FUZZ ;;
        all) wanted+=$BUILD$DEMO$TEST ;;
        *)
            printf 'usage: scripts/install.sh [build] [demo] [test] [fuzz]   (no group: all but fuzz)\n' >&2
            exit 2
            ;;
    esac
done

packages=() reasons=()
while read -r package kind name why; do
    if [ -z "$package" ] || [[ " ${packages[*]-} " == *" $package "* ]]; then continue; fi
    there "$kind" "$name" && continue
    packages+=("$package")
    reasons+=("$why")
done <<< "$wanted"
if [ ${#packages[@]} -eq 0 ]; then exit 0; fi

list() {
    for i in "${!packages[@]}"; do printf '  %-22s%s\n' "${packages[i]}" "${reasons[i]}"; done
}

if ! command -v apt-get > /dev/null; then
    list >&2
    fail 'there is no apt-get here: install these (named as in Debian) with your package manager, then run this again.'
fi
root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo > /dev/null; then
        list >&2
        fail 'installing these needs root, and there is no sudo.' "HINT: as root: apt-get install ${packages[*]}"
    fi
    root=(sudo)
    if [ ! -t 0 ]; then root=(sudo -n); fi  # nobody there to type a password: fail at once instead of waiting
fi

cd "$(dirname "$0")/.."
mkdir -p out
log=out/install.log
apt() {  # output to the log only
    ${root[@]+"${root[@]}"} env LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "$@" >> "$log" 2>&1 < /dev/null
}
if [ ${#root[@]} -gt 0 ] && ! "${root[@]}" true; then
    list >&2
    fail 'installing these needs root, and sudo refuses.' "HINT: as root: apt-get install ${packages[*]}"
fi

: > "$log"
apt update || true  # a broken source of something else must not stop this; if ours is broken, the installation says so
for i in "${!packages[@]}"; do
    # The name of newer Debian.
    if [ "${packages[i]}" = libdnnl-dev ] && [ -z "$(apt-cache --names-only search '^libdnnl-dev$' 2> /dev/null)" ]; then packages[i]=libonednn-dev; fi
done
printf 'Installing from Debian, with what they need (log: %s):\n' "$log"
list
if ! apt install -y --no-install-recommends "${packages[@]}"; then
    grep -E '^(E|W|Err):?' "$log" | sort -u | tail -n 8 >&2 || tail -n 8 "$log" >&2
    fail 'apt-get could not install them.' "HINT: is the network up? All of the output is in $PWD/$log"
fi
for i in "${!packages[@]}"; do
    dpkg-query -W -f '${db:Status-Status}' "${packages[i]}" 2> /dev/null | grep -q '^installed$' || fail "${packages[i]} is still missing (log: $PWD/$log)"
done
