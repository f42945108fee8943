#!/usr/bin/env bash
# RedPajama 1T: 1.2 trillion tokens in seven subsets, the data of the paper. 2,084 .jsonl files, 2.67 TB (only common_crawl is packed).
#
#     data/sets/redpajama_1t.sh [SUBSET...]      arxiv book c4 common_crawl github stackexchange wikipedia; all of them if none is named
#
#     wikipedia 111 GB, stackexchange 74 GB, arxiv 87 GB, github 212 GB, c4 806 GB, common_crawl 1.34 TB (.zst), book 100 GB (withdrawn by its
#     publisher: is skipped where the list has no such file). At 1 Gbit/s some 6 hours for all; ./tokenize prints its own speed and time left.
# Writes out/data/redpajama_1t/SUBSET_000000.bin ...; ./train_gpt --train @data/redpajama-1t.mix mixes them by their shares.
# Needs the internet.
source "$(dirname "$0")/common.sh"
parse_arguments redpajama_1t https://data.together.xyz/redpajama-data-1T/v1.0.0 "$@"

fetch urls.txt
for subset in ${rest[@]+"${rest[@]}"}; do
    grep -q "/$subset/" "$out/raw/urls.txt" || die "no subset '$subset' in $base/urls.txt" "arxiv book c4 common_crawl github stackexchange wikipedia"
done
[ ${#rest[@]} -gt 0 ] || rest=(arxiv book c4 common_crawl github stackexchange wikipedia)
for subset in "${rest[@]}"; do
    sed -n "s|.*/\($subset/.*\)|\1|p" "$out/raw/urls.txt" | while read -r file; do fetch "$file"; done
done
need_tokenizer
for subset in "${rest[@]}"; do
    [ -d "$out/raw/$subset" ] || continue
    shards "$subset" "$out/raw/$subset" -- --val-fraction 0.001
done
