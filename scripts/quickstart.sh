#!/usr/bin/env bash
# scripts/quickstart.sh [--anew]   from a fresh Debian to a trained language model, in a few minutes on two cores.
#
# Installs what is missing (it says what), builds, trains a tokenizer on the King James Bible, then a small Llama on two tensor-parallel
# ranks that synchronise half of their channels, and shows what it learned. Everything it writes is in out/quickstart and build.
# An interrupted training goes on where it stopped when this is run again; --anew removes out/quickstart first.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=out/quickstart

case ${1:-} in
    '') ;;
    --anew) rm -rf "$dir" ;;
    *)
        echo 'usage: scripts/quickstart.sh [--anew]' >&2
        exit 2
        ;;
esac

step() { printf '\n=== %s  [%d:%02d]\n' "$1" $((SECONDS / 60)) $((SECONDS % 60)); }

step 'What this needs'
scripts/install.sh build demo
echo 'All there.'

step 'Build'
mkdir -p "$dir"
if ! make -j"$(nproc)" train_gpt tokenize > "$dir/build.log" 2>&1; then
    tail -n 30 "$dir/build.log" >&2
    echo "quickstart.sh: the build failed; all of its output is in $PWD/$dir/build.log" >&2
    exit 1
fi
echo 'Built ./train_gpt and ./tokenize.'

step 'Text, tokenizer, shards'
if [ ! -f "$dir/kjv.json" ]; then  # ./tokenize writes it last
    data/bible_chapters.sh > "$dir/kjv.txt"
    ./tokenize --train-tokenizer 2048 --doc-separator blank-lines --out "$dir/kjv.model" "$dir/kjv.txt"
    ./tokenize --tokenizer "$dir/kjv.model" --doc-separator blank-lines --val-fraction 0.05 --out "$dir/kjv" "$dir/kjv.txt"
fi

step 'Training: 2 tensor-parallel ranks, half of the channels synchronised'
./train_gpt --model demo --tp 2 --sync-factor 0.5 \
    --train "$dir/kjv_0*.bin" --val "$dir/kjv_val_*.bin" --tokenizer "$dir/kjv.model" \
    --steps 500 --val-every 50 --val-batches 0 \
    --prompt 'And the LORD said' --sample-every 500 --temperature 0.8 --top-k 40 \
    --out "$dir/model" --save-every 100 --keep 1 --resume --log "$dir/train.jsonl" || {
    status=$?
    if [ "$status" -gt 128 ]; then
        echo 'Stopped. Run scripts/quickstart.sh again to go on from here.' >&2
    else
        echo 'quickstart.sh: the training failed. HINT: scripts/quickstart.sh --anew starts without what is left of an earlier one' >&2
    fi
    exit "$status"
}

step 'What it learned'
scripts/quickstart_report.py "$dir/train.jsonl" --train "$dir/kjv_0*.bin" --val "$dir/kjv_val_*.bin" --out "$dir/loss.png"

cat << END

Try next:
  more text of this model    ./train_gpt --checkpoint $dir/model --prompt 'In the beginning' --generate 200
  train it further           ./train_gpt --resume --out $dir/model --steps 1000
  your own text              ./tokenize --train-tokenizer 4096 --out out/my.model my.txt
                             ./tokenize --tokenizer out/my.model --split-documents 10000 --val-fraction 0.05 --out out/my my.txt
                             ./train_gpt --model demo --vocab 4096 --tp 2 --sync-factor 0.5 --train 'out/my_0*.bin' --val 'out/my_val_*.bin' \\
                                 --tokenizer out/my.model --out out/my-model --log out/my.jsonl --steps 500 --val-every 50
  curves of any run          scripts/plot.py out/my.jsonl
  all flags                  ./train_gpt --help
END
printf '\nDone in %d min %02d s.\n' $((SECONDS / 60)) $((SECONDS % 60))
