#!/usr/bin/env python3
"""What models cost, from ./train_gpt --dry-run.

    scripts/presets.py                      the presets as a Markdown table: parameters, tokens and FLOPs of the paper's runs, memory a rank (bf16,
                                            micro-batch 1), bytes a rank sends in a step for the partial channel reduces
    scripts/presets.py memory               1.1b and 7b at T = 1, 2, 4, 8: the largest micro-batch that fits 80 and 141 GB, at each --recompute
    scripts/presets.py plan [--device h100] [--gpus-per-node 8] [--utilisation 0.4] FLAG...
                                            one run's tokens, FLOPs, memory, bytes on the wire and hours; FLAG: ./train_gpt's
"""
import argparse
import sys

from cost import DEVICES, GIB, RESERVED, dry_run, human, human_bytes

TOKENS = {'130m': 7.8e9, '7b': 160e9, 'gpt3-xl': 50e9}  # of the paper's runs, where it says
TP = {'15m': 2, 'gpt2': 4, '130m': 8, '1.1b': 8, '7b': 8, 'gpt3-xl': 8}
MOST_SEQUENCES = 64  # of a micro-batch, where the table of memory ends


def bf16_run(model, tp, p, *flags):
    return dry_run(['--model', model, '--tp', tp, '--sync-factor', p, '--dtype', 'bf16', '--micro-batch', 1, *flags])


def print_presets():
    print('| preset | parameters | batch x S | tokens in the paper | steps | FLOPs | GiB per rank, T = 1 | GiB per rank, T | sent per step, p = 1 | p = 0.5 |')
    print('|---|---|---|---|---|---|---|---|---|---|')
    for model, tp in TP.items():
        one, many = bf16_run(model, 1, 1), bf16_run(model, tp, 0.5)
        tokens = TOKENS.get(model)
        cost = f'{tokens / 1e9:g}B | {tokens / one.tokens_per_step():.0f} | {one.flops_per_token() * tokens:.1e}' if tokens else '- | - | -'
        print(f'| {model} | {one.parameters / 1e6:.0f}M | {one.batch} x {one.seq} | {cost} | {one.memory / GIB:.1f} | {many.memory / GIB:.1f} (T = {tp}) '
              f'| {human_bytes(many.wire_p1)} | {human_bytes(many.wire)} |')


def largest_micro_batch(device, *flags):
    """The largest power of two that leaves RESERVED bytes free, and its bytes; (0, bytes of 1) where nothing fits."""
    best, memory = 0, dry_run([*flags, '--micro-batch', 1]).memory
    for micro_batch in (2**i for i in range(MOST_SEQUENCES.bit_length())):
        bytes_needed = dry_run([*flags, '--micro-batch', micro_batch]).memory
        if bytes_needed + RESERVED > device.memory:
            break
        best, memory = micro_batch, bytes_needed
    return best, memory


def print_memory():
    print('# What fits\n\nMade by `scripts/presets.py memory > docs/memory.md` from `./train_gpt --dry-run`.\n')
    print('Each cell: the largest micro-batch (a power of two, 64 at most) and the GiB that a rank needs with it. bf16, p = 0.5, of 79.6 GiB (H100) and\n'
          f'140.4 GiB (H200) less {RESERVED / GIB:g} for CUDA\'s context and the libraries\' buffers. D = 8: eight data-parallel ranks under ZeRO-1.\n'
          'Gradients: --grad-dtype.\n')
    print('| model | T | D | gradients | 80 GB, recompute 0 | 1 | 2 | 141 GB, recompute 0 | 1 | 2 |\n|---|---|---|---|---|---|---|---|---|---|')
    for model in ('1.1b', '7b'):
        for tp in (1, 2, 4, 8):
            for dp, grad in ((1, 'fp32'), (1, 'bf16'), (8, 'fp32'), (8, 'bf16')):
                cells = []
                for device in (DEVICES['h100'], DEVICES['h200']):
                    for level in (0, 1, 2):
                        best, memory = largest_micro_batch(device, '--model', model, '--tp', tp, '--sync-factor', 0.5, '--dtype', 'bf16', '--dp', dp,
                                                           '--zero', int(dp > 1), '--grad-dtype', grad, '--recompute', level)
                        cells.append(f'{best}: {memory / GIB:.1f}' if best else f'- ({memory / GIB:.0f})')
                print(f'| {model} | {tp} | {dp} | {grad} | {" | ".join(cells)} |', flush=True)
    print('\nA dash: not even one sequence fits, which would need what is in brackets.')


def print_plan(run, device, gpus_per_node, utilisation):
    gpus, tokens = run.tp * run.dp, run.steps * run.tokens_per_step()
    flops = tokens * run.flops_per_token()
    seconds = flops / (gpus * device.flops * utilisation)
    room = device.memory - RESERVED
    within_node = run.tp <= gpus_per_node
    layers_rate = device.nvlink if within_node else 50e9
    rows = [
        ('run', f'{run.model}, {human(run.parameters)} parameters, T {run.tp} x D {run.dp} = {gpus} GPUs on {-(-gpus // gpus_per_node)} node(s)'),
        ('tokens', f'{human(tokens)} = {run.steps} steps of {run.batch} x {run.seq} = {human(run.tokens_per_step())}; {tokens / run.parameters:.3g} a parameter'),
        ('FLOPs', f'{flops:.3g} = tokens x {human(run.flops_per_token())}: 6 a weight that multiplies, 6 L NH HS (S + 1) for causal attention'),
        ('memory', f'{run.memory / GIB:.1f} GiB a GPU of {device.memory / GIB:.1f}, {RESERVED / GIB:g} of them reserved: '
                   + ('fits' if run.memory <= room else f'TOO MUCH by {(run.memory - room) / GIB:.1f} GiB: lower --micro-batch, raise --recompute, T or D')),
        ('wire', f'a GPU sends per step: layers {human_bytes(run.wire)} ({human_bytes(run.wire_p1)} at p = 1), {1e3 * run.wire / layers_rate:.3g} ms '
                 + ('over NVLink' if within_node else 'at 400 Gb/s: T is more than a node') + f'; gradients {human_bytes(run.wire_dp())} over D'),
        ('hours', f'{seconds / 3600:.4g} = FLOPs / ({gpus} x {human(device.flops)}FLOP/s x {utilisation:g}) on {device.name}; {gpus * seconds / 3600:.4g} GPU hours. '
                  f'The share {utilisation:g} is an assumption (UTILISATION)'),
        ('optimiser', run.lr),
    ]
    for key, text in rows:
        print(f'| {key:<10} | {text}')
    sys.stdout.flush()


def main():
    mode = sys.argv[1] if len(sys.argv) > 1 else ''
    if mode == '':
        print_presets()
    elif mode == 'memory':
        print_memory()
    elif mode == 'plan':
        parser = argparse.ArgumentParser(prog='scripts/presets.py plan', allow_abbrev=False)
        parser.add_argument('--device', choices=DEVICES, default='h100')
        parser.add_argument('--gpus-per-node', type=int, default=8)
        parser.add_argument('--utilisation', type=float, default=0.4)
        known, flags = parser.parse_known_args(sys.argv[2:])
        if not 0 < known.utilisation <= 1:
            sys.exit(f'presets.py: --utilisation is {known.utilisation:g}: wanted a number above 0, up to 1')
        print_plan(dry_run(flags), DEVICES[known.device], known.gpus_per_node, known.utilisation)
    else:
        sys.exit(__doc__)


if __name__ == '__main__':
    main()
