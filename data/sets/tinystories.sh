#!/usr/bin/env bash
# TinyStories (its second version, all by GPT-4): 2.7 million short stories, 2.2 GB of .txt; some 540 million tokens with Llama-2's tokenizer.
#
#     data/sets/tinystories.sh
#
# A line <|endoftext|> ends a story. Writes out/data/tinystories/train_000000.bin ..., val_000000.bin. Needs the internet: a minute, and some
# minutes for the shards on two cores.
source "$(dirname "$0")/common.sh"
parse_arguments tinystories https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main "$@"

for part in train valid; do fetch "TinyStoriesV2-GPT4-$part.txt"; done
need_tokenizer
shards train "$out/raw/TinyStoriesV2-GPT4-train.txt" -- --doc-separator '<|endoftext|>'
shards val "$out/raw/TinyStoriesV2-GPT4-valid.txt" -- --doc-separator '<|endoftext|>'
