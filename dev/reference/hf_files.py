"""Hugging Face folders in plain numpy: config.json, and safetensors read and written without the safetensors package,
which Debian does not have. FORMATS: u64 header length, JSON header, row-major little-endian data."""
import glob, json, os, struct
import numpy as np

# BF16 is the upper half of an F32; numpy has no such type.
READERS = {
    "F64": lambda raw: np.frombuffer(raw, "<f8"),
    "F32": lambda raw: np.frombuffer(raw, "<f4"),
    "F16": lambda raw: np.frombuffer(raw, "<f2"),
    "BF16": lambda raw: (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4"),
}


def read_safetensors(path):
    """-> {name: float64 array}; integer tensors (GPT-2's old causal-mask buffers among them) are left out."""
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    tensors = {}
    for name, t in header.items():
        if name != "__metadata__" and t["dtype"] in READERS:
            begin, end = t["data_offsets"]
            tensors[name] = READERS[t["dtype"]](data[begin:end]).astype(np.float64).reshape(t["shape"])
    return tensors


def write_safetensors(path, tensors):
    """Writes F32, sorted by name (all of one type, so that is the library's own order), header padded to 8 bytes."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors):
        size = 4 * int(np.prod(tensors[name].shape))
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            f.write(np.ascontiguousarray(tensors[name], "<f4").tobytes())


def read_folder(folder):
    """-> (config dict, {name: float64 array}) of one HF model folder, sharded or not."""
    with open(os.path.join(folder, "config.json")) as f:
        config = json.load(f)
    files = sorted(glob.glob(os.path.join(folder, "*.safetensors")))
    if not files:
        raise SystemExit(f"{folder}: no *.safetensors in it")
    tensors = {}
    for path in files:
        tensors.update(read_safetensors(path))
    return config, tensors


def write_json(path, value):
    with open(path, "w") as f:
        json.dump(value, f, indent=1)
        f.write("\n")
