#!/usr/bin/env python3
"""What the presets cost, as a Markdown table, from ./train_gpt --dry-run: parameters, tokens and FLOPs of the paper's run,
memory per rank in bf16 at micro-batch 1, bytes a rank sends per step in the layers.

    scripts/presets.py
"""
import os, re, subprocess

TRAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'train_gpt')
TOKENS = {'130m': 7.8e9, '7b': 160e9, 'gpt3-xl': 50e9}  # of the paper's runs, where it says
TP = {'15m': 2, 'gpt2': 4, '130m': 8, '1.1b': 8, '7b': 8, 'gpt3-xl': 8}


def dry_run(model, tp, p):
    out = subprocess.run([TRAIN, '--model', model, '--tp', str(tp), '--sync-factor', str(p), '--dtype', 'bf16', '--micro-batch', '1', '--dry-run'], stdout=subprocess.PIPE, text=True, check=True).stdout

    def number(pattern):
        return float(re.search(pattern, out).group(1))
    return dict(parameters=number(r'in all \((\d+);'), memory=number(r'memory *\| ([\d.]+) GiB'), wire=re.search(r'wire *\| (\S+ \S+) per rank', out).group(1), wire1=re.search(r'; (\S+ \S+) at p = 1', out).group(1), batch=number(r'batch *\| (\d+) sequences'),
                seq=number(r'sequences of (\d+)'))


def main():
    print('| preset | parameters | batch x S | tokens in the paper | steps | FLOPs | GiB per rank, T = 1 | GiB per rank, T | sent per step, p = 1 | p = 0.5 |')
    print('|---|---|---|---|---|---|---|---|---|---|')
    for model, tp in TP.items():
        one, many = dry_run(model, 1, 1), dry_run(model, tp, 0.5)
        tokens = TOKENS.get(model)
        cost = f'{tokens / 1e9:g}B | {tokens / one["batch"] / one["seq"]:.0f} | {6 * one["parameters"] * tokens:.1e}' if tokens else '- | - | -'
        print(f'| {model} | {one["parameters"] / 1e6:.0f}M | {one["batch"]:.0f} x {one["seq"]:.0f} | {cost} | {one["memory"]:.1f} | {many["memory"]:.1f} (T = {tp}) | {many["wire1"]} | {many["wire"]} |')


if __name__ == '__main__':
    main()
