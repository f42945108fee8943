#!/usr/bin/env python3
"""dev/roofline/roofline.py [--check]   writes docs/roofline.md: what bounds a training step on a GPU, op by op. --check: is it up to date?

The ops, their order and their shapes are those that train_gpt.cu calls: build/step_ops notes them (make build/step_ops). A time is the larger
of FLOPs / peak and bytes / bandwidth, each operand of an op counted once; the sum is the least time that these ops can take on that device.
The peaks are in scripts/cost.py, with their sources.
"""
import collections
import functools
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, 'scripts'))
from cost import DEVICES, dry_run  # noqa: E402

PAGE = os.path.join(ROOT, 'docs', 'roofline.md')
STEP_OPS = os.path.join(ROOT, 'build', 'step_ops')
MICRO_BATCH = {'130m': 16, '1.1b': 8, '7b': 4}  # 16,384 tokens
WIRES = {'NVLink': None, '400 Gb/s': 50e9, '100 Gb/s': 12.5e9}  # bytes/s one way for each GPU; None: the device's own
LATENCY = 10e-6  # seconds of an exchange beside its bytes; an assumption

# What good kernels reach of a peak: assumptions, until a GPU was measured. Products: cuBLASLt in bf16 at these shapes. Attention by mma.sync:
# FlashAttention-2 reaches 35% of an H100's peak (arXiv 2407.08608). Memory: streams of 128 bits. Wire: NCCL's large messages.
REACHED = {'product': 0.70, 'attention_forward': 0.35, 'attention_backward': 0.30, 'memory': 0.85, 'wire': 0.8}
LIMIT = dict.fromkeys(REACHED, 1.0)

# ---- what an op costs ------------------------------------------------------------------------------------------------
# FLOPs that count as the model's, FLOPs done, bytes: llmc/timed_ops.h, but that attention's backward makes q k^T again.
Cost = collections.namedtuple('Cost', 'model flops bytes')


def cost(call):
    return Cost(call['flops'], call['flops'] * (1.25 if call['op'] == 'attention_backward' else 1), call['bytes'])


def kind(op):
    return 'product' if op.startswith('matmul') else op if op.startswith('attention') else 'memory'


def seconds(call, device, reached=LIMIT):
    c = cost(call)
    return max(c.flops / (device.flops * reached[kind(call['op'])]), c.bytes / (device.bandwidth * reached['memory']))


# ---- a step ----------------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=None)
def step_calls(*flags):
    """(calls of a first micro-batch, of a later one, of the update)"""
    done = subprocess.run([STEP_OPS, *flags], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f'roofline.py: {STEP_OPS} failed; make build/step_ops builds it')
    return split_step([json.loads(line) for line in done.stdout.splitlines()], 2 if '--interleave' in flags else 1)


def split_step(calls, passes):
    """passes: of a micro-batch, one or two halves"""
    begins = [i for i, c in enumerate(calls) if c.get('op') == 'embedding_forward'][::passes]
    last = max(i for i, c in enumerate(calls) if c.get('op') in ('embedding_backward', 'position_backward'))
    return calls[begins[0]:begins[1]], calls[begins[1]:last + 1], calls[last + 1:]


Timeline = collections.namedtuple('Timeline', 'seconds exposed')


def timeline(calls, device, wire=None, reached=LIMIT):
    """Kernels one after another on one stream, exchanges one after another on another; a wait waits."""
    now = free = exposed = 0.0
    done = {}
    for c in calls:
        if 'op' in c:
            now += seconds(c, device, reached)
        elif 'start' in c:
            free = max(now, free) + LATENCY + c['bytes'] / ((wire or device.nvlink) * reached['wire'])
            done[c['start']] = free
        else:
            exposed += max(0.0, done[c['wait']] - now)
            now = max(now, done[c['wait']])
    return Timeline(now, exposed)


def flags_of(model, tp=1, p=1.0, recompute=0, interleave=False):
    return ('--model', model, '--tp', str(tp), '--sync-factor', str(p), '--micro-batch', str(MICRO_BATCH[model]), '--recompute', str(recompute), '--dtype', 'bf16',
            *(['--interleave'] if interleave else []))


def model_flops(calls):
    return sum(cost(c).model for c in calls if 'op' in c)


# ---- the page --------------------------------------------------------------------------------------------------------
def title(call):
    return f'{call["op"]} {call["K"]} -> {call["OC"]}' if call['op'].startswith('matmul') else call['op']


def by_op(calls, name=title):
    """name -> [calls, FLOPs, bytes, seconds on H100, on H200], in the order of first calls"""
    rows = collections.OrderedDict()
    for c in calls:
        if 'op' in c:
            row, numbers = rows.setdefault(name(c), [0, 0.0, 0.0, 0.0, 0.0]), cost(c)
            for i, value in enumerate((1, numbers.flops, numbers.bytes, seconds(c, DEVICES['h100']), seconds(c, DEVICES['h200']))):
                row[i] += value
    return rows


def op_table(model, tp, p):
    h200, rows = DEVICES['h200'], by_op(step_calls(*flags_of(model, tp, p))[1])
    total = [sum(row[i] for row in rows.values()) for i in range(5)]
    lines = ['| op | calls | GFLOP | GB | H100 ms | H200 ms | bound on H200 | share |', '|---|---|---|---|---|---|---|---|']
    for name, (count, flops, size, one, two) in rows.items():
        bound = 'FLOPs' if flops / h200.flops > size / h200.bandwidth else 'bytes'
        lines.append(f'| {name} | {count} | {flops / 1e9:,.0f} | {size / 1e9:.2f} | {1e3 * one:.2f} | {1e3 * two:.2f} | {bound} | {100 * two / total[4]:.1f}% |')
    lines.append(f'| **sum** | {total[0]} | {total[1] / 1e9:,.0f} | {total[2] / 1e9:.2f} | {1e3 * total[3]:.2f} | {1e3 * total[4]:.2f} | | |')
    return '\n'.join(lines)


class Step:
    """A whole step of one rank at D = 1 on a device."""

    def __init__(self, model, tp, p, device, wire=None, reached=LIMIT, recompute=0, interleave=False):
        flags = flags_of(model, tp, p, recompute, interleave)
        first, later, update = [timeline(calls, device, wire, reached) for calls in step_calls(*flags)]
        run = dry_run_of(flags)
        self.later, self.update = later, update
        self.seconds = first.seconds + (run.batch // run.micro_batch - 1) * later.seconds + update.seconds
        self.tokens_per_gpu = run.tokens_per_step() / self.seconds / tp
        self.share_of_peak = self.tokens_per_gpu * run.flops_per_token() / device.flops
        wire_seconds = sum(LATENCY + c['bytes'] / ((wire or device.nvlink) * reached['wire']) for c in step_calls(*flags)[1] if 'start' in c)
        self.exposed = later.exposed / later.seconds
        self.wire_busy = wire_seconds / (later.seconds - later.exposed)


@functools.lru_cache(maxsize=None)
def dry_run_of(flags):
    return dry_run(flags)


def summary(tensor_parallel):
    head = ['model', 'T', 'p', 'device', 'limit: ms', 'share of peak', 'expected: tokens/s a GPU', 'share of peak']
    if tensor_parallel:
        head += [f'{what}, {wire}' for wire in WIRES for what in ('exposed', 'wire busy')]
        head += ['halves: tokens/s a GPU'] + [f'halves: exposed, {wire}' for wire in WIRES]
    lines = [f'| {" | ".join(head)} |', '|' + '---|' * len(head)]
    for model in MICRO_BATCH:
        for tp, p in [(tp, p) for tp in (2, 4, 8) for p in (1, 0.5)] if tensor_parallel else [(1, 1)]:
            for device in (DEVICES['h100'], DEVICES['h200']):
                limit, expected = Step(model, tp, p, device), Step(model, tp, p, device, reached=REACHED)
                row = [model, tp, p if tp > 1 else '-', device.name.split()[0], f'{1e3 * limit.later.seconds:.1f}', f'{100 * limit.share_of_peak:.0f}%',
                       f'{expected.tokens_per_gpu:,.0f}', f'{100 * expected.share_of_peak:.0f}%']
                for wire in WIRES.values() if tensor_parallel else ():
                    step = Step(model, tp, p, device, wire, REACHED)
                    row += [f'{100 * step.exposed:.1f}%', f'{100 * step.wire_busy:.0f}%']
                if tensor_parallel:
                    halves = [Step(model, tp, p, device, wire, REACHED, interleave=True) for wire in WIRES.values()]
                    row += [f'{halves[0].tokens_per_gpu:,.0f}'] + [f'{100 * step.exposed:.1f}%' for step in halves]
                lines.append(f'| {" | ".join(map(str, row))} |')
    return '\n'.join(lines)


def products_needed(model, device, goal):
    """The share of the peak that products must reach for `goal` of the peak in all, at T = 1; None if even 100% is too little."""
    for percent in range(1, 101):
        if Step(model, 1, 1, device, reached={**REACHED, 'product': percent / 100}).share_of_peak >= goal:
            return percent / 100
    return None


def recompute_table():
    lines = ['| model | recompute 0 | 1 | 2 |', '|---|---|---|---|']
    for model in MICRO_BATCH:
        cells = [Step(model, 1, 1, DEVICES['h200'], reached=REACHED, recompute=level) for level in (0, 1, 2)]
        lines.append(f'| {model} | ' + ' | '.join(f'{step.tokens_per_gpu:,.0f} tokens/s, {100 * step.share_of_peak:.0f}%' for step in cells) + ' |')
    return '\n'.join(lines)


# What each op does in one pass, and what another fusion would save: a share of the bytes of the op as it is.
FUSED = {
    'embedding_forward': 'lookup, position',
    'residual_norm_forward': 'residual sum of both blocks where they lie, bias, norm, statistics',
    'norm_backward': 'norm, residual gradient, the block to send, gradient of the weight',
    'norm_apply': 'the norm again from its statistics (recomputation)',
    'rope_split_forward': 'split into heads, rotation',
    'rope_split_backward': 'rotation back, joining',
    'attention_forward': 'both products, softmax, log-sum-exp; nothing of S x S in memory',
    'attention_backward': 'five products, softmax again; nothing of S x S in memory',
    'classifier_stats': 'maximum, sum, target in one pass',
    'classifier_backward': 'softmax and gradient in place',
    'adamw_update': 'clipping, moments, decay, weights with what their rounding cuts off',
    'matmul_forward': 'bias, sqrt(T), rounding',
    'matmul_gelu_forward': 'bias, GELU (GPT)',
    'matmul_wgrad': 'sum over micro-batches in fp32, gradient of the bias (GPT)',
}
UNFUSED = {
    'swiglu_forward': (2 / 3, 'in the epilogue of the gate and up product: gate and up would not be read again'),
    'swiglu_backward': (1 / 5, 'in the epilogue of down\'s input gradient: dh would not be read again'),
    'rope_split_forward': (1, 'in the epilogue of the QKV product'),
    'rope_split_backward': (1, 'in the end of attention\'s backward'),
    'classifier_stats': (1, 'in the epilogue of the head\'s product'),
    'cast': (1, 'one input gradient over both blocks instead of an fp32 sum of two'),
}


def fusion_table(cases):
    columns = [f'{model}, T {tp}' for model, tp, _ in cases]
    lines = [f'| op | saves | {" | ".join(f"{column}: ms" for column in columns)} |', '|---|---|' + '---|' * len(columns)]
    sums = [by_op(step_calls(*flags_of(*case))[1], lambda c: c['op']) for case in cases]
    for op, (share, how) in UNFUSED.items():
        lines.append(f'| {op} | {how} | ' + ' | '.join(f'{1e3 * share * rows[op][4]:.2f}' if op in rows else '-' for rows in sums) + ' |')
    lines.append('| the micro-batch, at the limit | | ' + ' | '.join(f'{1e3 * sum(row[4] for row in rows.values()):.1f}' for rows in sums) + ' |')
    return '\n'.join(lines)


def update_line():
    cells = []
    for model in MICRO_BATCH:
        step = Step(model, 1, 1, DEVICES['h200'])
        cells.append(f'{model} {1e3 * step.update.seconds:.1f} ms of {1e3 * step.seconds:,.0f}')
    return '; '.join(cells)


def reach(share):
    return f'{100 * share:.0f}%' if share else 'more than all'


def exposed(model, tp, interleave):
    return f"{100 * Step(model, tp, 0.5, DEVICES['h100'], reached=REACHED, interleave=interleave).exposed:.1f}%"


def page():
    h100, h200 = DEVICES['h100'], DEVICES['h200']
    goals = {device: Step('1.1b', 1, 1, device, reached=REACHED).share_of_peak for device in (h100, h200)}
    return f'''# The roofline on paper

Made by `dev/roofline/roofline.py` from the calls that `train_gpt.cu` makes (`build/step_ops`) and the devices' peaks. No GPU was measured.

A time is the larger of FLOPs / peak and bytes / bandwidth, each operand counted once. **Limit**: every op at its roof, a wire at its rate; no program
with these ops is faster. **Expected**: with what good kernels reach, an assumption: products {100 * REACHED['product']:.0f}% of the peak, attention {100 * REACHED['attention_forward']:.0f}% forward and {100 * REACHED['attention_backward']:.0f}% backward, memory
{100 * REACHED['memory']:.0f}%, wires {100 * REACHED['wire']:.0f}% and {1e6 * LATENCY:.0f} us an exchange. Share of peak: the model's FLOPs (6 a weight that multiplies and token, causal attention; nothing computed again)
over the bf16 peak, for whole steps of the preset's global batch at D = 1; micro-batches of 16,384 tokens, nothing recomputed unless said. Sums leave out
launches, which a stream hides, and the SMs that collectives take.

| device | bf16, dense | memory | NVLink, one way | source |
|---|---|---|---|---|
''' + '\n'.join(f'| {d.name} | {d.flops / 1e12:.0f} TFLOP/s | {d.bandwidth / 1e12:.2f} TB/s | {d.nvlink / 1e9:.0f} GB/s | {d.source} |' for d in (h100, h200)) + f'''

## What it says

- **60% of the peak for 1.1B at T = 1**: expected {100 * goals[h100]:.0f}% on H100, {100 * goals[h200]:.0f}% on H200. For 60% products would have to reach {reach(products_needed('1.1b', h100, 0.6))} and {reach(products_needed('1.1b', h200, 0.6))} of
  the peak, attention and memory as assumed. The limit itself is {100 * Step('1.1b', 1, 1, h100).share_of_peak:.0f}% and {100 * Step('1.1b', 1, 1, h200).share_of_peak:.0f}%: the rest goes to what memory bounds and to scores computed again.
- **No exposed reduce at p = 0.5 over NVLink**: nearly so at T = 2, not at T = 8. A forward reduce has only the private block's product to hide behind, and that shrinks
  with T while the reduce grows. With `--interleave` it has the other half's work: 7B at T = 8 waits for {exposed('7b', 8, True)} of its time instead of {exposed('7b', 8, False)}, 1.1B for {exposed('1.1b', 8, True)} instead of {exposed('1.1b', 8, False)} (H100).
- p = 0.5 against p = 1 at T = 8: {100 * (Step('7b', 8, 0.5, h100, reached=REACHED).tokens_per_gpu / Step('7b', 8, 1, h100, reached=REACHED).tokens_per_gpu - 1):.0f}% more tokens/s for 7B on H100 over NVLink, {100 * (Step('7b', 8, 0.5, h100, 50e9, REACHED).tokens_per_gpu / Step('7b', 8, 1, h100, 50e9, REACHED).tokens_per_gpu - 1):.0f}% over 400 Gb/s.
- The update (gradient norm, AdamW) at the limit, T = 1, H200: {update_line()}.

## One rank

{summary(False)}

Recomputation, T = 1, expected on H200:

{recompute_table()}

## Tensor parallelism

Exposed: share of the time that the kernels wait for an exchange, expected kernels and wires. Wire busy: time of all exchanges over time of all kernels.
Halves: the same with `--interleave`, whose products have half the rows; tokens/s over NVLink.

{summary(True)}

## What is fused

| op | in one pass |
|---|---|
''' + '\n'.join(f'| {op} | {what} |' for op, what in FUSED.items()) + f'''

Not fused, and what fusing would save of a micro-batch on H200:

{fusion_table([('130m', 1, 1), ('1.1b', 1, 1), ('7b', 1, 1), ('7b', 8, 0.5)])}

## Op by op: 1.1B, T = 1

One micro-batch of 8 x 2048 that adds to the gradients.

{op_table('1.1b', 1, 1)}

## Op by op: 7B, T = 1

4 x 4096.

{op_table('7b', 1, 1)}

## Op by op: 7B, T = 8, p = 0.5

{op_table('7b', 8, 0.5)}

## Op by op: 130M, T = 1

16 x 1024.

{op_table('130m', 1, 1)}
'''


def main():
    text = page()
    if '--check' in sys.argv[1:]:
        with open(PAGE) as f:
            if f.read() != text:
                sys.exit('docs/roofline.md is not up to date: dev/roofline/roofline.py')
        return
    with open(PAGE, 'w') as f:
        f.write(text)


if __name__ == '__main__':
    main()
