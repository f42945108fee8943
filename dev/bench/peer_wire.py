#!/usr/bin/env python3
"""The peer of bench_wire.py: the same Llama in PyTorch, tensor-parallel over gloo, with sums of the first int(C*p) channels only. One process a rank, one
thread each; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them. Prints a JSON line after each step: its seconds, loss and gradient norm.

    peer_wire.py --layers 12 --channels 768 --heads 16 --ffn 2048 --vocab 32000 --batch 4 --seq 256 --sync-factor 0.5

Written as its users would: Megatron's column- and row-parallel layers, a blocking all-reduce where a sum is needed, the loss by one softmax over the
vocabulary's shards. With --dtype bf16 products are autocast: row-parallel ones and their gradients are bf16, and so are
the layers' sums on the wire; weights, moments, the residual stream and the block entry's sums stay fp32. With --weights and --data (as peer_torch.py has
them) they are those in place of random ones; every step then takes the first windows.
"""
import argparse, json, math, os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from peer_torch import read_weights, read_windows


def summed(x):
    x = x.contiguous()
    dist.all_reduce(x)
    return x


class PartialReduce(torch.autograd.Function):
    """[:, :shared] summed over ranks, the others times sqrt(T); so is its gradient."""
    @staticmethod
    def forward(ctx, z, shared):
        ctx.shared = shared
        return PartialReduce.apply_to(z, shared)

    @staticmethod
    def backward(ctx, dz):
        return PartialReduce.apply_to(dz, ctx.shared), None

    @staticmethod
    def apply_to(z, shared):
        scale = math.sqrt(dist.get_world_size())
        if shared == 0:
            return z * scale
        if shared == z.shape[-1]:
            return summed(z.clone())
        return torch.cat([summed(z[..., :shared]), z[..., shared:] * scale], dim=-1)


class Reduce(torch.autograd.Function):
    """The sum over ranks, in forward, backward or both."""
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.reduce = backward
        return summed(x.clone()) if forward else x

    @staticmethod
    def backward(ctx, dx):
        return summed(dx.clone()) if ctx.reduce else dx, None, None


class Block(nn.Module):
    def __init__(self, o, T):
        super().__init__()
        C = o.channels
        self.heads, self.size, self.shared = o.heads // T, C // o.heads, int(C * o.sync_factor)
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.qkv = nn.Linear(C, 3 * C // T, bias=False)
        self.attn_out = nn.Linear(C // T, C, bias=False)
        self.gate_up = nn.Linear(C, 2 * o.ffn // T, bias=False)
        self.down = nn.Linear(o.ffn // T, C, bias=False)

    def forward(self, x, cos, sin):
        B, S, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, S, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)

        def rotate(t):
            a, b = t.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + PartialReduce.apply(self.attn_out(y.transpose(1, 2).reshape(B, S, -1)), self.shared)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + PartialReduce.apply(self.down(F.silu(gate) * up), self.shared)


class Llama(nn.Module):
    def __init__(self, o, rank, T):
        super().__init__()
        self.rows, self.first = o.vocab // T, rank * (o.vocab // T)
        self.embedding = nn.Embedding(self.rows, o.channels)
        self.blocks = nn.ModuleList(Block(o, T) for _ in range(o.layers))
        self.norm, self.head = nn.RMSNorm(o.channels, eps=1e-5), nn.Linear(o.channels, self.rows, bias=False)
        size = o.channels // o.heads
        angles = torch.outer(torch.arange(o.seq), 1e4 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer('cos', angles.cos())
        self.register_buffer('sin', angles.sin())
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def load(self, w, rank, T):
        def rows(*names):
            return torch.cat([w[f'{name}.weight'].chunk(T)[rank] for name in names])

        def columns(name):
            return w[f'{name}.weight'].chunk(T, dim=1)[rank]
        state = {'embedding': rows('model.embed_tokens'), 'norm': w['model.norm.weight'], 'head': rows('lm_head')}
        for i in range(len(self.blocks)):
            at = f'model.layers.{i}.'
            state |= {f'blocks.{i}.{name}': tensor for name, tensor in {
                'norm1': w[f'{at}input_layernorm.weight'], 'norm2': w[f'{at}post_attention_layernorm.weight'],
                'qkv': rows(*(f'{at}self_attn.{part}_proj' for part in 'qkv')), 'attn_out': columns(f'{at}self_attn.o_proj'),
                'gate_up': rows(f'{at}mlp.gate_proj', f'{at}mlp.up_proj'), 'down': columns(f'{at}mlp.down_proj')}.items()}
        self.load_state_dict({f'{name}.weight': tensor for name, tensor in state.items()} | {'cos': self.cos, 'sin': self.sin})

    def mine(self, ids):
        local = ids - self.first
        here = (local >= 0) & (local < self.rows)
        return local.clamp(0, self.rows - 1), here

    def forward(self, tokens, targets):
        local, here = self.mine(tokens)
        x = Reduce.apply(self.embedding(local) * here.unsqueeze(-1), True, True)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).float().flatten(0, 1)
        top = logits.detach().amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        local, here = self.mine(targets.flatten())
        # One exchange for both numbers of a token.
        numbers = torch.stack([(logits - top.unsqueeze(-1)).exp().sum(-1), (logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) - top) * here])
        exps, target = Reduce.apply(numbers, True, False)
        return (exps.log() - target).mean()


def main():
    flags = argparse.ArgumentParser()
    for name, default in dict(layers=12, channels=768, heads=16, ffn=2048, vocab=32000, batch=4, seq=256, steps=3).items():
        flags.add_argument('--' + name, type=int, default=default)
    flags.add_argument('--sync-factor', type=float, default=1.0)
    flags.add_argument('--dtype', choices=['fp32', 'bf16'], default='fp32')
    flags.add_argument('--weights')
    flags.add_argument('--data')
    o = flags.parse_args()
    dist.init_process_group('gloo')
    rank, T = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = Llama(o, rank, T)
    if o.weights:
        model.load(read_weights(os.path.join(o.weights, 'model.safetensors')), rank, T)
    replicated = [p for p in model.parameters() if p.dim() == 1]
    for p in replicated:
        dist.broadcast(p.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data = torch.Generator().manual_seed(0)
    given = read_windows(o.data, o.seq)[:o.batch] if o.data else None
    for _ in range(o.steps):
        batch = given if o.data else torch.randint(0, o.vocab, (o.batch, o.seq + 1), generator=data)
        dist.barrier()
        begin = time.perf_counter()
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=o.dtype == 'bf16'):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        together = summed(torch.cat([p.grad for p in replicated]))
        for p, grad in zip(replicated, together.split([p.numel() for p in replicated])):
            p.grad.copy_(grad)
        squares = torch.stack([sum(p.grad.square().sum() for p in model.parameters() if p.dim() == 2)])
        norm = (summed(squares) + together.square().sum()).sqrt()
        for p in model.parameters():
            p.grad.mul_(min(1.0, 1.0 / (norm.item() + 1e-6)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(json.dumps(dict(kind='step', loss=loss.item(), grad_norm=norm.item(), seconds=time.perf_counter() - begin)), flush=True)


if __name__ == '__main__':
    main()
