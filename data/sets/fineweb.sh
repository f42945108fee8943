#!/usr/bin/env bash
# FineWeb, its sample of 10 billion tokens, as shards that others have made with GPT-2's tokenizer in llm.c's format: nothing to tokenize.
#
#     data/sets/fineweb.sh [SHARDS]      how many of the 103 training shards to take (100 million tokens, 200 MB each); 9 if not said
#
# Fetches out/data/fineweb/fineweb_train_000001.bin ... and fineweb_val_000000.bin, and verifies them. Needs the internet: two seconds a shard
# at 1 Gbit/s. Train with --vocab 50257, and generate with --tokenizer FOLDER of GPT-2's encoder.json and vocab.bpe.
source "$(dirname "$0")/common.sh"
parse_arguments fineweb https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main "$@"

fetch fineweb_val_000000.bin ../fineweb_val_000000.bin
for ((i = 1; i <= ${rest[0]:-9}; i++)); do
    shard=$(printf 'fineweb_train_%06d.bin' "$i")
    fetch "$shard" "../$shard"
done
[ -z "$fetch_only" ] || exit 0
[ -x ./tokenize ] || make tokenize
./tokenize --verify --vocab 50257 "$out"/fineweb_*.bin
