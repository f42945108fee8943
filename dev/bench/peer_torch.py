#!/usr/bin/env python3
"""The peer of `make bench`: a Llama or GPT-2 of the same shape and the same weights in plain PyTorch, trained on the CPU as its users would: causal SDPA,
fused AdamW, clipping of the global norm. Prints one JSON line: the loss over the windows of --data, and tokens/s of every step.

    peer_torch.py --weights FOLDER --data tokens.bin --batch 4 --seq 1024

FOLDER is a Hugging Face one (config.json, model.safetensors in F32), tokens.bin an llm.c shard of 16 bit.
"""
import argparse, array, json, os, struct, time
import torch
from torch import nn
from torch.nn import functional as F


class LlamaBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        C, self.heads, self.kv_heads = c['hidden_size'], c['num_attention_heads'], c['num_key_value_heads']
        self.size = c.get('head_dim') or C // self.heads
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=c['rms_norm_eps']), nn.RMSNorm(C, eps=c['rms_norm_eps'])
        self.qkv = nn.Linear(C, (self.heads + 2 * self.kv_heads) * self.size, bias=False)
        self.attn_out = nn.Linear(C, C, bias=False)
        self.gate_up = nn.Linear(C, 2 * c['intermediate_size'], bias=False)
        self.down = nn.Linear(c['intermediate_size'], C, bias=False)

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
    def __init__(self, c, seq):
        super().__init__()
        C = c['hidden_size']
        self.embedding = nn.Embedding(c['vocab_size'], C)
        self.blocks = nn.ModuleList(LlamaBlock(c) for _ in range(c['num_hidden_layers']))
        self.norm, self.head = nn.RMSNorm(C, eps=c['rms_norm_eps']), nn.Linear(C, c['vocab_size'], bias=False)
        size = self.blocks[0].size
        angles = torch.outer(torch.arange(seq), c['rope_theta'] ** (-torch.arange(0, size, 2) / size))
        self.register_buffer('cos', angles.cos())
        self.register_buffer('sin', angles.sin())

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())

    def load(self, w):
        block = 'model.layers.{}.'
        names = {'embedding.weight': ['model.embed_tokens.weight'], 'norm.weight': ['model.norm.weight'], 'head.weight': ['lm_head.weight']}
        for i in range(len(self.blocks)):
            at = block.format(i)
            names |= {f'blocks.{i}.{ours}.weight': [f'{at}{name}.weight' for name in theirs] for ours, theirs in {
                'norm1': ['input_layernorm'], 'norm2': ['post_attention_layernorm'], 'qkv': ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'],
                'attn_out': ['self_attn.o_proj'], 'gate_up': ['mlp.gate_proj', 'mlp.up_proj'], 'down': ['mlp.down_proj']}.items()}
        self.load_state_dict({ours: torch.cat([w[name] for name in theirs]) for ours, theirs in names.items()} | {'cos': self.cos, 'sin': self.sin})


class GptBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        C, self.heads = c['n_embd'], c['n_head']
        self.ln_1, self.ln_2 = nn.LayerNorm(C, eps=c['layer_norm_epsilon']), nn.LayerNorm(C, eps=c['layer_norm_epsilon'])
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        inner = c.get('n_inner') or 4 * C
        self.c_fc, self.mlp_proj = nn.Linear(C, inner), nn.Linear(inner, C)

    def forward(self, x):
        B, S, C = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(B, S, 3 * self.heads, -1).transpose(1, 2).chunk(3, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, S, C))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate='tanh'))


class Gpt(nn.Module):
    def __init__(self, c, seq):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c['vocab_size'], c['n_embd']), nn.Embedding(c['n_positions'], c['n_embd'])
        self.h = nn.ModuleList(GptBlock(c) for _ in range(c['n_layer']))
        self.ln_f = nn.LayerNorm(c['n_embd'], eps=c['layer_norm_epsilon'])

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return F.cross_entropy(F.linear(self.ln_f(x), self.wte.weight).float().flatten(0, 1), targets.flatten())  # the head is the embedding

    def load(self, w):
        state = {}
        for name in self.state_dict():
            theirs = name.replace('mlp_proj', 'mlp.c_proj').replace('.c_fc', '.mlp.c_fc').replace('.c_attn', '.attn.c_attn')
            theirs = theirs.replace('.c_proj', '.attn.c_proj') if '.mlp.' not in theirs else theirs
            tensor = w[theirs] if theirs in w else w[f'transformer.{theirs}']
            linear = any(part in theirs for part in ('c_attn.weight', 'c_proj.weight', 'c_fc.weight'))
            state[name] = tensor.t().contiguous() if linear else tensor  # GPT-2's files hold (in, out)
        self.load_state_dict(state)


def read_weights(path):
    with open(path, 'rb') as f:
        header = json.loads(f.read(struct.unpack('<Q', f.read(8))[0]))
        data = torch.frombuffer(bytearray(f.read()), dtype=torch.uint8)
    return {name: data[slice(*t['data_offsets'])].view(torch.float32).view(t['shape']) for name, t in header.items() if name != '__metadata__'}


def read_windows(path, seq):
    with open(path, 'rb') as f:
        f.seek(1024)
        tokens = torch.tensor(array.array('H', f.read()), dtype=torch.long)
    return torch.stack([tokens[at:at + seq + 1] for at in range(0, len(tokens) - seq, seq)])


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument('--weights', required=True)
    flags.add_argument('--data', required=True)
    for name, default in dict(batch=4, seq=1024, steps=3, threads=2).items():
        flags.add_argument('--' + name, type=int, default=default)
    flags.add_argument('--dtype', choices=['fp32', 'bf16'], default='fp32')
    flags.add_argument('--compile', action='store_true')
    o = flags.parse_args()
    torch.set_num_threads(o.threads)
    with open(os.path.join(o.weights, 'config.json')) as f:
        config = json.load(f)
    model = (Gpt if config['model_type'] == 'gpt2' else Llama)(config, o.seq)
    model.load(read_weights(os.path.join(o.weights, 'model.safetensors')))
    windows = read_windows(o.data, o.seq)
    batches = windows[:len(windows) // o.batch * o.batch].split(o.batch)
    with torch.no_grad():
        loss = sum(model(b[:, :-1], b[:, 1:]).item() for b in batches) / len(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model) if o.compile else model
    rates = []
    for step in range(o.steps):
        batch = batches[step % len(batches)]
        begin = time.perf_counter()
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=o.dtype == 'bf16'):
            step_loss = run(batch[:, :-1], batch[:, 1:])
        step_loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rates.append(o.batch * o.seq / (time.perf_counter() - begin))
    print(json.dumps(dict(torch=torch.__version__, loss=loss, tokens_per_second=rates)))


if __name__ == '__main__':
    main()
