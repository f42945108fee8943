#!/usr/bin/env bash
# TinyShakespeare: 1.1 MB of plays in one .txt; seconds. With Llama-2's tokenizer 368,633 tokens and the one EOS at its end.
#
#     data/sets/tinyshakespeare.sh
#
# Cut at the first line end from every 4,096 bytes on, so that a tenth can be held out. Writes out/data/tinyshakespeare/train_000000.bin,
# train_val_000000.bin. Needs the internet.
source "$(dirname "$0")/common.sh"
parse_arguments tinyshakespeare https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare "$@"

fetch input.txt
need_tokenizer
shards train "$out/raw/input.txt" -- --split-documents 4096 --val-fraction 0.1
