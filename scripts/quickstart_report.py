#!/usr/bin/python3
"""What scripts/quickstart.sh ends with: text before and after training, the loss against a unigram model, the picture.

    scripts/quickstart_report.py LOG --train 'x_0*.bin' --val 'x_val_*.bin' [--out FILE.png]
"""
import argparse
import glob
import json
import sys
import textwrap

import plot
import numpy as np

SHARDS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}  # llm.c's magic and version -> type of an id
HEADER = 256  # i32: magic, version, tokens, zeros


def read_shard(path):
    header = np.fromfile(path, dtype="<i4", count=HEADER)
    ids = SHARDS.get(tuple(header[:2]))
    if header.size < HEADER or ids is None:
        sys.exit(f"quickstart_report.py: '{path}' is not a shard of token ids")
    return np.fromfile(path, dtype=ids, count=header[2], offset=4 * HEADER).astype(np.int64)


def read_shards(pattern):
    paths = sorted(glob.glob(pattern))
    if not paths:
        sys.exit(f"quickstart_report.py: no shard matches '{pattern}'")
    return [read_shard(path) for path in paths]


def unigram_loss(train, val, vocab, seq):
    """Nats per token of the model that knows only how often each token occurs: add-one smoothed frequencies of the training
    tokens, on exactly the tokens that the trainer's validation predicts: windows of seq + 1 that overlap by one."""
    counts = np.bincount(np.concatenate(train), minlength=vocab) + 1.0
    nats = -np.log(counts / counts.sum())
    predicted = np.concatenate([ids[1 : 1 + (ids.size - 1) // seq * seq] for ids in val])
    return nats[predicted].mean(), predicted.size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", metavar="LOG", help="what train_gpt --log wrote")
    parser.add_argument("--train", required=True, metavar="GLOB", help="the shards trained on")
    parser.add_argument("--val", required=True, metavar="GLOB", help="the shards validated on")
    parser.add_argument("--out", metavar="FILE.png", help="the picture")
    options = parser.parse_args()
    sys.stdout.reconfigure(errors="replace")  # an untrained model writes any character; not every terminal can

    records = list(plot.Run.read(options.log))
    of_kind = lambda kind: [r for r in records if r.get("kind") == kind]
    flags = of_kind("run")[-1]["flags"]
    losses = [r["loss"] for r in of_kind("val")]
    samples = of_kind("sample")
    unigram, tokens = unigram_loss(read_shards(options.train), read_shards(options.val), flags["vocab"], flags["seq"])

    for sample in samples[:1] + samples[1:][-1:]:
        print("What the model wrote " + (f"after {sample['step']} steps:" if sample["step"] else "before training:"))
        for line in sample["text"].splitlines():
            printable = "".join(c if c.isprintable() else "\ufffd" for c in line)
            print(textwrap.fill(printable, 110, initial_indent="    ", subsequent_indent="    "))
        print()
    print(f"Loss in nats per token, on {tokens} tokens of chapters that were kept out of training:")
    print(f"    this model                            {losses[-1]:.4f}   ({losses[0]:.4f} before training)")
    print(f"    unigram model (token frequencies)     {unigram:.4f}")
    if not losses[-1] < unigram:
        sys.exit("quickstart_report.py: the model is not better than token frequencies alone: something is wrong with this training")
    print("\nLoss curves, a picture to open:")
    print("    ", end="", flush=True)
    title = f"King James Bible, {flags['tp']} tensor-parallel ranks, sync factor {flags['sync_factor']:g}"
    plot.main([options.log, "--reference", f"{unigram}=unigram model", "--title", title] + (["--out", options.out] if options.out else []))


if __name__ == "__main__":
    main()
