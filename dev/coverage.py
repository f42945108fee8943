#!/usr/bin/env python3
"""dev/coverage.py FOLDER: what of the CUDA build the emulator has executed (make coverage).

FOLDER holds objects compiled with --coverage, and what runs of their programs have counted. Listed are
  - the lines of namespace gpu, and of the files that are host code of the CUDA build: those that no run has executed, in no instantiation;
  - the calls of CUDA, cuBLASLt, cuDNN and NCCL in the sources: where no run has come to one. A template's argument is called by what is made of it.
Exit code 1 if there is any but those named in CANNOT.
"""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HOST_FILES = ["llmc/device_cuda.h", "llmc/gemm_cublaslt.h", "llmc/comm_device.h", "llmc/comm_nccl.h", "llmc/comm_nccl.cpp"]
# What cannot be executed without a GPU, and why.
CANNOT = {
    "cudaLaunchKernelEx": "only nvcc compiles it; the emulator's launch stands in its place, with the same shape and arguments",
    **dict.fromkeys(("cudnnCreate", "cudnnDestroy", "cudnnSetStream", "cudnnGetErrorString", "cudnnGetVersion"),
                    "attention by cuDNN (CUDNN=1) needs a GPU; its graphs are computed on the CPU by dev/test/test_attention_cudnn.cpp"),
}
API_CALL = re.compile(r"\b((?:cuda|cublas|cudnn|nccl)[A-Z]\w*)(?<!_t)\s*\(")
API_NAME = re.compile(r"\b((?:cuda|cublas|cudnn|nccl)[A-Z]\w*)\b")
DEFINITION = re.compile(r"^(?:cudaError_t|cublasStatus_t|ncclResult_t|const char\*|size_t) ((?:cuda|cublas|nccl)\w+)\(", re.M)


def executed_lines(folder):
    """{file: {line: how often}} over all objects: a template's line counts where any instantiation has run it. And the names of what was executed,
    arguments of templates included."""
    counts, names = defaultdict(lambda: defaultdict(int)), set()
    data = sorted(folder.glob("*.gcda"))
    if not data:
        sys.exit(f"coverage: no counts in {folder}: run its programs first")
    for report in data:
        out = subprocess.run(["gcov", "--json-format", "--stdout", report], check=True, capture_output=True).stdout
        for source in (file for text in out.splitlines() if text for file in json.loads(text)["files"]):
            lines = counts[os.path.normpath(source["file"])]
            for line in source["lines"]:
                lines[line["line_number"]] += line["count"]
            names.update(name for f in source["functions"] if f["execution_count"] for name in API_NAME.findall(f["demangled_name"]))
    return counts, names


def text_of(path):
    return Path(path).read_text().split("\n")


def gpu_ranges(path):
    """Lines in `namespace gpu { ... }  // namespace gpu`, from 1; the whole file where it is host code of the CUDA build."""
    text = text_of(path)
    if path in HOST_FILES:
        return [range(1, len(text) + 1)]
    begins = [i for i, line in enumerate(text, 1) if line.startswith("namespace gpu {")]
    ends = [i for i, line in enumerate(text, 1) if line.startswith("}  // namespace gpu")]
    return [range(begin, end) for begin, end in zip(begins, ends)]


def sources():
    listed = subprocess.run(["git", "ls-files", "llmc", "train_gpt.cu"], check=True, capture_output=True, text=True).stdout.split()
    return [path for path in listed if not path.startswith("llmc/simt/") and Path(path).suffix in (".h", ".cuh", ".cu", ".cpp")]


def report_lines(counts, paths):
    missed = []
    print(f"{'lines of the CUDA build':40} {'executed':>9} {'not':>5}")
    for path in paths:
        inside = [line for lines in gpu_ranges(path) for line in lines if line in counts[path]]
        not_executed = [line for line in inside if counts[path][line] == 0 and text_of(path)[line - 1].strip(" });")]
        if inside:
            print(f"{path:40} {len(inside) - len(not_executed):9} {len(not_executed):5}")
        missed += [(path, line) for line in not_executed]
    for path, line in missed:
        print(f"  not executed: {path}:{line}: {text_of(path)[line - 1].strip()}")
    return len(missed)


def count_at(lines, number):
    """Of the statement that holds this line: gcov counts its first one, some lines above. 0 also where it is not compiled."""
    return next((lines[n] for n in range(number, number - 6, -1) if n in lines), 0)


def report_calls(counts, executed, paths):
    emulated = {name for path in Path("llmc/simt").glob("*.cpp") for name in DEFINITION.findall(path.read_text())}
    sites = defaultdict(list)  # of each function: (path, line, count)
    for path in paths:
        for number, line in enumerate(text_of(path), 1):
            code = line.split("//")[0]
            for name in sorted({*API_CALL.findall(code), *(set(API_NAME.findall(code)) & emulated)}):
                is_argument = re.search(rf"\b{name}\s*>", code)
                sites[name].append((path, number, 0 if name in CANNOT else name in executed if is_argument else count_at(counts[path], number)))
    print(f"\n{'calls of CUDA, cuBLASLt, cuDNN, NCCL':40} {'executed':>9} {'not':>5}")
    missed = 0
    for name, places in sorted(sites.items()):
        not_executed = [place for place in places if not place[2]]
        print(f"{name:40} {len(places) - len(not_executed):9} {len(not_executed):5}{'   ' + CANNOT[name] if name in CANNOT else ''}")
        for path, number, _ in not_executed:
            print(f"  not executed: {path}:{number}")
        missed += 0 if name in CANNOT else len(not_executed)
    return missed


def main():
    counts, executed = executed_lines(Path(sys.argv[1]))
    paths = sources()
    missed = report_lines(counts, paths) + report_calls(counts, executed, paths)
    instructions = sum(line.count("asm volatile") for path in paths for line in text_of(path))
    print(f"\n{instructions} statements of inline PTX are compiled by nvcc alone; each has an emulated body in their place.")
    print(f"{missed} lines and calls that can be executed were not")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
