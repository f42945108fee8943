#!/usr/bin/env python3
"""dev/bench/bench_wire.py: steps of tensor parallelism over a slow wire, beside the least that they could take.

    dev/bench/bench_wire.py                                    as root: the 130M preset on wires of 0.5, 1, 2 and 4 times its compute
    dev/bench/bench_wire.py --model 20m --wires 1 --sync-factors 1,0.5 --schedules plain --python VENV/bin/python
    dev/bench/bench_wire.py --quick                            a tiny model: is the bench right?   The last line is 'N passed, N failed'

Hosts are network namespaces, each with one core and one rank of one thread; a pair of virtual Ethernet devices joins them (a bridge, from three hosts
on), with a token bucket on every host's way out. That takes root (CAP_NET_ADMIN and CAP_SYS_ADMIN); nothing outside the namespaces is touched. A wire is
named by what it takes for the bytes of p = 1, in units of the step's compute. A core's pace may change by half within seconds, where neighbours share it. So
all programs of a row live at once, and take steps in turn: computing, the schedules, PyTorch, computing, ... For each p it prints

  ideal       max(compute + stack, bytes / rate). compute: CPU time of a step at p = 0 without a token bucket, of the host that takes longer. stack: the
              CPU time that moving the bytes of this p takes, from a loop of products beside which they are moved over this wire (bench_stack)
  no stack    max(compute, bytes / rate)
  allowed     what the schedule's own order allows: ops on one line, exchanges on another, a wait waits
  seconds     a step's; over the ideal of the computing steps just before and after it; exposed: what of it rank 0 waited. Medians
  bytes       that host 0 sends in a step, in MB: by the interface's counter, as the program counts them, 2(T-1)/T times the payload; and the ratios

and the same step by PyTorch with gloo (peer_wire.py) where --python names an interpreter that has it: its exposed seconds are those in which no
thread of rank 0 ran. Before anything is timed, both must have the same loss and gradient norm, from the same weights and tokens.
"""
import argparse
import array
import contextlib
import functools
import glob
import json
import math
import os
import random
import shlex
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))
sys.path.insert(0, os.path.join(ROOT, 'dev', 'roofline'))
sys.path.insert(0, os.path.join(ROOT, 'scripts'))
from measure import has, machine  # noqa: E402
from roofline import cost, kind, step_calls  # noqa: E402

MODELS = {'130m': dict(layers=12, channels=768, heads=16, ffn=2048, vocab=32000, batch=32, seq=256, passes=32),
          '20m': dict(layers=6, channels=512, heads=8, ffn=1408, vocab=4096, batch=32, seq=256, passes=16),
          'quick': dict(layers=2, channels=256, heads=4, ffn=512, vocab=512, batch=4, seq=128, passes=4, dtype='fp32')}
# All compute the batch in the same passes of so many sequences, and give the same bits.
SCHEDULES = {'plain': lambda sequences: ['--micro-batch', sequences],
             'interleaved': lambda sequences: ['--micro-batch', 2 * sequences, '--interleave'],
             'overlapped': lambda sequences: ['--micro-batch', sequences, '--overlap-batches', 8]}
# What a core does of each in a second, for the shares of ops in the timeline alone: the sum is scaled to the compute that was measured.
SHARES = {'fp32': {'product': 100e9, 'attention_forward': 60e9, 'attention_backward': 60e9, 'memory': 10e9},
          'bf16': {'product': 140e9, 'attention_forward': 44e9, 'attention_backward': 41e9, 'memory': 10e9},
          'bf16 with AMX': {'matmul_forward': 550e9, 'matmul_dgrad': 430e9, 'matmul_wgrad': 380e9, 'attention_forward': 145e9, 'attention_backward': 112e9, 'memory': 12e9}}

# Bytes that a wire which was idle makes up for. A smaller bucket costs the kernel much more time.
BUCKET = 128 << 10

# A step is not counted of which other programs took so much.
DISTURBED = 0.05

# ---- hosts and their wire --------------------------------------------------------------------------------------------
def run(*command, **kw):
    return subprocess.run([str(c) for c in command], check=True, **kw)


class Hosts:
    """T namespaces. Packets are large (MTU 9000), so that the wire carries 99% of its rate as payload; congestion control is reno, which every Linux allows a namespace."""
    MTU = 9000

    def __init__(self, count, folder):
        self.count, self.names = count, [f'wire{os.getpid()}_{i}' for i in range(count)]
        self.switch = f'wire{os.getpid()}_s'
        self.taken = set()  # processes that belong to a job
        self.agent = os.path.join(folder, 'agent')
        with open(self.agent, 'w') as f:  # stands for ssh: agent [options] ADDRESS COMMAND...
            f.write('#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nhost=$((${1##*.} - 1)); shift\n'
                    f'exec ip netns exec wire{os.getpid()}_$host taskset -c $((host % {os.cpu_count()})) bash -c "$*"\n')
        os.chmod(self.agent, 0o755)

    def __enter__(self):
        try:
            for name in self.names + [self.switch] * (self.count > 2):
                run('ip', 'netns', 'add', name)
                run('ip', '-n', name, 'link', 'set', 'lo', 'up')
            if self.count > 2:
                run('ip', '-n', self.switch, 'link', 'add', 'bridge', 'type', 'bridge')
                run('ip', '-n', self.switch, 'link', 'set', 'bridge', 'mtu', self.MTU, 'up')
                for i, name in enumerate(self.names):
                    run('ip', '-n', name, 'link', 'add', 'wire', 'type', 'veth', 'peer', 'name', f'port{i}', 'netns', self.switch)
                    run('ip', '-n', self.switch, 'link', 'set', f'port{i}', 'mtu', self.MTU, 'master', 'bridge', 'up')
            else:
                run('ip', '-n', self.names[0], 'link', 'add', 'wire', 'type', 'veth', 'peer', 'name', 'wire', 'netns', self.names[1])
            for i, name in enumerate(self.names):
                run('ip', '-n', name, 'addr', 'add', f'{self.address(i)}/24', 'dev', 'wire')
                run('ip', '-n', name, 'link', 'set', 'wire', 'mtu', self.MTU, 'up')
                run('ip', 'netns', 'exec', name, 'sysctl', '-q', 'net.ipv4.tcp_congestion_control=reno')
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names + [self.switch]:
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(['ip', 'netns', 'del', name], stderr=subprocess.DEVNULL)

    @staticmethod
    def pids(name):
        return [int(pid) for pid in subprocess.run(['ip', 'netns', 'pids', name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.split()]

    @staticmethod
    def address(host):
        return f'10.77.0.{host + 1}'

    def set_rate(self, bytes_per_second):
        """Of every host's way out; None: as fast as the kernel copies."""
        for name in self.names:
            if bytes_per_second:
                run('tc', '-n', name, 'qdisc', 'replace', 'dev', 'wire', 'root', 'tbf', 'rate', f'{int(8 * bytes_per_second)}bit', 'burst', BUCKET, 'latency', '50ms')
            else:
                subprocess.run(['tc', '-n', name, 'qdisc', 'del', 'dev', 'wire', 'root'], stderr=subprocess.DEVNULL)

    def bytes_sent(self, host):
        out = run('ip', '-n', self.names[host], '-s', '-j', 'link', 'show', 'wire', stdout=subprocess.PIPE).stdout
        return json.loads(out)[0]['stats64']['tx']['bytes']

    def settle(self):
        """Until what was sent has left."""
        before = -1
        while before != (before := sum(map(self.bytes_sent, range(self.count)))):
            time.sleep(0.02)

    @staticmethod
    def start(command, **kw):
        return subprocess.Popen([str(c) for c in command], **kw)

    def inside(self, host, command):
        """The command, on this host's core."""
        return ['ip', 'netns', 'exec', self.names[host], 'taskset', '-c', str(host % os.cpu_count()), *map(str, command)]

    def mpirun(self, command):
        """One rank a host. Open MPI's own messages go over the wire too; there is no other network."""
        subnet = '10.77.0.0/24'
        hosts = ','.join(f'{self.address(i)}:1' for i in range(self.count))
        return self.inside(0, ['mpirun', '--allow-run-as-root', '--bind-to', 'none', '-n', self.count, '-H', hosts, '--mca', 'plm_rsh_agent', self.agent,
                               '--mca', 'btl_tcp_if_include', subnet, '--mca', 'oob_tcp_if_include', subnet, *command])

    def each(self, command_of):
        """Runs command_of(host) on every host at once; returns what they print."""
        started = [self.start(self.inside(i, command_of(i)), stdout=subprocess.PIPE, text=True) for i in range(self.count)]
        outputs = [p.communicate()[0] for p in started]
        if any(p.returncode for p in started):
            sys.exit(f'bench_wire: {" ".join(map(str, command_of(0)))} failed')
        return outputs


@contextlib.contextmanager
def scratch_folder():
    folder = tempfile.mkdtemp()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# ---- what is to be expected ------------------------------------------------------------------------------------------
def flags_of(shape, p, T, schedule):
    flags = [*SCHEDULES[schedule](shape['batch'] // shape['passes']), '--kv-heads', shape['heads'], '--tp', T, '--sync-factor', p, '--dtype', shape['dtype']]
    for name in ('layers', 'channels', 'heads', 'ffn', 'vocab', 'seq'):
        flags += ['--' + name, shape[name]]
    return [str(f) for f in flags]


def fast_dtype(shape):
    """What --dtype auto takes here, as the trainer says."""
    flags = flags_of(dict(shape, dtype='auto'), 1, 2, 'plain')
    numbers = run(os.path.join(ROOT, 'train_gpt'), '--dry-run', *flags, stdout=subprocess.PIPE, text=True).stdout
    return 'bf16' if 'bf16 activations' in numbers else 'fp32'


def payload(shape, p):
    """Bytes of a step's sums over ranks, in the step's own type: four reduces of k channels in each layer; all channels twice at the block entry, backward in
    fp32. (The head's three numbers a token are not counted: a thousandth.)"""
    rows, size = shape['batch'] * shape['seq'], 2 if shape['dtype'] == 'bf16' else 4
    return rows * (size * (4 * shape['layers'] * int(shape['channels'] * p) + shape['channels']) + 4 * shape['channels'])


def wire_bytes(shape, p, T):
    """What a rank sends in a step: 2(T-1)/T times the payload."""
    return 2 * (T - 1) / T * payload(shape, p)


def timeline(calls, op_seconds, wire):
    """Ops one after another, exchanges one after another, a wait waits: when the ops end, and how long they waited. A wire that was idle has a bucket to give."""
    now = free = exposed = 0.0
    done = {}
    for c in calls:
        if 'op' in c:
            now += op_seconds(c)
        elif 'start' in c:
            free = max(now - BUCKET / wire, free) + c['bytes'] / wire
            done[c['start']] = free
        elif 'wait' in c:
            exposed += max(0.0, done[c['wait']] - now)
            now = max(now, done[c['wait']])
    return now, exposed


def calls_of(shape, p, T, schedule):
    """Ops, exchanges and waits of a step, in the order in which train_gpt.cu comes to them."""
    micro_batches = shape['passes'] // 2 if schedule == 'interleaved' else shape['passes']
    return [c for part in step_calls('--micro-batches', str(micro_batches), *flags_of(shape, p, T, schedule)) for c in part]


def op_weight(c, dtype):
    """Seconds of an op, but for a factor that all have."""
    rates = SHARES['bf16 with AMX' if dtype == 'bf16' and has('amx_bf16') else dtype]
    return cost(c).bytes / rates['memory'] if kind(c['op']) == 'memory' else cost(c).flops / rates.get(c['op'], rates.get(kind(c['op'])))


def allowed(shape, p, T, schedule, compute, wire):
    """What a schedule's own order of ops, exchanges and waits allows, where its ops take `compute` seconds together."""
    calls = calls_of(shape, p, T, schedule)
    weight = functools.partial(op_weight, dtype=shape['dtype'])
    scale = compute / sum(weight(c) for c in calls if 'op' in c)
    return timeline(calls, lambda c: scale * weight(c), wire)[0]


# ---- runs ------------------------------------------------------------------------------------------------------------
def program_of(pid):
    """What the process runs, also where it is a script."""
    with contextlib.suppress(OSError), open(f'/proc/{pid}/cmdline') as f:
        return [os.path.basename(word) for word in f.read().split('\0')[:2]]
    return []


class Job:
    """A program of one process a host that takes steps, and stands still between them: so programs take steps in turn, on a machine whose pace changes from one
    second to the next. It writes a JSON record after each step to `records`."""
    BEGUN = 0.02  # seconds that the next step has run when its processes are stopped; they count

    def __init__(self, hosts, records, program):
        """Returns when the first step is done, which touches all memory for the first time."""
        self.hosts, self.records, self.counted, self.sent = hosts, records, 0, 0
        self.first = self.next_record()
        self.pids = [pid for host in hosts.names for pid in hosts.pids(host) if pid not in hosts.taken and program in program_of(pid)]
        hosts.taken.update(self.pids)
        self.pause(time.perf_counter())

    def next_record(self):
        for line in self.records:
            record = json.loads(line) if line.startswith('{') else {}
            if record.get('kind') == 'step':
                return record
            if record.get('kind') == 'end':
                sys.exit(f'bench_wire: {record["command"]}\n{record["output"]}')
        sys.exit('bench_wire: a program ended')

    def signal(self, number):
        for pid in self.pids:
            os.kill(pid, number)

    def cpu_seconds(self):
        """Of each host's process."""
        return [1e-9 * sum(int(open(path).read().split()[0]) for path in glob.glob(f'/proc/{pid}/task/*/schedstat')) for pid in self.pids]

    def delays(self):
        """Seconds in which each host's process could have run, and others ran on its core."""
        return [1e-9 * int(open(f'/proc/{pid}/schedstat').read().split()[1]) for pid in self.pids]

    def pause(self, begin):
        time.sleep(self.BEGUN)
        self.signal(signal.SIGSTOP)
        self.stopped = time.perf_counter()
        self.begun = self.stopped - begin
        self.hosts.settle()

    def turn(self):
        """One step, from the moment where the last turn ended."""
        cpu, delays, sent, paused = self.cpu_seconds(), self.delays(), self.hosts.bytes_sent(0), time.perf_counter()
        self.signal(signal.SIGCONT)
        record, end = self.next_record(), time.perf_counter()
        seconds, away = self.begun + end - paused, paused - self.stopped
        self.pause(end)
        busy = [b - a for a, b in zip(cpu, self.cpu_seconds())]
        exposed = record.get('comm_exposed_seconds', seconds - busy[0])
        others = [b - a for a, b in zip(delays, self.delays())]
        if 'comm_exposed_seconds' in record:
            if abs(seconds - busy[0] - (exposed - away)) < abs(seconds - busy[0] - exposed):
                exposed -= away  # it was waiting when it was stopped
            others.append(seconds - exposed - busy[0])  # it was stopped by somebody else
        self.counted += record.get('comm_bytes', 0)
        self.sent += self.hosts.bytes_sent(0) - sent
        return dict(seconds=seconds, exposed=exposed, busy=max(busy), delay=max(others), bytes=record.get('comm_bytes'), loss=record['loss'])

    def end_it(self):
        self.signal(signal.SIGKILL)


class Bench:
    def __init__(self, o, shape, hosts, folder, batches=8):
        self.o, self.shape, self.hosts, self.folder, self.started = o, shape, hosts, folder, 0
        rng = random.Random(0)
        tokens = array.array('H', [rng.randrange(shape['vocab']) for _ in range(shape['batch'] * shape['seq'] * batches + 1)])
        self.data = f'{folder}/random.bin'
        with open(self.data, 'wb') as f:
            f.write(struct.pack('<3i', 20240520, 1, len(tokens)).ljust(1024, b'\0') + tokens.tobytes())

    def ours(self, p, schedule, *more):
        self.started += 1
        log = f'{self.folder}/log{self.started}'
        os.mkfifo(log)
        records = os.fdopen(os.open(log, os.O_RDWR), 'r')
        command = [os.path.join(ROOT, 'train_gpt'), '--train', self.data, '--log', log, '--global-batch', self.shape['batch'], '--steps', 10000, '--threads', 1,
                   *flags_of(self.shape, p, self.hosts.count, schedule), *self.o.flags, *more]
        program = self.hosts.start(self.hosts.mpirun(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        def tell_its_end():
            output = program.communicate()[0]
            with contextlib.suppress(OSError, ValueError):
                os.write(records.fileno(), (json.dumps(dict(kind='end', command=shlex.join(map(str, command)), output=output)) + '\n').encode())
        threading.Thread(target=tell_its_end, daemon=True).start()
        return Job(self.hosts, records, 'train_gpt')

    def torch(self, p, *more):
        env = [f'{k}={v}' for k, v in dict(WORLD_SIZE=self.hosts.count, MASTER_ADDR=self.hosts.address(0), MASTER_PORT=29500, GLOO_SOCKET_IFNAME='wire').items()]
        command = [self.o.python, os.path.join(ROOT, 'dev/bench/peer_wire.py'), '--steps', 10000, '--sync-factor', p, *more]
        for name in ('layers', 'channels', 'heads', 'ffn', 'vocab', 'batch', 'seq', 'dtype'):
            command += ['--' + name, self.shape[name]]
        started = [self.hosts.start(self.hosts.inside(host, ['env', '-u', 'OPENBLAS_CORETYPE', *env, f'RANK={host}', *command]), stdout=subprocess.PIPE, text=True) for host in range(self.hosts.count)]
        return Job(self.hosts, started[0].stdout, 'peer_wire.py')

    def stack(self):
        """CPU seconds for each byte that a host sends and receives over the wire as it is now."""
        rows = self.shape['batch'] * self.shape['seq'] // self.shape['passes']
        out = self.hosts.each(lambda host: [os.path.join(ROOT, 'build/bench_stack'), self.hosts.address(0) if host else '', rows, self.shape['channels'],
                                            self.shape['ffn'] // 2, self.shape['dtype'], self.o.stack_seconds] if host < 2 else ['true'])
        return statistics.mean(json.loads(o)['seconds_per_byte'] for o in out[:2])


def same_model(o, shape, hosts):
    """Of our first step and PyTorch's, from the same weights and tokens: (p, name, ours, PyTorch's, are they equal?)."""
    with scratch_folder() as folder:
        bench = Bench(o, dict(shape, layers=2, batch=2, passes=1, dtype='fp32'), hosts, folder, batches=1)
        model, hf = f'{folder}/model', f'{folder}/hf'
        trainer = [os.path.join(ROOT, 'train_gpt')]
        for command in ([*flags_of(bench.shape, 1, 1, 'plain'), '--train', bench.data, '--global-batch', 2, '--steps', 0, '--out', model], ['--checkpoint', model, '--export-hf', hf]):
            run(*trainer, *command, stdout=subprocess.DEVNULL)
        for p in (1, 0.5):
            jobs = bench.ours(p, 'plain', '--init-from', hf), bench.torch(p, '--weights', hf, '--data', bench.data)
            for job in jobs:
                job.end_it()
            for name, tolerance in (('loss', 1e-4), ('grad_norm', 1e-3)):
                ours, theirs = (job.first[name] for job in jobs)
                yield p, name, ours, theirs, abs(ours - theirs) <= tolerance * ours


def report(o, shape, bench):
    T = bench.hosts.count
    rows = []
    median = statistics.median
    if o.python:
        for p, name, ours, theirs, equal in same_model(o, shape, bench.hosts):
            if not equal:
                sys.exit(f'bench_wire: on the same weights and tokens, p = {p}, ./train_gpt has {name} {ours}, PyTorch {theirs}: one of them computes something else')
    print(f'{machine()}; {T} hosts of one thread; {o.model}: {shape}; up to {o.steps} steps of each, in turn', flush=True)
    alone = bench.ours(0, 'plain')

    def compute_step():
        bench.hosts.set_rate(None)
        return alone.turn()['busy']
    for wire in o.wires:
        compute = median(compute_step() for _ in range(2))
        rate = wire_bytes(shape, 1, T) / (wire * compute)
        bench.hosts.set_rate(rate)
        per_byte = max(0.0, bench.stack())
        print(f'\nwire {wire:g}x: {8e-6 * rate:.0f} Mbit/s; compute {compute:.2f} s; stack {per_byte * 1e9:.2f} CPU s/GB\n'
              '   p | bytes/rate compute stack ideal no stack' + ''.join(f' | {s:>11} s /ideal   (least, most) exposed allowed /allowed' for s in o.schedules)
              + ' | MB: counter    ours payload counter/ours ours/payload | rounds' + ' | PyTorch s exposed      MB ours faster' * bool(o.python), flush=True)
        for p in o.sync_factors:
            bench.hosts.set_rate(None)
            jobs = {schedule: bench.ours(p, schedule) for schedule in o.schedules}
            if o.python:
                jobs['torch'] = bench.torch(p)
            bytes_ = wire_bytes(shape, p, T)
            stack, on_wire = per_byte * bytes_, bytes_ / rate
            computes, steps, began = [compute_step()], {name: [] for name in jobs}, time.perf_counter()
            for step in range(o.steps):
                if step > 0 and time.perf_counter() - began > o.seconds:
                    break
                bench.hosts.set_rate(rate)
                for name, job in jobs.items():
                    steps[name].append(job.turn())
                computes.append(compute_step())
            for job in jobs.values():
                job.end_it()
            beside = [(a + b) / 2 for a, b in zip(computes, computes[1:])]  # of the computing steps before and after
            ideals = [max(c + stack, on_wire) for c in beside]
            clean = [i for i in range(len(ideals)) if all(taken[i]['delay'] < DISTURBED * taken[i]['seconds'] for taken in steps.values())] or range(len(ideals))

            def undisturbed(values):
                return [v for i, v in enumerate(values) if i in clean]
            row = dict(wire=wire, p=p, rate=rate, compute=median(computes), computes=computes, stack=stack, on_wire=on_wire, ideal=median(ideals), no_stack=median(max(c, on_wire) for c in beside), steps=steps, schedules={})
            line = f'{p:4.2f} | {on_wire:10.2f} {row["compute"]:7.2f} {stack:5.2f} {row["ideal"]:5.2f} {row["no_stack"]:8.2f}'
            for schedule in o.schedules:
                taken = undisturbed(steps[schedule])
                over = [s['seconds'] / ideal for s, ideal in zip(taken, undisturbed(ideals))]
                allow = [allowed(shape, p, T, schedule, c + stack, rate) for c in undisturbed(beside)]
                r = row['schedules'][schedule] = dict(seconds=median(s['seconds'] for s in taken), over_ideal=median(over), exposed=median(s['exposed'] for s in taken), allowed=median(allow),
                                                      over_allowed=median(s['seconds'] / a for s, a in zip(taken, allow)), busy=median(s['busy'] for s in taken),
                                                      sent=jobs[schedule].sent / len(steps[schedule]), counter=jobs[schedule].sent / jobs[schedule].counted, bytes=taken[-1]['bytes'])
                line += f' | {r["seconds"]:13.2f} {r["over_ideal"]:6.2f} ({min(over):5.2f}, {max(over):5.2f}) {r["exposed"]:7.2f} {r["allowed"]:7.2f} {r["over_allowed"]:8.2f}'
            best = min(row['schedules'], key=lambda s: row['schedules'][s]['over_ideal'])
            line += f' | {1e-6 * r["sent"]:11.2f} {1e-6 * r["bytes"]:7.2f} {1e-6 * bytes_:7.2f} {r["counter"]:12.4f} {r["bytes"] / bytes_:12.4f} | {len(clean)} of {len(ideals):2}'
            if o.python:
                row['torch'], row['torch_exposed'] = (median(s[what] for s in undisturbed(steps['torch'])) for what in ('seconds', 'exposed'))
                row['torch_sent'] = jobs['torch'].sent / len(steps['torch'])
                row['faster'] = median(t['seconds'] / s['seconds'] for t, s in zip(undisturbed(steps['torch']), undisturbed(steps[best])))
                line += f' | {row["torch"]:9.2f} {row["torch_exposed"]:7.2f} {1e-6 * row["torch_sent"]:7.2f} {row["faster"]:10.2f}x'
            print(line, flush=True)
            rows.append(row)
    return rows


def quick(o):
    """Is the bench right? What needs no namespaces first."""
    counts = {True: 0, False: 0}

    def expect(condition, what):
        counts[bool(condition)] += 1
        print(('ok   ' if condition else 'FAIL ') + what, flush=True)

    # By hand: an op of 1 s, an exchange of 3 s under an op of 2 s, 1 s waited; another of 1 s behind an op of 3 s, nothing waited; 1 s. The wire of
    # 1 byte/s has no bucket to speak of at this scale.
    second = BUCKET * 1000
    calls = [{'op': 1}, {'start': 1, 'bytes': 3 * second}, {'op': 2}, {'wait': 1}, {'start': 2, 'bytes': second}, {'op': 3}, {'wait': 2}, {'op': 1}]
    end, exposed = timeline(calls, lambda c: c['op'], second)
    expect(abs(end - 8) <= 0.01 and abs(exposed - 1) <= 0.01, f'timeline by hand: {end:.3f} s of 8, {exposed:.3f} of 1 waited')
    shape = MODELS['quick']
    for p, T in ((1, 2), (0.5, 2), (0.3, 4), (0, 2)):
        for schedule in SCHEDULES:
            sent = sum(c['bytes'] for c in calls_of(shape, p, T, schedule) if c.get('group') == 'tp')
            expect(abs(sent / wire_bytes(shape, p, T) - 1) <= 0.03, f'T = {T}, p = {p}, {schedule}: train_gpt.cu starts exchanges of {sent} bytes, 2(T-1)/T times the payload is {wire_bytes(shape, p, T):.0f}')
    compute, never = 1.0, 1e18
    expect(abs(allowed(shape, 1, 2, 'plain', compute, never) - compute) <= 1e-6, 'no wire, no wait')
    for schedule, before_backward in (('plain', 1), ('interleaved', 2), ('overlapped', 4)):
        ops = [c['op'] for c in calls_of(shape, 1, 2, schedule) if 'op' in c]
        begun = ops[:ops.index('embedding_backward')].count('embedding_forward')
        expect(begun == before_backward, f'{schedule}: {begun} passes have begun when the first one ends, of {before_backward}')
    ops = [c['op'] for c in calls_of(dict(MODELS['130m'], dtype='bf16'), 1, 2, 'overlapped') if 'op' in c]
    begun = ops[:ops.index('classifier_stats')].count('embedding_forward')
    expect(begun == 5, f'130m, overlapped: {begun} passes of 52 stops have begun, 52/8 apart, when the first one is at the head, its stop 25')
    if subprocess.run(['ip', 'netns', 'add', f'wire{os.getpid()}'], stderr=subprocess.DEVNULL).returncode:
        print('no network namespaces here (they take root): the arithmetic only')
    else:
        run('ip', 'netns', 'del', f'wire{os.getpid()}')
        o.steps = 4
        with scratch_folder() as folder, Hosts(2, folder) as hosts:
            bench, rate = Bench(o, shape, hosts, folder), 10e6
            hosts.set_rate(rate)
            jobs = {(p, s): bench.ours(p, s) for p, s in ((1, 'plain'), (1, 'interleaved'), (1, 'overlapped'), (0.5, 'overlapped'))}
            runs = {which: [job.turn() for _ in range(o.steps)] for which, job in jobs.items()}
            for (p, schedule), steps in runs.items():
                on_wire, job = wire_bytes(shape, p, 2) / rate, jobs[p, schedule]
                expect(abs(job.sent / job.counted - 1) <= 0.03, f'p = {p}, {schedule}: the interface counted {job.sent / job.counted:.4f} of our bytes')
                expect(abs(steps[0]['bytes'] / wire_bytes(shape, p, 2) - 1) <= 0.03, f'p = {p}, {schedule}: {steps[0]["bytes"]} bytes sent, 2(T-1)/T times the payload is {wire_bytes(shape, p, 2):.0f}')
                seconds = statistics.median(step['seconds'] for step in steps)
                expect(seconds >= 0.9 * on_wire, f'p = {p}, {schedule}: {seconds:.3f} s a step, its bytes take the wire {on_wire:.3f}')
            for p, name, ours, theirs, equal in same_model(o, shape, hosts) if o.python else ():
                expect(equal, f'p = {p}: PyTorch has {name} {theirs:.5f} on our weights and tokens, we have {ours:.5f}')
            losses = {schedule: [step['loss'] for step in runs[1, schedule]] for schedule in SCHEDULES}
            expect(losses['plain'] == losses['interleaved'] == losses['overlapped'], 'all schedules have the same losses')
    print(f'{counts[True]} passed, {counts[False]} failed')
    return 1 if counts[False] else 0


def main():
    def numbers(text):
        return [float(n) for n in text.split(',')]
    flags = argparse.ArgumentParser()
    flags.add_argument('--model', choices=MODELS, default='130m')
    flags.add_argument('--wires', type=numbers, default=[0.5, 1, 2, 4])
    flags.add_argument('--sync-factors', type=numbers, default=[1, 0.75, 0.5, 0.25, 0])
    flags.add_argument('--schedules', type=lambda text: text.split(','), default=list(SCHEDULES))
    flags.add_argument('--hosts', type=int, default=2)
    flags.add_argument('--steps', type=int, default=3, help='of each program, that count')
    flags.add_argument('--seconds', type=float, default=math.inf, help='after which a row has no further steps')
    flags.add_argument('--layers', type=int, help='fewer than the model has: a faster bench')
    flags.add_argument('--batch', type=int, help='sequences of a step')
    flags.add_argument('--passes', type=int, help='in which a step computes them: an even number')
    flags.add_argument('--dtype', choices=['fp32', 'bf16'], help='of the step and of its sums; what --dtype auto takes, without it')
    flags.add_argument('--stack-seconds', type=float, default=4)
    flags.add_argument('--python', help='an interpreter with torch')
    flags.add_argument('--json')
    flags.add_argument('--quick', action='store_true')
    flags.add_argument('flags', nargs='*', help='after --: further flags of the trainer')
    o = flags.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('bench_wire: ended by SIGTERM'))  # takes namespaces and programs down
    if o.quick:
        sys.exit(quick(o))
    shape = dict(MODELS[o.model], **{k: getattr(o, k) for k in ('layers', 'batch', 'passes', 'dtype') if getattr(o, k)})
    shape.setdefault('dtype', fast_dtype(shape))
    with scratch_folder() as folder, Hosts(o.hosts, folder) as hosts:
        rows = report(o, shape, Bench(o, shape, hosts, folder))
    if o.json:
        with open(o.json, 'w') as f:
            json.dump(rows, f)


if __name__ == '__main__':
    main()
