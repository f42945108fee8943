"""What a run costs, from ./train_gpt --dry-run and the model's shape: parameters, FLOPs, memory, bytes on the wire. Used by
scripts/presets.py, scripts/run.sh (its header) and dev/roofline.py.
"""
import dataclasses
import os
import re
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    name: str
    flops: float      # FLOP/s, bf16 on tensor cores, dense (half of what is stated "with sparsity")
    bandwidth: float  # bytes/s, device memory
    memory: float     # bytes, as nvidia-smi counts them
    nvlink: float     # bytes/s, one way: half of what is stated, which adds both ways
    source: str


DEVICES = {
    'a100': Device('A100 80GB SXM', 312e12, 2.039e12, 81920 * 2**20, 300e9, "NVIDIA A100 data sheet (2021): 312 TFLOP/s, 2,039 GB/s, NVLink 600 GB/s"),
    'h100': Device('H100 80GB SXM', 989.4e12, 3.35e12, 81559 * 2**20, 450e9, "NVIDIA H100 data sheet (2023): 1,979 TFLOP/s with sparsity, 3.35 TB/s, NVLink 900 GB/s"),
    'h200': Device('H200 141GB SXM', 989.4e12, 4.8e12, 143771 * 2**20, 450e9, "NVIDIA H200 data sheet (2024): 1,979 TFLOP/s with sparsity, 4.8 TB/s, NVLink 900 GB/s"),
}
RESERVED = 3 * GIB  # of a GPU's memory, not ours to plan: CUDA's context, kernels, NCCL's and cuBLASLt's buffers. An assumption


@dataclasses.dataclass
class DryRun:
    """The header box of ./train_gpt --dry-run, read back."""
    model: str
    gpt: bool
    tied: bool
    layers: int
    channels: int
    heads: int
    head_size: int
    kv_heads: int
    ffn: int
    vocab: int
    parameters: int
    per_rank: int
    tp: int
    dp: int
    batch: int
    seq: int
    micro_batch: int
    steps: int
    lr: str
    memory: float     # bytes a rank
    families: dict    # name -> bytes
    wire: float       # bytes a rank sends in a step, for the partial channel reduces
    wire_p1: float    # the same at p = 1
    zero: bool
    box: str

    def matmul_parameters(self):
        """Weights that a token is multiplied with: all matrices but the embedding, which is looked up (a tied one is the head)."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_size * self.channels
        mlp = (2 if self.gpt else 3) * self.ffn * self.channels
        return self.layers * (attention + mlp) + self.vocab * self.channels

    def flops_per_token(self):
        """Of the model, forward and backward; nothing that is computed again counts. A weight costs 2 FLOPs forward and 4 backward. Causal
        attention: two products forward and four backward, each 2 HS FLOPs a head for each of (S + 1)/2 keys on average."""
        return 6 * self.matmul_parameters() + 6 * self.layers * self.heads * self.head_size * (self.seq + 1)

    def tokens_per_step(self):
        return self.batch * self.seq

    def wire_dp(self):
        """Bytes a rank sends in a step for data parallelism: gradients summed, and under ZeRO-1 bf16 parameters gathered."""
        share = (self.dp - 1) / self.dp
        gradients = 4 * self.per_rank
        if 'bf16 gradients' in self.box:
            gradients -= 2 * (self.matmul_parameters() - self.vocab * self.channels) / self.tp
        return share * (gradients + 2 * self.per_rank if self.zero else 2 * gradients)


UNITS = {'B': 1, 'KB': 1e3, 'kB': 1e3, 'MB': 1e6, 'GB': 1e9, 'TB': 1e12, 'PB': 1e15}


def amount(text):
    number, unit = text.split()
    return float(number) * UNITS[unit]


def read_box(box):
    def find(pattern, kind=str):
        match = re.search(pattern, box)
        if not match:
            raise SystemExit(f'cost.py: the header of ./train_gpt --dry-run has no {pattern!r}:\n{box}')
        return kind(match.group(1))

    families = {name: float(size) * GIB for name, size in re.findall(r'([a-z][a-z ]+) ([\d.]+)', find(r'GiB per rank: (.*)'))}
    return DryRun(
        model=find(r'model *\| ([^:]+):'), gpt=': GPT,' in box, tied=', tied' in box, layers=find(r'(\d+) layers', int), channels=find(r' C (\d+)', int),
        heads=find(r'(\d+) heads', int), head_size=find(r'heads of (\d+)', int), kv_heads=find(r'\((\d+) KV\)', int), ffn=find(r'FFN (\d+)', int),
        vocab=find(r' V (\d+)', int), parameters=find(r'in all \((\d+);', int), per_rank=find(r'not\), (\d+) on this rank', int), tp=find(r'ranks *\| tp (\d+)', int),
        dp=find(r'x dp (\d+)', int), batch=find(r'batch *\| (\d+) sequences', int), seq=find(r'sequences of (\d+)', int), micro_batch=find(r'micro-batch (\d+)', int),
        steps=find(r', (\d+) steps', int), lr=find(r'optimiser *\| (.*)'), memory=find(r'memory *\| ([\d.]+) GiB', float) * GIB, families=families,
        wire=amount(find(r'wire *\| (\S+ \S+) per rank')), wire_p1=amount(find(r'; (\S+ \S+) at p = 1')), zero='ZeRO-1' in box, box=box)


def dry_run(flags):
    """flags: train_gpt's. An error of train_gpt's is shown as it is. TRAIN_GPT in the environment names another build of it."""
    program = os.environ.get('TRAIN_GPT') or os.path.join(ROOT, 'train_gpt')
    done = subprocess.run([program, *map(str, flags), '--dry-run'], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return read_box(done.stdout)


def human(number, digits=3):
    """1234567 -> 1.23M"""
    for limit, unit in ((1e24, 'Y'), (1e21, 'Z'), (1e18, 'E'), (1e15, 'P'), (1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if abs(number) >= limit:
            return f'{number / limit:.{digits}g}{unit}'
    return f'{number:.{digits}g}'


def human_bytes(number):
    """453000000 -> 453 MB"""
    text = human(number)
    return f'{text[:-1]} {text[-1]}B' if text[-1].isalpha() else f'{text} B'
