#!/usr/bin/env python3
"""The peer of `make bench` in generation: llama.cpp, through llama-cpp-python, on the same weights in the same number format. Prints one JSON line: the ids
that it writes, choosing the likeliest each time, tokens/s after the first, seconds until the first was there, and the way that was fastest.

    peer_llama.py --weights FOLDER --gguf FILE --prompt tokens.bin --count 64

FOLDER is a Hugging Face one (config.json, model.safetensors in F32), FILE the same model for llama.cpp, made if it is not there; tokens.bin an llm.c shard of
16 bit. Products read weights of --dtype; llama.cpp's activations are fp32, rounded to the weights' type for the products. Ways: its attention fused (flash) or not, the
cache of keys and values in --dtype or (for bf16) llama.cpp's own choice, fp16, the prompt in parts of 512 or 1,024.
"""
import argparse, ctypes, itertools, json, os, struct, time
import gguf, llama_cpp
import numpy as np

TYPES = {'fp32': gguf.GGMLQuantizationType.F32, 'bf16': gguf.GGMLQuantizationType.BF16, 'fp16': gguf.GGMLQuantizationType.F16}
BLOCK = {'input_layernorm': 'attn_norm', 'self_attn.q_proj': 'attn_q', 'self_attn.k_proj': 'attn_k', 'self_attn.v_proj': 'attn_v', 'self_attn.o_proj': 'attn_output',
         'post_attention_layernorm': 'ffn_norm', 'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up', 'mlp.down_proj': 'ffn_down'}
NAMES = {'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm', 'lm_head': 'output'}


def read_weights(path):
    with open(path, 'rb') as f:
        header = json.loads(f.read(struct.unpack('<Q', f.read(8))[0]))
        start = f.tell()
    for name, t in header.items():
        if name != '__metadata__':
            begin, end = t['data_offsets']
            yield name, np.memmap(path, np.float32, 'r', start + begin, tuple(t['shape']))


def write_gguf(path, folder, dtype):
    with open(os.path.join(folder, 'config.json')) as f:
        c = json.load(f)
    heads, kv_heads = c['num_attention_heads'], c['num_key_value_heads']
    writer = gguf.GGUFWriter(path, 'llama')
    writer.add_tokenizer_model('none')
    writer.add_vocab_size(c['vocab_size'])
    writer.add_context_length(c['max_position_embeddings'])
    writer.add_embedding_length(c['hidden_size'])
    writer.add_block_count(c['num_hidden_layers'])
    writer.add_feed_forward_length(c['intermediate_size'])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(c.get('head_dim') or c['hidden_size'] // heads)
    writer.add_rope_freq_base(c['rope_theta'])
    writer.add_layer_norm_rms_eps(c['rms_norm_eps'])
    for name, values in read_weights(os.path.join(folder, 'model.safetensors')):
        *block, part = name.removesuffix('.weight').removeprefix('model.layers.').split('.', 1) if '.layers.' in name else [name.removesuffix('.weight')]
        theirs = f'blk.{block[0]}.{BLOCK[part]}.weight' if block else f'{NAMES[part]}.weight'
        if part in ('self_attn.q_proj', 'self_attn.k_proj'):  # llama.cpp turns neighbours by one angle, Hugging Face a head's halves
            n = heads if part == 'self_attn.q_proj' else kv_heads
            values = values.reshape(n, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        stored = TYPES[dtype] if values.ndim == 2 else TYPES['fp32']
        writer.add_tensor(theirs, gguf.quants.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def generate(model, o, prompt, flash, cache, part):
    """ids, seconds until the first was there, seconds from there to the last"""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = len(prompt) + o.count, len(prompt), part, o.threads, o.threads
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.type_k = params.type_v = int(TYPES[cache])
    params.no_perf = True
    context = llama_cpp.llama_init_from_model(model, params)

    def read(ids):
        tokens = (llama_cpp.llama_token * len(ids))(*ids)  # the batch only points to it
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(ids))) != 0:
            raise RuntimeError(f'llama_decode failed on {len(ids)} tokens')
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.argmax(np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (o.among,))))

    for _ in range(2):  # the first time touches its memory
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        begin = time.perf_counter()
        ids = [read(prompt)]
        first = time.perf_counter()
        while len(ids) < o.count:
            ids.append(read(ids[-1:]))
        end = time.perf_counter()
    llama_cpp.llama_free(context)
    return ids, first - begin, end - first


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument('--weights', required=True)
    flags.add_argument('--gguf', required=True)
    flags.add_argument('--prompt', required=True)
    flags.add_argument('--dtype', choices=['fp32', 'bf16'], default='fp32')
    flags.add_argument('--count', type=int, default=64)
    flags.add_argument('--among', type=int, required=True, help='the first ids, of which one is chosen')
    flags.add_argument('--way', help='one of the ways, as they are printed; else all are tried')
    flags.add_argument('--threads', type=int, default=os.cpu_count())
    o = flags.parse_args()
    if not os.path.exists(o.gguf):
        write_gguf(o.gguf, o.weights, o.dtype)
    with open(o.prompt, 'rb') as f:
        prompt = np.fromfile(f, np.uint16, offset=1024).tolist()
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(o.gguf.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f'llama.cpp cannot load {o.gguf}')
    ways = {f'{"fused" if flash else "plain"} attention, cache {cache}, prompt by {part}': (flash, cache, part) for flash, cache, part in itertools.product(
        [True, False], ['fp32'] if o.dtype == 'fp32' else ['bf16', 'fp16'], [512, 1024] if len(prompt) > 512 else [512])}
    done = {way: generate(model, o, prompt, *ways[way]) for way in ([o.way] if o.way else ways)}
    way = min(done, key=lambda w: done[w][1] if o.count == 1 else done[w][2])
    ids, first, rest = done[way]
    print(json.dumps(dict(llama_cpp=llama_cpp.__version__, ids=ids, first_seconds=first, tokens_per_second=(o.count - 1) / rest if o.count > 1 else None, way=way)))


if __name__ == '__main__':
    main()
