#!/usr/bin/env python3
"""make bench: the trainer beside PyTorch on the same work, and two ranks beside one, as ratios of runs taken in turn.

    dev/bench/bench.py [--rounds 3] [--steps 3] [--python PYTHON_WITH_TORCH] [--no-peer] [--quick]

Without --python it makes a virtual environment in build/peer and installs torch from PyPI. Speeds of a shared machine swing;
so peer and trainer run alternately, each round gives a ratio, and the median of the ratios counts.
"""
import argparse, array, json, os, random, shutil, statistics, struct, subprocess, sys, tempfile

from measure import cpu_name, measured

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))
SHAPES = {'130m': dict(layers=12, channels=768, heads=16, kv_heads=16, ffn=2048, vocab=32000, batch=4, seq=1024),
          'quick': dict(layers=2, channels=256, heads=4, kv_heads=4, ffn=704, vocab=2000, batch=4, seq=128)}


def peer_python(given):
    if given:
        return given
    python = os.path.join(ROOT, 'build/peer/bin/python')
    if not os.path.exists(python):
        print('installing torch from PyPI into build/peer (once, some GB) ...', flush=True)
        subprocess.run([sys.executable, '-m', 'venv', os.path.join(ROOT, 'build/peer')], check=True)
        subprocess.run([python, '-m', 'pip', 'install', '-q', 'torch', 'numpy'], check=True)
    return python


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument('--rounds', type=int, default=3)
    flags.add_argument('--steps', type=int, default=3)
    flags.add_argument('--threads', type=int, default=os.cpu_count())
    flags.add_argument('--python')
    flags.add_argument('--no-peer', action='store_true', help='only two ranks beside one')
    flags.add_argument('--quick', action='store_true', help='a tiny shape: shows that the bench runs, not how fast anything is')
    o = flags.parse_args()
    python, shape, folder = None if o.no_peer else peer_python(o.python), SHAPES['quick' if o.quick else '130m'], tempfile.mkdtemp()
    rng = random.Random(0)
    tokens = [rng.randrange(shape['vocab']) for _ in range(shape['batch'] * shape['seq'] * 8 + 1)]
    with open(f'{folder}/random.bin', 'wb') as f:
        f.write(struct.pack('<3i', 20240520, 1, len(tokens)).ljust(1024, b'\0') + array.array('H', tokens).tobytes())

    def ours(*extra):
        log = f'{folder}/log'
        command = [os.path.join(ROOT, 'train_gpt'), '--train', f'{folder}/random.bin', '--log', log, '--steps', str(o.steps + 1), '--threads', str(o.threads), '--dtype', 'fp32',
                   '--micro-batch', str(shape['batch']), '--global-batch', str(shape['batch']), *extra]
        for name in ('layers', 'channels', 'heads', 'kv_heads', 'ffn', 'vocab', 'seq'):
            command += ['--' + name.replace('_', '-'), str(shape[name])]
        _, _, peak = measured(command)
        with open(log) as f:
            steps = [r for r in map(json.loads, f) if r['kind'] == 'step'][1:]  # the first step touches all memory for the first time
        speeds = [r['tokens_per_second'] for r in steps]
        return statistics.median(speeds), peak, steps[-1]['comm_bytes_tp_layers'], max(speeds)

    def torch():
        command = [python, os.path.join(ROOT, 'dev/bench/peer_llama.py'), '--steps', str(o.steps + 1), '--threads', str(o.threads)]
        for name, value in shape.items():
            command += ['--' + name.replace('_', '-'), str(value)]
        # Some machines pin OpenBLAS to an old kernel; the peer gets the library's own choice.
        env = {k: v for k, v in os.environ.items() if not k.startswith('OPENBLAS')}
        out, _, peak = measured(command, env=env)
        return statistics.median(json.loads(out.splitlines()[-1])['tokens_per_second'][1:]), peak

    rows = []
    for i in range(o.rounds):
        one, peer, two = ours(), None if o.no_peer else torch(), ours('--tp', '2', '--sync-factor', '0.5')
        rows.append((one, peer, two))
        shown = {'train_gpt': one, 'PyTorch': peer, 'train_gpt --tp 2 --sync-factor 0.5': two}
        print(f'round {i + 1}: ' + ' | '.join(f'{name} {r[0]:.0f} tok/s {r[1] / 2**30:.2f} GiB' for name, r in shown.items() if r), flush=True)
    shutil.rmtree(folder)
    payload = 4 * shape['layers'] * shape['batch'] * shape['seq'] * (shape['channels'] // 2) * 4
    result = dict(tp2_vs_tp1=statistics.median(c[0] / a[0] for a, _, c in rows), wire_bytes_over_payload=rows[0][2][2] / payload)
    print(f'{cpu_name()}, {o.threads} threads, fp32, {shape}')
    if not o.no_peer:
        result.update(speed_vs_pytorch=statistics.median(a[0] / b[0] for a, b, _ in rows), memory_vs_pytorch=statistics.median(a[1] / b[1] for a, b, _ in rows))
        print(f'speed, over PyTorch          {result["speed_vs_pytorch"]:.2f}x   (bar 0.9)')
        print(f'peak memory, over PyTorch    {result["memory_vs_pytorch"]:.2f}x   (bar 0.8)')
    print(f'--tp 2 p 0.5, over --tp 1    {result["tp2_vs_tp1"]:.2f}x   (bar 0.9)')
    # Whatever else runs on the machine only slows: the fastest steps say what the program itself takes.
    print(f'  fastest step of each       {max(c[3] for _, _, c in rows) / max(a[3] for a, _, _ in rows):.2f}x')
    print(f'bytes on the wire, over the payload    {result["wire_bytes_over_payload"]:.4f}   (2(T-1)/T = 1)')
    print(json.dumps(result))


if __name__ == '__main__':
    main()
