#!/usr/bin/env python3
"""Makes dev/golden/megatron anew, the same bytes each time: small Megatron sets and the order in which Megatron-LM draws from them.

  make_megatron_goldens.py [--out DIR]      needs numpy and xxhash; a few seconds

Written from the rules, not from the C++: a sample is found by where its first token lies in the shuffled documents, one after the other,
and NumPy itself shuffles and adds.
"""
import argparse, json, math, os, struct
import numpy as np
import xxhash

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_set(prefix, documents, dtype):
    lengths = np.array([len(d) for d in documents], dtype="<i4")
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)[:-1])) * np.dtype(dtype).itemsize
    with open(prefix + ".idx", "wb") as f:
        f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(documents), len(documents) + 1))
        f.write(lengths.tobytes() + starts.astype("<i8").tobytes() + np.arange(len(documents) + 1, dtype="<i8").tobytes())
    with open(prefix + ".bin", "wb") as f:
        f.write(np.concatenate(documents).astype(dtype).tobytes())


def normalize(weights):
    weights = np.array(weights, dtype=np.float64)
    return (weights / np.sum(weights)).tolist()


def split_ranges(split, n):
    shares = [float(x) for x in split.split(",")]
    shares = normalize(shares + [0.0] * (3 - len(shares)))
    ends = [0]
    for share in shares:
        ends.append(ends[-1] + share)
    return [[round(a * float(n)), round(b * float(n))] for a, b in zip(ends, ends[1:])]


def epochs_of(T, S, N, keep=False):
    epochs = 1
    while epochs * T < N * S + 1:
        epochs += 1
    tokens = epochs * T
    samples = math.ceil(np.float32(np.float32(tokens - 1) / np.float32(S))) if keep else (tokens - 1) // S
    before_final = ((epochs - 1) * T - 1) // S if epochs > 1 else 0
    apart = epochs > 1 and N - before_final < int(0.80 * ((T - 1) // S))
    return {"epochs": epochs, "samples": int(samples), "apart": apart, "before_final": before_final}


def order(lengths, lo, hi, S, N, seed, keep=False):
    documents = np.arange(lo, hi, dtype=np.int32)
    T = int(lengths[lo:hi].astype(np.int64).sum())
    e = epochs_of(T, S, N, keep)
    random = np.random.RandomState(seed)

    def shuffled(values):
        random.shuffle(values)
        return values

    E, n = e["epochs"], e["samples"]
    if e["apart"]:
        places = np.concatenate([shuffled(np.tile(documents, E - 1)), shuffled(documents.copy())])
    else:
        places = shuffled(np.tile(documents, E))
    ends = np.cumsum(lengths[places], dtype=np.int64)
    rows = [(0, 0)]
    for i in range(1, n + 1):
        token = i * S
        if token < E * T:
            place = int(np.searchsorted(ends, token, side="right"))
            rows.append((place, token - int(ends[place] - lengths[places[place]])))
        else:
            rows.append((len(places) - 1, int(lengths[places[-1]]) - 1))
    cut = e["before_final"] if e["apart"] else n
    samples = np.arange(n, dtype=np.uint32)
    samples = np.concatenate([shuffled(samples[:cut].copy()), shuffled(samples[cut:].copy())])
    return e | {"tokens_per_epoch": T}, places, np.array(rows, dtype=np.int32), samples


def blend(weights, n):
    """The i-th sample comes from the set that is furthest behind its share, the first of equals."""
    weights = np.array(weights, dtype=np.float64)
    counts = np.zeros(len(weights))
    picks = []
    for i in range(n):
        pick = int(np.argmax(weights * max(float(i), 1.0) - counts))
        counts[pick] += 1
        picks.append(pick)
    return picks


def pseudo_random_states(n):
    """Also written in the test, which has no NumPy."""
    states, x = [], 1
    for _ in range(n):
        x = (x * 1103515245 + 12345) % 2**31
        states.append(x)
    return states


def pseudo_random_lengths(n):
    return np.array([(x >> 16) % 500 for x in pseudo_random_states(n)], dtype=np.int32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.path.join(os.path.dirname(__file__), "../golden/megatron"))
    out = parser.parse_args().out
    os.makedirs(out, exist_ok=True)
    hash_of = lambda array: xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).tobytes())

    # Documents without tokens first, in the middle (two in a row) and last; of one token; longer than a sample.
    random = np.random.RandomState(7)
    small = np.array([0, 5, 1, 13, 0, 0, 2, 1, 40, 7, 1, 1, 9, 3, 21, 6, 0, 11, 4, 8, 30, 2, 0], dtype=np.int32)
    documents = [random.randint(0, 250, size=n) for n in small]
    for dtype in ("uint16", "int32"):
        write_set(os.path.join(out, "small_" + dtype), documents, dtype)

    T = int(small.sum())
    orders = []

    def add(name, lengths, S, N, seed=1234, split="1", part=0, keep=False):
        lo, hi = split_ranges(split, len(lengths))[part]
        e, places, rows, samples = order(lengths, lo, hi, S, N, seed, keep)
        case = {"set": name, "S": S, "wanted": N, "seed": seed, "split": split, "part": part, "keep": keep, "range": [lo, hi]} | e
        if name == "small":
            case |= {"document_index": places.tolist(), "sample_index": rows.reshape(-1).tolist(), "shuffle_index": samples.tolist()}
        else:
            case |= {"document_index": hash_of(places), "sample_index": hash_of(rows), "shuffle_index": hash_of(samples)}
        orders.append(case)

    full = (T - 1) // 8
    for N in (0, 1, full, full + 1, 2 * full, int(7.5 * full)):  # less than, exactly and just more than one epoch, two, seven and a half
        add("small", small, 8, N)
    for seed in (0, 1, 2**32 - 1):
        add("small", small, 8, full + 5, seed)
    for more in (-1, 0, 1):  # the last epoch apart, then not
        add("small", small, 8, full + int(0.80 * full) + more)
    add("small", small, 1, 3)
    add("small", small, 100, 4)  # samples that take in many documents
    add("small", small, T - 1, 1)  # one sample an epoch
    add("small", small, T - 1, 3)
    for part in (0, 1, 2):
        add("small", small, 4, 9, split="6,2,2", part=part)
    add("small", small, 8, 0, keep=True)
    add("small", small, 7, 30, keep=True)
    large = pseudo_random_lengths(20000)
    for S, N, split in ((2048, 2000, "1"), (2048, 6000, "1"), (1024, 10000, "969,30,1"), (256, 25000, "98,2"), (128, 100, "90,5,5")):
        add("large", large, S, N, split=split, part=1 if split == "90,5,5" else 0)

    splits = [
        {"split": s, "documents": n, "ranges": split_ranges(s, n)}
        for s in ("969,30,1", "949,50,1", "1", "1,1", "98,2,0", "0,1", "0,0,1", "0.7,0.2,0.1", "3,3,3", "99.5,.25,0.25", "1,0,1")
        for n in (0, 1, 3, 5, 1000, 123457, 2**31 - 1)
    ]
    counts = []
    random = np.random.RandomState(3)
    for _ in range(60):
        S = int(random.choice([1, 7, 256, 1024, 2048, 4096]))
        T = int(10 ** random.uniform(math.log10(S + 1), 11)) + 1
        N = max(1, int((T - 1) // S * random.uniform(0, 9)) + int(random.randint(-1, 2)))
        e, kept = epochs_of(T, S, N), epochs_of(T, S, N, True)
        counts.append([T, S, N, e["epochs"], e["samples"], int(e["apart"]), e["before_final"], kept["samples"]])

    blends = []
    for weights in ([0.7, 0.3], [1, 1, 1], [878, 175, 59, 26, 28, 24, 20], [0.1] * 10, [1, 2, 3, 4, 5, 6, 7, 8, 9.5], [1e-3, 1, 1e3],
                    (np.arange(1, 21) ** 1.5).tolist(), (1 / np.arange(1, 301)).tolist()):
        once = normalize(weights)
        twice = normalize(once)
        picks = blend(twice, 5000)
        requests = [[int(math.ceil(math.ceil(n * w) * (1 + 0.005))) for w in once] for n in (1, 1000, 305175781)]
        blends.append({"weights": weights, "once": hash_of(np.array(once)), "twice": hash_of(np.array(twice)), "picks": picks[:60],
                       "picks_hash": hash_of(np.array(picks, dtype=np.int16)), "samples": [1, 1000, 305175781],
                       "requests": [hash_of(np.array(r, dtype=np.int64)) for r in requests]})

    # Values with all their bits in use, also made in the test: the order of the additions shows.
    values = np.array([x / 3.0 for x in pseudo_random_states(300)])
    sums = [{"n": n, "sum": float(np.sum(values[:n]))} for n in (0, 1, 7, 8, 9, 15, 16, 31, 100, 128, 129, 136, 255, 256, 257, 300)]

    shuffles = []
    for n in (0, 1, 2, 3, 255, 256, 257, 70000):
        for seed in (0, 5489):
            values, state = np.arange(n, dtype=np.int32), np.random.RandomState(seed)
            state.shuffle(values)
            state.shuffle(values)
            shuffles.append({"n": n, "seed": seed, "twice": hash_of(values)})

    golden = {"orders": orders, "splits": splits, "counts": counts, "blends": blends, "sums": sums, "shuffles": shuffles}
    with open(os.path.join(out, "golden.json"), "w") as f:
        f.write("{\n" + ",\n".join(f'"{key}": [\n' + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]"
                                   for key, rows in golden.items()) + "\n}\n")


if __name__ == "__main__":
    main()
