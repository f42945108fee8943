#!/usr/bin/env bash
# data/bible_chapters.sh   the King James Bible of Debian's bible-kjv to standard output: a verse a line, an empty line after each chapter,
# so that a chapter can be a document and validation is on whole chapters that training never sees.
set -euo pipefail
bible -f 'gen1:1-rev22:21' | awk '{
    chapter = $1; sub(/:[0-9]+$/, "", chapter)
    if (NR > 1 && chapter != last) print ""
    last = chapter
    print substr($0, length($1) + 2)
}'
