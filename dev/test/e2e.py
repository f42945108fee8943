#!/usr/bin/env python3
"""End-to-end tests: the programs as a user runs them. Needs the built ./train_gpt and ./tokenize, mpirun, and python3.

    dev/test/e2e.py [NAME...]      all tests, or those whose name contains a word; last line: 'N passed, N failed'

Each test names its oracle: the unbroken run, the other launch (threads or mpirun), the same run again, or an exit code and
a message that a user can act on.
"""
import array, glob, json, math, os, random, re, shutil, signal, struct, subprocess, sys, tempfile, time

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))
TRAIN, TOKENIZE = os.path.join(ROOT, 'train_gpt'), os.path.join(ROOT, 'tokenize')
HAVE_MPI = shutil.which('mpirun') is not None
# Only tests force these on Open MPI: root in a container, more ranks than cores.
MPI_ENV = dict(OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1')
MPIRUN = ['mpirun', '--oversubscribe']
SMALL = ['--model', 'tiny', '--layers', '2', '--channels', '32', '--heads', '4', '--kv-heads', '4', '--ffn', '48', '--vocab', '64', '--seq', '8',
         '--micro-batch', '2', '--global-batch', '4', '--dtype', 'fp32', '--warmup', '3', '--lr', '0.01', '--threads', '2']


STARTED = []  # by start(): none outlives its test
for number in (signal.SIGINT, signal.SIGHUP):  # to a program of a shell's background they are ignored: not to those that are tested
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


class Failed(Exception):
    pass


def expect(condition, message):
    if not condition:
        raise Failed(message)


def run(args, n=0, cwd='.', env=None, timeout=120, prefix=(), program=None):
    """train_gpt, or another program, with args; under mpirun with n ranks if n > 0."""
    command = (MPIRUN + ['-n', str(n)] if n else []) + list(prefix) + [program or TRAIN] + [str(a) for a in args]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **MPI_ENV, **(env or {})}, timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors='replace')


def ok(args, **kw):
    r = run(args, **kw)
    expect(r.returncode == 0, f'exit code {r.returncode} of {args}:\n{r.stderr[-2000:]}{r.stdout[-500:]}')
    return r


def refused(args, code, *words, **kw):
    begin = time.time()
    r = run(args, **kw)
    expect(r.returncode == code, f'exit code {r.returncode}, wanted {code}, of {args}:\n{r.stderr[-1500:]}')
    for word in words:
        expect(word in r.stderr, f'{word!r} is not in the message of {args}:\n{r.stderr[-1500:]}')
    expect(r.stderr.count('error:') == 1, f'one message wanted, of {args}:\n{r.stderr[-1500:]}')
    expect(time.time() - begin < 20, f'took {time.time() - begin:.0f} s')
    return r


def write_shard(path, tokens, magic=20240520, version=1, kind='H', count=None):
    with open(path, 'wb') as f:
        f.write(struct.pack('<3i', magic, version, len(tokens) if count is None else count).ljust(1024, b'\0'))
        f.write(array.array(kind, tokens).tobytes())


def make_data(folder, windows=24, seq=8, vocab=64, shards=2, seed=1):
    rng = random.Random(seed)
    for s in range(shards):
        tokens, state = [], 0
        for _ in range(windows // shards * seq + 1):  # a walk that can be learned
            state = (state * 5 + rng.choice([1, 1, 1, 7])) % vocab
            tokens.append(state)
        write_shard(os.path.join(folder, f'd_{s:06d}.bin'), tokens)
    return ['--train', os.path.join(folder, 'd_*.bin')]


def records(path, kind='step'):
    with open(path) as f:
        return [r for r in map(json.loads, f) if r['kind'] == kind]


def curve(path):
    return [(r['step'], r['loss'], r['grad_norm'], r['lr'], r['tokens']) for r in records(path)]


def state_hashes(checkpoint):
    with open(os.path.join(checkpoint, 'checkpoint.json')) as f:
        return sorted((x['tp'], x['dp'] if 'dp' in x else 0, x['xxh3']) for x in json.load(f)['files'])


def newest(out):
    return sorted(glob.glob(os.path.join(out, 'step_*')))[-1]


# ---------------------------------------------------------------------------------------------------------------------

def test_threads_equal_mpirun(d):
    data = make_data(d)
    for tp, dp, zero, p, more in [(2, 1, 0, 0.5, []), (1, 2, 1, 1, []), (2, 2, 1, 0.3, ['--interleave']), (4, 1, 0, 0, []), (2, 1, 0, 0.5, ['--interleave', '--overlap-batches', 2]),
                                  (2, 2, 1, 0.3, ['--dtype', 'bf16', '--grad-dtype', 'bf16'])]:
        args = SMALL + data + ['--tp', tp, '--dp', dp, '--zero', zero, '--sync-factor', p, '--steps', 6] + more
        ok(args + ['--log', f'{d}/threads'])
        ok(args + ['--log', f'{d}/mpi'], n=tp * dp)
        expect(curve(f'{d}/threads') == curve(f'{d}/mpi'), f'tp {tp} dp {dp}: {curve(f"{d}/threads")[-1]} and {curve(f"{d}/mpi")[-1]}')
        a, b = records(f'{d}/threads')[-1], records(f'{d}/mpi')[-1]
        for key in ('comm_bytes_tp_layers', 'comm_bytes_embedding', 'comm_bytes_loss', 'comm_bytes_dp'):
            expect(a[key] == b[key], f'{key}: {a[key]} and {b[key]}')


def traced(args, d, **kw):
    """The spans of a run with --trace: per rank [(begin, end, name, args, place in the order of issue)] of work and of sums, and what it printed."""
    out = ok(args + ['--profile', '--trace', f'{d}/trace.json'], **kw).stdout
    with open(f'{d}/trace.json') as f:
        events = json.load(f)['traceEvents']
    work, sums, begun = {}, {}, {}
    for place, e in enumerate(events):
        if e['ph'] == 'X':
            work.setdefault(e['pid'], []).append((e['ts'], e['ts'] + e['dur'], e['name'], e['args'], place))
        elif e['ph'] == 'b':
            begun[e['id']] = e
        elif e['ph'] == 'e':
            b = begun.pop(e['id'])
            sums.setdefault(e['pid'], []).append((b['ts'], e['ts'], b['name'], b['args'], place))
    expect(not begun, f'{len(begun)} sums never end')
    return work, sums, out


def test_profile_and_trace(d):
    """Oracles: the sums and products that a step has by its formulas; time, in which a rank does one thing after another; the other launch."""
    steps, layers, rows, C, F, V, S, T = 3, 2, 4 * 8, 32, 48, 64, 8, 2
    args = SMALL + make_data(d) + ['--tp', T, '--sync-factor', 0.5, '--interleave', '--recompute', 0, '--steps', steps]
    orders = []
    for n in (0, T):
        work, sums, out = traced(args, d, n=n)
        expect(sorted(work) == sorted(sums) == list(range(T)), f'ranks {sorted(work)} and {sorted(sums)}')
        expect('matmul_wgrad' in out and 'waiting for ranks' in out and 'everything else' in out, f'no table of ops: {out}')
        for rank in range(T):
            spans = sorted(work[rank])
            expect(all(a[1] <= b[0] + 1e-3 for a, b in zip(spans, spans[1:])), 'two things at once')
            reduces = [s for s in sums[rank] if s[2] == 'partial channel reduce']
            halves = 2 * 2 * steps  # of two micro-batches a step
            expect(len(reduces) == 4 * layers * halves, f'{len(reduces)} partial channel reduces')
            expect(abs(sum(s[3]['MB'] for s in reduces) * 1e6 - 4 * layers * steps * rows * (C // 2) * 4) < 1, 'bytes of the partial channel reduces')
            # A reduce is under way during the other half's attention, which no schedule of one half alone could do. (These are tiny: MPI has done with them before.)
            hidden = n > 0 or [s for s in spans if s[2] == 'attention_forward' and any(r[0] <= s[0] and s[1] <= r[1] for r in reduces)]
            expect(hidden, 'no reduce is under way during an attention')
            flops = sum(s[3]['GFLOP'] for s in spans if s[2].startswith('matmul')) * 1e9
            weights = (layers * (4 * C * C + 3 * C * F) + V * C) // T
            expect(abs(flops - steps * 3 * 2 * rows * weights) < 1, f'{flops} operations in products')
            flops = sum(s[3]['GFLOP'] for s in spans if s[2].startswith('attention')) * 1e9
            expect(abs(flops - steps * 6 * layers * rows * (S + 1) // 2 * 2 * C // T) < 1, f'{flops} operations in attention')
        orders.append([s[2] for s in sorted(work[0])])
    expect(orders[0] == orders[1], 'threads and mpirun do other things')


def test_same_run_twice_and_any_number_of_threads(d):
    data = make_data(d)
    curves = []
    for threads, omp in [(1, 1), (2, 2), (2, 1), (3, 4)]:
        ok(SMALL + data + ['--steps', 8, '--threads', threads, '--log', f'{d}/log'], env={'OMP_NUM_THREADS': str(omp)})
        curves.append(curve(f'{d}/log'))
    expect(all(c == curves[0] for c in curves), 'the log depends on the number of threads')
    ok(SMALL + data + ['--steps', 8, '--seed', 7, '--log', f'{d}/log'])
    expect(curve(f'{d}/log') != curves[0], '--seed has no effect')


def check_resume(d, flags, n, cut, steps=20, program=None):
    data = make_data(d)
    args = SMALL + data + flags + ['--steps', steps]
    ok(args + ['--out', f'{d}/whole', '--log', f'{d}/whole.log'], n=n, program=program)
    ok(args + ['--out', f'{d}/parts', '--log', f'{d}/parts.log', '--save-every', cut, '--keep', 0], n=n, program=program)
    shutil.rmtree(f'{d}/parts/step_{steps:08d}')
    for step in sorted(glob.glob(f'{d}/parts/step_*')):
        if int(step[-8:]) > cut:
            shutil.rmtree(step)
    ok(args + ['--out', f'{d}/parts', '--log', f'{d}/rest.log', '--resume'], n=n, program=program)
    rest = curve(f'{d}/rest.log')
    expect(rest[0][0] == cut + 1, f'resumed at step {rest[0][0]}')
    expect(rest == curve(f'{d}/whole.log')[cut:], f'{flags}: the resumed run differs: {rest[0]} and {curve(f"{d}/whole.log")[cut]}')
    expect(state_hashes(newest(f'{d}/parts')) == state_hashes(newest(f'{d}/whole')), f'{flags}: the final states differ')


def test_resume_is_bit_exact_plain(d):
    check_resume(d, [], 0, 7)


def test_resume_is_bit_exact_tp_in_third_epoch(d):  # 24 windows: an epoch is 6 steps
    check_resume(d, ['--tp', 2, '--sync-factor', 0.5], 0, 14)


def test_resume_is_bit_exact_tp_dp_zero_bf16(d):
    check_resume(d, ['--tp', 2, '--sync-factor', 0.5, '--dp', 2, '--zero', 1, '--dtype', 'bf16', '--grad-dtype', 'bf16', '--rounding', 'stochastic'], 0, 5)


def test_resume_is_bit_exact_under_mpirun(d):
    check_resume(d, ['--tp', 2, '--sync-factor', 0.5, '--dp', 2, '--zero', 1], 4, 5)


def test_resume_with_another_dp_and_micro_batch(d):
    data = make_data(d)
    args = SMALL + data + ['--steps', 16]
    ok(args + ['--out', f'{d}/whole', '--log', f'{d}/whole.log'])
    previous = 0
    for steps, dp, mb, zero in [(5, 2, 1, 1), (10, 1, 4, 0), (16, 4, 1, 1)]:
        ok(SMALL + data + ['--steps', steps, '--decay-steps', 16, '--dp', dp, '--micro-batch', mb, '--zero', zero, '--out', f'{d}/parts', '--log', f'{d}/parts.log', '--resume'])
        part = curve(f'{d}/parts.log')[previous:]
        expect(part[0][0] == previous + 1, f'continued at {part[0][0]}')
        for a, b in zip(part, curve(f'{d}/whole.log')[previous:]):
            expect(a[0] == b[0] and a[4] == b[4] and abs(a[1] - b[1]) <= 2e-5 * b[1], f'{a} and {b}')
        previous = steps


def test_resume_needs_no_flags_and_refuses_others(d):
    data = make_data(d)
    ok(SMALL + data + ['--tp', 2, '--sync-factor', 0.5, '--steps', 4, '--out', f'{d}/out'])
    ok(['--out', f'{d}/out', '--resume', '--steps', 6, '--log', f'{d}/log'])
    expect([r['step'] for r in records(f'{d}/log')] == [5, 6], 'steps')
    for flag, value in [('--tp', 4), ('--sync-factor', 0.25), ('--layers', 3), ('--channels', 64), ('--vocab', 65), ('--private-scale', 'none'), ('--norm-eps', 1e-6)]:
        refused(['--out', f'{d}/out', '--resume', '--steps', 8, flag, value], 2, flag)
    refused(SMALL + data + ['--out', f'{d}/out', '--steps', 8], 2, '--resume')
    make_data(d, seed=2, windows=32)
    refused(['--out', f'{d}/out', '--resume', '--steps', 8], 2, '--train')


def test_p1_checkpoint_loads_at_any_tp(d):
    data = make_data(d)
    ok(SMALL + data + ['--tp', 2, '--steps', 5, '--decay-steps', 10, '--out', f'{d}/out', '--log', f'{d}/log'])
    shutil.copytree(f'{d}/out', f'{d}/same')
    ok(['--out', f'{d}/same', '--resume', '--steps', 10, '--log', f'{d}/same.log'])
    for tp in (1, 4):
        shutil.copytree(f'{d}/out', f'{d}/tp{tp}')
        ok(['--out', f'{d}/tp{tp}', '--resume', '--tp', tp, '--steps', 10, '--log', f'{d}/tp{tp}.log'])
        for a, b in zip(curve(f'{d}/tp{tp}.log'), curve(f'{d}/same.log')):
            expect(abs(a[1] - b[1]) <= 1e-4 * b[1], f'tp {tp}: {a} and {b}')


def wait_for_step(log, step, process, timeout=60):
    begin = time.time()
    while time.time() - begin < timeout:
        expect(process.poll() is None, f'ended with {process.returncode} before step {step}')
        if os.path.exists(log):
            with open(log) as f:
                if f'"kind":"step"' in (text := f.read()) and f'"step":{step},' in text:
                    return
        time.sleep(0.01)
    raise Failed(f'no step {step} within {timeout} s')


def start(args, n=0, mca=(), **kw):
    command = (MPIRUN + list(mca) + ['-n', str(n)] if n else []) + [TRAIN] + [str(a) for a in args]
    STARTED.append(subprocess.Popen(command, env={**os.environ, **MPI_ENV}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **kw))
    return STARTED[-1]


def test_signals_save_and_leave(d):
    data = make_data(d)
    ok(SMALL + data + ['--tp', 2, '--sync-factor', 0.5, '--steps', 400, '--log', f'{d}/whole.log'])
    for sig, n in [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGUSR1, 0), (signal.SIGTERM, 2), (signal.SIGUSR1, 2)]:
        out, log = f'{d}/out{sig}{n}', f'{d}/log{sig}{n}'
        args = SMALL + data + ['--tp', 2, '--sync-factor', 0.5, '--steps', 100000, '--decay-steps', 400, '--out', out, '--log', log]
        p = start(args, n=n, mca=['--mca', 'odls_base_sigkill_timeout', '3'])  # seconds to save in; mpirun waits them in full, twice
        wait_for_step(log, 3, p)
        p.send_signal(sig)
        _, err = p.communicate(timeout=20)
        expect(p.returncode in ((128 + sig,) if n == 0 or sig == signal.SIGUSR1 else (1, 128 + sig)) and p.returncode != 0, f'{sig} n={n}: exit code {p.returncode} {err[-500:]}')
        saved = int(newest(out)[-8:])
        steps = [r['step'] for r in records(log)]
        expect(saved == steps[-1], f'{sig} n={n}: saved {saved}, last step {steps[-1]}')
        ok(['--out', out, '--resume', '--steps', saved + 2, '--log', f'{d}/rest'], n=n)
        tail = [(r['step'], r['loss']) for r in records(f'{d}/rest')]
        if saved + 2 <= 400:
            expect(tail == [(r['step'], r['loss']) for r in records(f'{d}/whole.log')][saved:saved + 2], f'{sig} n={n}: the continuation differs')
        os.unlink(f'{d}/rest')


def test_sigkill_at_random_moments_loses_at_most_one_interval(d):
    data = make_data(d)
    rng = random.Random(5)
    out, log = f'{d}/out', f'{d}/log'
    for i in range(12):
        before = int(newest(out)[-8:]) if glob.glob(f'{out}/step_*') else 0
        p = start(SMALL + data + ['--steps', 100000, '--save-every', 2, '--keep', 2, '--out', out, '--log', log] + (['--resume'] if i else []))
        wait_for_step(log, before + 4, p)
        time.sleep(rng.random() * 0.1)
        os.killpg(p.pid, signal.SIGKILL)
        p.communicate()
        steps = [r['step'] for r in records_until_cut(log)]
        saved = int(newest(out)[-8:])
        expect(saved >= steps[-1] - 3, f'kill {i}: step {steps[-1]} was reached, {saved} is saved')
    ok(['--out', out, '--resume', '--steps', int(newest(out)[-8:]) + 1])
    expect(len(glob.glob(f'{out}/step_*')) <= 2 and not glob.glob(f'{out}/.step*tmp'), f'left behind: {os.listdir(out)}')


def records_until_cut(path):
    found = []
    for line in open(path):
        try:
            r = json.loads(line)
        except ValueError:
            continue
        if r['kind'] == 'step':
            found.append(r)
    return found


def test_a_killed_rank_takes_all_down(d):
    data = make_data(d)
    p = start(SMALL + data + ['--tp', 2, '--sync-factor', 0.5, '--steps', 1000000, '--log', f'{d}/log'], n=2)
    wait_for_step(f'{d}/log', 3, p)
    ranks = subprocess.run(['pgrep', '-P', str(p.pid)], stdout=subprocess.PIPE, text=True).stdout.split()
    begin = time.time()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    p.communicate(timeout=15)
    expect(p.returncode != 0 and time.time() - begin < 10, f'exit code {p.returncode} after {time.time() - begin:.1f} s')
    expect(subprocess.run(['pgrep', '-f', f'{d}/log'], stdout=subprocess.PIPE).stdout == b'', 'a rank lives on')


def test_data_missing_on_one_rank_only(d):
    os.makedirs(f'{d}/a'), os.makedirs(f'{d}/b')
    make_data(f'{d}/a')
    script = f'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then cd "{d}/b"; else cd "{d}/a"; fi; exec "$@"'
    begin = time.time()
    r = run(SMALL + ['--train', 'd_*.bin', '--tp', 2, '--steps', 3], n=2, prefix=['sh', '-c', script, 'sh'])
    expect(r.returncode != 0 and time.time() - begin < 10, f'exit code {r.returncode} after {time.time() - begin:.1f} s')
    expect('d_*.bin' in r.stderr, r.stderr[-1000:])


def test_world_must_be_tp_times_dp(d):
    data = make_data(d)
    for n, flags in [(3, ['--tp', 2]), (4, ['--tp', 1, '--dp', 2]), (2, ['--tp', 4])]:
        refused(SMALL + data + flags, 2, '--tp', str(n), n=n)
    ok(SMALL + data + ['--tp', 2, '--sync-factor', 0.5, '--steps', 2], n=4)  # dp is 4 / 2


def test_eight_ranks_on_two_cores(d):
    data = make_data(d)
    args = SMALL + data + ['--heads', 8, '--kv-heads', 8, '--tp', 8, '--sync-factor', 0.5, '--steps', 5]
    ok(args + ['--log', f'{d}/a'], timeout=60)
    ok(args + ['--log', f'{d}/b'], n=8, timeout=60)
    expect(curve(f'{d}/a') == curve(f'{d}/b'), 'threads and mpirun differ')


def test_bad_data_is_named(d):
    os.makedirs(f'{d}/x')
    refused(SMALL + ['--train', f'{d}/none_*.bin'], 2, 'none_*.bin')
    write_shard(f'{d}/x/short.bin', [1] * 8)
    refused(SMALL + ['--train', f'{d}/x/short.bin'], 1, 'short.bin', '9')
    write_shard(f'{d}/x/magic.bin', [1] * 100, magic=1234)
    refused(SMALL + ['--train', f'{d}/x/magic.bin'], 1, 'magic.bin', '1234')
    write_shard(f'{d}/x/version.bin', [1] * 100, version=2)
    refused(SMALL + ['--train', f'{d}/x/version.bin'], 1, 'version.bin')
    write_shard(f'{d}/x/cut.bin', [1] * 100, count=1000)
    refused(SMALL + ['--train', f'{d}/x/cut.bin'], 1, 'cut.bin')
    open(f'{d}/x/empty.bin', 'w').close()
    refused(SMALL + ['--train', f'{d}/x/empty.bin'], 1, 'empty.bin')
    write_shard(f'{d}/x/ids.bin', [1] * 50 + [64] + [1] * 50)
    refused(SMALL + ['--train', f'{d}/x/ids.bin', '--tp', 2, '--sync-factor', 0.5, '--steps', 20], 1, 'ids.bin', '64', '50')
    write_shard(f'{d}/x/exact.bin', list(range(9)))
    ok(SMALL + ['--train', f'{d}/x/exact.bin', '--steps', 1])


def test_bad_output_is_refused_before_the_first_step(d):
    data = make_data(d)
    open(f'{d}/file', 'w').close()
    for out in (f'{d}/file', f'{d}/file/below'):
        r = refused(SMALL + data + ['--out', out, '--steps', 1], 1, out)
        expect('| loss' not in r.stdout, 'a step was made')
    refused(SMALL + data + ['--log', f'{d}/no/such/folder', '--steps', 1], 1, '--log')
    ok(SMALL + data + ['--out', f'{d}/new/deep folder/out', '--steps', 1])
    expect(os.path.exists(f'{d}/new/deep folder/out/step_00000001/checkpoint.json'), 'no checkpoint')


def test_not_finite_stops_on_all_ranks_and_keeps_the_last_checkpoint(d):
    data = make_data(d)
    ok(SMALL + data + ['--tp', 2, '--sync-factor', 0.5, '--steps', 2, '--out', f'{d}/out'])
    for n in (0, 2):
        r = refused(['--out', f'{d}/out', '--resume', '--steps', 9, '--lr', '1e30', '--min-lr', '1e30', '--schedule', 'constant', '--warmup', 0], 1, 'step', n=n)
        expect('before the weights changed' in r.stderr, r.stderr)
        expect(os.path.exists(f'{d}/out/step_00000002/checkpoint.json'), 'the good checkpoint is gone')
    ok(['--out', f'{d}/out', '--resume', '--steps', 3])


def test_damaged_checkpoints_are_refused_by_name(d):
    data = make_data(d)
    ok(SMALL + data + ['--steps', 2, '--out', f'{d}/out'])
    state = glob.glob(f'{d}/out/step_00000002/state_*')[0]
    whole = open(state, 'rb').read()
    for damaged in (whole[:-1], whole[:len(whole) // 2], b'', whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]):
        open(state, 'wb').write(damaged)
        refused(['--out', f'{d}/out', '--resume', '--steps', 3], 1, os.path.basename(state))
    os.unlink(state)
    refused(['--out', f'{d}/out', '--resume', '--steps', 3], 1, os.path.basename(state))


def test_full_disk_keeps_the_old_checkpoint(d):
    data = make_data(d)
    ok(SMALL + data + ['--steps', 2, '--out', f'{d}/out'])
    limit = ['sh', '-c', 'ulimit -f 100; exec "$@"', 'sh']
    r = run(['--out', f'{d}/out', '--resume', '--steps', 4], prefix=limit)
    expect(r.returncode == 1 and 'state_' in r.stderr, f'{r.returncode} {r.stderr[-500:]}')
    expect(sorted(os.listdir(f'{d}/out')) == ['.lock', 'step_00000002'], f'left behind: {os.listdir(f"{d}/out")}')
    ok(['--out', f'{d}/out', '--resume', '--steps', 4])


def test_logs_and_pipes(d):
    data = make_data(d)
    r = subprocess.run(f'"{TRAIN}" {" ".join(map(str, SMALL))} --train "{d}/d_*.bin" --steps 40 --log "{d}/log" | head -1', shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
    time.sleep(0.2)
    expect(len(records(f'{d}/log')) == 40, f'{len(records(f"{d}/log"))} of 40 steps after the reader left {r.stderr}')
    r = ok(SMALL + data + ['--steps', 3, '--log', '/dev/full'])
    expect('/dev/full' in r.stderr, 'no warning about the log')
    r = ok(SMALL + data + ['--steps', 3, '--tp', 4, '--log', f'{d}/log4'], n=4)
    expect(r.stdout.count('step 1/3') == 1, 'not one voice')
    runs = records(f'{d}/log4', 'run')
    expect(len(runs) == 1 and runs[0]['flags']['tp'] == 4 and runs[0]['ranks'] == 4, str(runs))
    fields = {'step', 'loss', 'grad_norm', 'lr', 'tokens', 'seconds', 'tokens_per_second', 'comm_bytes', 'comm_exposed_seconds', 'comm_bytes_tp_layers', 'comm_bytes_embedding', 'comm_bytes_loss', 'comm_bytes_dp'}
    expect(fields <= set(records(f'{d}/log4')[0]), f'missing {fields - set(records(f"{d}/log4")[0])}')


def test_locale_and_spaces(d):
    folder = f'{d}/my data'
    os.makedirs(folder)
    data = make_data(folder)
    subprocess.run(['localedef', '-i', 'de_DE', '-f', 'UTF-8', f'{d}/de_DE.UTF-8'], check=True)
    comma = {'LC_ALL': 'de_DE.UTF-8', 'LANG': 'de_DE.UTF-8', 'LOCPATH': d}
    point = subprocess.run(['locale', 'decimal_point'], env={**os.environ, **comma}, capture_output=True, text=True).stdout
    expect(point == ',\n', f'the decimal point of the test\'s locale is {point!r}')
    ok(SMALL + data + ['--steps', 3, '--log', f'{d}/a', '--lr', '0.001'])
    ok(SMALL + data + ['--steps', 3, '--log', f'{d}/b', '--lr', '0.001', '--out', f'{folder}/out put'], env=comma)
    expect(curve(f'{d}/a') == curve(f'{d}/b'), 'the locale changes the run')
    ok(['--resume', '--out', f'{folder}/out put', '--steps', 4], env=comma)
    ok(SMALL + ['--train', f'0.7:{folder}/d_000000.bin,0.3:{folder}/d_000001.bin', '--steps', 5], env=comma)


def test_export_to_hugging_face(d):
    # Oracle: the checkpoint's own evaluation.
    data = make_data(d)
    loss = lambda r: float(re.search(r'loss ([0-9.]+)', r.stdout)[1])
    for arch in (['--tp', 2], ['--tp', 2, '--arch', 'gpt', '--tie']):
        folder = f'{d}/{len(arch)}'
        ok(SMALL + data + arch + ['--steps', 4, '--out', f'{folder}/c'])
        ok(['--checkpoint', f'{folder}/c', '--export-hf', f'{folder}/hf'])
        of_checkpoint, of_export = [loss(ok(model + ['--eval', f'{d}/d_000000.bin', '--seq', 8, '--dtype', 'fp32'])) for model in
                                    (['--checkpoint', f'{folder}/c'], ['--init-from', f'{folder}/hf'])]
        expect(abs(of_checkpoint - of_export) <= 2e-6 * of_checkpoint, f'{of_checkpoint} became {of_export}')
    ok(SMALL + data + ['--tp', 2, '--sync-factor', 0.5, '--steps', 2, '--out', f'{d}/private'])
    refused(['--checkpoint', f'{d}/private', '--export-hf', f'{d}/no'], 2, 'private channels', 'HINT')
    expect(not os.path.exists(f'{d}/no'), 'half an export')


def test_dry_run_of_models_larger_than_the_machine(d):
    begin = time.time()
    for model, tp in [('7b', 8), ('1.1b', 4), ('gpt3-xl', 8)]:
        r = ok(['--model', model, '--tp', tp, '--sync-factor', 0.5, '--dry-run', '--micro-batch', 1])
        expect('GiB per rank' in r.stdout and 'p 0.5' in r.stdout, r.stdout)
    expect('6.74B in all' in ok(['--model', '7b', '--dry-run']).stdout, 'parameter count of 7b')
    expect('134M in all (134' in ok(['--model', '130m', '--dry-run']).stdout, 'parameter count of 130m')
    expect(time.time() - begin < 20, 'slow')


def test_memory_that_is_not_there(d):
    data = make_data(d)
    r = refused(SMALL + data + ['--micro-batch', 50000000, '--global-batch', 50000000], 1, 'GiB', 'HINT')
    expect('--micro-batch' in r.stderr, r.stderr)
    r = run(SMALL + data + ['--micro-batch', 20000, '--global-batch', 20000, '--steps', 1], prefix=['sh', '-c', 'ulimit -v 600000; exec "$@"', 'sh'])
    expect(r.returncode != 0 and 'memory' in r.stderr.lower(), f'{r.returncode} {r.stderr[-500:]}')


def test_every_flag_has_an_effect(d):
    data = make_data(d, windows=48) + ['--val', f'{d}/d_000000.bin']
    base = SMALL + data + ['--steps', 6, '--schedule', 'linear', '--min-lr', 0, '--seed', 3, '--tp', 2, '--sync-factor', 0.5]

    def outcome(extra):
        log = f'{d}/log'
        ok(base + ['--log', log] + extra)
        val = [(r['step'], r['loss']) for r in records(log, 'val')]
        return curve(log), val, records(log, 'run')[0]['flags']
    plain = outcome([])
    expect(outcome([]) == plain, 'two equal runs differ')
    changes = [['--lr', '0.02'], ['--min-lr', '0.005'], ['--warmup', '5'], ['--schedule', 'cosine'], ['--schedule', 'wsd', '--wsd-decay', '2'], ['--schedule', 'constant'], ['--decay-steps', '100'],
               ['--weight-decay', '0.5'], ['--beta1', '0.5'], ['--beta2', '0.5'], ['--eps', '0.1'], ['--clip', '0.01'], ['--seed', '4'], ['--sync-factor', '0.25'], ['--private-scale', 'none'],
               ['--norm-eps', '0.1'], ['--rope-base', '10'], ['--positions', 'learned'], ['--tie'], ['--arch', 'gpt'], ['--vocab-multiple', '128'], ['--dtype', 'bf16'], ['--reduce-dtype', 'bf16'],
               ['--kv-heads', '2'], ['--head-size', '12'], ['--ffn', '64'], ['--layers', '3'], ['--global-batch', '8'], ['--seq', '6'], ['--val-every', '2'], ['--val-batches', '1']]
    for extra in changes:
        changed = outcome(extra)
        expect(changed[0] != plain[0] or changed[1] != plain[1], f'{extra} changes nothing')
        expect(changed[2] != plain[2], f'{extra} is not in the run record')
    for flags in (['--rounding', 'stochastic'], ['--grad-dtype', 'bf16']):
        expect(outcome(['--dtype', 'bf16'] + flags)[0] != outcome(['--dtype', 'bf16'])[0], f'{flags} changes nothing')


TEXT = ['the quick brown fox jumps over the lazy dog', 'a trainer that people read, run and trust', 'shared channels are summed, private channels stay',
        'half the traffic for the same loss', 'grüße aus köln, naïve façade', 'emoji 🙂 and 漢字 end here']


def make_text_model(d, tp=2, p=0.5, steps=30, tokenizer=None, flags=()):
    rng = random.Random(3)
    with open(f'{d}/text.txt', 'w') as f:
        f.write('\n'.join(rng.choice(TEXT) for _ in range(3000)))
    train_tokenizer = [] if tokenizer else [['--train-tokenizer', '400', '--out', f'{d}/tok.model', f'{d}/text.txt']]
    tokenizer = tokenizer or f'{d}/tok.model'
    for args in train_tokenizer + [['--tokenizer', tokenizer, '--out', f'{d}/t', f'{d}/text.txt']]:
        r = subprocess.run([TOKENIZE] + args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
        expect(r.returncode == 0, f'tokenize {args}: {r.stderr[-1000:]}')
    with open(f'{d}/t.json') as f:
        vocab = json.load(f)['tokenizer']['vocab']
    ok(SMALL + ['--vocab', vocab, '--seq', 64, '--train', f'{d}/t_[0-9]*.bin', '--tp', tp, '--sync-factor', p, '--steps', steps, '--out', f'{d}/model', '--tokenizer', tokenizer,
                '--sample-every', 10, '--val', f'{d}/t_[0-9]*.bin', '--val-batches', 0, '--log', f'{d}/log', '--lr', '0.02', '--global-batch', 8, *flags])
    return ['--checkpoint', f'{d}/model', '--tokenizer', tokenizer]


def test_generation_with_gpt2_tokenizer(d):
    use = make_text_model(d, tokenizer=os.path.join(ROOT, 'dev/golden/gpt2/vocab.json'), steps=60)
    r = subprocess.run([TOKENIZE, '--decode', f'{d}/t_000000.bin'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    expect(r.stdout == open(f'{d}/text.txt', 'rb').read(), f'the text does not come back: {r.stderr[-500:]}')
    greedy = ok(use + ['--generate', 60, '--prompt', 'the quick', '--temperature', 0]).stdout
    expect(greedy.startswith('the quick br'), f'what was learned: {greedy}')
    val = records(f'{d}/log', 'val')
    expect(val[-1]['loss'] < val[0]['loss'] - 1, 'nothing was learned')
    expect(len(records(f'{d}/log', 'sample')) >= 3, 'no samples')
    refused(use[:2] + ['--tokenizer', os.path.join(ROOT, 'dev/golden/gpt2/texts.jsonl'), '--generate', 3], 1, 'GPT-2')


def test_generation(d):
    use = make_text_model(d)

    def text(extra, n=0):
        return ok(use + extra, n=n).stdout
    greedy = text(['--generate', 40, '--prompt', 'the quick', '--temperature', 0])
    expect(greedy.startswith('the quick brown'), f'the space after the prompt: {greedy}')
    expect(text(['--generate', 40, '--prompt', 'the quick', '--temperature', 0, '--seed', 99]) == greedy, 'greedy depends on the seed')
    expect(text(['--generate', 40, '--prompt', 'the quick', '--temperature', 0], n=2) == greedy, 'mpirun writes another text than threads')
    hot = text(['--generate', 50, '--prompt', 'a', '--seed', 5])
    expect(hot == text(['--generate', 50, '--prompt', 'a', '--seed', 5], n=2), 'sampled: mpirun writes another text than threads')
    expect(hot != text(['--generate', 50, '--prompt', 'a', '--seed', 6]), '--seed has no effect on sampling')
    hot.encode('utf-8').decode('utf-8')
    expect(text(['--generate', 10, '--prompt', '']) is not None, 'empty prompt')
    expect(text(['--generate', 0, '--prompt', 'the quick']) == 'the quick\n', '--generate 0')
    r = ok(use + ['--generate', 5, '--prompt', 'the quick', '--temperature', 0, '--ignore-eos', '--profile'])
    products = 2 * (2 + 2 * 2) + 1  # 2 layers: qkv and up, attention output and down in two blocks each; the head
    found = re.findall(r'^(the prompt:|each token after it:)|^matmul_forward +(\d+) |^step .* mean of (\d+) step', r.stderr, re.M)
    expect(found == [('the prompt:', '', ''), ('', str(products), ''), ('', '', '1'), ('each token after it:', '', ''), ('', str(products), ''), ('', '', '3')], f'--profile: {found} in {r.stderr}')
    expect(r.stdout == text(['--generate', 5, '--prompt', 'the quick', '--temperature', 0, '--ignore-eos']), '--profile changes the text')
    r = subprocess.run(f'"{TRAIN}" --checkpoint {d}/model --tokenizer {d}/tok.model --generate 5 > /dev/full', shell=True, stderr=subprocess.PIPE, text=True)
    expect(r.returncode == 1 and 'standard output' in r.stderr, f'output that is lost: {r.returncode} {r.stderr}')
    ok(use + ['--generate', 10 ** 6, '--prompt', 'a', '--ignore-eos'])  # ends where the context is full
    refused(use + ['--generate', 5, '--prompt', 'word ' * 100], 1, 'context')
    refused(use + ['--generate', 5, '--tp', 4], 2, '--tp')
    refused(use + ['--generate', 5, '--tp', 1], 2, '--tp')
    expect('"sync_factor": 0.5' in ok(['--checkpoint', f'{d}/model', '--info']).stdout, '--info')
    refused(['--checkpoint', f'{d}/nowhere', '--info'], 1, 'nowhere')
    before = open(f'{d}/log').read()
    val = records(f'{d}/log', 'val')[-1]
    r = ok(['--checkpoint', f'{d}/model', '--eval', f'{d}/t_000000.bin', '--log', f'{d}/eval.log'])
    found = records(f'{d}/eval.log', 'eval')[0]
    expect(records(f'{d}/eval.log', 'run') and open(f'{d}/log').read() == before, 'the training log was touched, or the first record is not the run')
    subprocess.run([TOKENIZE, '--train-tokenizer', '300', '--out', f'{d}/other.model', f'{d}/text.txt'], check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    subprocess.run([TOKENIZE, '--tokenizer', f'{d}/other.model', '--out', f'{d}/o', f'{d}/text.txt'], check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    refused(['--checkpoint', f'{d}/model', '--eval', f'{d}/o_000000.bin'], 2, 'other.model')
    refused(use[:2] + ['--tokenizer', f'{d}/other.model', '--generate', 3], 2, 'other.model')
    r = subprocess.run(['/usr/bin/python3', os.path.join(ROOT, 'scripts/quickstart_report.py'), f'{d}/log', '--train', f'{d}/t_[0-9]*.bin', '--val', f'{d}/t_[0-9]*.bin', '--out', f'{d}/loss.png'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    expect(r.returncode == 0 and 'unigram' in r.stdout.lower(), f'quickstart_report.py: {r.stdout} {r.stderr[-1000:]}')
    expect(abs(found['loss'] - val['loss']) <= 1e-6 and found['bits_per_byte'] > 0, f'{found} and {val}')
    expect(val['loss'] < records(f'{d}/log', 'val')[0]['loss'] - 1, 'nothing was learned')
    expect(len(records(f'{d}/log', 'sample')) >= 3, 'no samples')


def test_generation_stops_at_the_end_of_a_text(d):  # a model that knows one text by heart
    with open(f'{d}/text.jsonl', 'w') as f:
        f.write('{"text": "one two three four five six seven"}\n' * 400)
    for args in (['--train-tokenizer', '300', '--out', f'{d}/tok.model', f'{d}/text.jsonl'], ['--tokenizer', f'{d}/tok.model', '--bos', '--out', f'{d}/t', f'{d}/text.jsonl']):
        r = subprocess.run([TOKENIZE] + args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if r.returncode != 0 and '--train-tokenizer' in args:  # the library names the largest size that the text allows
            args[1] = re.search(r'<= (\d+)', r.stderr).group(1)
            r = subprocess.run([TOKENIZE] + args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        expect(r.returncode == 0, r.stderr)
    vocab = json.load(open(f'{d}/t.json'))['tokenizer']['vocab']
    ok(SMALL + ['--vocab', vocab, '--seq', 32, '--train', f'{d}/t_[0-9]*.bin', '--steps', 60, '--lr', 0.02, '--tp', 2, '--sync-factor', 0.5, '--out', f'{d}/m', '--schedule', 'constant'])
    use = ['--checkpoint', f'{d}/m', '--tokenizer', f'{d}/tok.model', '--prompt', 'one two', '--temperature', 0, '--generate', 25]
    expect(ok(use).stdout == 'one two three four five six seven\n', ok(use).stdout)
    expect(len(ok(use + ['--ignore-eos']).stdout) > len(ok(use).stdout) + 10, '--ignore-eos')


def test_one_rank_is_told_to_stop(d):
    p = start(SMALL + make_data(d) + ['--tp', 2, '--sync-factor', 0.5, '--steps', 1000000, '--out', f'{d}/out', '--log', f'{d}/log'], n=2)
    wait_for_step(f'{d}/log', 3, p)
    ranks = subprocess.run(['pgrep', '-P', str(p.pid), 'train_gpt'], stdout=subprocess.PIPE, text=True).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGTERM)
    p.communicate(timeout=15)
    expect(p.returncode == 143 and glob.glob(f'{d}/out/step_*'), f'exit code {p.returncode}, {os.listdir(f"{d}/out")}')


def test_more_than_two_to_the_31_logits(d):
    V, S, B = 40000, 1024, 64  # B*S*V = 2.6e9
    write_shard(f'{d}/big.bin', [(i * 7919) % V for i in range(S * B + 1)])
    ok(SMALL + ['--layers', 1, '--channels', 8, '--heads', 1, '--kv-heads', 1, '--ffn', 8, '--vocab', V, '--seq', S, '--train', f'{d}/big.bin', '--steps', 1, '--micro-batch', B, '--global-batch', B, '--log', f'{d}/a'], timeout=200)
    a = curve(f'{d}/a')[0]
    expect(abs(a[1] - math.log(V)) < 0.1 and 0 < a[2] < 10, f'{a}')


def test_small_shared_memory(d):
    if os.geteuid() != 0:
        return print('     (not root: a small /dev/shm cannot be made)')
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    r = subprocess.run(['unshare', '-m', 'sh', '-c', script, 'sh'] + MPIRUN + ['-n', '4', TRAIN] + [str(a) for a in SMALL + make_data(d) + ['--tp', 4, '--sync-factor', 0.5, '--steps', 3]],
                       env={**os.environ, **MPI_ENV}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
    expect(r.returncode == 0 and 'step 3/3' in r.stdout, f'{r.returncode} {r.stderr[-1000:]}')


def test_redirected_output_keeps_its_order(d):
    data = make_data(d)
    line = ' '.join(f'"{a}"' for a in SMALL + data + ['--steps', 3, '--lr', '1e30', '--min-lr', '1e30', '--schedule', 'constant', '--warmup', 0])
    subprocess.run(f'(echo BEFORE; "{TRAIN}" {line}; echo AFTER) > {d}/f 2>&1', shell=True)
    text = open(f'{d}/f').read()
    expect(text.startswith('BEFORE') and text.rstrip().endswith('AFTER') and text.index('step 1/3') < text.index('error:'), text)
    expect(':null' in ok_log_of_a_diverging_run(d, data), 'what is no number is not null in the log')
    open(f'{d}/precious', 'w').write('not a log')
    refused(SMALL + data + ['--steps', 1, '--log', f'{d}/precious'], 1, '--log')
    old = f'{d}/old.log'
    ok(SMALL + data + ['--steps', 2, '--log', old])
    refused(SMALL + ['--train', f'{d}/typo*', '--log', old], 2, 'typo')
    expect(len(records(old)) == 2, 'a refused command emptied the old log')


def ok_log_of_a_diverging_run(d, data):
    run(SMALL + data + ['--steps', 3, '--lr', '1e30', '--min-lr', '1e30', '--schedule', 'constant', '--warmup', 0, '--log', f'{d}/nan.log'])
    return open(f'{d}/nan.log').read()


def test_links_in_the_readme(d):
    r = subprocess.run([sys.executable, os.path.join(ROOT, 'dev/test/readme_links.py')], stdout=subprocess.PIPE, text=True)
    expect(r.returncode == 0, r.stdout)


def test_insight(d):
    ok(SMALL + make_data(d) + ['--tp', 2, '--sync-factor', 0.5, '--steps', 4, '--insight-every', 2, '--log', f'{d}/a'])
    ok(SMALL + make_data(d) + ['--tp', 2, '--sync-factor', 0.5, '--dp', 2, '--zero', 1, '--micro-batch', 1, '--steps', 4, '--insight-every', 2, '--log', f'{d}/b'])
    a, b = records(f'{d}/a', 'insight'), records(f'{d}/b', 'insight')
    expect([r['step'] for r in a] == [2, 4] and len(a[0]['layer_grad_norm']) == 2, str(a))
    expect(all(0 < x < 2 for x in a[0]['layer_private_divergence']), str(a[0]))
    expect(all(abs(x - y) <= 1e-4 * x for x, y in zip(a[0]['layer_grad_norm'], b[0]['layer_grad_norm'])), f'{a[0]} {b[0]}')
    ok(SMALL + make_data(d) + ['--tp', 2, '--steps', 2, '--insight-every', 2, '--log', f'{d}/c'])
    expect(records(f'{d}/c', 'insight')[0]['layer_private_divergence'] == [0, 0], 'p = 1 has private channels')


def test_import(d):
    data = make_data(d, vocab=53, seq=8)
    hf = os.path.join(ROOT, 'dev/golden/models/llama_gqa')
    args = ['--init-from', hf, '--seq', 8, '--micro-batch', 2, '--global-batch', 4, '--dtype', 'fp32', '--steps', 2]
    r = ok(args + data + ['--tp', 2, '--sync-factor', 0.5])
    expect('channels of every block' in r.stdout, 'going from p = 1 to p < 1 is not explained')
    ok(args + data + ['--tp', 2, '--log', f'{d}/a']), ok(args + data + ['--log', f'{d}/b'])
    for x, y in zip(curve(f'{d}/a'), curve(f'{d}/b')):
        expect(abs(x[1] - y[1]) <= 1e-5 * y[1], f'{x} {y}')
    refused(['--init-from', f'{d}/none', '--dry-run'], 1, 'none')


def test_plot(d):
    python = next((p for p in ('/usr/bin/python3', 'python3') if subprocess.run([p, '-c', 'import matplotlib'], stderr=subprocess.DEVNULL).returncode == 0), None)
    expect(python, 'no python3 has matplotlib: apt-get install python3-matplotlib')
    ok(SMALL + make_data(d) + ['--steps', 12, '--val', f'{d}/d_000000.bin', '--val-every', 4, '--log', f'{d}/log'])
    subprocess.run([python, os.path.join(ROOT, 'scripts/plot.py'), f'{d}/log', '--out', f'{d}/plot.png'], check=True, stdout=subprocess.PIPE, timeout=60)
    expect(open(f'{d}/plot.png', 'rb').read(8) == b'\x89PNG\r\n\x1a\n', 'not a PNG')


def test_no_validation_no_out_no_log(d):
    ok(SMALL + make_data(d) + ['--steps', 2, '--val-every', 0])
    ok(['--help']), ok(SMALL + make_data(d) + ['--steps', 0])
    help_text = ok(['--help']).stdout
    for flag in ('--sync-factor', '--private-scale', '--train', '--schedule', '--resume', '--generate', '--skip-spikes'):
        expect(flag in help_text, f'{flag} is not in --help')


def test_collectives_give_the_same_bits_under_mpirun(d):
    program = os.path.join(ROOT, 'build/test_comm')
    for shape in (['1'], ['2'], ['3'], ['4'], ['2', '2']):
        n = math.prod(map(int, shape))
        found = [subprocess.run(launcher + [program, '--results'] + shape, env={**os.environ, **MPI_ENV}, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
                 for launcher in ([], MPIRUN + ['-n', str(n)])]
        expect(found[0] == found[1] and found[0].count('\n') > 10, f'{shape}: threads and mpirun differ')


def test_jobs_that_fail_end_within_seconds(d):
    program = os.path.join(ROOT, 'build/test_launch')
    for how, code, word in [('one', 1, 'shard is cut'), ('usage of one', 2, '--heads 3'), ('in flight', 1, 'under way'), ('usage', 2, '--heads 3'), ('alike', 1, 'not a number'), ('memory', 1, 'memory'), ('killed', None, '')]:
        for launcher in ([], MPIRUN + ['-n', '3']):
            begin = time.time()
            r = subprocess.run(launcher + [program, '--fail', how, '3'], env={**os.environ, **MPI_ENV}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
            expect(r.returncode == code if code else r.returncode != 0, f'{how} {launcher}: exit code {r.returncode} {r.stderr}')
            expect(word in r.stderr and (r.stderr.count('error:') == 1 or how in ('killed', 'in flight')), f'{how} {launcher}: {r.stderr}')
            expect(time.time() - begin < 10, f'{how} {launcher}: {time.time() - begin:.1f} s')


def test_folder_with_a_space_builds(d):
    copy = f'{d}/my checkout'
    os.makedirs(copy)
    for name in ('Makefile', 'llmc'):
        (shutil.copytree if os.path.isdir(os.path.join(ROOT, name)) else shutil.copy)(os.path.join(ROOT, name), f'{copy}/{name}')
    r = subprocess.run(['make', 'build/launch.o'], cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    expect(r.returncode == 0 and os.path.exists(f'{copy}/build/launch.o'), r.stderr[-800:])


def run_tests(module):
    """Runs the test_... functions of a module (its globals()), or those that the command line names, and leaves."""
    tests = [(name[5:], function) for name, function in module.items() if name.startswith('test_') and (len(sys.argv) < 2 or any(word in name for word in sys.argv[1:]))]
    failures = 0
    for name, function in tests:
        begin = time.time()
        folder = tempfile.mkdtemp(prefix='e2e_')
        try:
            function(folder)
            print(f'ok   {name} ({time.time() - begin:.1f} s)', flush=True)
        except (Failed, subprocess.SubprocessError, OSError, KeyError, IndexError, ValueError) as error:
            failures += 1
            print(f'FAIL {name} ({time.time() - begin:.1f} s): {type(error).__name__}: {error}', flush=True)
        finally:
            for process in STARTED:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            STARTED.clear()
            shutil.rmtree(folder, ignore_errors=True)
    print(f'{len(tests) - failures} passed, {failures} failed')
    sys.exit(1 if failures else 0)


if __name__ == '__main__':
    run_tests(globals())
