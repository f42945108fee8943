#!/usr/bin/env python3
"""Writes a small random model as a Hugging Face folder (config.json, model.safetensors), Llama or GPT-2, odd sizes welcome.

  make_tiny_model.py --out DIR --arch llama --layers 2 --channels 32 --heads 8 --kv-heads 4 --ffn 20 --vocab 53 --tie
  make_tiny_model.py --out DIR --arch gpt --layers 2 --channels 28 --heads 4 --vocab 61 --positions rotary --no-tie

Norm weights spread around 1 and biases around 0, so that one which is forgotten shows. GPT-2 with --positions rotary is no
Hugging Face model: it is marked by the config key "caat_positions" and has no wpe.
"""
import argparse, os
import numpy as np
from hf_files import write_json, write_safetensors


def llama(o):
    C, kv = o.channels, o.kv_heads * (o.channels // o.heads)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": o.vocab, "hidden_size": C,
              "intermediate_size": o.ffn, "num_hidden_layers": o.layers, "num_attention_heads": o.heads,
              "num_key_value_heads": o.kv_heads, "max_position_embeddings": o.context, "rms_norm_eps": o.norm_eps,
              "rope_theta": o.rope_base, "hidden_act": "silu", "tie_word_embeddings": o.tie,
              "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"}
    shapes = {"model.embed_tokens.weight": (o.vocab, C), "model.norm.weight": (C,)}
    for l in range(o.layers):
        for name, shape in (("input_layernorm", (C,)), ("post_attention_layernorm", (C,)), ("self_attn.q_proj", (C, C)),
                            ("self_attn.k_proj", (kv, C)), ("self_attn.v_proj", (kv, C)), ("self_attn.o_proj", (C, C)),
                            ("mlp.gate_proj", (o.ffn, C)), ("mlp.up_proj", (o.ffn, C)), ("mlp.down_proj", (C, o.ffn))):
            shapes[f"model.layers.{l}.{name}.weight"] = shape
    return config, shapes


def gpt(o):
    C = o.channels
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": o.vocab, "n_embd": C,
              "n_layer": o.layers, "n_head": o.heads, "n_positions": o.context, "activation_function": "gelu_new",
              "layer_norm_epsilon": o.norm_eps, "tie_word_embeddings": o.tie,
              "bos_token_id": o.vocab - 1, "eos_token_id": o.vocab - 1, "torch_dtype": "float32"}
    if o.ffn != 4 * C:
        config["n_inner"] = o.ffn
    shapes = {"wte.weight": (o.vocab, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    if o.positions == "learned":
        shapes["wpe.weight"] = (o.context, C)
    else:
        config.update({"caat_positions": "rotary", "rope_theta": o.rope_base})
    for l in range(o.layers):
        for name, n_in, n_out in (("attn.c_attn", C, 3 * C), ("attn.c_proj", C, C), ("mlp.c_fc", C, o.ffn), ("mlp.c_proj", o.ffn, C)):
            shapes[f"h.{l}.{name}.weight"], shapes[f"h.{l}.{name}.bias"] = (n_in, n_out), (n_out,)   # Conv1D: [in, out]
        for name in ("ln_1", "ln_2"):
            shapes[f"h.{l}.{name}.weight"], shapes[f"h.{l}.{name}.bias"] = (C,), (C,)
    return config, shapes


def draw(name, shape, rng):
    """Uniform, not normal: RandomState's uniform bits need no libm, so every machine writes the same file."""
    spread = lambda std: rng.uniform(-std * 3 ** 0.5, std * 3 ** 0.5, shape)
    if len(shape) == 1:
        return 1 + spread(0.2) if name.endswith("weight") else spread(0.2)
    if name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight")):
        return spread(0.3)
    # Of unit gain, so that attention and FFN move x as much as the embedding does and no gradient drowns in another.
    conv1d = name.startswith("h.")
    return spread((shape[0] if conv1d else shape[1]) ** -0.5)


def options():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out", required=True, metavar="DIR")
    a.add_argument("--arch", choices=("llama", "gpt"), default="llama")
    a.add_argument("--layers", type=int, default=2)
    a.add_argument("--channels", type=int, default=32)
    a.add_argument("--heads", type=int, default=4)
    a.add_argument("--kv-heads", type=int, help="Llama; default: --heads")
    a.add_argument("--ffn", type=int, help="default: 4 x channels")
    a.add_argument("--vocab", type=int, default=61)
    a.add_argument("--context", type=int, default=32, help="longest sequence; GPT: rows of wpe")
    a.add_argument("--tie", action=argparse.BooleanOptionalAction, default=True)
    a.add_argument("--positions", choices=("rotary", "learned"), help="GPT; default: learned")
    a.add_argument("--rope-base", type=float, default=10000.0)
    a.add_argument("--norm-eps", type=float, default=1e-5)
    a.add_argument("--seed", type=int, default=0)
    return a


def make(arguments):
    a = options()
    o = a.parse_args(arguments)
    o.kv_heads, o.ffn = o.kv_heads or o.heads, o.ffn or 4 * o.channels
    if o.arch == "llama" and o.positions == "learned":
        a.error("--positions learned: a Llama is rotary")
    o.positions = o.positions or ("rotary" if o.arch == "llama" else "learned")
    if o.arch == "gpt" and o.kv_heads != o.heads:
        a.error(f"--kv-heads {o.kv_heads}: GPT has --heads ({o.heads}) of them")
    if o.channels % o.heads or o.heads % o.kv_heads:
        a.error(f"--heads {o.heads} must divide --channels {o.channels}, and --kv-heads {o.kv_heads} must divide --heads")
    if o.positions == "rotary" and o.channels // o.heads % 2:
        a.error(f"head size {o.channels // o.heads}: rotary positions turn pairs of channels")

    config, shapes = {"llama": llama, "gpt": gpt}[o.arch](o)
    if not o.tie:
        shapes["lm_head.weight"] = (o.vocab, o.channels)
    rng = np.random.RandomState(o.seed)
    os.makedirs(o.out, exist_ok=True)
    write_json(os.path.join(o.out, "config.json"), config)
    write_safetensors(os.path.join(o.out, "model.safetensors"), {name: draw(name, shapes[name], rng) for name in sorted(shapes)})


if __name__ == "__main__":
    make(None)
