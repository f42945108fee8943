#!/usr/bin/env python3
"""dev/ptxas_report.py build/cuda/ops_sm_90.log ...: registers, static shared memory, stack and spills of every kernel (make kernels).

Reads what `nvcc -Xptxas -v` said. Occupancy is what registers and static shared memory allow for blocks of 256 threads, of 64 warps a
multiprocessor (48 on compute capabilities 8.6, 8.9 and 12.x): dynamic shared memory, which a launch decides, can lower it. Exit code 1 if
a kernel spills registers or uses a stack.
"""
import re
import subprocess
import sys

THREADS = 256
ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)\w*'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def readable(names):
    out = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True).stdout.split("\n")
    return [re.sub(r"\([\w:]+\)", "", re.sub(r"^(void )?gpu::", "", name)) for name in out]


def warps_at_once(arch, registers, shared):
    most = 48 if arch in (86, 89) or arch >= 120 else 64
    per_warp = -(-registers * 32 // 256) * 256  # allocated by 256
    blocks = min(65536 // (per_warp * THREADS // 32), most * 32 // THREADS)
    if shared:
        blocks = min(blocks, (100 if most == 48 else 164) * 1024 // (shared + 1024))
    return blocks * THREADS // 32, most


def main(logs):
    rows, bad = [], 0
    for log in logs:
        kernel = None
        for line in open(log):
            if m := ENTRY.search(line):
                kernel = {"name": m[1], "arch": int(m[2])}
            elif kernel and (m := STACK.search(line)):
                kernel["stack"], kernel["stores"], kernel["loads"] = map(int, m.groups())
            elif kernel and (m := USED.search(line)):
                kernel["registers"] = int(m[1])
                shared = SHARED.search(line)
                kernel["shared"] = int(shared[1]) if shared else 0
                rows.append(kernel)
                kernel = None
    if not rows:
        sys.exit(f"ptxas_report: no kernel in {' '.join(logs)}: was it made with -Xptxas -v?")
    for row, name in zip(rows, readable([row["name"] for row in rows])):
        row["name"] = name
    print(f"{'sm':>4} {'registers':>9} {'shared':>6} {'stack':>5} {'spills':>6} {'warps':>7}  kernel")
    for row in sorted(rows, key=lambda row: (row["arch"], row["name"])):
        warps, most = warps_at_once(row["arch"], row["registers"], row["shared"])
        spills = row["stores"] + row["loads"]
        bad += spills > 0 or row["stack"] > 0
        print(f"{row['arch']:>4} {row['registers']:>9} {row['shared']:>6} {row['stack']:>5} {spills:>6} {warps:>4}/{most}  {row['name']}")
    print(f"{len(rows)} kernels, {bad} with spills or a stack")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
