#!/usr/bin/env python3
"""End-to-end tests of ./tokenize: runs that are killed, stopped, starved and resumed; filters; looking inside and converting.

    dev/test/e2e_data.py [NAME...]      all tests, or those whose name contains a word; last line: 'N passed, N failed'

The oracle of every resumed run is the unbroken one, byte for byte; that of the filters is written here in Python.
"""
import array, atexit, gzip, json, os, random, resource, shutil, signal, struct, subprocess, sys, tempfile, time

import e2e
from e2e import ROOT, STARTED, TOKENIZE, expect

# Hundreds of runs that sync their files: in memory where there is room.
if os.access('/dev/shm', os.W_OK) and shutil.disk_usage('/dev/shm').free > 1 << 30:
    tempfile.tempdir = '/dev/shm'
SHARED = tempfile.mkdtemp(prefix='e2e_data_')  # what several tests use
atexit.register(shutil.rmtree, SHARED, True)

WORDS = 'the earth was without form and void darkness moved upon face of waters return x if (y > 10) { naïve café 漢字 🙂 Привет 12345'.split(' ')


def tokenize(args, cwd='.', env=None, stdin=None, prefix=(), timeout=120, preexec=None):
    return subprocess.run(list(prefix) + [TOKENIZE] + [str(a) for a in args], cwd=cwd, env={**os.environ, **(env or {})}, input=stdin, timeout=timeout,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=preexec)


def ok(args, **kw):
    r = tokenize(args, **kw)
    expect(r.returncode == 0, f'exit code {r.returncode} of {args}:\n{r.stderr.decode()[-2000:]}')
    return r


def refused(args, code, *words, **kw):
    r = tokenize(args, **kw)
    text = r.stderr.decode(errors='replace')
    expect(r.returncode == code, f'exit code {r.returncode}, wanted {code}, of {args}:\n{text[-1500:]}')
    for word in words:
        expect(word in text, f'{word!r} is not in the message of {args}:\n{text[-1500:]}')
    return r


def start(args, **kw):
    process = subprocess.Popen([TOKENIZE] + [str(a) for a in args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **kw)
    STARTED.append(process)
    return process


def model():
    path = f'{SHARED}/tok.model'
    if not os.path.exists(path):
        with open(f'{SHARED}/train.txt', 'w') as f:
            rng = random.Random(7)
            f.write('\n'.join(' '.join(rng.choices(WORDS, k=12)) for _ in range(2000)))
        ok(['--train-tokenizer', 420, '--out', path, f'{SHARED}/train.txt'])
    return path


def lines(n, seed=1, key='text', words=40):
    """n lines of JSON, some of them broken, and as many documents as are whole."""
    rng = random.Random(seed)
    out = []
    for i in range(n):
        text = ' '.join(rng.choices(WORDS, k=rng.randint(1, words))) + rng.choice(['', '\n', ' <s> ', '\ttab'])
        record = {key: f'{i}: {text}', 'meta': {'n': i}} if rng.random() < 0.5 else {'meta': {'n': i}, key: f'{i}: {text}'}
        line = json.dumps(record, ensure_ascii=rng.random() < 0.5)
        out.append('{"broken": ' if rng.random() < 0.01 else '' if rng.random() < 0.01 else line)
    return ('\n'.join(out) + '\n').encode()


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'wb') as f:
        f.write(data)
    return path


def pack_zstd(path):
    subprocess.run(['zstd', '-q', '--rm', path], check=True)
    return path + '.zst'


def files(folder, prefix):
    """What a set is on the disk: name -> content."""
    return {name: open(os.path.join(folder, name), 'rb').read() for name in sorted(os.listdir(folder)) if name.startswith(prefix) and not name.endswith('.lock')}


def same(found, wanted, what):
    expect(sorted(found) == sorted(wanted), f'{what}: files {sorted(found)}, wanted {sorted(wanted)}')
    for name in wanted:
        expect(found[name] == wanted[name], f'{what}: {name} differs from that of the unbroken run')


def only_aside(folder, prefix, what):
    """After a broken run that was not publishing: no shard under its name, no side file."""
    state = f'{folder}/{prefix}.resume.json'
    if not os.path.isdir(folder) or os.path.exists(f'{folder}/{prefix}.json') or (os.path.exists(state) and json.load(open(state))['publishing']):
        return
    left = [n for n in files(folder, prefix) if not n.endswith('.tmp') and not n.endswith('.resume.json')]
    expect(not left, f'{what}: left {left}')


def make_preload():
    """A library that kills the program with SIGKILL just before its N-th call that touches files, and lets a second pass with each look at the clock,
    so that a short run saves its state as often as a long one."""
    path = f'{SHARED}/kill.so'
    if not os.path.exists(path):
        calls = [('int', 'rename', 'const char* a, const char* b', 'a, b'), ('int', 'unlink', 'const char* a', 'a'), ('int', 'fsync', 'int a', 'a'),
                 ('int', 'ftruncate', 'int a, off_t b', 'a, b'), ('FILE*', 'fopen', 'const char* a, const char* b', 'a, b'), ('int', 'fclose', 'FILE* a', 'a')]
        source = '''#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
static void count(void) {
    static int n;
    static int at = -1;
    if (at < 0) { at = getenv("KILL_AT") ? atoi(getenv("KILL_AT")) : 0; }
    if (__sync_add_and_fetch(&n, 1) == at) { kill(getpid(), SIGKILL); }
}
int clock_gettime(clockid_t id, struct timespec* t) {
    static long n;
    int r = ((int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime"))(id, t);
    t->tv_sec += __sync_add_and_fetch(&n, 1);
    return r;
}
'''
        for result, name, parameters, arguments in calls:
            types = ', '.join(p.rsplit(' ', 1)[0] for p in parameters.split(', '))
            source += f'{result} {name}({parameters}) {{ count(); return (({result} (*)({types}))dlsym(RTLD_NEXT, "{name}"))({arguments}); }}\n'
        write(f'{SHARED}/kill.c', source.encode())
        subprocess.run(['g++', '-x', 'c', '-D_GNU_SOURCE', '-shared', '-fPIC', '-O1', '-w', f'{SHARED}/kill.c', '-o', path, '-ldl'], check=True)
    return path


# ---------------------------------------------------------------------------------------------------------------------

def test_killed_at_every_call_then_resumed(d):
    """SIGKILL before the N-th file operation, for N all over the run and above all in publishing, which replaces an older set."""
    preload = make_preload()
    inputs = [write(f'{d}/in/a.jsonl', lines(100)), write(f'{d}/in/b.jsonl.gz', gzip.compress(lines(100, seed=2))), pack_zstd(write(f'{d}/in/c.jsonl', lines(100, seed=3)))]
    old = [write(f'{d}/in/old.jsonl', lines(60, seed=4))]
    basic = ['--tokenizer', model(), '--val-fraction', 0.2, '--threads', 2]
    args = basic + ['--shard-tokens', 900]
    ok(args + ['--out', f'{d}/whole/s'] + inputs)
    wanted = files(f'{d}/whole', 's')
    expect(len(wanted) > 10, f'few shards: {sorted(wanted)}')
    ok(basic + ['--shard-tokens', 500, '--out', f'{d}/old/s'] + old)
    before = files(f'{d}/old', 's')
    states = killed = 0
    n, step = 1, 1
    while True:
        shutil.rmtree(f'{d}/k', ignore_errors=True)
        shutil.copytree(f'{d}/old', f'{d}/k')
        command = args + ['--out', f'{d}/k/s'] + inputs
        r = tokenize(command, env={'LD_PRELOAD': preload, 'KILL_AT': str(n)})
        if r.returncode == 0:
            break
        expect(r.returncode == -signal.SIGKILL, f'call {n}: exit code {r.returncode} {r.stderr.decode()[-500:]}')
        killed += 1
        left = files(f'{d}/k', 's')
        if 's.resume.json' in left:
            states += 1
            publishing = json.loads(left['s.resume.json'])['publishing']
            step = 2 if publishing else 9
        if 's.json' in left and left['s.json'] == before['s.json']:
            same({k: v for k, v in left.items() if k in before}, before, f'call {n}: the older set')
        ok(command + ['--resume'])
        same(files(f'{d}/k', 's'), wanted, f'killed at call {n}')
        n += step
    expect(killed > 30 and states > 20, f'{killed} runs were killed, {states} had a state')
    r = ok(args + ['--resume', '--out', f'{d}/k/s'] + inputs)
    expect(b'complete' in r.stdout, f'a finished run is done again: {r.stdout}')


def test_a_killed_conversion_is_no_set(d):
    """SIGKILL before the N-th file operation: what is there is nothing, the whole set, or known not to be whole."""
    preload = make_preload()
    ok(['--tokenizer', model(), '--out', f'{d}/s', write(f'{d}/in.jsonl', lines(60))])
    partial, n = 0, 1
    while True:
        shutil.rmtree(f'{d}/k', ignore_errors=True)
        r = tokenize(['--convert', 'llm.c', '--shard-tokens', 300, '--out', f'{d}/k/s', f'{d}/s.json'], env={'LD_PRELOAD': preload, 'KILL_AT': str(n)})
        left = files(f'{d}/k', 's') if os.path.isdir(f'{d}/k') else {}
        shards = [name for name in left if name.endswith('.bin')]
        if r.returncode == 0:
            break
        partial += bool(shards) and 's.json' not in left
        expect(not shards or 's.json' in left or 's.resume.json' in left, f'call {n}: a part passes for the set: {sorted(left)}')
        n += 1
    expect(partial > 5 and 's.json' in left and 's.resume.json' not in left, f'{partial} parts, then {sorted(left)}')


def test_killed_at_random_times_then_resumed(d):
    rng = random.Random(int(os.environ.get('SEED', '5')))
    data = lines(3000, words=60)
    args = ['--tokenizer', model(), '--shard-tokens', 20000, '--val-fraction', 0.1]
    took, copies = 0, 1
    while took < 1 and copies < 64:  # long enough to be hit in the middle, however fast it is
        copies *= 2
        write(f'{d}/in/a.jsonl', data * copies), write(f'{d}/in/b.jsonl.gz', gzip.compress(data * copies, 1))
        shutil.rmtree(f'{d}/whole', ignore_errors=True)
        begin = time.time()
        ok(args + ['--out', f'{d}/whole/s', f'{d}/in'])
        took = time.time() - begin
    wanted = files(f'{d}/whole', 's')
    resumed = 0
    for attempt in range(60):  # four, and more if chance would have it that they were all killed before the first state
        if attempt >= 4 and resumed >= 2:
            break
        kills = 0
        while True:
            command = args + ['--out', f'{d}/k{attempt}/s', f'{d}/in', '--resume', '--threads', rng.choice([1, 2, 3])]
            p = start(command)
            try:
                out, err = p.communicate(timeout=rng.uniform(0.05, took) if kills < 6 else 100)
            except subprocess.TimeoutExpired:
                p.kill()
                out, err = p.communicate()
                kills += 1
                only_aside(f'{d}/k{attempt}', 's', 'killed')
            resumed += b'going on after' in err
            if p.returncode == 0:
                break
            expect(p.returncode == -signal.SIGKILL, f'exit code {p.returncode} {err.decode()[-500:]}')
        same(files(f'{d}/k{attempt}', 's'), wanted, f'attempt {attempt}')
        shutil.rmtree(f'{d}/k{attempt}')
    expect(resumed >= 2, f'only {resumed} runs went on from a state')


def test_stopped_by_a_signal_then_resumed(d):
    """Standard input in packed and plain form; the program waits for more of it when the signal comes."""
    data = lines(4000)
    packs = {'plain': data, 'gzip': gzip.compress(data), 'zstd': subprocess.run(['zstd', '-q'], input=data, stdout=subprocess.PIPE, check=True).stdout}
    args = ['--tokenizer', model(), '--format', 'jsonl', '--shard-tokens', 9000, '--val-fraction', 0.1]
    ok(args + ['--out', f'{d}/whole/s', '-'], stdin=data)
    wanted = files(f'{d}/whole', 's')
    # Two inputs, so that something is done when the wait begins.
    first = write(f'{d}/first.jsonl', lines(2000, seed=2))
    ok(args + ['--out', f'{d}/both/s', first, '-'], stdin=data)
    both = files(f'{d}/both', 's')
    for number, (name, packed) in zip([signal.SIGTERM, signal.SIGINT, signal.SIGTERM], packs.items()):
        p = start(args + ['--out', f'{d}/{name}/s', first, '-'])
        time.sleep(0.5)
        p.send_signal(number)
        out, err = p.communicate(timeout=20)
        expect(p.returncode == 128 + number and b'--resume' in err, f'{name}: exit code {p.returncode} {err}')
        only_aside(f'{d}/{name}', 's', name)
        expect(os.path.exists(f'{d}/{name}/s.resume.json'), f'{name}: no state')
        refused(args + ['--out', f'{d}/{name}/s', first, '-'], 1, '--resume', 'delete', stdin=packed)
        full = [s['file'] for part in ('train', 'val') for s in json.load(open(f'{d}/{name}/s.resume.json'))[part]['shards'] if s['xxh3']]
        of_file = lambda path: (os.stat(path).st_ino, os.stat(path).st_mtime_ns)
        written = [of_file(f'{d}/{name}/{file}.tmp') for file in full]
        r = ok(args + ['--resume', '--out', f'{d}/{name}/s', first, '-'], stdin=packed)
        expect(b'going on after' in r.stderr and b'after 0 ' not in r.stderr, r.stderr)
        expect(len(full) > 3 and written == [of_file(f'{d}/{name}/{file}') for file in full], f'{name}: finished shards are written again')
        same(files(f'{d}/{name}', 's'), both, name)
    # In the middle of standard input: the state is of a slow feed.
    for name, packed in packs.items():
        p = start(args + ['--out', f'{d}/mid-{name}/s', '-'], env={**os.environ, 'LD_PRELOAD': make_preload()})
        p.stdin.write(packed[:len(packed) * 2 // 3]), p.stdin.flush()
        time.sleep(0.3)
        p.send_signal(signal.SIGTERM)
        p.communicate(timeout=20)
        expect(os.path.exists(f'{d}/mid-{name}/s.resume.json'), f'{name}: no state')
        if name == 'plain':
            refused(args + ['--resume', '--out', f'{d}/mid-{name}/s', '-'], 1, 'starts otherwise', stdin=packed[7:])
            refused(args + ['--resume', '--out', f'{d}/mid-{name}/s', '-'], 1, 'ends before', stdin=packed[:70000])
        ok(args + ['--resume', '--out', f'{d}/mid-{name}/s', '-'], stdin=packed)
        same(files(f'{d}/mid-{name}', 's'), wanted, f'standard input, {name}')


def stopped_run(d, args, first):
    """A state that a stop left after all of `first`, and the command that would go on."""
    command = args + ['--out', f'{d}/s', first, '-']
    p = start(command)
    time.sleep(0.5)
    p.send_signal(signal.SIGTERM)
    p.communicate(timeout=20)
    expect(os.path.exists(f'{d}/s.resume.json'), 'no state')
    return command


def test_resume_refuses_what_differs(d):
    first, second = write(f'{d}/first.jsonl', lines(2000)), write(f'{d}/second.jsonl', lines(100, seed=9))
    args = ['--tokenizer', model(), '--format', 'jsonl', '--shard-tokens', 1000]
    command = stopped_run(d, args, first)
    before = files(d, 's')
    for extra, word in [(['--text-key', 'x'], 'text_key'), (['--shard-tokens', 999], 'shard_tokens'), (['--bos'], 'bos'), (['--no-eos'], 'eos'), (['--val-fraction', '0.5'], 'val_fraction'),
                        (['--keep', 'a>1'], 'filter'), (['--format', 'txt'], 'format')]:
        changed = [a for i, a in enumerate(command) if not (a == extra[0] or (i and command[i - 1] == extra[0]))]
        refused(changed + extra + ['--resume'], 1, '--resume', word, 'HINT', stdin=b'')
    ok(['--train-tokenizer', 410, '--out', f'{d}/other.model', f'{SHARED}/train.txt'])
    refused(['--tokenizer', f'{d}/other.model'] + command[2:] + ['--resume'], 1, 'tokenizer', stdin=b'')
    refused(command[:-2] + [second, '-', '--resume'], 1, 'input 1', 'first.jsonl', 'second.jsonl', stdin=b'')
    refused(command[:-1] + ['--resume'], 1, 'input 2', 'none', stdin=b'')
    expect(files(d, 's') == before, 'a refused resume changed files')
    with open(first, 'ab') as f:
        f.write(b'{"text": "more"}\n')
    refused(command + ['--resume'], 1, 'first.jsonl', 'bytes', stdin=b'')
    os.truncate(first, os.path.getsize(first) - len(b'{"text": "more"}\n'))
    shard = next(n for n in before if n.endswith('.bin.tmp'))
    os.truncate(f'{d}/{shard}', 1030)
    refused(command + ['--resume'], 1, shard, '1030 bytes', stdin=b'')
    write(f'{d}/{shard}', before[shard])
    write(f'{d}/s.resume.json', before['s.resume.json'][:100])
    refused(command + ['--resume'], 1, 's.resume.json', 'delete', stdin=b'')
    write(f'{d}/s.resume.json', before['s.resume.json'])
    ok(command + ['--resume'], stdin=lines(50))
    for name in os.listdir(d):
        expect(not name.endswith('.tmp') and 'resume' not in name, f'left {name}')


def test_no_space(d):
    data = write(f'{d}/a.jsonl', lines(2000))
    args = ['--tokenizer', model(), '--threads', 1, f'{d}/a.jsonl']
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))
    r = refused(args + ['--out', f'{d}/limited/s'], 1, 'File too large', 's_000000.bin', preexec=limit)
    expect(not os.listdir(f'{d}/limited'), f'left {os.listdir(f"{d}/limited")}')
    if os.geteuid() != 0 or subprocess.run(['unshare', '-m', 'true'], stderr=subprocess.DEVNULL).returncode != 0:
        return print('     (not root: a small file system cannot be made)')
    ok(args + ['--out', f'{d}/whole/s', '--shard-tokens', 4000])
    wanted = files(f'{d}/whole', 's')
    os.makedirs(f'{d}/small'), os.makedirs(f'{d}/copy')
    # In a mount namespace of its own: fails, is listed, gets room, goes on.
    script = f'''mount -t tmpfs -o size=100k tmpfs {d}/small || exit 77
LD_PRELOAD={make_preload()} "$@" 2> {d}/copy/error; echo $? > {d}/copy/code; ls {d}/small > {d}/copy/left
mount -o remount,size=20m {d}/small && "$@" --resume && cp {d}/small/s* {d}/copy'''
    r = subprocess.run(['unshare', '-m', 'sh', '-c', script, 'sh', TOKENIZE] + [str(a) for a in args] + ['--shard-tokens', '4000', '--out', f'{d}/small/s'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    if r.returncode == 77:
        return print('     (no tmpfs can be mounted)')
    expect(r.returncode == 0, f'{r.returncode} {r.stderr.decode()}')
    error, left = open(f'{d}/copy/error').read(), open(f'{d}/copy/left').read().split()
    expect(open(f'{d}/copy/code').read().strip() == '1' and 'No space left' in error and '--resume' in error, error)
    expect('s.resume.json' in left and all(n.endswith('.tmp') or n == 's.resume.json' for n in left), f'left {left}')
    same(files(f'{d}/copy', 's'), wanted, 'after the disk was full')


def test_files_that_grow_or_are_cut_meanwhile(d):
    """Sizes are taken when the run begins; a pipe as the first input holds it until the others have changed."""
    data = lines(3000)
    args = ['--tokenizer', model(), '--format', 'jsonl']
    for name, change in [('grown', lambda path: open(path, 'ab').write(b'{"text": "too late"}\n')), ('cut', lambda path: os.truncate(path, len(data) // 2)),
                         ('grown.gz', lambda path: open(path, 'ab').write(gzip.compress(b'{"text": "too late"}\n'))), ('cut.gz', lambda path: os.truncate(path, os.path.getsize(path) // 2))]:
        path = write(f'{d}/{name}', gzip.compress(data) if name.endswith('gz') else data)
        os.mkfifo(f'{d}/pipe_{name}')
        p = start(args + ['--out', f'{d}/{name}_out/s', f'{d}/pipe_{name}', path])
        pipe = open(f'{d}/pipe_{name}', 'wb')
        pipe.write(b'{"text": "first"}\n')
        change(path)
        pipe.close()
        out, err = p.communicate(timeout=20)
        expect(p.returncode == 0, err.decode()[-1000:])
        info = json.load(open(f'{d}/{name}_out/s.json'))
        wanted = 'files_that_grew' if 'grown' in name else 'files_cut'
        expect(info['problems'].get(wanted) == 1 and path in err.decode(), f'{name}: {info["problems"]} {err.decode()[-500:]}')
        if 'grown' in name:
            ok(args + ['--out', f'{d}/{name}_plain/s', '-', write(f'{d}/{name}_whole', data)], stdin=b'{"text": "first"}\n')
            expect(files(f'{d}/{name}_plain', 's_')['s_000000.bin'] == files(f'{d}/{name}_out', 's_')['s_000000.bin'], f'{name}: other tokens than those of the first bytes')
        else:
            expect(0 < info['train']['documents'] < 3000, f'{name}: {info["train"]}')
        p = start(args + ['--on-error', 'stop', '--out', f'{d}/{name}_stop/s', f'{d}/pipe_{name}', path])
        pipe = open(f'{d}/pipe_{name}', 'wb')
        change(path) if 'grown' in name else os.truncate(path, os.path.getsize(path) // 2)
        pipe.close()
        out, err = p.communicate(timeout=20)
        expect(p.returncode == 1, f'{name}: --on-error stop goes on')


def test_redpajama_v2_filters(d):
    """Documents, signals that miss some of them, and duplicates; what must be left is worked out here."""
    rng = random.Random(3)
    wanted, dropped = [], {'in --drop-ids': 0, 'rps_doc_word_count>=20': 0, 'rps_doc_word_count not known': 0, 'perplexity<500': 0, 'bucket=head': 0}
    duplicates = []
    for shard, bucket in [('0000', 'head'), ('0000', 'middle'), ('0001', 'head')]:
        documents, signals = [], []
        name = f'2023-06/{shard}/en_{bucket}.json.gz'
        for line in range(200):
            words = rng.randint(0, 60)
            text = ' '.join(rng.choices(WORDS[:12], k=words)) + f' {shard} {bucket} {line}'
            perplexity = rng.uniform(100, 700)
            documents.append(json.dumps({'url': 'http://x', 'raw_content': text, 'perplexity': perplexity, 'bucket': bucket, 'language': 'en', 'length': len(text)}))
            has = rng.random() < 0.9
            null = rng.random() < 0.05
            if has:
                signals.append(json.dumps({'id': f'{name}/{line}', 'id_int': line, 'metadata': {'language': 'en'}, 'quality_signals': {
                    'ccnet_perplexity': [[0, len(text), perplexity]], 'rps_lines_numerical': [[0, 5, 0.0], [5, 9, 1.0]], 'rps_doc_word_count': [[0, len(text), None if null else float(words)]], 'empty': []}}))
            duplicate = rng.random() < 0.1
            if duplicate:
                duplicates.append(f'{name}/{line}')
            reason = ('in --drop-ids' if duplicate else 'rps_doc_word_count not known' if not has or null else 'rps_doc_word_count>=20' if words < 20 else
                      'perplexity<500' if perplexity >= 500 else 'bucket=head' if bucket != 'head' else None)
            if reason:
                dropped[reason] += 1
            else:
                wanted.append(text)
        write(f'{d}/rp2/documents/{name}', gzip.compress(('\n'.join(documents) + '\n').encode()))
        write(f'{d}/rp2/quality_signals/{name.replace(".json.gz", ".signals.json.gz")}', gzip.compress(('\n'.join(signals) + '\n').encode()))
    rng.shuffle(duplicates)
    ids = pack_zstd(write(f'{d}/duplicates', '\n'.join(duplicates).encode()))
    args = ['--tokenizer', model(), '--text-key', 'raw_content', '--signals', f'{d}/rp2/quality_signals', '--drop-ids', ids, '--keep', 'rps_doc_word_count>=20', '--keep', 'perplexity<500', '--keep', 'bucket=head',
            '--shard-tokens', 3000]
    ok(args + ['--out', f'{d}/v2/s', f'{d}/rp2/documents'])
    info = json.load(open(f'{d}/v2/s.json'))
    expect(info['dropped'] == {k: v for k, v in dropped.items() if v}, f'dropped {info["dropped"]}, wanted {dropped}')
    text = ok(['--decode', '--doc-separator', '--', f'{d}/v2/s_*.bin']).stdout.decode()
    expect(text.split('\n--\n') == wanted, f'{len(text.split(chr(10) + "--" + chr(10)))} documents are left, wanted {len(wanted)}')
    expect(info['train']['documents'] == len(wanted) and sum(s['documents'] for s in info['sources']) == len(wanted) and len(info['sources']) == 3, str(info['sources']))
    # Resumed at every possible moment it is the same.
    for n in (15, 25, 40, 60, 80):
        tokenize(args + ['--out', f'{d}/r/s', f'{d}/rp2/documents'], env={'LD_PRELOAD': make_preload(), 'KILL_AT': str(n)})
        ok(args + ['--resume', '--out', f'{d}/r/s', f'{d}/rp2/documents'])
        same(files(f'{d}/r', 's'), files(f'{d}/v2', 's'), f'filtered, killed at call {n}')
        shutil.rmtree(f'{d}/r')
    # Signals of another file; none; broken ones; conditions that are none.
    os.rename(f'{d}/rp2/quality_signals/2023-06/0001', f'{d}/rp2/quality_signals/2023-06/0002')
    r = ok(args + ['--out', f'{d}/n/s', f'{d}/rp2/documents'])
    expect(json.load(open(f'{d}/n/s.json'))['problems']['files_without_signals'] == 1 and b'0001/en_head.json.gz' in r.stderr, r.stderr)
    write(f'{d}/rp2/quality_signals/2023-06/0001/en_head.signals.json.gz', gzip.compress(b'{"id": "2023-06/0001/en_head.json.gz/3"}\nrubbish\n{"id": "2023-06/0001/en_head.json.gz/1"}\n{"id": "x"}\n'))
    ok(args + ['--out', f'{d}/b/s', f'{d}/rp2/documents'])
    expect(json.load(open(f'{d}/b/s.json'))['problems']['lines_of_signals_broken'] == 4, open(f'{d}/b/s.json').read()[-2000:])
    write(f'{d}/rp2/quality_signals/2023-06/0001/en_head.signals.json.gz', gzip.compress(b'{"id": "2023-06/0007/en_head.json.gz/3"}\n'))
    refused(args + ['--out', f'{d}/c/s', f'{d}/rp2/documents'], 1, '0007/en_head', 'mirrors')
    for bad in ('x', 'x>', 'x>y', '>3', 'x=>3', 'x<nan', 'x<1e999'):
        refused(args + ['--out', f'{d}/e/s', '--keep', bad, f'{d}/rp2/documents'], 2, '--keep', 'HINT')
    refused(args[:2] + ['--out', f'{d}/e/s', '--signals', f'{d}/none', f'{d}/rp2/documents'], 1, '--signals')
    refused(args[:2] + ['--out', f'{d}/e/s', '--drop-ids', f'{d}/none', f'{d}/rp2/documents'], 1, '--drop-ids')
    # The key that V2 has is found out and said.
    r = refused(args[:2] + ['--out', f'{d}/e/s', f'{d}/rp2/documents'], 1, 'no training tokens')
    expect(b'--text-key raw_content' in r.stderr, r.stderr[-1000:])


def test_summary_and_progress(d):
    write(f'{d}/in/a.jsonl', lines(200)), write(f'{d}/in/sub/b.jsonl', lines(100, seed=2))
    ok(['--tokenizer', model(), '--out', f'{d}/o/s', '--val-fraction', 0.1, f'{d}/in'])
    info = json.load(open(f'{d}/o/s.json'))
    expect([s['source'] for s in info['sources']] == [f'{d}/in/a.jsonl', f'{d}/in/sub/b.jsonl'], str(info['sources']))
    for key in ('documents', 'tokens', 'text_bytes'):
        expect(sum(s[key] for s in info['sources']) == info['train'][key] + info['val'][key], key)
    totals = {}
    for s in info['sources']:
        expect(abs(s['bytes_per_token'] - s['text_bytes'] / s['tokens']) < 1e-4, str(s))
        for name, n in s['problems'].items():
            totals[name] = totals.get(name, 0) + n
    expect(totals == info['problems'] and totals['lines_not_json'] > 0, f'{totals} {info["problems"]}')
    sums = subprocess.run(['xxhsum', '-H3', f'{d}/o/s_000000.bin'], stdout=subprocess.PIPE, text=True).stdout if shutil.which('xxhsum') else None
    expect(sums is None or info['train']['shards'][0]['xxh3'] in sums, f'{sums} {info["train"]["shards"]}')
    for i in range(1100):  # too many to list: their folders are
        write(f'{d}/many/{i % 3}/{i}.jsonl', b'{"text": "one of many"}\n')
    ok(['--tokenizer', model(), '--out', f'{d}/m/s', f'{d}/many'])
    expect([s['source'] for s in json.load(open(f'{d}/m/s.json'))['sources']] == [f'{d}/many/{i}' for i in range(3)], 'sources')
    # Progress, with a clock that runs fast; of a pipe nobody knows how much is left.
    large = write(f'{d}/large.jsonl', lines(8000))
    for source, stdin, known in [(large, None, True), ('-', open(large, 'rb').read(), False)]:
        told = ok(['--tokenizer', model(), '--format', 'jsonl', '--out', f'{d}/p/s', source], env={'LD_PRELOAD': make_preload()}, stdin=stdin).stderr.decode()
        expect('MB/s' in told and 'tokens' in told and ('% done' in told) == known and (' left' in told) == known, told[-1000:])


# ---------------------------------------------------------------------------------------------------------------------
# Files of ids, as other programs write them

CODES = {'B': 1, 'b': 2, 'h': 3, 'i': 4, 'q': 5, 'H': 8}


def megatron_files(prefix, documents, kind):
    flat = [t for document in documents for t in document]
    write(prefix + '.bin', array.array(kind, flat).tobytes())
    pointers, at = [], 0
    for document in documents:
        pointers.append(at)
        at += len(document) * array.array(kind).itemsize
    n = len(documents)
    write(prefix + '.idx', b'MMIDIDX\0\0' + struct.pack('<QBQQ', 1, CODES[kind], n, n + 1) + array.array('i', map(len, documents)).tobytes() + array.array('q', pointers).tobytes() + array.array('q', range(n + 1)).tobytes())


def packed_file(path, tokens, places, kind, separator):
    write(path, b'LITPKDS' + struct.pack('<QBQ', 1, CODES[kind], places) + array.array(kind, tokens + [separator] * (places - len(tokens))).tobytes())


def shard_ids(path):
    data = open(path, 'rb').read()
    magic, version, n = struct.unpack('<3i', data[:12])
    kind = {20240520: 'H', 20240801: 'I'}[magic]
    ids = array.array(kind, data[1024:])
    expect(len(ids) == n, f'{path}: {n} in the header, {len(ids)} in the file')
    return list(ids), kind


def random_documents(rng, n, vocab, end):
    return [[rng.choice([x for x in (rng.randrange(vocab), rng.randrange(min(vocab, 20))) if x != end] or [1]) for _ in range(rng.choice([0, 1, 5, 50, 200]))] + [end] for _ in range(n)]


def test_convert_both_ways(d):
    rng = random.Random(1)
    for kind, vocab, extra in [('B', 200, []), ('b', 100, []), ('h', 30000, []), ('H', 65000, []), ('i', 70000, ['--vocab', 70000]), ('q', 70000, []), ('i', 60000, ['--vocab', 60000]), ('q', 60000, ['--vocab', 60000])]:
        end = vocab - 1
        documents = random_documents(rng, 60, vocab, end)
        flat = [t for document in documents for t in document]
        name = f'{d}/{kind}{vocab}'
        megatron_files(name, documents, kind)
        ok(['--convert', 'llm.c', '--eos-id', end, '--shard-tokens', 999, '--out', f'{d}/l/s', name + '.idx'] + extra)
        found, kinds = [], set()
        for file in sorted(os.listdir(f'{d}/l')):
            if file.endswith('.bin'):
                ids, width = shard_ids(f'{d}/l/{file}')
                found += ids
                kinds.add(width)
        narrow = kind in 'BbhH' or extra == ['--vocab', 60000]
        expect(found == flat and kinds == {'H' if narrow else 'I'}, f'{kind} {vocab}: other ids, or of width {kinds}')
        info = json.load(open(f'{d}/l/s.json'))
        expect(info['train']['documents'] == 60 and info['train']['tokens'] == len(flat) and info['documents']['end_with_eos'] and info['tokenizer']['eos_id'] == end, str(info)[:600])
        ok(['--verify', f'{d}/l/s.json'])
        # And back, from the side file alone: as Megatron would have written it.
        ok(['--convert', 'megatron', '--out', f'{d}/m/s', f'{d}/l/s.json'] + extra)
        megatron_files(f'{d}/wanted', documents, 'H' if int(info['tokenizer']['vocab']) < 65500 else 'i')
        for suffix in ('bin', 'idx'):
            expect(open(f'{d}/m/s.{suffix}', 'rb').read() == open(f'{d}/wanted.{suffix}', 'rb').read(), f'{kind} {vocab}: the .{suffix} that comes back is another')
        ok(['--verify', f'{d}/m/s'])
        ok(['--convert', 'llm.c', '--out', f'{d}/again/s', '--shard-tokens', 999, f'{d}/m/s.bin'] + extra)
        same({k: v for k, v in files(f'{d}/again', 's').items() if k.endswith('.bin')}, {k: v for k, v in files(f'{d}/l', 's').items() if k.endswith('.bin')}, 'there and back again')
        # A packed shard: its tail is filled with the separator, of which the first may be a document's.
        packed_file(f'{d}/p_0000000000.bin', flat, len(flat) + 500, kind, end)
        ok(['--convert', 'llm.c', '--eos-id', end, '--out', f'{d}/packed/s', f'{d}/p_0000000000.bin'] + extra)
        expect(shard_ids(f'{d}/packed/s_000000.bin')[0] == flat, f'{kind} {vocab}: other ids from a packed shard')
        # A name that ends as a shard's does keeps its side file.
        ok(['--convert', 'megatron', '--out', f'{d}/m/s_000001', f'{d}/l/s.json'] + extra)
        expect(b'checksum right' in ok(['--verify', f'{d}/m/s_000001']).stdout, 'a set with a number has no side file')
        for folder in 'l', 'm', 'again', 'packed':
            shutil.rmtree(f'{d}/{folder}')
    # What cannot be.
    megatron_files(f'{d}/x', [[1, 2, 3], [4, 5]], 'i')
    refused(['--convert', 'llm.c', '--vocab', 5, '--out', f'{d}/e/s', f'{d}/x'], 1, 'id 5', 'x.bin')
    expect(os.listdir(f'{d}/e') == [], f'left {os.listdir(f"{d}/e")}')
    r = ok(['--convert', 'llm.c', '--eos-id', 3, '--out', f'{d}/e/s', f'{d}/x'])
    expect(b'1 of 2 documents do not end with the id 3' in r.stderr, r.stderr)
    write(f'{d}/s_000000.bin', struct.pack('<3i', 20240520, 1, 3).ljust(1024, b'\0') + array.array('H', [7, 8, 9]).tobytes())
    refused(['--convert', 'megatron', '--out', f'{d}/e/m', f'{d}/s_000000.bin'], 1, '--eos-id')
    ok(['--convert', 'megatron', '--eos-id', 8, '--out', f'{d}/e/m', f'{d}/s_000000.bin'])
    megatron_files(f'{d}/wanted', [[7, 8], [9]], 'i')
    expect(open(f'{d}/e/m.idx', 'rb').read()[18:] == open(f'{d}/wanted.idx', 'rb').read()[18:] or json.load(open(f'{d}/e/m.json'))['train']['documents'] == 2, 'documents')
    refused(['--convert', 'megatron', '--eos-id', 8, '--out', f'{d}/x', f'{d}/s_000000.bin'], 1, 'in the way', 'x.bin')
    refused(['--convert', 'llm.c', '--out', f'{d}/s', f'{d}/x'], 1, 'in the way', 's_000000.bin')
    refused(['--convert', 'arrow', '--out', f'{d}/s', f'{d}/x'], 2, '--convert')
    refused(['--convert', 'llm.c', f'{d}/x'], 2, '--out')
    refused(['--convert', 'llm.c', '--inspect', '--out', f'{d}/s', f'{d}/x'], 2, '--inspect')


def test_verify_finds_what_is_wrong(d):
    ok(['--tokenizer', model(), '--out', f'{d}/s', '--shard-tokens', 2000, '--val-fraction', 0.2, write(f'{d}/in.jsonl', lines(300))])
    info = json.load(open(f'{d}/s.json'))
    shards = [s['file'] for split in ('train', 'val') for s in info[split]['shards']]
    clean = {name: open(f'{d}/{name}', 'rb').read() for name in shards}
    r = ok(['--verify', f'{d}/s.json'])
    told = r.stdout.decode().splitlines()
    expect(len(told) == len(shards) and all(line.startswith('ok ') and 'checksum right' in line for line in told), r.stdout.decode())
    first, middle, last = shards[0], shards[len(shards) // 2], shards[-1]

    def change(name, at, value=None):
        data = bytearray(clean[name])
        data[at] = data[at] ^ 1 if value is None else value
        return bytes(data)
    for wrong, words in [({middle: change(middle, 1500)}, ['xxh3']), ({first: change(first, 800)}, ['xxh3']), ({last: change(last, len(clean[last]) - 1, 255)}, ['outside the vocabulary']), ({middle: clean[middle][:-2]}, ['bytes']),
                         ({last: None, first: change(first, 1024)}, ['xxh3', 'No such file']), ({first: clean[last]}, ['wanted the'])]:
        for name, data in wrong.items():
            os.remove(f'{d}/{name}') if data is None else write(f'{d}/{name}', data)
        r = tokenize(['--verify', f'{d}/s.json'])
        told = r.stdout.decode().splitlines()
        expect(r.returncode == 1 and len(told) == len(shards) and all(line.startswith('ok ') != any(name in line.split(': ')[0] for name in wrong) for line in told), r.stdout.decode() + r.stderr.decode())
        expect(all(any(word in line for line in told if line.startswith('FAIL')) for word in words), f'{words} {r.stdout.decode()}')
        for name in wrong:
            write(f'{d}/{name}', clean[name])
    expect(tokenize(['--verify', f'{d}/{first}', f'{d}/none', f'{d}/s.json']).stdout.decode().count('\n') == len(shards) + 2, 'it does not look at all files')
    write(f'{d}/alone_000000.bin', clean[first])
    expect(b'vocabulary is not known' in ok(['--verify', f'{d}/alone_000000.bin']).stdout, 'alone')
    expect(tokenize(['--verify', '--vocab', 10, f'{d}/alone_000000.bin']).returncode == 1, '--vocab means nothing')
    # The index of a Megatron set, which no size gives away.
    for both in ('s.json', 's_*.bin'):  # would train on the validation documents
        refused(['--convert', 'megatron', '--out', f'{d}/m', f'{d}/{both}'], 2, 'validation', 's_[0-9]*.bin')
    refused(['--convert', 'megatron', '--out', f'{d}/s', f'{d}/{first}'], 1, 'another --out')
    expect({name: open(f'{d}/{name}', 'rb').read() for name in shards} == clean, 'a refused --convert changed the set')
    ok(['--convert', 'megatron', '--out', f'{d}/m', f'{d}/s_[0-9]*.bin'])
    expect(json.load(open(f'{d}/m.json'))['train']['text_bytes'] == info['train']['text_bytes'] > 0, 'the text of a whole split')
    index = bytearray(open(f'{d}/m.idx', 'rb').read())
    index[34:38], index[38:42] = index[38:42], index[34:38]
    write(f'{d}/m.idx', bytes(index))
    expect(tokenize(['--verify', f'{d}/m']).returncode == 1, 'two lengths that changed places are not seen')


def test_inspect_and_decode_every_kind(d):
    text = lines(120, key='text')
    ok(['--tokenizer', model(), '--out', f'{d}/s', write(f'{d}/in.jsonl', text)])
    ids, _ = shard_ids(f'{d}/s_000000.bin')
    documents, at = [], 0
    while at < len(ids):
        end = ids.index(2, at) + 1
        documents.append(ids[at:end])
        at = end
    megatron_files(f'{d}/m', documents, 'i')
    packed_file(f'{d}/p_0000000000.bin', ids, len(ids) + 777, 'H', 2)
    wanted = ok(['--decode', '--doc-separator', '|', f'{d}/s_000000.bin']).stdout
    expect(wanted.count(b'\n|\n') == len(documents) - 1 and len(documents) > 100, 'documents')
    counts = sorted(((ids.count(t), -t) for t in set(ids)), reverse=True)
    for name in ('s_000000.bin', 's.json', 'm', 'm.bin', 'm.idx', 'p_0000000000.bin'):
        extra = [] if name.startswith('s') else ['--tokenizer', model()]
        expect(ok(['--decode', '--doc-separator', '|', f'{d}/{name}'] + extra).stdout == wanted, f'--decode {name}')
        told = ok(['--inspect', f'{d}/{name}'] + extra).stdout.decode()
        for part in (f'{len(ids):,} tokens', f'documents {len(documents):,}\n', f'smallest {min(ids)}, largest {max(ids)}, {len(set(ids)):,} different', f'most frequent {-counts[0][1]} ', 'first  ' + ' '.join(map(str, ids[:24])), 'last   ' + ' '.join(map(str, ids[-24:]))):
            expect(part in told, f'--inspect {name}: {part!r} is not in {told}')
    # The documents of a Megatron set without marks between them; each begins with the space that the tokenizer adds.
    megatron_files(f'{d}/bare', [document[:-1] for document in documents], 'H')
    expect(ok(['--decode', '--doc-separator', '|', '--tokenizer', model(), f'{d}/bare']).stdout == wanted, '--decode without EOS')


def test_large_documents_in_little_memory(d):
    """Documents of 64 MiB in a row on two threads, as a line of JSON and as text, packed and not."""
    rng = random.Random(2)
    piece = ' '.join(rng.choices(WORDS, k=40000))
    text = (piece * ((64 << 20) // len(piece.encode()) + 1)).encode()[:64 << 20].decode(errors='ignore')
    record = json.dumps({'text': text, 'meta': {}}).encode() + b'\n'
    inputs = [pack_zstd(write(f'{d}/large.jsonl', record)), write(f'{d}/large.txt', text.encode())]
    process = start(['--tokenizer', model(), '--threads', 2, '--out', f'{d}/s'] + inputs)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    expect(process.returncode == 0, process.stderr.read().decode()[-1000:])
    info = json.load(open(f'{d}/s.json'))
    expect(info['train']['documents'] == 2 and info['train']['text_bytes'] == 2 * len(text.encode()) and not info['problems'], str(info)[:800])
    expect(usage.ru_maxrss < 1 << 20, f'{usage.ru_maxrss >> 10} MiB at the peak')
    # Of a unigram model, too, where each byte is an id; and where the library encodes, in parts then.
    characters = ''.join(chr(rng.randrange(0x4e00, 0x9000)) for _ in range(1 << 18)).encode()
    for kind, times, problems in (('unigram', (64 << 20) // len(characters), {}), ('char', 8, {'documents_encoded_in_parts': 1})):
        text = write(f'{d}/{kind}.txt', characters * times)
        ok(['--train-tokenizer', 320, '--model-type', 'unigram', '--split-documents', 1000, '--out', f'{d}/u.model', f'{SHARED}/train.txt'])
        if kind == 'char':  # as a field of the model says that comes last
            with open(f'{d}/u.model', 'ab') as f:
                f.write(b'\x12\x02\x18\x04')
        process = start(['--tokenizer', f'{d}/u.model', '--threads', 2, '--out', f'{d}/u', text])
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        expect(process.returncode == 0 and usage.ru_maxrss < 1 << 20, f'{kind}: {process.returncode}, {usage.ru_maxrss >> 10} MiB at the peak')
        expect(json.load(open(f'{d}/u.json'))['problems'] == problems, kind)
    # One that is too long is passed over and counted, in little memory.
    with open(f'{d}/long.jsonl', 'wb') as f:
        f.write(b'{"text": "before"}\n{"text": "'), [f.write(b'x' * (1 << 20)) for _ in range(140)], f.write(b'"}\n{"text": "after"}\n')
    r = ok(['--tokenizer', model(), '--out', f'{d}/l', f'{d}/long.jsonl'])
    expect(json.load(open(f'{d}/l.json'))['problems'] == {'documents_too_long': 1} and b'long.jsonl:2' in r.stderr and ok(['--decode', '--doc-separator', '|', f'{d}/l_000000.bin']).stdout == b'before\n|\nafter', r.stderr)
    for separator in ('--', ''):
        with open(f'{d}/long.txt', 'wb') as f:
            f.write(b'before\n--\n'), [f.write(b'x' * (1 << 20) + b'\n') for _ in range(140)], f.write(b'--\nafter')
        args = ['--tokenizer', model(), '--out', f'{d}/t', f'{d}/long.txt'] + (['--doc-separator', separator] if separator else [])
        refused(args + ['--on-error', 'stop'], 1, 'long.txt:3' if separator else 'long.txt:1', '--split-documents')
        if separator:
            ok(args)
            expect(json.load(open(f'{d}/t.json'))['problems'] == {'documents_too_long': 1} and ok(['--decode', '--doc-separator', '|', f'{d}/t_000000.bin']).stdout == b'before\n|\nafter', 'long text')
        else:
            refused(args, 1, 'no training tokens', 'documents_too_long')


def test_inputs_that_are_no_text(d):
    """UTF-16, files of 0 bytes, what ./tokenize itself wrote into the folder of texts: counted and named, none of them stops a run."""
    write(f'{d}/in/a.jsonl', b'{"text": "one"}\n'), write(f'{d}/in/b.txt', 'zwei'.encode('utf-16')), write(f'{d}/in/c.jsonl.gz', b''), write(f'{d}/in/d.txt', b''), write(f'{d}/in/e.jsonl', b'{"text": "two"}\n')
    args = ['--tokenizer', model(), '--out', f'{d}/in/s', f'{d}/in']
    r = ok(args)
    wanted = files(f'{d}/in', 's')
    info = json.loads(wanted['s.json'])
    expect(info['problems'] == {'files_empty': 2, 'files_in_utf16': 1} and info['train']['documents'] == 2, str(info['problems']))
    for name in ('b.txt', 'c.jsonl.gz', 'd.txt'):
        expect(f'{d}/in/{name}:' in r.stderr.decode(), f'{name} is not named: {r.stderr}')
    expect(ok(['--decode', '--doc-separator', '|', f'{d}/in/s_000000.bin']).stdout == b'one\n|\ntwo', 'the text')
    refused(args[:3] + [f'{d}/stop', '--on-error', 'stop', f'{d}/in'], 1, 'b.txt', 'UTF-16')
    ok(args)  # the side file lies among the texts now
    same(files(f'{d}/in', 's'), wanted, 'again')
    # And so does the state of a run.
    os.remove(f'{d}/in/b.txt'), os.remove(f'{d}/in/d.txt')
    write(f'{d}/in/e.jsonl', lines(3000))
    command = args[:2] + [f'{d}/in', '-', '--format', 'jsonl', '--out']
    ok(command + [f'{d}/whole/s'], stdin=b'{"text": "three"}\n')
    p = start(command + [f'{d}/in/s'])
    time.sleep(0.5)
    p.send_signal(signal.SIGTERM)
    p.communicate(timeout=20)
    expect(os.path.exists(f'{d}/in/s.resume.json'), 'no state')
    ok(command + [f'{d}/in/s', '--resume'], stdin=b'{"text": "three"}\n')
    same(files(f'{d}/in', 's'), files(f'{d}/whole', 's'), 'resumed')


def test_resume_beyond_4_gib(d):
    """A file with a hole of 5 GiB; the state is moved behind it, as if all before had been read."""
    first, start_of_file, rest = f'{d}/first.jsonl', lines(2000), b'{"text": "far out"}\nbroken\n{"text": "the end"}\n'
    far = (5 << 30) + 1
    write(first, start_of_file)
    with open(first, 'r+b') as f:
        f.seek(far - 1), f.write(b'\n' + rest)
    command = ['--tokenizer', model(), '--format', 'jsonl', '--out', f'{d}/s', first, '-']
    write(f'{d}/head.jsonl', start_of_file)
    stopped_run(d, command[:4], f'{d}/head.jsonl')
    state = json.load(open(f'{d}/s.resume.json'))
    expect(state['position']['file'] == 0 and state['position']['line'] > 1000, str(state['position']))
    state['inputs'][0] = [first, os.path.getsize(first)]
    state['sources'][0]['source'] = first
    state['position'].update(offset=far, line=2001)
    write(f'{d}/s.resume.json', json.dumps(state).encode())
    r = ok(command + ['--resume'], stdin=b'')
    expect(b'first.jsonl:2003: not a whole JSON object' in r.stderr, r.stderr[-500:])
    text = ok(['--decode', '--doc-separator', '|', f'{d}/s_000000.bin']).stdout
    expect(text.endswith(b'\n|\nfar out\n|\nthe end') and json.load(open(f'{d}/s.json'))['train']['documents'] == state['train']['documents'] + 2, text[-200:])


def test_ids_above_16_bit(d):
    """A SentencePiece model of 70,000 pieces, made by hand: its later ones must come back as they are. CASES B.1 10."""
    def field(number, data):
        return bytes([number << 3 | 2, len(data)]) + data

    def piece(text, score, kind):
        return field(1, field(1, text.encode()) + b'\x15' + struct.pack('<f', score) + bytes([0x18, kind]))
    vocab, before, after = 70000, 'abcdefghijklmnopqrst', 'ABCDEFGHIJKLMNOPQRST'
    pieces = [piece('<unk>', 0, 2), piece('<s>', 0, 3), piece('</s>', 0, 3)] + [piece(f'<0x{b:02X}>', 0, 6) for b in range(256)] + [piece(c, -1e6, 1) for c in before + after + '\u2581']
    pairs = [a + b for a in before for b in after]  # merge first, and then two of them
    words = pairs + [a + b for a in pairs for b in pairs][:vocab - len(pieces) - len(pairs)]
    data = b''.join(pieces) + b''.join(piece(w, -float(i), 1) for i, w in enumerate(words))
    write(f'{d}/t.model', data + field(2, b'\x18\x02\x98\x02\x01') + field(3, b'\x18\x00\x20\x00'))
    rng = random.Random(1)
    text = ' '.join(rng.choices(words[-5000:], k=500))
    ok(['--tokenizer', f'{d}/t.model', '--out', f'{d}/s', write(f'{d}/in.txt', text.encode())])
    ids, kind = shard_ids(f'{d}/s_000000.bin')
    expect(kind == 'I' and sum(i >= 65536 for i in ids) > 400 and max(ids) < vocab, f'{kind} {max(ids)}')
    expect(ok(['--decode', f'{d}/s_000000.bin']).stdout.decode() == text, 'the text does not come back')


if __name__ == '__main__':
    e2e.run_tests(globals())
