# data/sets/common.sh: what the scripts of this folder share. Each takes
#     --tokenizer FILE   (default $TOKENIZER, else data/tokenizer.model)      --out FOLDER   (default out/data/NAME)
#     --base URL         (a mirror, or file:///folder)                        --fetch-only   (no shards yet)
# and, where it says so, what part of the set to take. Run again after a break, a script goes on where it stopped: whole files and
# finished shards stay as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

die() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    [ $# -lt 2 ] || printf 'HINT: %s\n' "$2" >&2
    exit 1
}

# Sets tokenizer, out, base, fetch_only and rest (the words that are not of the four flags). $1: name of the set, $2: its address.
parse_arguments() {
    tokenizer=${TOKENIZER:-data/tokenizer.model} out=out/data/$1 base=$2 fetch_only=
    rest=()
    shift 2
    while [ $# -gt 0 ]; do
        case $1 in
            --tokenizer | --out | --base)
                [ $# -gt 1 ] || die "$1 needs a value"
                printf -v "${1#--}" %s "$2"
                shift
                ;;
            --fetch-only) fetch_only=1 ;;
            -h | --help)
                sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
                exit 0
                ;;
            -*) die "unknown flag '$1'" "--help shows what there is" ;;
            *) rest+=("$1") ;;
        esac
        shift
    done
    mkdir -p "$out/raw"
}

# fetch's: $base/$file -> $to.part; sets status to curl's exit code, or to NOT_THERE.
NOT_THERE=44
download() {
    local answer
    status=0
    answer=$(curl --fail --location --retry 5 --retry-delay 2 --silent --show-error --write-out '%{http_code}' "$@" --output "$to.part" "$base/$file") || status=$?
    if [ "$answer" = 404 ] || [ $status = 37 ]; then status=$NOT_THERE; fi  # 37: a file:// that is not there
}

# Path under $base -> the same path under $out/raw (or $2). Goes on with a file that an earlier run left in part. False where there is none.
fetch_if_there() {
    local file=$1 to=$out/raw/${2:-$1} status
    [ -f "$to" ] && return
    command -v curl > /dev/null || die "curl is not installed" "apt-get install curl"
    mkdir -p "$(dirname "$to")"
    echo "fetching $base/$file"
    download --continue-at -
    case $status in
        22 | 33 | 36) rm -f "$to.part" && download ;;  # a part that is the whole file already, or of another one
    esac
    if [ $status = $NOT_THERE ]; then return 1; fi
    [ $status = 0 ] || die "cannot fetch $base/$file" "this needs the internet (or --base URL of a mirror); run it again to go on"
    mv "$to.part" "$to" || die "cannot write $to"
}
fetch() { fetch_if_there "$@" || die "there is no $base/$1" "--base URL of a mirror, if the set has moved"; }

need_tokenizer() {
    [ -z "$fetch_only" ] || exit 0
    [ -e "$tokenizer" ] || die "no tokenizer '$tokenizer'" \
        'pass --tokenizer FILE: a SentencePiece tokenizer.model, or GPT-2'\''s vocab.bpe beside its encoder.json; ./tokenize --train-tokenizer makes one'
    [ -x ./tokenize ] || make tokenize
}

# shards NAME INPUT... [-- FLAGS]: $out/NAME_000000.bin and so on, unless they are all there.
shards() {
    local name=$1 inputs=()
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do inputs+=("$1") && shift; done
    [ $# -eq 0 ] || shift
    if [ -f "$out/$name.json" ]; then
        echo "$out/$name: there already"
        return
    fi
    local resume=()
    [ ! -f "$out/$name.resume.json" ] || resume=(--resume)
    ./tokenize --tokenizer "$tokenizer" --out "$out/$name" "$@" ${resume[@]+"${resume[@]}"} "${inputs[@]}"
}
