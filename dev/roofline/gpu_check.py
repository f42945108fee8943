"""The stages of dev/gpu_check.sh, and its report. What an op costs, and what devices can do, is roofline.py's and cost.py's."""
import argparse
import array
import datetime
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import time

import roofline
from roofline import DEVICES, ROOT, cost, dry_run

# What is measured. The emulator gets the same commands at sizes that it can bear.
TINY = '--model tiny --layers 1 --channels 32 --heads 2 --kv-heads 2 --ffn 48 --vocab 600 --seq 16'
CUDNN = 'build/cudnn_frontend/include'  # scripts/cudnn_frontend.sh: with it cuDNN's attention is compared with ours
SIDES = {
    'cuda': dict(
        targets='cuda build/cuda/tests build/cuda/step_ops build/cuda/lab', vocab=32000, lab='', attention='',
        steps={'130m': ('--model 130m --micro-batch 64', (0, 1, 2)), '1.1b': ('--model 1.1b --micro-batch 16', (0, 1, 2)),
               '7b, 4 layers': ('--model 7b --layers 4 --micro-batch 4', (0,))},
        trainer='--model 130m --micro-batch 32 --global-batch 64 --steps 10', tp8='--model 130m --micro-batch 8 --global-batch 8 --steps 6', generate=200),
    'simt': dict(
        targets='simt build/simt/tests build/simt/step_ops build/simt/lab', vocab=600, lab='33 40', attention='tiny', steps={'tiny': (f'{TINY} --micro-batch 1', (0, 2))},
        trainer=f'{TINY} --micro-batch 1 --global-batch 2 --steps 4',
        tp8='--model tiny --layers 1 --channels 64 --heads 8 --kv-heads 8 --ffn 64 --vocab 600 --seq 8 --micro-batch 1 --global-batch 1 --steps 3', generate=6),
}
# Of build/SIDE/tests: on a GPU all that do not test cuBLASLt's shim; in the emulator, where make test runs them all, a few.
TESTS = dict(cuda='-Cublas.*:GemmCuda.NothingRuns*', simt='*Mlp:*AdamW:*ProductOnTensorCores')


class Stages:
    """Runs commands one after another, each within its limit and what is left of all the time."""

    def __init__(self, out, seconds):
        self.out, self.end, self.begin, self.done = out, time.time() + seconds, time.time(), []

    def note(self, name, verdict, seconds=0.0, why=''):
        self.done.append(dict(stage=name, verdict=verdict, seconds=round(seconds, 1), why=why))
        now = int(time.time() - self.begin)
        print(f'[{now // 60}:{now % 60:02d}] {verdict:<8} {name} ({why or f"{seconds:.0f} s"})', flush=True)

    def run(self, name, limit, *commands, stdout=None):
        """Commands are strings, split at blanks. The output goes to NAME.log, standard output to the file `stdout` if there is one."""
        begin, left = time.time(), self.end - time.time()
        if left <= 0:
            return self.note(name, 'no time')
        verdict = 'ok'
        log = os.path.join(self.out, name + '.log')
        with open(log, 'w') as text, open(os.path.join(self.out, stdout) if stdout else os.devnull, 'w') as results:
            for command in commands:
                verdict = self.one(command.split(), text, results if stdout else text, begin + min(limit, left))
                if verdict != 'ok':
                    break
        self.note(name, verdict, time.time() - begin)
        if verdict != 'ok':
            with open(log, errors='replace') as text:
                print(''.join('        ' + line for line in text.readlines()[-15:]), end='', flush=True)

    def one(self, command, text, results, end):
        try:
            process = subprocess.Popen(command, cwd=ROOT, stdout=results, stderr=text, start_new_session=True)
        except OSError as error:
            print(error, file=text)
            return 'FAILED'
        try:
            return 'ok' if process.wait(timeout=max(end - time.time(), 0.1)) == 0 else 'FAILED'
        except subprocess.TimeoutExpired:
            return 'too long'
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # also what a command left behind
            except ProcessLookupError:
                pass
            process.wait()

    def check(self, name, condition, why):
        """A stage that came through, but gave what it should not."""
        stage = next(s for s in self.done if s['stage'] == name)
        if stage['verdict'] == 'ok' and not condition:
            stage.update(verdict='FAILED', why=why)
            print(f'        {name}: {why}', flush=True)

    def failed(self):
        return [s for s in self.done if s['verdict'] in ('FAILED', 'too long', 'no time')]


# ---- stages ----------------------------------------------------------------------------------------------------------
def gpu():
    """nvidia-smi's word on the first GPU."""
    fields = ('name', 'driver_version', 'memory.total', 'clocks.max.sm', 'power.limit')
    try:
        out = subprocess.run(['nvidia-smi', '--query-gpu=' + ','.join(fields), '--format=csv,noheader'], stdout=subprocess.PIPE, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        sys.exit('gpu_check: nvidia-smi finds no GPU\nHINT: dev/gpu_check.sh --simt runs the same in the emulator')
    return dict(zip(fields, out.splitlines()[0].split(', ')))


def write_tokens(path, vocab):
    rng = random.Random(1)
    tokens = array.array('H', (rng.randrange(vocab) for _ in range(1 << 20)))
    with open(path, 'wb') as f:
        f.write(struct.pack('<3i', 20240520, 1, len(tokens)).ljust(1024, b'\0') + tokens.tobytes())


def step_name(model, level):
    return f'step {model} recompute {level}'.replace(',', '').replace(' ', '_')


def run_stages(stages, side, build, out):
    what, train = SIDES[side], f'./train_gpt_{side}'
    tokens, model = os.path.join(out, 'tokens.bin'), os.path.join(out, 'model')
    data = f'--train {tokens} --warmup 2'
    write_tokens(tokens, what['vocab'])
    if build:
        cudnn = 'CUDNN=1' if side == 'cuda' and os.path.exists(CUDNN) else ''
        stages.run('build', 260, f'make -j{os.cpu_count()} {what["targets"]}', f'make -j{os.cpu_count()} build/{side}/bench_attention {cudnn}')
    else:
        stages.note('build', 'skipped', why='--no-build')
    stages.run('op_tests', 90, f'build/{side}/tests --gtest_brief=1 --gtest_filter={TESTS[side]}')
    stages.run('goldens', 60, f'./test_gpt_{side}', f'./test_gpt_{side} --dtype bf16')
    for name, (flags, levels) in what['steps'].items():
        for level in levels:
            stages.run(step_name(name, level), 40, f'build/{side}/step_ops --time {flags} --recompute {level} --dtype bf16', stdout=step_name(name, level) + '.jsonl')
    stages.run('attention', 40, f'build/{side}/bench_attention {what["attention"]}', stdout='attention.jsonl')
    stages.run('trainer', 60, f'{train} {what["trainer"]} {data} --log {out}/trainer.jsonl')
    stages.run('tp8', 40, f'{train} {what["tp8"]} {data} --tp 8 --sync-factor 0.5 --log {out}/tp8.jsonl')
    decode = f'{train} --checkpoint {model} --tokenizer dev/golden/gpt2/vocab.json --prompt a --generate {what["generate"]} --ignore-eos'
    stages.run('decode', 40, f'{train} {what["trainer"]} {data} --steps 1 --out {model}', decode)
    stages.run('decode_no_graph', 30, decode + ' --no-graph')
    stages.run('kernels_lab', 20, f'build/{side}/lab {what["lab"]}')
    if side == 'simt' or not shutil.which('compute-sanitizer'):
        stages.note('sanitizer', 'skipped', why='no GPU' if side == 'simt' else 'there is no compute-sanitizer')
    else:
        stages.run('sanitizer', 90, *(f'compute-sanitizer --tool {tool} --error-exitcode 1 build/{side}/tests --gtest_filter=*Kernels*:-*ManyRows*' for tool in ('memcheck', 'racecheck')))
    shutil.rmtree(model, ignore_errors=True)
    os.unlink(tokens)


# ---- results ---------------------------------------------------------------------------------------------------------
def records(path):
    """Of a file of JSON Lines; none if a stage did not come to write it."""
    if not os.path.exists(path):
        return []
    with open(path) as f:
        return [json.loads(line) for line in f if line.startswith('{') and line.endswith('}\n')]


def known_device(name):
    return next((DEVICES[key] for key in DEVICES if key.upper() in name.upper()), None)


def ops_of(calls, device):
    """Per op and shape: calls, milliseconds of one, rates and their share of the device's; the slowest sum first."""
    rows = {}
    for c in calls:
        if 'op' in c and 'seconds' in c:
            rows.setdefault(roofline.title(c), []).append((c['seconds'], cost(c)))
    table = []
    for name, values in rows.items():
        seconds = sum(v[0] for v in values)
        flops, size = sum(v[1].flops for v in values), sum(v[1].bytes for v in values)
        row = dict(op=name, calls=len(values), ms=1e3 * seconds / len(values), sum_ms=1e3 * seconds, tflops=flops / seconds / 1e12, gb_per_s=size / seconds / 1e9)
        if device:
            row.update(share_of_flops=flops / seconds / device.flops, share_of_bandwidth=size / seconds / device.bandwidth,
                       share_of_roof=sum(max(v[1].flops / device.flops, v[1].bytes / device.bandwidth) for v in values) / seconds)
        table.append(row)
    return sorted(table, key=lambda row: -row['sum_ms'])


def finite_losses(path):
    return [r['loss'] for r in records(path) if r['kind'] == 'step' and r['loss'] is not None and math.isfinite(r['loss'])]


def training(path, flags, device):
    """tokens/s of the trainer's own log, without the first steps."""
    steps = [r for r in records(path) if r['kind'] == 'step'][2:]
    if not steps:
        return None
    rate = statistics.median(r['tokens_per_second'] for r in steps)
    share = rate * dry_run(flags.split()).flops_per_token() / device.flops if device else None
    return dict(flags=flags, tokens_per_second=rate, share_of_peak=share)


def decode_speed(log):
    """Tokens, tokens/s, seconds of the first, and how many steps were launched as a graph; None if nothing was said."""
    text = open(log, errors='replace').read() if os.path.exists(log) else ''
    said = re.search(r'\[(\d+) tokens, ([\d.]+) tokens/s after the first, which took ([\d.]+) s(?:; (\d+) of the steps by one launch each)?\]', text)
    return said and (int(said.group(1)), float(said.group(2)), float(said.group(3)), int(said.group(4) or 0))


def collect(stages, side, out):
    what = SIDES[side]
    name = 'emulated' if side == 'simt' else gpu()['name']
    device = known_device(name)
    result = dict(date=datetime.date.today().isoformat(), device='emulated' if side == 'simt' else gpu(), peaks=device.source if device else None, steps=[], ops={})
    for model, (flags, levels) in what['steps'].items():
        for level in levels:
            calls = records(os.path.join(out, step_name(model, level) + '.jsonl'))
            whole = next((c for c in calls if 'steps' in c), None)
            stages.check(step_name(model, level), whole is not None, 'no time of a whole step')
            if not whole:
                continue
            rate = whole['tokens'] / whole['seconds']
            share = rate * dry_run(flags.split()).flops_per_token() / device.flops if device else None
            result['steps'].append(dict(model=model, recompute=level, flags=flags, tokens_per_second=rate, share_of_peak=share))
            if level == levels[0]:
                result['ops'][model] = ops_of(calls, device)
                stages.check(step_name(model, level), result['ops'][model], 'no op was timed')
    result['trainer'] = training(os.path.join(out, 'trainer.jsonl'), what['trainer'], device)
    stages.check('trainer', len(finite_losses(os.path.join(out, 'trainer.jsonl'))) >= 4, 'losses are missing, or not finite')
    result['tp8_losses'] = finite_losses(os.path.join(out, 'tp8.jsonl'))
    stages.check('tp8', len(result['tp8_losses']) >= 3, f'losses {result["tp8_losses"]}')
    result['decode_tokens_per_second'], result['first_token_seconds'] = {}, None
    for stage, graph in (('decode', True), ('decode_no_graph', False)):
        said = decode_speed(os.path.join(out, stage + '.log'))
        stages.check(stage, said and said[0] == what['generate'], 'the tokens that were asked for did not come')
        stages.check(stage, said and (said[3] > 0) == graph, 'steps are launched as a graph where they should not be, or are not where they should')
        if said:
            result['decode_tokens_per_second']['graph' if graph else 'no graph'] = said[1]
            result['first_token_seconds'] = result['first_token_seconds'] or said[2]
    result['attention'] = records(os.path.join(out, 'attention.jsonl'))
    stages.check('attention', result['attention'], 'nothing was measured')
    result['stages'] = stages.done
    return result


def percent(share):
    return '-' if share is None else f'{100 * share:.0f}%'


def attention_lines(shapes):
    """Ours beside cuDNN's, where that was built: milliseconds, and the largest difference of any result."""
    lines = ['', f'{"attention, B S heads (KV) of HS":<34}{"forward ms":>11}{"cuDNN":>9}{"backward ms":>12}{"cuDNN":>9}{"apart":>9}']
    for s in shapes:
        name, ours, theirs = f'{s["B"]} {s["S"]} {s["NH"]} ({s["KVH"]}) of {s["HS"]}', s['ours'], s.get('cudnn')
        cells = [('refused' if s[f'{half}_refused'] else f'{theirs[half + "_ms"]:.3f}') if theirs else '-' for half in ('forward', 'backward')]
        apart = f'{max(s[k] for k in ("att", "lse", "dq", "dk", "dv")):.1e}' if theirs else '-'
        lines.append(f'{name:<34}{ours["forward_ms"]:>11.3f}{cells[0]:>9}{ours["backward_ms"]:>12.3f}{cells[1]:>9}{apart:>9}')
    return lines if shapes else []


def write_report(result, out):
    with open(os.path.join(out, 'report.json'), 'w') as f:
        json.dump(result, f, indent=1)
    lines = [f'{result["date"]}  {result["device"]}', f'peaks: {result["peaks"] or "not known: no shares"}', '', f'{"step":<24}{"recompute":>10}{"tokens/s":>14}{"of peak":>9}']
    lines += [f'{s["model"]:<24}{s["recompute"]:>10}{s["tokens_per_second"]:>14,.0f}{percent(s["share_of_peak"]):>9}' for s in result['steps']]
    if result['trainer']:
        lines.append(f'{"the trainer, 130m" if result["peaks"] else "the trainer":<34}{result["trainer"]["tokens_per_second"]:>14,.0f}{percent(result["trainer"]["share_of_peak"]):>9}')
    for how, rate in result['decode_tokens_per_second'].items():
        lines.append(f'{"decode, one sequence, " + how:<34}{rate:>14,.1f}   first token after {result["first_token_seconds"]} s')
    lines += attention_lines(result['attention'])
    for model, rows in result['ops'].items():
        lines += ['', f'{model:<34}{"calls":>6}{"ms each":>10}{"ms":>9}{"TFLOP/s":>9}{"GB/s":>8}{"of roof":>9}']
        lines += [f'{r["op"]:<34}{r["calls"]:>6}{r["ms"]:>10.4f}{r["sum_ms"]:>9.2f}{r["tflops"]:>9.1f}{r["gb_per_s"]:>8.0f}{percent(r.get("share_of_roof")):>9}' for r in rows]
    lines += [''] + [f'{s["verdict"]:<10} {s["stage"]} ({s["why"] or str(s["seconds"]) + " s"})' for s in result['stages']]
    with open(os.path.join(out, 'report.txt'), 'w') as f:
        f.write('\n'.join(lines) + '\n')
    return lines


def main():
    parser = argparse.ArgumentParser(prog='dev/gpu_check.sh', allow_abbrev=False)
    parser.add_argument('--simt', action='store_true')
    parser.add_argument('--no-build', action='store_true')
    parser.add_argument('--seconds', type=float, default=480)
    args = parser.parse_args()
    side = 'simt' if args.simt else 'cuda'
    out = os.path.join('out', 'gpu_check' + ('_simt' if args.simt else ''))
    os.chdir(ROOT)
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    os.environ['TRAIN_GPT'] = os.path.join(ROOT, f'train_gpt_{side}')
    if not args.simt:
        print(', '.join(f'{key} {value}' for key, value in gpu().items()))
    stages = Stages(out, args.seconds)
    run_stages(stages, side, not args.no_build, out)
    print('\n'.join(write_report(collect(stages, side, out), out)))
    failed = stages.failed()
    print(f'\n{out}/report.json, {out}/report.txt; {len(stages.done) - len(failed)} stages passed or skipped, {len(failed)} failed')
    sys.exit(1 if failed else 0)


if __name__ == '__main__':
    main()
