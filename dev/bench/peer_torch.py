#!/usr/bin/env python3
"""The peer of `make bench`: a Llama of the same shape in plain PyTorch, trained on the CPU as its users would: causal SDPA,
fused AdamW, clipping of the global norm. Prints one JSON line: tokens/s of every step, and the losses.

    peer_llama.py --layers 12 --channels 768 --heads 16 --kv-heads 16 --ffn 2048 --vocab 32000 --batch 4 --seq 1024
"""
import argparse, json, time
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, C, heads, kv_heads, ffn):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, C // heads
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.qkv = nn.Linear(C, (heads + 2 * kv_heads) * self.size, bias=False)
        self.attn_out = nn.Linear(C, C, bias=False)
        self.gate_up = nn.Linear(C, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, C, bias=False)

    def forward(self, x, cos, sin):
        B, S, C = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, S, -1, self.size).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)

        def rotate(t):
            a, b = t.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.attn_out(y.transpose(1, 2).reshape(B, S, C))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.embedding = nn.Embedding(o.vocab, o.channels)
        self.blocks = nn.ModuleList(Block(o.channels, o.heads, o.kv_heads, o.ffn) for _ in range(o.layers))
        self.norm, self.head = nn.RMSNorm(o.channels, eps=1e-5), nn.Linear(o.channels, o.vocab, bias=False)
        size = o.channels // o.heads
        angles = torch.outer(torch.arange(o.seq), 1e4 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer('cos', angles.cos())
        self.register_buffer('sin', angles.sin())
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def main():
    flags = argparse.ArgumentParser()
    for name, default in dict(layers=12, channels=768, heads=16, kv_heads=16, ffn=2048, vocab=32000, batch=4, seq=1024, steps=5, threads=2).items():
        flags.add_argument('--' + name.replace('_', '-'), type=int, default=default)
    flags.add_argument('--dtype', choices=['fp32', 'bf16'], default='fp32')
    flags.add_argument('--compile', action='store_true')
    o = flags.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    model = Llama(o)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model) if o.compile else model
    rates, losses = [], []
    for _ in range(o.steps):
        batch = torch.randint(0, o.vocab, (o.batch, o.seq + 1))
        begin = time.perf_counter()
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=o.dtype == 'bf16'):
            loss = run(batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rates.append(o.batch * o.seq / (time.perf_counter() - begin))
        losses.append(loss.item())
    print(json.dumps(dict(torch=torch.__version__, tokens_per_second=rates, losses=losses)))


if __name__ == '__main__':
    main()
