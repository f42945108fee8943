#!/usr/bin/env python3
"""Tests of dev/roofline: what is counted over the calls of a step against counts that know nothing of ops. Needs build/step_ops, ./train_gpt.

    dev/test/test_roofline.py [NAME...]      as dev/test/e2e.py
"""
import os, subprocess, sys

import e2e
from e2e import ROOT, expect

sys.path.insert(0, os.path.join(ROOT, 'dev', 'roofline'))
import roofline
from roofline import DEVICES, cost, flags_of, step_calls, timeline


def close(a, b, error=1e-12):
    return abs(a - b) <= error * abs(b)


def test_flops_of_the_calls_are_those_of_the_weights(d):
    """2 a weight and token forward, 4 backward, 6 L NH HS (S + 1) for attention: from the shape alone, by hand for the presets."""
    weights = {'130m': 12 * (4 * 768 * 768 + 3 * 768 * 2048) + 32000 * 768, '1.1b': 22 * (2048 * 3072 + 2048 * 2048 + 3 * 2048 * 5632) + 32000 * 2048,
               '7b': 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096}
    attention = {'130m': 12 * 768 * 1025, '1.1b': 22 * 2048 * 2049, '7b': 32 * 4096 * 4097}
    for model in weights:
        for tp, p, recompute in ((1, 1, 0), (1, 1, 1), (2, 0.5, 0), (8, 0.5, 0), (8, 0.3, 1), (4, 1, 0), (4, 0, 0)):
            first, later, _ = step_calls(*flags_of(model, tp, p, recompute))
            wanted = 6 * (weights[model] + attention[model]) * 16384 / tp
            for calls in (first, later):
                expect(close(roofline.model_flops(calls), wanted), f'{model} T {tp} p {p}: {roofline.model_flops(calls)}, wanted {wanted}')
        run = roofline.dry_run_of(flags_of(model))
        expect(run.flops_per_token() == 6 * (weights[model] + attention[model]), f'{model}: {run.flops_per_token()} a token')
    gpt = ('--model', 'gpt3-xl', '--tp', '2', '--sync-factor', '0.5', '--micro-batch', '1')
    wanted = 6 * (24 * (12 * 2048 * 2048 + 2048 * 2049) + 32000 * 2048) * 2048 / 2
    expect(close(roofline.model_flops(step_calls(*gpt)[0]), wanted), f'gpt3-xl: {roofline.model_flops(step_calls(*gpt)[0])}, wanted {wanted}')


def test_bytes_on_the_wire_are_the_dry_runs(d):
    for model, tp, p in (('1.1b', 2, 0.5), ('1.1b', 8, 1), ('7b', 4, 0.5), ('7b', 8, 0)):
        run, calls = roofline.dry_run_of(flags_of(model, tp, p)), step_calls(*flags_of(model, tp, p))[1]
        sent = sum(c['bytes'] for c in calls if c.get('layers')) * run.batch / run.micro_batch
        expect(close(sent, run.wire, 5e-3), f'{model} T {tp} p {p}: {sent}, --dry-run says {run.wire}')
        reduces = sum(1 for c in calls if c.get('layers'))
        expect(reduces == (4 * run.layers if p else 0), f'{model} T {tp} p {p}: {reduces} reduces in {run.layers} layers')


def test_bytes_of_the_update(d):
    """Under AdamW a weight moves its gradient (twice: the norm reads it), its master (the parameter, and what was cut off) and two moments."""
    run, update = roofline.dry_run_of(flags_of('1.1b')), step_calls(*flags_of('1.1b'))[2]
    moved = sum(cost(c).bytes for c in update if 'op' in c)
    expect(close(moved, run.parameters * (4 + 4 + 2 * 12), 1e-3), f'{moved / run.parameters} bytes a parameter')


def test_a_timeline_by_hand(d):
    h100 = DEVICES['h100']

    def work(ms):
        return dict(op='sums_of_squares', flops=0, bytes=ms * 1e-3 * h100.bandwidth)

    def exchange(number, ms):
        return dict(start=number, bytes=(ms * 1e-3 - roofline.LATENCY) * h100.nvlink)
    t = timeline([work(1), exchange(1, 3), work(2), dict(wait=1), work(1)], h100)
    expect(close(t.seconds, 5e-3) and close(t.exposed, 1e-3), f'one exchange: {t}')
    t = timeline([exchange(1, 3), exchange(2, 3), work(4), dict(wait=1), work(1), dict(wait=2)], h100)
    expect(close(t.seconds, 6e-3) and close(t.exposed, 1e-3), f'two on one wire: {t}')
    t = timeline([exchange(1, 3), dict(wait=1), exchange(2, 1), dict(wait=2)], h100)
    expect(close(t.seconds, 4e-3) and close(t.exposed, 4e-3), f'nothing to hide behind: {t}')


def test_the_page_is_up_to_date(d):
    done = subprocess.run([f'{ROOT}/dev/roofline/roofline.py', '--check'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    expect(done.returncode == 0, done.stdout)


if __name__ == '__main__':
    e2e.run_tests(globals())
