#!/usr/bin/env python3
"""End-to-end tests of the trainer's data: every kind of set, Megatron's order, splits, recipes, reading ahead.

    dev/test/e2e_loader.py [NAME...]      as dev/test/e2e.py
"""
import array, glob, json, os, random, shutil, struct, subprocess

import e2e
from e2e import SMALL, curve, expect, newest, ok, records, refused, run, start, wait_for_step, write_shard

SEQ = 8


def walk(n, seed=1, vocab=64):
    rng = random.Random(seed)
    tokens, state = [], 0
    for _ in range(n):
        state = (state * 5 + rng.choice([1, 1, 1, 7])) % vocab
        tokens.append(state)
    return tokens


def documents_of(tokens, seed=2):
    rng = random.Random(seed)
    documents, at = [], 0
    while at < len(tokens):
        length = rng.choice([0, 1, 3, 17, 40])
        documents.append(tokens[at:at + length])
        at += length
    return documents


def write_megatron(prefix, documents, code=8):
    kind, size = {8: ('H', 2), 4: ('i', 4), 5: ('q', 8)}[code]
    lengths = [len(d) for d in documents]
    pointers = [size * sum(lengths[:i]) for i in range(len(documents))]
    with open(prefix + '.bin', 'wb') as f:
        for d in documents:
            f.write(array.array(kind, d).tobytes())
    with open(prefix + '.idx', 'wb') as f:
        f.write(b'MMIDIDX\0\0' + struct.pack('<QBQQ', 1, code, len(documents), len(documents) + 1))
        f.write(struct.pack(f'<{len(documents)}i', *lengths) + struct.pack(f'<{len(documents)}q', *pointers) + struct.pack(f'<{len(documents) + 1}q', *range(len(documents) + 1)))


def write_packed(path, blocks, code=8, unused=50):
    tokens = [t for block in blocks for t in block]
    tokens += [2] * unused if tokens[-1] != 2 else []
    with open(path, 'wb') as f:
        f.write(b'LITPKDS' + struct.pack('<QBQ', 1, code, len(tokens)) + array.array({8: 'H', 4: 'i'}[code], tokens).tobytes())


def losses(d, flags, **kw):
    ok(SMALL + flags + ['--log', f'{d}/log'], **kw)
    return curve(f'{d}/log')


# ---------------------------------------------------------------------------------------------------------------------

def test_kinds_of_the_same_tokens_train_alike(d):
    tokens = walk(24 * SEQ + 1)
    write_shard(f'{d}/l.bin', tokens)
    write_shard(f'{d}/l32.bin', tokens, magic=20240801, version=7, kind='i')
    for code in (8, 4, 5):
        write_megatron(f'{d}/m{code}', documents_of(tokens), code)
    for code in (8, 4):  # the windows of the shard, each a block
        write_packed(f'{d}/p{code}.bin', [tokens[w * SEQ:w * SEQ + SEQ + 1] for w in range(24)], code)
    steps = ['--steps', 14, '--order', 'windows', '--val-batches', 0]
    wanted = losses(d, ['--train', f'{d}/l.bin', '--val', f'{d}/l.bin'] + steps)
    validation = records(f'{d}/log', 'val')
    for name in ('l32.bin', 'm8', 'm8.bin', 'm4.idx', 'm5.*', 'p8.bin', 'p4.bin'):
        found = losses(d, ['--train', f'{d}/{name}', '--val', f'{d}/{name}'] + steps)
        expect(found == wanted, f'{name}: {found[-1]} and {wanted[-1]}')
        expect([(r['step'], r['loss']) for r in records(f'{d}/log', 'val')] == [(r['step'], r['loss']) for r in validation], f'{name}: validation')
    expect(losses(d, ['--train', f'{d}/p8.bin', '--tp', 2, '--dp', 2, '--micro-batch', 1] + steps, n=4)[-1][0] == 14, 'mpirun')
    ok(SMALL + ['--train', f'{d}/m8', '--steps', 2, '--out', f'{d}/out'])
    r = ok(['--checkpoint', f'{d}/out', '--eval', f'{d}/m8', f'{d}/p8.bin', f'{d}/l.bin'])
    found = {line.split(':')[0]: line.split('|')[1] for line in r.stdout.splitlines() if 'nats per token' in line}
    expect(len(found) == 3 and len(set(found.values())) == 1, r.stdout)
    for kind, name in (('llm.c shard', 'l.bin'), ('Megatron set', 'm8'), ('lit-gpt packed shard', 'p8.bin')):
        expect(kind in ok(SMALL + ['--train', f'{d}/{name}', '--steps', 1]).stdout, f'the header does not say {kind}')


def test_a_converted_set_trains_as_its_shard(d):
    with open(f'{d}/text.txt', 'w') as f:
        f.write('\n'.join(f'line {i} of a text that is worth {i * i % 97} tokens' for i in range(400)))
    for args in (['--train-tokenizer', 300, '--out', f'{d}/t.model', f'{d}/text.txt'], ['--tokenizer', f'{d}/t.model', '--split-documents', 300, '--out', f'{d}/s', f'{d}/text.txt'],
                 ['--convert', 'megatron', '--out', f'{d}/m', f'{d}/s.json']):
        r = subprocess.run([e2e.TOKENIZE] + [str(a) for a in args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        expect(r.returncode == 0, r.stderr)
    found = []
    for spec in (f'{d}/s_0*.bin', f'{d}/m'):
        steps = losses(d, ['--vocab', 300, '--train', spec, '--val', spec, '--order', 'windows', '--steps', 6, '--tokenizer', f'{d}/t.model', '--sample-every', 6])
        found.append((steps, [r['loss'] for r in records(f'{d}/log', 'val')], records(f'{d}/log', 'sample')[-1]['text']))
    expect(found[0] == found[1], f'{found[0]} and {found[1]}')


def test_megatron_order(d):
    write_megatron(f'{d}/m', documents_of(walk(700)))
    write_megatron(f'{d}/k', documents_of(walk(300, seed=5), seed=6), code=4)
    for name, spec in (('one', f'{d}/m'), ('blend', f'0.7:{d}/m,0.3:{d}/k')):
        base = ['--train', spec, '--steps', 62, '--seed', 1234]
        whole = losses(d, base)
        out = ok(SMALL + base).stdout
        expect('Megatron' in out and 'shuffled together' in out, out[:3000])
        expect(losses(d, base + ['--order', 'megatron', '--data-cache', f'{d}/cache {name}']) == whole, 'with a cache')
        made = sorted((f, os.stat(f'{d}/cache {name}/{f}').st_mtime_ns) for f in os.listdir(f'{d}/cache {name}'))
        expect(len(made) >= 3, made)
        mpi = losses(d, base + ['--data-cache', f'{d}/cache {name}', '--dp', 2], n=2)
        expect(all(a[0] == b[0] and abs(a[1] - b[1]) < 1e-5 * a[1] for a, b in zip(mpi, whole)), 'dp 2')
        expect(made == sorted((f, os.stat(f'{d}/cache {name}/{f}').st_mtime_ns) for f in os.listdir(f'{d}/cache {name}')), 'the cache was made again')
        expect(losses(d, base + ['--order', 'windows']) != whole, 'the order has no effect')
        # Stopped and taken up again; and not with another number of epochs.
        ok(SMALL + base + ['--out', f'{d}/{name}', '--save-every', 23, '--keep', 0])
        for step in (46, 62):
            subprocess.run(['rm', '-r', f'{d}/{name}/step_{step:08d}'], check=True)
        ok(['--out', f'{d}/{name}', '--resume', '--log', f'{d}/{name} rest'])
        expect(curve(f'{d}/{name} rest') == whole[23:], 'the resumed run differs')
        refused(['--out', f'{d}/{name}', '--resume', '--steps', 600], 2, 'epoch', '--steps', 'HINT')
        refused(['--out', f'{d}/{name}', '--resume', '--steps', 63, '--order', 'windows'], 2, '--train')
        ok(['--out', f'{d}/{name}', '--resume', '--steps', 63, '--log', f'{d}/{name} more'])  # within the same epochs
        expect([r[0] for r in curve(f'{d}/{name} more')] == [63], 'not one more step')
    write_shard(f'{d}/x.bin', walk(200))
    refused(SMALL + ['--train', f'0.5:{d}/m,0.5:{d}/x.bin', '--order', 'megatron'], 2, '--order', 'x.bin')
    refused(SMALL + ['--train', f'{d}/m', '--order', 'sorted'], 2, '--order', 'sorted')
    expect('every epoch shuffled anew' in ok(SMALL + ['--train', f'0.5:{d}/m,0.5:{d}/x.bin', '--steps', 1]).stdout, 'auto')


def test_split_gives_validation(d):
    documents = documents_of(walk(1500))
    write_megatron(f'{d}/m', documents)
    cut = round(0.9 * len(documents))
    write_megatron(f'{d}/first', documents[:cut])
    write_megatron(f'{d}/rest', documents[cut:])
    flags = ['--steps', 12, '--val-batches', 0, '--order', 'windows']
    apart = losses(d, ['--train', f'{d}/first', '--val', f'{d}/rest'] + flags), records(f'{d}/log', 'val')
    split = losses(d, ['--train', f'{d}/m', '--split', '90,10'] + flags), records(f'{d}/log', 'val')
    expect(len(apart[1]) == 2 and apart == split, f'{apart[1]} and {split[1]}')
    given = losses(d, ['--train', f'{d}/m', '--val', f'{d}/m', '--split', '90,10,0'] + flags), records(f'{d}/log', 'val')
    expect(given == apart, 'the same --val, given')
    none = losses(d, ['--train', f'{d}/m', '--split', '1'] + flags)
    expect(none[-1][0] == 12 and not records(f'{d}/log', 'val'), 'a split of one part')
    write_shard(f'{d}/x.bin', walk(200))
    refused(SMALL + ['--train', f'{d}/x.bin', '--split', '90,10'], 2, '--split', 'x.bin')
    refused(SMALL + ['--train', f'{d}/m', '--split', 'x'], 2, '--split')


def test_recipes_shares_and_epochs(d):
    os.makedirs(f'{d}/my data')
    for name, windows, seed in (('web', 40, 1), ('code', 6, 2), ('books', 30, 3)):
        write_shard(f'{d}/my data/{name}_000000.bin', walk(windows * SEQ + 1, seed))
    with open(f'{d}/a.mix', 'w') as f:
        f.write(f'# shares\n6:{d}/my data/web_*.bin\n\n3:{d}/my data/code_*.bin   # runs out\n1:{d}/my data/books_*.bin\n')
    r = ok(SMALL + ['--train', f'@{d}/a.mix', '--steps', 10, '--log', f'{d}/log', '--out', f'{d}/out'])
    inline = losses(d, ['--train', ','.join(f'{w}:{d}/my data/{n}_*.bin' for w, n in ((6, 'web'), (3, 'code'), (1, 'books'))), '--steps', 10])
    ok(SMALL + ['--train', f'@{d}/a.mix', '--steps', 10, '--log', f'{d}/log'])
    expect(curve(f'{d}/log') == inline, 'a recipe is not what it says inline')
    end = {s['source'].split('/')[-1]: s for s in records(f'{d}/log', 'data')[-1]['sources']}
    expect(end['web_*.bin']['windows_drawn'] == 24 and end['code_*.bin']['windows_drawn'] == 12 and end['books_*.bin']['windows_drawn'] == 4, str(end))
    expect(end['code_*.bin']['epochs'] == 2 and end['code_*.bin']['share_wanted'] == 0.3 and abs(end['code_*.bin']['share_drawn'] - 0.3) < 1e-9, str(end))
    again = [(e['source'].split('/')[-1], e['epoch']) for e in records(f'{d}/log', 'epoch')]
    expect(again == [('code_*.bin', 2)], str(again))
    step = records(f'{d}/log', 'epoch')[0]['step']
    expect(f'step {step} | source {d}/my data/code_*.bin begins its epoch 2' in r.stdout, r.stdout)
    expect('2.00 epochs in 10 steps' in r.stdout and 'share 0.3000 wanted, 0.3000 drawn; 2.00 epochs' in r.stdout, r.stdout)
    ok(['--out', f'{d}/out', '--resume', '--steps', 12])
    with open(f'{d}/a.mix', 'a') as f:
        f.write(f'1:{d}/my data/web_*.bin\n')
    refused(['--out', f'{d}/out', '--resume', '--steps', 14], 2, '--train')
    with open(f'{d}/b.mix', 'w') as f:
        f.write(f'1:{d}/my data/web_*.bin\nhalf:x\n')
    refused(SMALL + ['--train', f'@{d}/b.mix'], 2, 'b.mix', 'line 2', 'half')
    refused(SMALL + ['--train', f'@{d}/none.mix'], 2, 'none.mix')


def test_a_damaged_set_stops_the_run_by_name(d):
    tokens = walk(40 * SEQ + 1)
    tokens[100] = 64  # past the vocabulary: found by the thread that reads ahead
    write_megatron(f'{d}/m', documents_of(tokens))
    for n in (0, 2):
        refused(SMALL + ['--train', f'{d}/m', '--order', 'windows', '--tp', 2, '--steps', 40], 1, f'{d}/m.bin', '64', 'vocabulary', n=n)
    write_megatron(f'{d}/n', documents_of(walk(100)))
    with open(f'{d}/n.idx', 'r+b') as f:
        f.truncate(60)
    refused(SMALL + ['--train', f'{d}/n'], 1, 'n.idx')
    os.unlink(f'{d}/m.idx')
    refused(SMALL + ['--train', f'{d}/m.bin'], 1, 'm.bin')
    write_megatron(f'{d}/empty', [[], [], []])
    refused(SMALL + ['--train', f'{d}/empty'], 1, 'empty')


def test_prompts_begin_as_the_set_does(d):
    """Without a side file nobody says whether documents begin with BOS: the set's first id does. Oracle: the same with the side file."""
    with open(f'{d}/text.jsonl', 'w') as f:
        f.write('{"text": "one two three four five six seven"}\n{"text": "seven six five"}\n' * 200)
    with open(f'{d}/corpus.txt', 'w') as f:
        rng = random.Random(3)
        f.write('\n'.join(''.join(rng.choices('abcdefghijklmnopqrstuvwxyz ', k=40)) for _ in range(300)))
    tokenizer = f'{d}/t.model'
    for mode in (['--train-tokenizer', 300, '--out', tokenizer, f'{d}/corpus.txt'],) + tuple(['--tokenizer', tokenizer, '--out', f'{d}/{name}', f'{d}/text.jsonl'] + flags for name, flags in (('bos', ['--bos']), ('plain', []))):
        r = subprocess.run([e2e.TOKENIZE] + [str(a) for a in mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        expect(r.returncode == 0, r.stderr)
    for name in ('bos', 'plain'):
        written = []
        for side_file in (True, False):
            if not side_file:
                os.unlink(f'{d}/{name}.json')
            out = f'{d}/{name}{side_file}'
            ok(SMALL + ['--vocab', 300, '--seq', 32, '--train', f'{d}/{name}_0*.bin', '--steps', 40, '--lr', 0.02, '--out', out, '--schedule', 'constant'])
            written.append([ok(['--checkpoint', out, '--tokenizer', tokenizer, '--generate', 12, '--temperature', 0, '--ignore-eos', '--prompt', p]).stdout for p in ('', 'one two', 'zzz')])
        with open(f'{newest(out)}/checkpoint.json') as f:
            found = json.load(f)['meta']['tokens']
        expect(found.keys() == {'first_id'} and (found['first_id'] == 1) == (name == 'bos'), str(found))
        expect(written[0] == written[1], f'{name}: {written}')


def test_an_index_cut_during_the_run_is_named(d):
    """It is mapped: reading past its new end is a signal, which must not end the run without a word."""
    documents = documents_of(walk(60000))
    flags = ['--tp', 2, '--steps', 1000000, '--decay-steps', 100, '--val-batches', 0, '--order', 'megatron', '--data-cache', f'{d}/cache']
    for n, name in ((0, 'm.idx'), (2, 'm.idx'), (0, 'cache/m-*-sample_index.npy')):
        write_megatron(f'{d}/m', documents)
        shutil.rmtree(f'{d}/cache', ignore_errors=True)
        log = f'{d}/log{n}'
        process = start(SMALL + flags + ['--train', f'{d}/m', '--log', log], n=n)
        wait_for_step(log, 3, process)
        path, = glob.glob(f'{d}/{name}')
        os.truncate(path, 4096)
        os.unlink(log)
        _, err = process.communicate(timeout=30)
        expect(process.returncode == 1 and path in err and 'was cut' in err and 'HINT' in err, f'{name}, n={n}: exit code {process.returncode}: {err[-1500:]}')


if __name__ == '__main__':
    e2e.run_tests(globals())
