#!/usr/bin/env bash
# RedPajama 1T sample: one file for each subset, in all some 1 billion tokens, 5 GB of .jsonl.
#
#     data/sets/redpajama_sample.sh [SUBSET...]      arxiv book c4 cc_2019-30 cc_2020-05 cc_2021-04 cc_2022-05 cc_2023-06 github stackexchange wikipedia
#
# Writes out/data/redpajama_sample/SUBSET_000000.bin ... Needs the internet: minutes, then about as long for the shards.
source "$(dirname "$0")/common.sh"
parse_arguments redpajama_sample https://huggingface.co/datasets/togethercomputer/RedPajama-Data-1T-Sample/resolve/main "$@"

[ ${#rest[@]} -gt 0 ] || rest=(arxiv book c4 cc_2019-30 cc_2020-05 cc_2021-04 cc_2022-05 cc_2023-06 github stackexchange wikipedia)
for subset in "${rest[@]}"; do fetch "${subset}_sample.jsonl"; done
need_tokenizer
for subset in "${rest[@]}"; do shards "$subset" "$out/raw/${subset}_sample.jsonl" -- --val-fraction 0.01; done
