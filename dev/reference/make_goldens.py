#!/usr/bin/env python3
"""Makes every model and golden of dev/golden anew, the same bytes each time: `git diff --stat dev/golden` is then empty.

  make_goldens.py [--selfcheck] [--out DIR]      needs torch and numpy; half a minute on one core
"""
import argparse, os
from types import SimpleNamespace
import numpy as np
import torch
import caat_reference as caat
import make_tiny_model

# Every model differs from the field's defaults somewhere: head size, rope base, eps, tied or not, FFN, context.
MODELS = {
    "llama_hs20": "--layers 2 --channels 40 --heads 2 --kv-heads 1 --ffn 17 --vocab 61 --no-tie --seed 1",
    "llama_gqa": "--layers 2 --channels 32 --heads 8 --kv-heads 4 --ffn 20 --vocab 53 --rope-base 500000 --norm-eps 1e-6 --seed 2",
    "llama_t3": "--layers 2 --channels 36 --heads 6 --kv-heads 3 --ffn 21 --vocab 97 --no-tie --seed 3",
    "gpt_learned": "--arch gpt --layers 2 --channels 50 --heads 2 --ffn 22 --vocab 61 --context 19 --seed 4",
    "gpt_rotary": "--arch gpt --positions rotary --layers 1 --channels 30 --heads 3 --ffn 33 --vocab 50 --no-tie --seed 5",
    "gpt_v9": "--arch gpt --layers 1 --channels 20 --heads 4 --vocab 9 --context 16 --no-tie --seed 6",
}

# How far fp32 may be from the five losses and norms, relative. A float32 run of caat_reference is within 2e-7 on all of these,
# while decay on the wrong tensors, another beta2, eps or no clipping shift the losses or norms by 6e-5 to 1e-2, which the 2e-3
# and 5e-3 that do for a trained model would let through.
STEPS_TOLERANCE = {"losses": 5e-6, "grad_norms": 1e-5}

# model, T, p (as text: it names the folder), rows, ids a row
GOLDENS = [
    ("llama_hs20", 1, "1", 2, 14),      # plain: GQA with one KV head, head size 20, odd S
    ("llama_gqa", 2, "0.5", 2, 14),     # vocabulary shards 27 and 26
    ("llama_gqa", 2, "0", 2, 14),       # nothing shared
    ("llama_gqa", 2, "1", 2, 14),       # ordinary tensor parallelism
    ("llama_gqa", 4, "0.25", 3, 10),    # one KV head a rank; shards 14, 14, 14, 11
    ("llama_t3", 3, "0.3", 1, 24),      # k = 10 of 36; shards 33, 33, 31; a factor sqrt(3) that is no power of two
    ("gpt_learned", 2, "0.58", 2, 14),  # head size 25; tied; k = 28, but 29 in exact or in float arithmetic
    ("gpt_rotary", 3, "0.7", 2, 14),    # k = 21, but 20 where p is parsed as a float
    ("gpt_v9", 4, "0.5", 3, 12),        # shards 3, 3, 3 and none: the last rank owns no vocabulary
]


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = os.path.dirname(os.path.abspath(__file__))
    a.add_argument("--out", default=os.path.join(here, "..", "golden"), metavar="DIR")
    a.add_argument("--selfcheck", action="store_true", help="also check each by finite differences")
    o = a.parse_args()
    torch.set_num_threads(1)

    for name, flags in MODELS.items():
        make_tiny_model.make(flags.split() + ["--out", os.path.join(o.out, "models", name)])
    for number, (model, T, p, rows, length) in enumerate(GOLDENS):
        name = f"{model}_tp{T}_p{p}"
        print(name)
        m, w, ranks = caat.load(os.path.join(o.out, "models", model),
                                SimpleNamespace(tp=T, sync_factor=float(p), private_scale="forward", vocab_multiple=0))
        ids = np.random.RandomState(100 + number).randint(0, m.V, (rows, length))
        batch = torch.from_numpy(ids.astype(np.int64))
        if o.selfcheck and not caat.selfcheck(m, w, batch, ranks):
            raise SystemExit(f"{name}: self-check failed")
        facts, logits, per_token, grads = caat.golden(m, w, batch, ranks)
        # Exact zeros, such as the gradient of GPT-2's key bias (softmax does not see it), come out as noise that differs by BLAS.
        for g in grads.values():
            g[g.abs() < 1e-14 * facts["grad_norms"][0]] = 0
        folder = os.path.join(o.out, name)
        facts.update(model=f"../models/{model}", batch="batch.i32", steps_tolerance=STEPS_TOLERANCE)
        caat.write_golden(folder, facts, logits, per_token, grads)
        ids.astype("<i4").tofile(os.path.join(folder, "batch.i32"))


if __name__ == "__main__":
    main()
