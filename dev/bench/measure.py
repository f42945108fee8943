"""What the benches that run programs share."""
import functools, os, platform, subprocess, sys, time


def measured(command, **kw):
    """Runs it; returns (stdout, seconds, peak resident bytes)."""
    begin = time.time()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **kw)
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f'failed: {" ".join(command)}')
    return out, time.time() - begin, usage.ru_maxrss * 1024


def cpu_info(field):
    with open('/proc/cpuinfo') as f:
        return next((line.split(':')[1].strip() for line in f if line.startswith(field)), '')


@functools.lru_cache
def has(instructions):
    return instructions in cpu_info('flags').split()


def machine():
    """Date, processor, cores, and what multiplies bf16."""
    bf16 = 'AMX' if has('amx_bf16') else 'AVX512_BF16' if has('avx512_bf16') else 'no bf16 products'
    return f'{time.strftime("%d %B %Y")}, {cpu_info("model name") or platform.processor()}, {os.cpu_count()} cores, {bf16}'
