#!/usr/bin/env python3
"""make bench: one table of speeds: work, ours, peer, ratio, limit, share of the limit.

    dev/bench/bench.py [--rows 130m,start] [--rounds 3] [--steps 2] [--python PYTHON_WITH_TORCH [--peer fp32,bf16]] [--llama-python PYTHON_WITH_LLAMA_CPP]
                       [--no-peer] [--quick]

training    ./train_gpt beside PyTorch (peer_torch.py) on the same weights and shape, in turn, each round a ratio: medians. PyTorch as fast as it gets here:
            eager or compiled, fp32 or bf16, tried first (--quick: eager, fp32). Both must give the same loss before anything is timed.
            Limit: each product of the step (build/step_ops lists them) at the vendor library's rate for it, attention at the mean of those rates, and the
            bytes of all else at the memory's (build/bench_limit, in the same run)
tp2         two ranks, p = 0.5, beside one rank on as many threads
generation  one token after another, beside llama.cpp (peer_llama.py) on the same weights in the same type: medians of rounds in turn. In fp32 both must write the
            same text before anything is timed. Limit: the weights that each token reads, over the rate of reading as much memory again and again
prefill     a prompt that fills the context, 1,024 tokens, beside llama.cpp likewise; limit: its products at the vendor library's rate, attention at
            the mean of those rates
start       from the command to the first step of a run that resumes, the median; the checkpoint is in page cache

Without --python it makes a virtual environment in build/peer and installs torch from PyPI; without --llama-python one in build/peer-llama, where llama-cpp-python
is built from source (10 minutes or more on 2 cores). A peer that cannot be had is a '-'. --quick: tiny shapes; shows that the bench runs, not how fast
anything is. Its last line is then 'N passed, N failed'.
"""
import argparse, array, functools, json, os, random, re, shutil, statistics, struct, subprocess, sys, tempfile, time

from measure import machine, measured

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))
TRAIN_GPT = os.path.join(ROOT, 'train_gpt')
LLAMA = dict(arch='llama', layers=12, channels=768, heads=16, kv_heads=16, ffn=2048, vocab=32000, batch=4, seq=1024)
GPT = dict(arch='gpt', layers=12, channels=768, heads=12, kv_heads=12, ffn=3072, vocab=50257, batch=4, seq=1024)
SHAPES = {'130m': LLAMA, '130m-short': {**LLAMA, 'batch': 8, 'seq': 256},
          '15m': {**LLAMA, 'layers': 6, 'channels': 288, 'heads': 6, 'kv_heads': 6, 'ffn': 768, 'batch': 16, 'seq': 256},
          '1.1b': {**LLAMA, 'layers': 2, 'channels': 2048, 'heads': 32, 'kv_heads': 8, 'ffn': 5632},  # two of its 22 layers
          'gpt2': GPT}
TINY = dict(layers=2, channels=64, heads=4, kv_heads=4, ffn=96, vocab=300, batch=2, seq=32)
PIECES = 290  # of the tokenizer that generation writes with
PEER_VARIANTS = {'fp32': [], 'bf16': ['--dtype', 'bf16'], 'fp32+compile': ['--compile'], 'bf16+compile': ['--dtype', 'bf16', '--compile']}


def peer_python(given, name, *packages, **build):
    """An interpreter that has them: the given one, else one in build/NAME, made once. None where they cannot be installed."""
    if given:
        return given
    python = os.path.join(ROOT, f'build/{name}/bin/python')
    if not os.path.exists(f'{python}.ready'):
        print(f'installing {", ".join(packages)} from PyPI into build/{name}, once ...', flush=True)
        try:
            subprocess.run([sys.executable, '-m', 'venv', os.path.join(ROOT, 'build', name)], check=True)
            subprocess.run([python, '-m', 'pip', 'install', '-q', *packages], check=True, env={**os.environ, **build})
        except subprocess.CalledProcessError as error:
            print(f'no peer: {error}')
            return None
        open(f'{python}.ready', 'w').close()
    return python


def shape_flags(shape):
    flags = ['--arch', shape['arch'], '--global-batch', shape['batch']]
    for name in ('layers', 'channels', 'heads', 'kv_heads', 'ffn', 'vocab', 'seq'):
        flags += ['--' + name.replace('_', '-'), shape[name]]
    return flags + (['--positions', 'learned', '--tie'] if shape['arch'] == 'gpt' else [])


def weights(s):
    """that multiply: in the layers and the head"""
    size = s['channels'] // s['heads']
    layer = s['channels'] * size * (2 * s['heads'] + 2 * s['kv_heads']) + (3 if s['arch'] == 'llama' else 2) * s['channels'] * s['ffn']
    return s['layers'] * layer + s['vocab'] * s['channels']


class Work:
    """A model with random weights, and tokens, in a folder of their own."""

    def __init__(self, o, shape, folder):
        self.o, self.shape, self.folder = o, shape, folder
        self.flags = [str(f) for f in shape_flags(shape)]
        self.data, self.model = f'{folder}/random.bin', f'{folder}/model'
        rng = random.Random(0)
        tokens = [rng.randrange(shape['vocab']) for _ in range(shape['batch'] * shape['seq'] * 2 + 1)]
        with open(self.data, 'wb') as f:
            f.write(struct.pack('<3i', 20240520, 1, len(tokens)).ljust(1024, b'\0') + array.array('H', tokens).tobytes())

    def train(self, *extra):
        """tokens/s of each step after the first, which touches all memory for the first time; peak memory. Keeps the type that --dtype auto took."""
        log = f'{self.folder}/log'
        _, _, peak = measured([TRAIN_GPT, *self.flags, '--train', self.data, '--log', log, '--steps', str(self.o.steps + 1), '--warmup', '1', '--threads',
                                str(self.o.threads), *extra])
        with open(log) as f:
            records = [json.loads(line) for line in f]
        self.dtype = next(r['flags']['dtype'] for r in records if r['kind'] == 'run')
        return [r['tokens_per_second'] for r in records if r['kind'] == 'step'][1:], peak

    def save(self):
        if not os.path.exists(self.model):
            measured([TRAIN_GPT, *self.flags, '--train', self.data, '--steps', '0', '--out', self.model, '--dtype', 'fp32'])

    def loss(self):
        log = f'{self.folder}/eval'
        measured([TRAIN_GPT, '--checkpoint', self.model, '--eval', self.data, '--log', log])
        with open(log) as f:
            return next(r['loss'] for r in map(json.loads, f) if r['kind'] == 'eval')

    def export(self):
        if not os.path.exists(f'{self.folder}/hf'):
            self.save()
            measured([TRAIN_GPT, '--checkpoint', self.model, '--export-hf', f'{self.folder}/hf'])
        return f'{self.folder}/hf'

    def peer(self, steps, variant):
        # Some machines pin OpenBLAS to an old kernel; the peer gets the library's own choice.
        env = {k: v for k, v in os.environ.items() if not k.startswith('OPENBLAS')}
        out, _, peak = measured([self.o.python, os.path.join(ROOT, 'dev/bench/peer_torch.py'), '--weights', self.export(), '--data', self.data, '--batch', str(self.shape['batch']),
                                 '--seq', str(self.shape['seq']), '--steps', str(steps + 1), '--threads', str(self.o.threads), *PEER_VARIANTS[variant]], env=env)
        result = json.loads(out.splitlines()[-1])
        return result['tokens_per_second'][1:], peak, result['loss']

    def limit(self):
        """seconds of a step in the type that train() took"""
        out = measured([os.path.join(ROOT, 'build/step_ops'), '--micro-batches', '1', '--micro-batch', str(self.shape['batch']), '--dtype', self.dtype, *self.flags])[0]
        calls = [c for c in map(json.loads, out.splitlines()) if 'op' in c]
        form = {'matmul_forward': 'forward', 'matmul_gelu_forward': 'forward', 'matmul_dgrad': 'dgrad', 'matmul_wgrad': 'wgrad'}
        products = [(c['flops'], f'{form[c["op"]]} {c["N"]} {c["K"]} {c["OC"]}') for c in calls if c['op'] in form]
        wanted = 6 * self.shape['batch'] * self.shape['seq'] * weights(self.shape)
        if sum(flops for flops, _ in products) != wanted:
            sys.exit(f'bench.py: the products of a step have {sum(flops for flops, _ in products):.0f} FLOPs; by its shape {wanted}')
        rates, memory = machine_rates(self.o.threads, self.dtype, sorted({p for _, p in products}))
        seconds = sum(flops / rates[p] for flops, p in products)
        mean_rate = sum(flops for flops, _ in products) / seconds
        seconds += sum(c['flops'] for c in calls if c['op'].startswith('attention')) / mean_rate
        seconds += sum(c['bytes'] for c in calls if c['op'] not in form and not c['op'].startswith('attention')) / memory['triad']
        return seconds

    def tokenizer(self):
        """One that knows little: a letter is a token."""
        path = f'{self.folder}/letters.model'
        if not os.path.exists(path):
            with open(f'{self.folder}/letters.txt', 'w') as f:
                f.write('\n'.join(' '.join(chr(97 + (i * j) % 26) for j in range(26)) for i in range(1, 200)))
            measured([os.path.join(ROOT, 'tokenize'), '--train-tokenizer', str(PIECES), '--out', path, f'{self.folder}/letters.txt'], stderr=subprocess.DEVNULL)
        return path

    def tokens_of(self, text):
        with open(f'{self.folder}/prompt.txt', 'w') as f:
            f.write(text)
        measured([os.path.join(ROOT, 'tokenize'), '--tokenizer', self.tokenizer(), '--no-eos', '--out', f'{self.folder}/prompt', f'{self.folder}/prompt.txt'], stderr=subprocess.DEVNULL)
        with open(f'{self.folder}/prompt_000000.bin', 'rb') as f:
            return struct.unpack('<3i', f.read(12))[2]

    def write(self, prompt, count, dtype):
        """tokens/s after the first token, seconds until that one was there, the text"""
        done = subprocess.run([TRAIN_GPT, '--checkpoint', self.model, '--dtype', dtype, '--tokenizer', self.tokenizer(), '--prompt', prompt, '--generate', str(count), '--temperature', '0',
                               '--ignore-eos', '--threads', str(self.o.threads)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=True)
        rate, first = re.search(r'tokens, ([0-9.]+) tokens/s after the first, which took ([0-9.]+) s', done.stderr).groups()
        return float(rate), float(first), done.stdout.strip()

    def llama(self, prompt, count, dtype, *way):
        """The same by llama.cpp, and the way that it went: the fastest of all, or the given one."""
        self.tokens_of(prompt)
        out = measured([self.o.llama_python, os.path.join(ROOT, 'dev/bench/peer_llama.py'), '--weights', self.export(), '--gguf', f'{self.folder}/{dtype}.gguf', '--dtype', dtype,
                        '--prompt', f'{self.folder}/prompt_000000.bin', '--count', str(count), '--among', str(PIECES), '--threads', str(self.o.threads), *(f'--way={w}' for w in way)])[0]
        r = json.loads(out.splitlines()[-1])
        with open(f'{self.folder}/prompt_000000.bin', 'rb') as f:
            ids = f.read()[1024:] + array.array('H', r['ids']).tobytes()
        with open(f'{self.folder}/written.bin', 'wb') as f:
            f.write(struct.pack('<3i', 20240520, 1, len(ids) // 2).ljust(1024, b'\0') + ids)
        text = measured([os.path.join(ROOT, 'tokenize'), '--decode', '--tokenizer', self.tokenizer(), f'{self.folder}/written.bin'])[0]
        return r['tokens_per_second'], r['first_seconds'], text.strip(), r['way']

    def beside_llama(self, prompt, count, dtype, speed, limit):
        """A row of the table: speed of (tokens/s, seconds until the first) and limit(), in each round a ratio and a share: medians."""
        self.save()
        if self.o.llama_python:
            ours, theirs = self.write(prompt, count, 'fp32')[2], self.llama(prompt, count, 'fp32')[2]
            if ours != theirs:
                sys.exit(f'bench.py: on the same weights ./train_gpt writes {ours!r}, llama.cpp {theirs!r}: one of them computes something else')
            way = self.llama(prompt, count, dtype)[3]
        rows = []
        for _ in range(self.o.rounds):
            before, ours = limit(), speed(*self.write(prompt, count, dtype)[:2])
            rows.append((ours, (before + limit()) / 2, speed(*self.llama(prompt, count, dtype, way)[:2]) if self.o.llama_python else None))
        peer, ratio = '-', '-'
        if self.o.llama_python:
            peer, ratio = f'{tokens(statistics.median(row[2] for row in rows))} (llama.cpp)', f'{statistics.median(ours / theirs for ours, _, theirs in rows):.2f}'
        return (tokens(statistics.median(row[0] for row in rows)), peer, ratio, tokens(statistics.median(row[1] for row in rows)),
                statistics.median(row[0] / row[1] for row in rows))


def machine_rates(threads, dtype, products, *read_bytes):
    done = subprocess.run([os.path.join(ROOT, 'build/bench_limit'), str(threads), dtype, *map(str, read_bytes)], input=''.join(p + '\n' for p in products), stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {r['product']: r['flops_per_second'] for r in lines[:-1]}, lines[-1]


def tokens(rate):
    return f'{rate:.0f} tok/s' if rate >= 100 else f'{rate:.1f} tok/s'


def gib(peak):
    return f'{peak / 2**30:.2f} GiB'


def training(o, work):
    variant = o.peer[0]
    if o.python:
        loss = work.peer(0, 'fp32')[2]
        ours = work.loss()
        if not abs(loss - ours) <= 1e-4 * ours:
            sys.exit(f'bench.py: on the same weights and tokens ./train_gpt has loss {ours}, PyTorch {loss}: one of them computes something else')
        if len(o.peer) > 1:
            variant = max(o.peer, key=lambda v: max(work.peer(1, v)[0]))
    rows = []
    for _ in range(o.rounds):
        rows.append((work.train(), work.peer(o.steps, variant) if o.python else None))
    ours = statistics.median(r for (rates, _), _ in rows for r in rates)
    limit = work.shape['batch'] * work.shape['seq'] / work.limit()
    peer, ratio = '-', '-'
    if o.python:
        rate = statistics.median(r for _, p in rows for r in p[0])
        peer = f'{tokens(rate)}, {gib(max(p[1] for _, p in rows))} ({variant})'
        ratio = f'{statistics.median(statistics.median(a[0]) / statistics.median(p[0]) for a, p in rows):.2f}'
    return f'{tokens(ours)}, {gib(max(a[1] for a, _ in rows))} ({work.dtype})', peer, ratio, tokens(limit), ours / limit


def two_ranks(o, work):
    rows = [(work.train('--tp', '2', '--sync-factor', '0.5'), work.train()) for _ in range(o.rounds)]
    two, one = (statistics.median(r for row in rows for r in row[i][0]) for i in (0, 1))
    return f'{tokens(two)} ({work.dtype})', f'{tokens(one)} (one rank)', f'{statistics.median(statistics.median(a[0]) / statistics.median(b[0]) for a, b in rows):.2f}', '-', None


def generation(o, work, dtype):
    weight_bytes = weights(work.shape) * (4 if dtype == 'fp32' else 2)
    return work.beside_llama('a b', 8 if o.quick else 64, dtype, lambda rate, first: rate, lambda: machine_rates(o.threads, dtype, [], weight_bytes)[1]['read'] / weight_bytes)


def prefill(o, work, dtype):
    text, s = ' '.join(chr(97 + i % 26) for i in range(4 * work.shape['seq'])), work.shape
    text = text[:len(text) * (s['seq'] - 8) // work.tokens_of(text)]  # as many tokens as the context holds, nearly
    n = work.tokens_of(text)
    shapes = [(n, s['channels'], s['channels'] // s['heads'] * (s['heads'] + 2 * s['kv_heads'])), (n, s['channels'], s['channels']), (n, s['channels'], 2 * s['ffn']), (n, s['ffn'], s['channels'])]

    def limit():
        rates = machine_rates(o.threads, dtype, [f'forward {a} {b} {c}' for a, b, c in shapes])[0]
        products, seconds = sum(2 * a * b * c for a, b, c in shapes), sum(2 * a * b * c / rates[f'forward {a} {b} {c}'] for a, b, c in shapes)
        attention = 2 * n * (n + 1) * s['channels']  # scores and what they weigh, of the keys that are seen: at the products' rate
        return n / (s['layers'] * seconds * (products + attention) / products)
    return work.beside_llama(text, 1, dtype, lambda _, first: n / max(first, 1e-3), limit)


def start(o, work):
    work.save()
    seconds = []
    for _ in range(o.rounds):
        copy = f'{work.folder}/resumed'
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(work.model, copy)
        log, begin = f'{copy}/log', time.time()
        process = subprocess.Popen([TRAIN_GPT, '--out', copy, '--resume', '--steps', '1', '--warmup', '0', '--train', work.data, '--log', log, '--threads', str(o.threads)], stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if line.startswith('step 1/1 |'):
                seconds.append(time.time() - begin)
        if process.wait() != 0:
            sys.exit('failed: the resumed run')
        with open(log) as f:
            seconds[-1] -= next(r['seconds'] for r in map(json.loads, f) if r['kind'] == 'step')
    return f'{statistics.median(seconds):.2f} s', '-', '-', '-', None


ROWS = {**dict.fromkeys(SHAPES, training), 'tp2': two_ranks,
        **{f'{name}-{model}-{dtype}': functools.partial(cells, dtype=dtype) for name, cells in (('gen', generation), ('prefill', prefill)) for model in ('130m', '1.1b') for dtype in ('fp32', 'bf16')},
        'start': start}


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument('--rows', default=','.join(ROWS), help='some of ' + ', '.join(ROWS))
    flags.add_argument('--rounds', type=int, default=3)
    flags.add_argument('--steps', type=int, default=2)
    flags.add_argument('--threads', type=int, default=os.cpu_count())
    flags.add_argument('--python', help='an interpreter that has torch')
    flags.add_argument('--llama-python', help='an interpreter that has llama-cpp-python, gguf and numpy')
    flags.add_argument('--peer', default=','.join(PEER_VARIANTS), help='how PyTorch may run: some of %(default)s')
    flags.add_argument('--no-peer', action='store_true', help='only ours and the limits')
    flags.add_argument('--quick', action='store_true', help='tiny shapes: shows that the bench runs, not how fast anything is')
    o = flags.parse_args()
    rows = o.rows.split(',')
    for row in rows:
        if row not in ROWS:
            sys.exit(f'bench.py: --rows {row}: there is no such row\nHINT: wanted some of {",".join(ROWS)}')
    o.peer = ['fp32'] if o.quick else o.peer.split(',')
    if o.quick:
        o.rounds = o.steps = o.threads = 1
    trains, writes = any(row in SHAPES for row in rows), any(row.startswith(('gen', 'prefill')) for row in rows)
    o.python = None if o.no_peer or not trains or (o.quick and not o.python) else peer_python(o.python, 'peer', 'torch', 'numpy')
    o.llama_python = None if o.no_peer or not writes or (o.quick and not o.llama_python) else peer_python(
        o.llama_python, 'peer-llama', 'llama-cpp-python', 'gguf', 'numpy', CMAKE_ARGS='-DLLAVA_BUILD=OFF', CMAKE_BUILD_PARALLEL_LEVEL=str(os.cpu_count()))
    print(f'{machine()}; {o.threads} threads')
    print(f'{"work":<17} {"ours":<28} {"peer":<36} {"ratio":>6} {"limit":>14} {"share":>6}')
    done = 0
    for row in rows:
        name = next((part for part in ('1.1b', '15m', 'gpt2', '130m-short') if part in row), '130m')
        shape = {**SHAPES[name], **(TINY if o.quick else {})}
        with tempfile.TemporaryDirectory() as folder:
            ours, peer, ratio, limit, share = ROWS[row](o, Work(o, shape, folder))
        print(f'{row:<17} {ours:<28} {peer:<36} {ratio:>6} {limit:>14} {"-" if share is None else f"{share:.0%}":>6}', flush=True)
        done += 1
    if o.quick:
        print(f'{done} passed, 0 failed')


if __name__ == '__main__':
    main()
