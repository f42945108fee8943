"""What the benches that run programs share."""
import os, platform, subprocess, sys, time


def measured(command, **kw):
    """Runs it; returns (stdout, seconds, peak resident bytes)."""
    begin = time.time()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **kw)
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f'failed: {" ".join(command)}')
    return out, time.time() - begin, usage.ru_maxrss * 1024


def cpu_name():
    with open('/proc/cpuinfo') as f:
        return next((line.split(':')[1].strip() for line in f if line.startswith('model name')), platform.processor())
