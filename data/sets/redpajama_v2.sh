#!/usr/bin/env bash
# RedPajama V2: 84 CommonCrawl snapshots, each in 5,000 shards of each of five languages; 30.4 trillion tokens after deduplication.
#
#     data/sets/redpajama_v2.sh SNAPSHOT [LANGUAGE [FILES]]      such as 2023-06 en 100: the first 100 files of its head and middle
#
# A file is some 100 MB of .json.gz, with the text under "raw_content"; its quality signals are another 10 MB. Documents are kept by a few of
# the rules of Gopher, over those signals; KEEP replaces them: KEEP='ccnet_perplexity<500 rps_doc_word_count>=100' data/sets/redpajama_v2.sh ...
# Duplicates are lists of document ids in .parquet (duplicates/NAME.duplicates.parquet, column doc_id); as lines of text ./tokenize takes them, with
# --drop-ids FILE. With pyarrow from PyPI: python3 -c 'import sys, pyarrow.parquet as p; print(*p.read_table(sys.argv[1])["doc_id"].to_pylist(), sep="\n")' X.parquet
# Files that the listing names and the place does not have, as it says of some, are left out, with a word for each.
# Writes out/data/redpajama_v2/LANGUAGE-SNAPSHOT_000000.bin ... Needs the internet: at 1 Gbit/s about a second a file, then a minute a file on two cores.
source "$(dirname "$0")/common.sh"
parse_arguments redpajama_v2 https://data.together.xyz/redpajama-data-v2/v1.0.0 "$@"

snapshot=${rest[0]:-} language=${rest[1]:-en} files=${rest[2]:-100}
[ -n "$snapshot" ] || die 'which snapshot?' 'data/sets/redpajama_v2.sh 2023-06 en 100'
keep=${KEEP:-rps_doc_word_count>=50 rps_doc_word_count<=100000 rps_doc_mean_word_length>=3 rps_doc_mean_word_length<=10 rps_doc_symbol_to_word_ratio<=0.1}

fetch "listings/$language-$snapshot-head_middle.txt"
inputs=()
while read -r file; do
    if fetch_if_there "documents/$file.json.gz" && fetch_if_there "quality_signals/$file.signals.json.gz"; then
        inputs+=("$out/raw/documents/$file.json.gz")
    else
        echo "left out: $base has not both documents and quality signals of $file"
    fi
done < <(head -n "$files" "$out/raw/listings/$language-$snapshot-head_middle.txt")
[ ${#inputs[@]} -gt 0 ] || die "there is none of the first $files files of $language-$snapshot"
need_tokenizer
rules=()
for rule in $keep; do rules+=(--keep "$rule"); done
shards "$language-$snapshot" "${inputs[@]}" -- --text-key raw_content --signals "$out/raw/quality_signals" "${rules[@]}" --val-fraction 0.001
