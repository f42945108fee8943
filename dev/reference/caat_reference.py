#!/usr/bin/env python3
"""CAAT-Net (arXiv 2506.19645) in float64 with automatic differentiation: the oracle of this project's trainer.

T tensor-parallel ranks are emulated in ONE process: every rank r has its own copy x[r] (N, C) of the residual stream, and
every collective is a Python sum over a list. Parameters are the global Hugging Face tensors, sharded by slicing inside the
forward pass, so autograd returns the true gradient of the one scalar loss in Hugging Face's own names and shapes.
Nothing here shares code, layout or hand-written backward with the C++ it checks.

  golden:      caat_reference.py --init-from HF_DIR --batch FILE.i32 --rows B --tp T --sync-factor P --out DIR
  compare:     the same with --compare DIR in place of --out (worst differences from an existing golden)
  self-check:  the same with --selfcheck (finite differences; p = 1 equals T = 1)
  generate:    caat_reference.py --init-from HF_DIR --tp T --sync-factor P --generate N --prompt-ids 1,2,3 (greedy; new ids only)

Needs torch (1.13 or later, CPU) and numpy.
"""
import argparse, json, math, os
import numpy as np
import torch
import torch.nn.functional as F
from hf_files import read_folder, read_safetensors, write_json, write_safetensors

ADAMW = {"lr": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-08, "weight_decay": 0.1,
         "decay": "2-D tensors only (embedding and norms: 2-D yes, 1-D no)", "clip": 1.0}
STEPS = 5


class Usage(SystemExit):
    def __init__(self, message):
        super().__init__("caat_reference: " + message)


# ---------------------------------------------------------------- CAAT-Net: what is not in an ordinary transformer

class Ranks:
    """T ranks, k shared channels, the factor of the private channels, and Vr vocabulary rows a rank."""

    def __init__(self, T, p, C, V, private_scale="forward", vocab_multiple=0):
        self.T, self.p, self.k = T, p, int(float(C) * p)
        self.scale = math.sqrt(T) if private_scale == "forward" else 1.0
        multiple = vocab_multiple * T or 1
        padded = (V + multiple - 1) // multiple * multiple
        self.Vr = (padded + T - 1) // T

    def __iter__(self):
        return iter(range(self.T))

    def shard(self, tensor, r, dim=0):
        """Rank r's contiguous 1/T of heads or FFN channels."""
        n = tensor.shape[dim] // self.T
        return tensor.narrow(dim, r * n, n)

    def vocab(self, r, V):
        """Rank r's vocabulary rows: the last shards may be short, or empty."""
        return min(r * self.Vr, V), min((r + 1) * self.Vr, V)

    def partial_channel_reduce(self, z):
        """z[r] (N, C) -> out[r] (N, C): channels [0, k) are summed over the ranks, channels [k, C) stay with their rank."""
        shared = sum(z_s[:, :self.k] for z_s in z)
        return [torch.cat([shared, self.scale * z_r[:, self.k:]], 1) for z_r in z]


def column_parallel(n_r, weight, bias, ranks, r):
    """y_r = n_r W_r^T + b_r, W_r and b_r rank r's output rows. No communication."""
    return F.linear(n_r, ranks.shard(weight, r), None if bias is None else ranks.shard(bias, r))


def row_parallel(a, weight, bias, ranks):
    """z_r = a_r V_r^T, V_r rank r's input columns; the reduce; then the bias, once, on every channel, unscaled."""
    out = ranks.partial_channel_reduce([F.linear(a[r], ranks.shard(weight, r, 1)) for r in ranks])
    return out if bias is None else [out_r + bias for out_r in out]


def forward(m, w, tokens, ranks):
    """tokens (B, S) -> logits (B*S, V), rank after rank's vocabulary shard."""
    B, S = tokens.shape
    ids = tokens.reshape(-1)
    spans = [ranks.vocab(r, m.V) for r in ranks]

    # Each rank looks up the rows that it owns, zero elsewhere; the all-reduce of the full width leaves the same x everywhere.
    embedding, head = m.embedding(w), m.head(w)
    looked_up = [((ids >= lo) & (ids < hi)).unsqueeze(1) * embedding[ids] for lo, hi in spans]
    x0 = sum(looked_up)
    if m.learned_positions:
        x0 = x0 + w["wpe.weight"][:S].repeat(B, 1)
    x = [x0 for r in ranks]

    for l in range(m.L):
        q, kv_k, kv_v, attn_out, fc, down, norm1, norm2 = m.layer(w, l)
        n = [m.norm(x_r, *norm1) for x_r in x]                              # of its OWN x_r: statistics differ between ranks
        a = [attention(m, *[column_parallel(n[r], *t, ranks, r) for t in (q, kv_k, kv_v)], B, S) for r in ranks]
        x = [x_r + out_r for x_r, out_r in zip(x, row_parallel(a, *attn_out, ranks))]
        n = [m.norm(x_r, *norm2) for x_r in x]
        h = [m.activation(*[column_parallel(n[r], *t, ranks, r) for t in fc]) for r in ranks]
        x = [x_r + out_r for x_r, out_r in zip(x, row_parallel(h, *down, ranks))]

    # No reduce before the head: each rank scores its own vocabulary from its own x_r.
    norm_f = m.final_norm(w)
    return torch.cat([F.linear(m.norm(x[r], *norm_f), head[lo:hi]) for r, (lo, hi) in zip(ranks, spans)], 1)


# ---------------------------------------------------------------- the ordinary parts: Llama and GPT-2

def attention(m, q, k, v, B, S):
    """Causal attention over the heads that q, k, v (N, heads_r * hs) hold; query heads share a KV head in contiguous groups."""
    q, k, v = (t.reshape(B, S, -1, m.HS).transpose(1, 2) for t in (q, k, v))           # (B, heads_r, S, hs)
    if not m.learned_positions:
        q, k = rotate(q, m.rope_base), rotate(k, m.rope_base)
    k, v = (t.repeat_interleave(m.NH // m.KVH, 1) for t in (k, v))
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) / math.sqrt(m.HS)).masked_fill(future, -math.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(B * S, -1)


def rotate(t, base):
    """RoPE, half-rotated: channel i of a head turns with channel i + hs/2 by the angle s * base^(-2i/hs)."""
    S, HS = t.shape[-2:]
    angle = torch.outer(torch.arange(S, dtype=torch.float64), base ** (-torch.arange(0, HS, 2, dtype=torch.float64) / HS))
    cos, sin = angle.cos(), angle.sin()
    a, b = t[..., :HS // 2], t[..., HS // 2:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Llama:
    embedding_name, learned_positions = "model.embed_tokens.weight", False
    row_parallel_weights = {"self_attn.o_proj.weight": 0, "mlp.down_proj.weight": 0}   # name's end: the dimension that holds C

    def __init__(self, c):
        rope = c.get("rope_parameters") or {}                               # where newer transformers put rope_theta
        if c.get("rope_scaling") or rope.get("rope_type", "default") != "default" or c.get("attention_bias") or c.get("mlp_bias"):
            raise Usage("config.json: scaled RoPE, attention_bias and mlp_bias are not part of this model")
        self.C, self.F, self.L, self.V = (c[n] for n in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
        self.NH = c["num_attention_heads"]
        self.KVH = c.get("num_key_value_heads") or self.NH
        self.HS = c.get("head_dim") or self.C // self.NH
        self.eps, self.rope_base = c.get("rms_norm_eps", 1e-6), float(c.get("rope_theta") or rope.get("rope_theta") or 10000.0)
        self.tied = c.get("tie_word_embeddings", False)

    def embedding(self, w):
        return w[self.embedding_name]

    def head(self, w):
        return w[self.embedding_name if self.tied else "lm_head.weight"]

    def final_norm(self, w):
        return (w["model.norm.weight"],)

    def norm(self, x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def activation(self, gate, up):
        return F.silu(gate) * up

    def layer(self, w, l):
        part = lambda name: w[f"model.layers.{l}.{name}.weight"]
        q, k, v, o, gate, up, down = ((part(n), None) for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                      "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))
        return q, k, v, o, (gate, up), down, (part("input_layernorm"),), (part("post_attention_layernorm"),)


class GPT:
    """GPT-2, and with the config key caat_positions = "rotary" a GPT-2 without wpe whose q and k are rotated."""
    embedding_name = "wte.weight"
    row_parallel_weights = {"attn.c_proj.weight": 1, "mlp.c_proj.weight": 1}           # Conv1D: [in, out]

    def __init__(self, c):
        if c.get("activation_function", "gelu_new") != "gelu_new":
            raise Usage("config.json: activation_function %r, wanted gelu_new" % c["activation_function"])
        self.C, self.L, self.V, self.NH = (c[n] for n in ("n_embd", "n_layer", "vocab_size", "n_head"))
        self.KVH, self.HS = self.NH, self.C // self.NH
        self.F = c.get("n_inner") or 4 * self.C
        self.eps, self.rope_base = c.get("layer_norm_epsilon", 1e-5), float(c.get("rope_theta", 10000.0))
        self.tied = c.get("tie_word_embeddings", True)
        self.learned_positions = c.get("caat_positions", "learned") == "learned"

    def embedding(self, w):
        return w[self.embedding_name]

    def head(self, w):
        return w[self.embedding_name if self.tied else "lm_head.weight"]

    def final_norm(self, w):
        return w["ln_f.weight"], w["ln_f.bias"]

    def norm(self, x, weight, bias):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps) * weight + bias

    def activation(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))

    def layer(self, w, l):
        pair = lambda name: (w[f"h.{l}.{name}.weight"], w[f"h.{l}.{name}.bias"])
        linear = lambda name: (pair(name)[0].t(), pair(name)[1])
        weight, bias = linear("attn.c_attn")
        q, k, v = zip(weight.split(self.C), bias.split(self.C))             # each is sharded by heads, on its own
        return q, k, v, linear("attn.c_proj"), (linear("mlp.c_fc"),), linear("mlp.c_proj"), pair("ln_1"), pair("ln_2")


def load(folder, o):
    """-> model, {HF name: float64 leaf tensor}, ranks"""
    config, arrays = read_folder(folder)
    kinds = {"llama": Llama, "gpt2": GPT}
    if config.get("model_type") not in kinds:
        raise Usage(f"{folder}/config.json: model_type {config.get('model_type')!r}, wanted one of {sorted(kinds)}")
    m = kinds[config["model_type"]](config)
    T, p = o.tp, o.sync_factor
    for what, n in (("heads", m.NH), ("KV heads", m.KVH), ("FFN channels", m.F)):
        if T < 1 or n % T:
            raise Usage(f"--tp {T} does not divide {what} ({n})")
    if not 0 <= p <= 1:
        raise Usage(f"--sync-factor {p} is not in [0, 1]")
    ranks = Ranks(T, p, m.C, m.V, o.private_scale, o.vocab_multiple)

    w = {}
    for name, array in arrays.items():
        name = name[len("transformer."):] if name.startswith("transformer.") else name
        if name.endswith((".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")) or (m.tied and name == "lm_head.weight"):
            continue                                                        # buffers of old files; the tied head's second copy
        w[name] = torch.from_numpy(array.copy())
        if o.private_scale == "init":                                       # once, and from then on it is just the weight
            for end, dim in m.row_parallel_weights.items():
                if name.endswith(end):
                    w[name].narrow(dim, ranks.k, m.C - ranks.k).mul_(math.sqrt(T))
        w[name].requires_grad_(True)
    return m, w, ranks


# ---------------------------------------------------------------- training

def losses_per_token(m, w, batch, ranks):
    """One softmax over the whole vocabulary. -> logits (N, V), losses (N)"""
    logits = forward(m, w, batch[:, :-1], ranks)
    return logits, F.cross_entropy(logits, batch[:, 1:].reshape(-1), reduction="none")


def gradients(loss, w):
    grads = torch.autograd.grad(loss, list(w.values()), allow_unused=True)
    unused = [name for name, g in zip(w, grads) if g is None]
    if unused:
        raise Usage(f"tensors that the model does not use: {unused}")
    return dict(zip(w, grads))


def adamw(w, grads, state, t):
    """Clip by the global norm, then one AdamW step at a constant rate, in place. -> norm before clipping"""
    a = ADAMW
    norm = math.sqrt(sum(g.pow(2).sum().item() for g in grads.values()))
    clip = min(1.0, a["clip"] / (norm + 1e-6))
    with torch.no_grad():
        for name, p in w.items():
            g = grads[name] * clip
            m, v = state.setdefault(name, (torch.zeros_like(p), torch.zeros_like(p)))
            m.mul_(a["beta1"]).add_(g, alpha=1 - a["beta1"])
            v.mul_(a["beta2"]).add_(g * g, alpha=1 - a["beta2"])
            m_hat, v_hat = m / (1 - a["beta1"] ** t), v / (1 - a["beta2"] ** t)
            decay = a["weight_decay"] if p.dim() == 2 else 0.0
            p.sub_(a["lr"] * (m_hat / (v_hat.sqrt() + a["eps"]) + decay * p))
    return norm


def golden(m, w, batch, ranks):
    """-> golden.json's dict, logits, per-token losses, gradients; w is trained for STEPS steps on the way."""
    state, losses, norms = {}, [], []
    for t in range(1, STEPS + 1):
        logits, per_token = losses_per_token(m, w, batch, ranks)
        grads = gradients(per_token.mean(), w)
        if t == 1:
            first = logits.detach(), per_token.detach(), grads
        losses.append(per_token.mean().item())                              # before this step's update
        norms.append(adamw(w, grads, state, t))
    facts = {"T": ranks.T, "p": ranks.p, "k": ranks.k, "batch_shape": list(batch.shape), "losses": losses,
             "grad_norms": norms, "adamw": ADAMW, "precision": "float64"}
    return (facts,) + first


def write_golden(folder, facts, logits, per_token, grads):
    os.makedirs(folder, exist_ok=True)
    twelve = lambda values: [float("%.12g" % v) for v in values]            # so that another BLAS writes the same bytes
    facts = dict(facts, losses=twelve(facts["losses"]), grad_norms=twelve(facts["grad_norms"]))
    write_json(os.path.join(folder, "golden.json"), facts)
    logits.numpy().astype("<f4").tofile(os.path.join(folder, "logits.f32"))
    per_token.numpy().astype("<f4").tofile(os.path.join(folder, "loss_per_token.f32"))
    write_safetensors(os.path.join(folder, "grads.safetensors"), {name: g.numpy() for name, g in grads.items()})


def compare_golden(folder, facts, logits, per_token, grads):
    """Prints the worst differences from a golden in `folder`. Its files are float32: 6e-8 relative is perfect."""
    path = lambda name: os.path.join(folder, name)
    with open(path("golden.json")) as f:
        theirs = json.load(f)
    for key in ("T", "p", "k", "batch_shape", "adamw", "precision"):
        if theirs[key] != facts[key]:
            print(f"  {key}: {facts[key]!r} here, {theirs[key]!r} in {path('golden.json')}")
    worst = lambda ours, their: np.max(np.abs(np.asarray(ours) - np.asarray(their)))
    relative = lambda ours, their: worst(np.divide(ours, their), np.ones(len(ours)))
    their_logits = np.fromfile(path("logits.f32"), "<f4").reshape(logits.shape)
    their_loss = np.fromfile(path("loss_per_token.f32"), "<f4")
    their_grads = read_safetensors(path("grads.safetensors"))
    if their_grads.keys() != grads.keys():
        print("  gradient names differ:", sorted(their_grads.keys() ^ grads.keys()))
    all_grads = math.sqrt(sum(np.sum(g ** 2) for g in their_grads.values()))
    grad_error = lambda n: np.linalg.norm(grads[n].numpy() - their_grads[n]) / (np.linalg.norm(their_grads[n]) + 1e-3 * all_grads)
    at, name = max((grad_error(n), n) for n in their_grads if n in grads)
    print(f"  logits {worst(logits, their_logits) / np.max(np.abs(their_logits)):.1e} of the largest,"
          f" losses per token {worst(per_token, their_loss):.1e},"
          f" gradients {at:.1e} relative ({name}),"
          f" {STEPS} losses {relative(facts['losses'], theirs['losses']):.1e},"
          f" {STEPS} norms {relative(facts['grad_norms'], theirs['grad_norms']):.1e} relative")


# ---------------------------------------------------------------- self-check and generation

def selfcheck(m, w, batch, ranks):
    """Autograd against finite differences, one random direction per tensor, so that every element takes part; and
    p = 1, like any p at T = 1, is the plain model in logits and all gradients. -> whether all is well"""
    rng = np.random.RandomState(1)

    def loss_and_gradients(r):
        logits, per_token = losses_per_token(m, w, batch, r)
        return logits.detach(), gradients(per_token.mean(), w)

    def loss_at(p, value):
        with torch.no_grad():
            p.copy_(value)
            return losses_per_token(m, w, batch, ranks)[1].mean().item()

    _, grads = loss_and_gradients(ranks)
    norm = math.sqrt(sum(g.pow(2).sum().item() for g in grads.values()))
    worst, h = (0.0, "none"), 1e-3
    for name, p in w.items():
        saved, d = p.detach().clone(), torch.from_numpy(rng.uniform(-1, 1, tuple(p.shape)))
        d /= d.norm()
        at = {i: loss_at(p, saved + i * h * d) for i in (-2, -1, 1, 2)}
        loss_at(p, saved)
        slope = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * h)        # fourth order
        true = (grads[name] * d).sum().item()
        worst = max(worst, (abs(slope - true) / (abs(true) + 1e-3 * norm), name))
    print(f"  finite differences: worst {worst[0]:.1e} relative ({worst[1]}), {len(w)} tensors")

    plain_logits, plain = loss_and_gradients(Ranks(1, 0.3, m.C, m.V))
    logits, same = loss_and_gradients(Ranks(ranks.T, 1.0, m.C, m.V))
    off = max([(logits - plain_logits).abs().max().item()] + [(plain[n] - same[n]).abs().max().item() / norm for n in w])
    print(f"  T = {ranks.T}, p = 1 against the plain model: {off:.1e}")
    return worst[0] <= 1e-6 and off <= 1e-10


def generate(m, w, ranks, ids, n):
    """Greedy, the whole prefix anew for each token; the first of equal logits wins, and no id ends it."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(n):
            logits = forward(m, w, torch.tensor([ids]), ranks)
            ids.append(int(np.argmax(logits[-1].numpy())))
    return ids[len(ids) - n:]


def check_ids(ids, m, w, longest, where):
    """Python would take id -1 for the last row, and a slice of wpe that is too short would be silent."""
    if ids.size == 0 or ids.min() < 0 or ids.max() >= m.V:
        raise Usage(f"{where}: ids must be in [0, {m.V}) and there must be some")
    if m.learned_positions and longest > len(w["wpe.weight"]):
        raise Usage(f"{where}: {longest} positions, the model has {len(w['wpe.weight'])}")


def read_batch(path, rows, m, w):
    ids = np.fromfile(path, "<i4")
    if rows < 1 or len(ids) % rows or len(ids) < 2 * rows:
        raise Usage(f"--rows {rows}: {path} holds {len(ids)} ids, wanted rows of two or more")
    check_ids(ids, m, w, len(ids) // rows - 1, path)
    return torch.from_numpy(ids.astype(np.int64)).reshape(rows, -1)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--init-from", required=True, metavar="HF_DIR", help="config.json and safetensors (F32, BF16, F16, F64), Llama or GPT-2")
    a.add_argument("--tp", type=int, default=1)
    a.add_argument("--sync-factor", type=float, default=1.0)
    a.add_argument("--private-scale", choices=("forward", "init", "none"), default="forward")
    a.add_argument("--vocab-multiple", type=int, default=0, help="Megatron: 128. Decides which rank owns a row")
    a.add_argument("--batch", metavar="FILE.i32", help="rows of S + 1 token ids")
    a.add_argument("--rows", type=int, default=1)
    a.add_argument("--out", metavar="DIR")
    a.add_argument("--compare", metavar="DIR")
    a.add_argument("--selfcheck", action="store_true")
    a.add_argument("--generate", type=int, metavar="N")
    a.add_argument("--prompt-ids", default="1")
    o = a.parse_args()
    torch.set_num_threads(1)                                                # the same sums, so the same bits, on every run

    m, w, ranks = load(o.init_from, o)
    if o.generate is not None:
        ids = [int(i) for i in o.prompt_ids.split(",")]
        check_ids(np.array(ids), m, w, len(ids) + o.generate - 1, "--prompt-ids and --generate")
        print(*generate(m, w, ranks, ids, o.generate))
        return
    if not o.batch or not (o.out or o.compare or o.selfcheck):
        a.error("--batch FILE and one of --out, --compare, --selfcheck, or --generate N")
    batch = read_batch(o.batch, o.rows, m, w)
    if o.selfcheck and not selfcheck(m, w, batch, ranks):
        raise Usage("self-check failed")
    if o.out or o.compare:
        result = golden(m, w, batch, ranks)
        if o.compare:
            compare_golden(o.compare, *result)
        if o.out:
            for key in ("private_scale", "vocab_multiple"):                 # said only where it is not what every reader takes for granted
                if getattr(o, key) != a.get_default(key):
                    result[0][key] = getattr(o, key)
            write_golden(o.out, *result)


if __name__ == "__main__":
    main()
