#!/usr/bin/env python3
"""End-to-end tests of the CUDA build, run by the emulator: ./train_gpt_simt as a user would run ./train_gpt_cuda. Needs ./train_gpt too.

    dev/test/e2e_simt.py [NAME...]      all tests, or those whose name contains a word; last line: 'N passed, N failed'

Oracles: the CPU build (losses within rounding, the same bytes sent, the same checkpoints, the same text), the other kind of collectives
(the same bits: all of them add in rank order), the unbroken run.
"""
import os

import e2e
from e2e import SMALL, check_resume, curve, expect, make_data, make_text_model, ok, records, refused, traced

SIMT = os.path.join(e2e.ROOT, 'train_gpt_simt')
TRAFFIC = ['tp_layers', 'embedding', 'loss', 'dp', 'other']
NCCL = {'SIMT_DEVICES': '4'}  # a GPU for each rank
# Every kind of collectives: threads that share a GPU, processes that share one, a GPU each.
KINDS = [(0, None), (1, None), (0, NCCL)]


def simt(args, **kw):
    return ok(args, program=SIMT, **kw)


def compare_curves(cpu, gpu, loss, norm, shared_channels):
    """The relative differences of losses and norms of two logs must be within those given. Bytes are equal, but for the rows of shared channels, which are
    padded to 16 bytes on a GPU, and for that padding."""
    a, b = records(cpu), records(gpu)
    expect(len(a) == len(b), f'{len(a)} and {len(b)} steps')
    for key, allowed in (('loss', loss), ('grad_norm', norm)):
        worst = max(abs(x[key] - y[key]) / x[key] for x, y in zip(a, b))
        expect(worst <= allowed, f'{key}: off by {worst:.2e}, allowed {allowed}')
    sent = lambda record, kind, channels=1: record['comm_bytes_' + kind] // channels
    padded = -(-shared_channels // 8) * 8
    for x, y in zip(a, b):
        expect(sent(x, 'tp_layers', max(shared_channels, 1)) == sent(y, 'tp_layers', max(padded, 1)), f'bytes sent in the layers: {sent(x, "tp_layers")}, {sent(y, "tp_layers")}')
        expect(x['comm_bytes_padding'] == 0 and x['comm_bytes_tp_layers'] == y['comm_bytes_tp_layers'] - y['comm_bytes_padding'], f'padding: {x}, {y}')
        expect(all(sent(x, kind) == sent(y, kind) for kind in TRAFFIC[1:]), f'bytes sent: {[(kind, sent(x, kind), sent(y, kind)) for kind in TRAFFIC]}')
        expect(y['comm_bytes'] == sum(sent(y, kind) for kind in TRAFFIC), 'bytes sent: a sum')


def test_fifty_steps_as_on_the_cpu(d):
    args = SMALL + make_data(d) + ['--tp', 2, '--sync-factor', 0.5, '--steps', 50]
    ok(args + ['--log', f'{d}/cpu'])
    simt(args + ['--log', f'{d}/gpu'])
    compare_curves(f'{d}/cpu', f'{d}/gpu', 2e-5, 2e-4, 16)
    expect(records(f'{d}/gpu')[-1]['loss'] < records(f'{d}/gpu')[0]['loss'] - 0.5, 'nothing was learned')


def test_every_kind_of_ranks_as_on_the_cpu(d):
    data = make_data(d)
    for tp, dp, p, flags, *in_turn in [(2, 2, 0.3, ['--zero', 1, '--recompute', 2]), (4, 1, 0, ['--arch', 'gpt', '--tie']), (1, 3, 1, ['--zero', 1, '--recompute', 0]),
                                       (4, 1, 0.97, []), (2, 2, 0.5, ['--interleave'], ['--micro-batch', 1]), (2, 2, 0.5, ['--overlap-batches', 2], [])]:
        plain = SMALL + data + ['--global-batch', 12, '--sync-factor', p, '--insight-every', 2, '--tp', tp, '--dp', dp, '--steps', 4]
        args = plain + flags
        channels = int(32 * p)
        ok(args + ['--log', f'{d}/cpu'])
        curves = []
        for by_mpi, env in KINDS:
            simt(args + ['--log', f'{d}/gpu'], n=tp * dp * by_mpi, env=env)
            compare_curves(f'{d}/cpu', f'{d}/gpu', 1e-6, 1e-5, channels)
            curves.append(curve(f'{d}/gpu'))
        expect(all(c == curves[0] for c in curves), f'tp {tp} dp {dp}: the kind of collectives changes the bits')
        for same in in_turn:
            simt(plain + same + ['--log', f'{d}/gpu'])
            expect(curve(f'{d}/gpu') == curves[0], f'{flags}: not the bits of passes in turn')


def in_order_of_issue(work, sums):
    """What a rank was given, one after the other: ops, starts of sums and waits for them; without sums of the host's values, which do not go through a GPU's collectives."""
    issued = sorted(work + sums, key=lambda s: s[4])
    host = lambda i: i >= 0 and issued[i][2] == 'other'
    return [s for i, s in enumerate(issued) if not host(i) and not (s[2] == 'waiting for ranks' and host(i - 1))]


def check_order(issued):
    """Waits come in the order of starts, a sum has products under it, and what was issued after its wait begins after its end. Emulated streams run as late as events allow."""
    under_way = []  # (sum, the ops issued since)
    for i, s in enumerate(issued):
        if 'GFLOP' not in s[3]:
            under_way.append((s, []))
        elif s[2] != 'waiting for ranks':
            for _, ops in under_way:
                ops.append(s[2])
        else:
            (_, end, name, *_), ops = under_way.pop(0)
            expect(name != 'partial channel reduce' or any(op.startswith('matmul') for op in ops), f'no product is issued between the start of a sum and its wait: {ops}')
            late = [op for op in issued[i + 1:] if 'GFLOP' in op[3] and op[0] < end - 1e-3]
            expect(not late, f'{name} ends at {end}, but what waits for it begins before: {late[:1]}')
    expect(not under_way, f'{len(under_way)} sums that nothing waits for')


def test_profile_and_trace_are_the_cpus(d):
    """Each rank is given the same ops, sums and waits in the same order, for every schedule; then time has to keep to what depends on what."""
    for schedule in ([], ['--interleave'], ['--overlap-batches', 2]):
        args = SMALL + make_data(d) + ['--tp', 2, '--sync-factor', 0.5, '--steps', 2] + schedule
        work, sums, _ = traced(args, d)
        for by_mpi, env in KINDS:
            gpu_work, gpu_sums, out = traced(args, d, program=SIMT, n=2 * by_mpi, env=env)
            expect('matmul_wgrad' in out, f'no table of ops: {out}')
            for rank in (0, 1):
                cpu, gpu = in_order_of_issue(work[rank], sums[rank]), in_order_of_issue(gpu_work[rank], gpu_sums[rank])
                expect(len(cpu) == len(gpu), f'{len(cpu)} and {len(gpu)} ops, sums and waits')
                for i, (a, b) in enumerate(zip(cpu, gpu)):
                    expect(a[2] == b[2], f'{schedule} rank {rank}: {i} is {b[2]}, on the CPU {a[2]}')
                expect(all(s[0] <= s[1] for s in gpu_work[rank]), 'an op ends before it begins')
                check_order(gpu)


def test_bf16_is_near_fp32(d):
    args = SMALL + make_data(d) + ['--tp', 2, '--sync-factor', 0.5, '--steps', 10]
    for name, program, *flags in (('fp32', None), ('bf16', SIMT, '--dtype', 'bf16'), ('bf16_gradients', SIMT, '--dtype', 'bf16', '--grad-dtype', 'bf16')):
        ok(args + flags + ['--log', f'{d}/{name}'], program=program)
    a, b, c = (records(f'{d}/{name}') for name in ('fp32', 'bf16', 'bf16_gradients'))
    worst = max(abs(x['loss'] - y['loss']) for x, y in zip(a, b))
    expect(worst <= 0.02, f'bf16 is {worst:.4f} from fp32')
    worst = max(abs(x['loss'] - y['loss']) for x, y in zip(a, c))
    expect(worst <= 0.02, f'with bf16 gradients it is {worst:.4f} from fp32')
    expect(b[0]['loss'] == c[0]['loss'] and b[-1]['loss'] != c[-1]['loss'], '--grad-dtype bf16: the same first loss, others later')
    expect(b[0]['comm_bytes_tp_layers'] * 2 == a[0]['comm_bytes_tp_layers'], 'bf16 is not sent as bf16')


def test_resume_is_bit_exact(d):
    check_resume(d, ['--tp', 2, '--dp', 2, '--zero', 1, '--sync-factor', 0.5, '--dtype', 'bf16', '--grad-dtype', 'bf16'], 0, 3, steps=6, program=SIMT)


def test_checkpoints_and_text_are_the_cpus(d):
    use = make_text_model(d)
    greedy = ['--generate', 12, '--prompt', 'the quick', '--temperature', 0]
    wanted = ok(use + greedy).stdout
    for by_mpi, env in KINDS:
        found = simt(use + greedy, n=2 * by_mpi, env=env).stdout
        expect(found == wanted, f'{found!r}, on the CPU {wanted!r}')
    e2e.write_shard(f'{d}/few.bin', [i * i % 256 for i in range(4 * 64 + 1)])
    of_cpu, of_gpu = [ok(use[:2] + ['--eval', f'{d}/few.bin', '--seq', 64, '--log', f'{d}/{name}'], program=program) and records(f'{d}/{name}', 'eval')[0]['loss']
                      for name, program in (('eval_cpu', None), ('eval_gpu', SIMT))]
    expect(abs(of_cpu - of_gpu) <= 1e-6 * of_cpu, f'evaluation: {of_cpu} and {of_gpu}')
    simt(['--resume', '--out', f'{d}/model', '--steps', 32, '--val-batches', 1, '--sample-every', 0, '--log', f'{d}/log'])  # and on with it
    expect(records(f'{d}/log')[-1]['step'] == 32, 'the run on the CPU is not gone on with')


def test_generation_with_and_without_graphs(d):
    """Decode steps launched as a graph: T = 1, and T = 2 by NCCL; kernel by kernel: --no-graph, and T = 2 where ranks meet on the host."""
    greedy, drawn = ['--temperature', 0], ['--temperature', 0.9, '--top-k', 30, '--top-p', 0.9, '--seed', 5]
    for tp, flags in ((1, ['--arch', 'gpt', '--positions', 'learned']), (2, [])):
        os.makedirs(f'{d}/{tp}')
        use = make_text_model(f'{d}/{tp}', tp=tp, steps=20, flags=flags)
        for how in (greedy, drawn):
            args = use + ['--generate', 25, '--prompt', 'the quick', '--ignore-eos'] + how
            wanted = ok(args).stdout
            for env in (None, NCCL):
                for no_graph in ([], ['--no-graph']):
                    found = simt(args + no_graph, env=env)
                    expect(found.stdout == wanted, f'tp {tp} {how} {no_graph} {env}: {found.stdout!r}, on the CPU {wanted!r}')
                    launches = 0 if no_graph or (tp == 2 and not env) else 23  # the prompt's step, and one before the recording
                    expect((f'; {launches} of the steps by one launch each' in found.stderr) == (launches > 0), f'tp {tp} {no_graph} {env}: {found.stderr}')


def test_the_box_says_where_it_runs(d):
    args = SMALL + make_data(d) + ['--tp', 2, '--steps', 1]
    for (by_mpi, env), words in zip(KINDS, ('one kernel for all ranks', 'through the host', 'NCCL')):
        said = simt(args, n=2 * by_mpi, env=env).stdout
        expect('GPU 0 (emulated), collectives: ' + words in said, f'not said: {words}\n{said[:1500]}')


def test_a_collective_that_does_not_end(d):
    args = SMALL + make_data(d) + ['--tp', 2, '--steps', 1, '--comm-timeout']
    refused(args + [1e-6], 1, 'a collective of rank', 'has not ended within 1e-06 s', 'HINT', '--comm-timeout', program=SIMT, env=NCCL)
    refused(args + [0], 2, '--comm-timeout is 0', program=SIMT, env=NCCL)


def test_without_a_gpu(d):
    none = {'SIMT_DEVICES': '0'}
    refused(SMALL + make_data(d) + ['--steps', 1], 1, 'no GPU can be used', 'HINT', program=SIMT, env=none)
    said = simt(['--model', '7b', '--tp', 8, '--dry-run'], env=none).stdout
    expect('GiB per rank' in said and 'no GPU yet' in said and 'fit' not in said, f'a dry run needs no GPU: {said[:1500]}')


def test_a_dry_run_says_whether_it_fits(d):
    have = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30  # an emulated GPU has the host's memory
    for flags, env, ranks, fits in [(['--tp', 2], None, 2, True), (['--tp', 2], NCCL, 1, True), (['--model', '7b', '--tp', 8], None, 8, False)]:
        said = simt(SMALL + flags + ['--dry-run'] if fits else flags + ['--dry-run'], env=env).stdout
        need = ranks * float(said.split('memory     | ')[1].split(' GiB')[0])
        line = next(line for line in said.splitlines() if 'fit' in line and '|' not in line)
        found = float(line.split(': ')[1].split(' GiB')[0])
        expect(abs(found - need) <= 0.006 + 0.001 * ranks and f'for {ranks} rank' in line and f'(emulated) of {have:.2f} GiB' in line, f'{line!r}: {need} of {have}')
        expect(line.startswith('fits' if fits else 'does not fit') and ('HINT: lower --micro-batch' in said) != fits, said)
    expect('padded to 16 channels: sent are' in simt(SMALL + ['--tp', 2, '--sync-factor', 0.3, '--dry-run']).stdout, 'padding is not said')


if __name__ == '__main__':
    e2e.run_tests(globals())
