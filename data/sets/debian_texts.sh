#!/usr/bin/env bash
# English texts that Debian packages bring: the King James Bible (bible-kjv, 4.4 MB, a chapter a document) and epigrams (fortunes, 1 MB). No internet
# but Debian's mirror; seconds. Without --tokenizer it trains one of 4,096 pieces on them.
#
#     data/sets/debian_texts.sh
#
# Writes out/data/debian_texts/bible_000000.bin, fortunes_000000.bin and their validation parts. ./train_gpt --train '0.8:out/data/debian_texts/bible_0*.bin,0.2:out/data/debian_texts/fortunes_0*.bin'
source "$(dirname "$0")/common.sh"
parse_arguments debian_texts '' "$@"

for package in bible-kjv:/usr/bin/bible fortunes:/usr/share/games/fortunes; do
    [ -e "${package#*:}" ] || die "the package ${package%:*} is not installed" "apt-get install ${package%:*}"
done
data/bible_chapters.sh > "$out/raw/bible.txt"
cat /usr/share/games/fortunes/{literature,people,science,wisdom,work,law,education} > "$out/raw/fortunes.txt"
[ -x ./tokenize ] || make tokenize
if [ ! -e "$tokenizer" ]; then
    tokenizer=$out/tokenizer.model
    [ -e "$tokenizer" ] || ./tokenize --train-tokenizer 4096 --split-documents 4096 --out "$tokenizer" "$out/raw/bible.txt" "$out/raw/fortunes.txt"
fi
need_tokenizer
shards bible "$out/raw/bible.txt" -- --doc-separator blank-lines --val-fraction 0.05
shards fortunes "$out/raw/fortunes.txt" -- --doc-separator % --val-fraction 0.05
