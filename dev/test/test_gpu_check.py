#!/usr/bin/env python3
"""Tests of dev/gpu_check.sh's own workings: what fails is seen, and does not stop the rest. Its whole flow runs in run_tests.sh (--simt).

    dev/test/test_gpu_check.py [NAME...]      as dev/test/e2e.py
"""
import json, os, subprocess, sys, time

import e2e
from e2e import ROOT, expect

sys.path.insert(0, os.path.join(ROOT, 'dev', 'roofline'))
import gpu_check
import roofline


def test_a_stage_that_fails_does_not_stop_the_others(d):
    stages = gpu_check.Stages(d, 60)
    stages.run('good', 10, 'true', 'echo said')
    stages.run('bad', 10, 'true', 'ls /there/is/nothing', 'echo never')
    stages.run('missing', 10, './no_such_program')
    begin = time.time()
    stages.run('sleeps', 0.5, 'sleep 30')
    expect(time.time() - begin < 5, 'a stage was not ended at its limit')
    stages.run('last', 10, 'echo here', stdout='last.out')
    verdicts = {s['stage']: s['verdict'] for s in stages.done}
    expect({k: verdicts[k] for k in ('good', 'bad', 'missing', 'sleeps', 'last')} == dict(good='ok', bad='FAILED', missing='FAILED', sleeps='too long', last='ok'), verdicts)
    expect([s['stage'] for s in stages.failed()][:2] == ['bad', 'missing'] and 'last' not in [s['stage'] for s in stages.failed()], stages.failed())
    expect(open(f'{d}/good.log').read() == 'said\n' and open(f'{d}/last.out').read() == 'here\n', 'output')
    expect('never' not in open(f'{d}/bad.log').read(), 'a command ran after one that failed')
    stages.check('last', False, 'not what it should be')
    expect(stages.done[-1]['verdict'] == 'FAILED', 'check')


def test_time_that_is_up(d):
    stages = gpu_check.Stages(d, 0.2)
    stages.run('first', 10, 'sleep 5')
    stages.run('second', 10, 'true')
    expect([s['verdict'] for s in stages.done] == ['too long', 'no time'], stages.done)
    expect(len(stages.failed()) == 2, 'a stage that did not run counts as failed')


def test_rates_by_hand(d):
    h100 = roofline.DEVICES['h100']
    expect(gpu_check.known_device('NVIDIA H100 80GB HBM3') == h100 and gpu_check.known_device('NVIDIA H200').name.startswith('H200') and gpu_check.known_device('emulated') is None, 'names')
    product = dict(op='matmul_forward', N=1000, K=1000, OC=1000, out='bf16', weight='bf16', seconds=1e-5, flops=2e9, bytes=6e6, **{'in': 'bf16'})
    stream = dict(op='sums_of_squares', pieces=1e9, seconds=2e-3, flops=0, bytes=4e9)
    rows = {r['op']: r for r in gpu_check.ops_of([product, product, stream, dict(wait=1)], h100)}
    row = rows['matmul_forward 1000 -> 1000']
    expect(row['calls'] == 2 and abs(row['ms'] - 0.01) < 1e-12 and abs(row['tflops'] - 200) < 1e-9 and abs(row['share_of_roof'] - 200 / 989.4) < 1e-9, row)
    row = rows['sums_of_squares']
    expect(abs(row['gb_per_s'] - 2000) < 1e-9 and abs(row['share_of_bandwidth'] - 2000 / 3350) < 1e-9, row)


def test_attention_beside_cudnn(d):
    half = dict(forward_ms=1.25, backward_ms=3.5)
    shape = dict(B=4, S=128, NH=8, KVH=2, HS=64, ours=half)
    both = dict(shape, cudnn=dict(forward_ms=0.5, backward_ms=9.0), att=1e-3, lse=0, dq=4e-3, dk=0, dv=0, forward_refused=False, backward_refused=True)
    lines = gpu_check.attention_lines([shape, both])
    expect(lines[2].split() == '4 128 8 (2) of 64 1.250 - 3.500 - -'.split(), lines[2])
    expect(lines[3].split() == '4 128 8 (2) of 64 1.250 0.500 3.500 refused 4.0e-03'.split(), lines[3])
    expect(gpu_check.attention_lines([]) == [], 'nothing was measured')


def test_without_a_gpu_it_says_so(d):
    done = subprocess.run(['dev/gpu_check.sh'], cwd=ROOT, env={**os.environ, 'PATH': '/usr/bin:/bin'}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    expect(done.returncode == 1 and '--simt' in done.stdout, done.stdout)


def test_a_report_of_nothing(d):
    """Every stage failed: there is still a report, and a stage for each thing that is missing."""
    stages = gpu_check.Stages(d, 60)
    for name in ('trainer', 'tp8', 'decode', 'decode_no_graph', 'attention', *(gpu_check.step_name(m, l) for m, (_, levels) in gpu_check.SIDES['simt']['steps'].items() for l in levels)):
        stages.run(name, 5, 'true')
    gpu_check.write_report(gpu_check.collect(stages, 'simt', d), d)
    expect(len(stages.failed()) == len(stages.done), stages.done)
    expect(len(json.load(open(f'{d}/report.json'))['stages']) == len(stages.done), 'report.json')


if __name__ == '__main__':
    e2e.run_tests(globals())
