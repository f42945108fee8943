#!/usr/bin/env python3
"""./tokenize beside SentencePiece's own spm_encode (Debian: sentencepiece) and Hugging Face tokenizers (PyPI), on the same documents.

    dev/bench/bench_tokenize.py [--mb 200] [--rounds 3] [--threads 2] [--model FILE] [--documents FOLDER]

FOLDER holds .jsonl files (RedPajama's sample), repeated up to --mb of text. Speeds of a shared machine swing; so the programs run in turn, each
round gives ratios, and the medians count. MB/s are bytes of text over wall time: of ./tokenize from start to finished shards, of spm_encode
likewise (one core, as it is; lines instead of documents), of tokenizers within encode_batch alone. The ids of tokenizers are compared with ours.
What reading, unpacking and parsing add: wall time from the file (plain, as gzip -6 and zstd -3 pack it) to all ids, over that from the same texts in
memory, less one, in rounds of its own (bench_parse.cpp).
"""
import argparse, array, glob, json, os, re, shutil, statistics, subprocess, sys, tempfile, time

from measure import machine, measured

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))
SHARED = os.path.join(ROOT, '../shared/data')
BATCH = 256  # documents
KINDS = 'plain', 'gzip', 'zstd'


def documents_of(path):
    with open(path, encoding='utf-8') as f:
        return [json.loads(line)['text'] for line in f]


def peer(model, path):
    """Runs in the virtual environment: seconds of each encode_batch pass over the documents, on request; then the ids."""
    import tokenizers
    from sentencepiece import SentencePieceProcessor
    spm = SentencePieceProcessor(model_file=model)
    pieces = [(spm.id_to_piece(i), spm.get_score(i)) for i in range(spm.get_piece_size())]
    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    merges = []
    for i, (piece, score) in enumerate(pieces):
        if not (spm.is_control(i) or spm.is_unknown(i) or spm.is_byte(i)):
            merges += [(-score, len(piece[:k]), piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in vocab and piece[k:] in vocab]
    merges = [(a, b) for _, _, a, b in sorted(merges, key=lambda m: m[:2])]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend('▁'), tokenizers.normalizers.Replace(' ', '▁')])
    documents = documents_of(path)
    print(f'tokenizers {tokenizers.__version__}', flush=True)
    for request in sys.stdin:
        ids = [] if request.strip() == 'ids' else None
        begin = time.time()
        for at in range(0, len(documents), BATCH):
            batch = tokenizer.encode_batch(documents[at:at + BATCH])
            if ids is not None:
                ids += [e.ids for e in batch]
        print(time.time() - begin if ids is None else json.dumps(ids), flush=True)


def peer_python():
    python = os.path.join(ROOT, 'build/peer_tokenize/bin/python')
    if not os.path.exists(python):
        print('installing tokenizers and sentencepiece from PyPI into build/peer_tokenize ...', flush=True)
        subprocess.run([sys.executable, '-m', 'venv', os.path.join(ROOT, 'build/peer_tokenize')], check=True)
        subprocess.run([python, '-m', 'pip', 'install', '-q', 'tokenizers', 'sentencepiece'], check=True)
    return python


def our_documents(prefix, eos=2):
    """The ids of each document, without the EOS that ends it."""
    documents, current = [], []
    for path in sorted(glob.glob(f'{prefix}_0*.bin')):
        with open(path, 'rb') as f:
            f.seek(1024)
            ids = array.array('H', f.read())
        for i in ids:
            if i == eos:
                documents.append(current)
                current = []
            else:
                current.append(i)
    return documents


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument('--mb', type=float, default=200)
    flags.add_argument('--rounds', type=int, default=3)
    flags.add_argument('--threads', type=int, default=2)
    flags.add_argument('--model', default=f'{SHARED}/llama2-tokenizer/tokenizer.model')
    flags.add_argument('--documents', default=f'{SHARED}/redpajama-sample')
    flags.add_argument('--peer', help=argparse.SUPPRESS)
    o = flags.parse_args()
    if o.peer:
        return peer(o.model, o.peer)
    if not shutil.which('spm_encode'):
        sys.exit('there is no spm_encode\nHINT: apt-get install sentencepiece')
    subprocess.run(['make', '-s', '-C', ROOT, 'tokenize', 'build/bench_parse'], check=True)
    python, folder = peer_python(), tempfile.mkdtemp()
    try:
        run(o, python, folder)
    finally:
        shutil.rmtree(folder)


def run(o, python, folder):
    once = [line for path in sorted(glob.glob(f'{o.documents}/*.jsonl')) for line in open(path, encoding='utf-8')]
    texts = [json.loads(line)['text'] for line in once]
    once_bytes = sum(len(t.encode()) for t in texts)
    times = max(1, round(o.mb * 1e6 / once_bytes))
    data, lines = f'{folder}/data.jsonl', f'{folder}/lines.txt'
    with open(data, 'w', encoding='utf-8') as f, open(lines, 'w', encoding='utf-8') as g:
        for _ in range(times):
            f.writelines(once)
            g.writelines(t + '\n' for t in texts)
    with open(f'{folder}/once.jsonl', 'w', encoding='utf-8') as f:
        f.writelines(once)
    packed = [f'{data}.gz', f'{data}.zst']
    with open(packed[0], 'wb') as f:
        subprocess.run(['gzip', '-6c', data], stdout=f, check=True)
    subprocess.run(['zstd', '-q3', data], check=True)
    mb = once_bytes * times / 1e6
    env = {**os.environ, 'RAYON_NUM_THREADS': str(o.threads), 'TOKENIZERS_PARALLELISM': 'true'}
    # Their speed does not depend on how often the documents come, but their memory does: a pass over the sample counts.
    hf = subprocess.Popen([python, __file__, '--peer', f'{folder}/once.jsonl', '--model', o.model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(request):
        print(request, file=hf.stdin, flush=True)
        return hf.stdout.readline()
    version = hf.stdout.readline().strip()
    tokenize = [os.path.join(ROOT, 'tokenize'), '--tokenizer', o.model, '--threads', str(o.threads), '--out']
    rows = []
    for i in range(o.rounds):
        _, ours, peak = measured(tokenize + [f'{folder}/t', data], stderr=subprocess.DEVNULL)
        spm = measured(['spm_encode', f'--model={o.model}', '--output_format=id', '--output=/dev/null', lines], stderr=subprocess.DEVNULL)[1]
        peer_seconds = float(ask('time'))
        rows.append((mb / ours, mb / spm, once_bytes / 1e6 / peer_seconds, peak))
        print(f'round {i + 1}: ./tokenize {rows[-1][0]:.1f} MB/s, {peak / 2**20:.0f} MiB | spm_encode {rows[-1][1]:.1f} MB/s | {version} {rows[-1][2]:.1f} MB/s', flush=True)
    parsed = measured([os.path.join(ROOT, 'build/bench_parse'), o.model, str(o.threads), data] + packed)[0]
    subprocess.run(tokenize + [f'{folder}/once', f'{folder}/once.jsonl'], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ours, theirs = our_documents(f'{folder}/once'), json.loads(ask('ids'))
    hf.stdin.close()
    differ = sum(a != b for a, b in zip(ours, theirs)) + abs(len(ours) - len(theirs))
    adds = dict(zip(KINDS, (float(percent) / 100 for percent in re.findall('wall time (.*?)%', parsed))))
    result = dict(vs_spm_encode=statistics.median(r[0] / r[1] for r in rows), vs_tokenizers=statistics.median(r[0] / r[2] for r in rows), reading_and_parsing_add=adds,
                  peak_mib=max(r[3] for r in rows) >> 20, documents=len(ours), documents_that_tokenizers_encodes_otherwise=differ)
    print(f'{machine()}; {o.threads} threads, {mb:.0f} MB of text')
    print(f'over spm_encode, one core          {result["vs_spm_encode"]:.2f}x   (bar 1.9)')
    print(f'over {version}, {o.threads} threads   {result["vs_tokenizers"]:.2f}x   (bar 1)')
    print(f'reading and parsing (bar for plain: 10%): {parsed}', end='')
    print(f'documents encoded otherwise by tokenizers: {differ} of {len(ours)}')
    print(json.dumps(result))


if __name__ == '__main__':
    main()
