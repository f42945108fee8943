#!/usr/bin/env python3
"""Tests of the scripts of real runs (scripts/run_*.sh, scripts/slurm): each as a user starts it, with --model swapped for a tiny one on the CPU
build, under mpirun with 2 ranks. Slurm is played by programs of ours named srun and scontrol.

    dev/test/run_scripts.py [NAME...]      as dev/test/e2e.py
"""
import os, re, shutil, signal, subprocess

import e2e
from e2e import MPI_ENV, ROOT, SMALL, curve, expect, make_data, newest, records, state_hashes, wait_for_step

BUSY = 600  # seconds: two ranks that wait for each other are slow where others want their cores
SCRIPTS = ('run_130m.sh', 'run_1.1b.sh', 'run_7b.sh', 'run_gpt3xl.sh')
TINY = [str(flag) for flag in SMALL if flag not in ('--dtype', 'fp32')]
# What the paper says of each run: its steps follow from its tokens. DESIGN's table, written a second time.
PAPER = {
    'run_130m.sh': dict(batch='256 sequences of 1024', lr='lr 0.0006', warmup='warm-up 2000', steps=29755, tokens=7.8e9),
    'run_1.1b.sh': dict(batch='1024 sequences of 2048', lr='lr 0.0004', warmup='warm-up 2000', steps=10000, tokens=None),
    'run_7b.sh': dict(batch='1024 sequences of 4096', lr='lr 0.0003', warmup='warm-up 2000', steps=38147, tokens=160e9),
    'run_gpt3xl.sh': dict(batch='512 sequences of 2048', lr='lr 0.0002', warmup='warm-up 600', steps=47684, tokens=50e9),
}


def environment(d, **more):
    data = make_data(d)
    return {**os.environ, **MPI_ENV, 'TRAIN_GPT': './train_gpt', 'TRAIN': data[1], 'VAL': '', 'OUT': f'{d}/out', 'GPUS': '2', 'T': '2', 'SAVE_EVERY': '1000', 'LAUNCH': 'mpirun --oversubscribe -n 2', **more}


def script(d, name, *flags, code=0, **more):
    done = subprocess.run([f'scripts/{name}', *map(str, flags)], cwd=ROOT, env=environment(d, **more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUSY)
    expect(done.returncode == code, f'{name}: exit code {done.returncode}, wanted {code}:\n{done.stdout[-3000:]}')
    return done.stdout


def test_each_script_trains_under_mpirun(d):
    for name in SCRIPTS:
        model = ['--model', 'gpt-tiny'] if name == 'run_gpt3xl.sh' else []
        out = script(d, name, *TINY, *model, STEPS='4', OUT=f'{d}/{name}')
        for row in ('run', 'tokens', 'FLOPs', 'memory', 'wire', 'hours'):
            expect(re.search(rf'^\| {row} +\|', out, re.M), f'{name}: no row {row!r} in its header:\n{out[:2000]}')
        expect('tp 2 x dp 1, MPI processes' in out, f'{name}: not two ranks under mpirun:\n{out[:3000]}')
        flags = records(f'{d}/{name}/log.jsonl', 'run')[0]['flags']
        wanted = dict(tp=2, dp=1, sync_factor=0.5, zero=1, dtype='bf16', steps=4, weight_decay=0.1, beta1=0.9, beta2=0.95, clip=1.0, schedule='cosine', decay_steps=4)
        found = {key: flags[key] for key in wanted}
        expect(found == wanted, f'{name}: {found}, wanted {wanted}')
        expect([r['step'] for r in records(f'{d}/{name}/log.jsonl')] == [1, 2, 3, 4], f'{name}: steps')
        expect(newest(f'{d}/{name}').endswith('step_00000004'), f'{name}: no checkpoint at the end')


def test_settings_are_the_papers(d):
    for name, paper in PAPER.items():
        out = script(d, name, '--dry-run', GPUS='8', T='8', LAUNCH='')
        for words in (paper['batch'], paper['lr'], paper['warmup'], 'cosine', f'{paper["steps"]} steps', 'p 0.5', 'bf16 on the wire', 'fits'):
            expect(words in out, f'{name}: {words!r} is not in its header:\n{out}')
        if paper['tokens']:
            batch, seq = map(int, re.findall(r'\d+', paper['batch']))
            short = paper['tokens'] - paper['steps'] * batch * seq
            expect(abs(short) < batch * seq, f'{name}: {paper["steps"]} steps are not {paper["tokens"]:g} tokens')
    out = script(d, 'run_7b.sh', '--dry-run', GPUS='64', T='8', LAUNCH='')
    expect('T 8 x D 8 = 64 GPUs on 8 node(s)' in out and 'fits' in out, f'run_7b.sh as in the paper:\n{out}')
    # Hours by hand: 6 x 6.607e9 weights + 6 x 32 x 4096 x 4097 a token, 160e9 tokens, 64 x 989.4e12 x 0.4.
    hours = float(re.search(r'hours *\| ([\d.]+)', out).group(1))
    expect(abs(hours - 160e9 * (6 * 6.607e9 + 6 * 32 * 4096 * 4097) / (64 * 989.4e12 * 0.4) / 3600) <= 0.1, f'{hours} hours')


def test_decay_horizon_is_one_flag_away(d):
    peak = 0.01  # SMALL's
    script(d, 'run_130m.sh', *TINY, STEPS='40', OUT=f'{d}/ours')
    script(d, 'run_130m.sh', *TINY, '--decay-steps', 500000, STEPS='40', OUT=f'{d}/code')
    ours, code = records(f'{d}/ours/log.jsonl')[-1]['lr'], records(f'{d}/code/log.jsonl')[-1]['lr']
    expect(abs(ours - peak / 10) <= 1e-9 and peak * 0.999 <= code <= peak, f'last learning rates {ours} and {code}')


def stop_after_step(d, command, env, step):
    with open(f'{d}/stopped.txt', 'w') as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    e2e.STARTED.append(process)
    wait_for_step(f'{env["OUT"]}/log.jsonl', step, process, BUSY)
    process.send_signal(signal.SIGUSR1)
    code = process.wait(timeout=BUSY)
    return code, open(f'{d}/stopped.txt').read()


def test_sigusr1_saves_and_the_same_command_goes_on(d):
    flags, env = TINY, environment(d, STEPS='600', OUT=f'{d}/parts')
    script(d, 'run_1.1b.sh', *flags, STEPS='600', OUT=f'{d}/whole')
    code, text = stop_after_step(d, ['scripts/run_1.1b.sh', *flags], env, 20)
    expect(code == 138, f'exit code {code}:\n{text[-2000:]}')
    stopped = int(newest(f'{d}/parts')[-8:])
    expect(20 <= stopped < 600, f'stopped after step {stopped}')
    script(d, 'run_1.1b.sh', *flags, STEPS='600', OUT=f'{d}/parts')
    expect(curve(f'{d}/parts/log.jsonl') == curve(f'{d}/whole/log.jsonl'), 'the resumed run is not the unbroken one')
    expect(state_hashes(newest(f'{d}/parts')) == state_hashes(newest(f'{d}/whole')), 'the final states differ')


SRUN = '''#!/usr/bin/env bash
echo "srun $*" >> "$PLAYED"
while [[ ${1:-} == --* ]]; do shift; done
exec mpirun --oversubscribe -n "$SLURM_NTASKS" "$@"
'''
SCONTROL = '''#!/usr/bin/env bash
echo "scontrol $*" >> "$PLAYED"
'''


def test_slurm_jobs_are_requeued_and_go_on(d):
    os.makedirs(f'{d}/bin')
    for name, text in (('srun', SRUN), ('scontrol', SCONTROL)):
        with open(f'{d}/bin/{name}', 'w') as f:
            f.write(text)
        os.chmod(f'{d}/bin/{name}', 0o755)
    script(d, 'run_7b.sh', *TINY, STEPS='600', OUT=f'{d}/whole')
    for job, nodes in (('one_node', 1), ('several_nodes', 2)):
        spool = shutil.copy(f'{ROOT}/scripts/slurm/{job}.sbatch', f'{d}/slurm_script')  # Slurm runs a copy, in the folder of the submission
        out, played = f'{d}/{job}', f'{d}/{job}.played'
        env = environment(d, STEPS='600', OUT=out, PATH=f'{d}/bin:{os.environ["PATH"]}', PLAYED=played, SLURM_NTASKS='2', SLURM_JOB_NUM_NODES=str(nodes), SLURM_JOB_ID='77', SLURM_JOB_NAME='caat')
        del env['LAUNCH'], env['GPUS']
        command = ['bash', spool, 'scripts/run_7b.sh', *TINY]
        code, text = stop_after_step(d, command, env, 20)
        expect(code == 0, f'{job}: exit code {code}:\n{text[-2000:]}')
        expect(f'on {nodes} node(s)' in text, f'{job}: nodes:\n{text[:1000]}')
        expect('scontrol requeue 77' in open(played).read(), f'{job}: not put into the queue again: {open(played).read()}')
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUSY)
        expect(done.returncode == 0, f'{job}: exit code {done.returncode} of the second run:\n{done.stdout[-2000:]}')
        expect(open(played).read().count('scontrol') == 1, f'{job}: a finished job went to the queue again')
        expect(curve(f'{out}/log.jsonl') == curve(f'{d}/whole/log.jsonl'), f'{job}: the requeued run is not the unbroken one')
        refused = subprocess.run(command + ['--lr', '-1'], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUSY)
        expect(refused.returncode != 0 and open(played).read().count('scontrol') == 1, f'{job}: a job that fails must fail')


def test_table_of_memory_is_up_to_date(d):
    table = subprocess.run(['scripts/presets.py', 'memory'], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout
    with open(f'{ROOT}/docs/memory.md') as f:
        expect(f.read() == table, 'docs/memory.md is not what this build needs: scripts/presets.py memory > docs/memory.md')


def test_wrong_settings_are_refused(d):
    for words, more in ((('GPUS is 3', 'GPUS=4'), dict(GPUS='3')), (("T is '0'",), dict(T='0')), (('there is no', 'make'), dict(TRAIN_GPT='./none'))):
        out = script(d, 'run_130m.sh', code=2, **more)
        for word in words:
            expect(word in out, f'{word!r} is not in {out!r}')
    out = script(d, 'run_130m.sh', '--layrs', '3', code=2)
    expect('--layers' in out, out)


if __name__ == '__main__':
    e2e.run_tests(globals())
