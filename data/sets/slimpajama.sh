#!/usr/bin/env bash
# SlimPajama: RedPajama 1T without its duplicates, 627 billion tokens. 59,166 files of .jsonl.zst in ten chunks, 895 GB.
#
#     data/sets/slimpajama.sh CHUNK [FIRST LAST]      such as 1 0 99: files 0 to 99 of chunk 1 (a chunk has some 5,900, of 15 MB each)
#
# Writes out/data/slimpajama/chunk1-0-99_000000.bin ... Validation is the first file of the set's own held-out part
# (validation/chunk1 to chunk5).
# Needs the internet: at 1 Gbit/s two hours for all.
source "$(dirname "$0")/common.sh"
parse_arguments slimpajama https://huggingface.co/datasets/cerebras/SlimPajama-627B/resolve/main "$@"

chunk=${rest[0]:-} first=${rest[1]:-0} last=${rest[2]:-99}
[ -n "$chunk" ] || die 'which chunk (1 to 10)?' 'data/sets/slimpajama.sh 1 0 99'
inputs=()
for ((i = first; i <= last; i++)); do
    fetch "train/chunk$chunk/example_train_$i.jsonl.zst"
    inputs+=("$out/raw/train/chunk$chunk/example_train_$i.jsonl.zst")
done
fetch validation/chunk1/example_holdout_0.jsonl.zst
need_tokenizer
shards "chunk$chunk-$first-$last" "${inputs[@]}"
shards validation "$out/raw/validation/chunk1/example_holdout_0.jsonl.zst"
