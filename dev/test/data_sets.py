#!/usr/bin/env python3
"""The scripts of data/sets against small local copies of each set's layout. Last line: 'N passed, N failed'.

Oracle: the text that went in, decoded from the shards that came out; and the second run, which must fetch and write nothing.
"""
import contextlib, functools, gzip, http.server, json, os, subprocess, sys, tempfile, threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from e2e import ROOT, TOKENIZE, Failed, expect, run_tests, write_shard


def text(name, i):
    return f'Document {i} of {name}: the quick brown fox jumps over the lazy dog.\n'


def write(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with (gzip.open if path.endswith('.gz') else open)(path, 'wb') as f:
        f.write(content.encode())


def json_lines(key, name, n=5):
    return ''.join(json.dumps({'meta': {'i': i}, key: text(name, i)}) + '\n' for i in range(n))


def zstd(path):
    subprocess.run(['zstd', '-q', '--rm', path], check=True)


@contextlib.contextmanager
def serving(folder):
    """A web server for the folder's files: its address."""
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f'http://127.0.0.1:{server.server_port}'
    finally:
        server.shutdown()
        server.server_close()


def tokenizer(d):
    write(f'{d}/corpus.txt', ''.join(text(name, i) for name in ('arxiv', 'c4', 'en', 'story') for i in range(60)))
    subprocess.run([TOKENIZE, '--train-tokenizer', '300', '--out', f'{d}/t.model', f'{d}/corpus.txt'], check=True, capture_output=True)
    return f'{d}/t.model'


def script(name, d, *arguments, code=0, env=None):
    command = [f'{ROOT}/data/sets/{name}.sh', '--tokenizer', f'{d}/t.model', '--out', f'{d}/out', *arguments]
    r = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    expect(r.returncode == code, f'exit code {r.returncode} of {command}:\n{r.stdout[-1500:]}{r.stderr[-1500:]}')
    return r.stdout + r.stderr


def decoded(d, prefix):
    r = subprocess.run([TOKENIZE, '--decode', '--tokenizer', f'{d}/t.model'] + sorted(f'{d}/out/{f}' for f in os.listdir(f'{d}/out') if f.startswith(prefix) and f.endswith('.bin')),
                       capture_output=True, text=True)
    expect(r.returncode == 0, r.stderr)
    return r.stdout


def everything_is_there(d, name, *arguments):
    before = {f: os.stat(os.path.join(folder, f)).st_mtime_ns for folder, _, files in os.walk(f'{d}/out') for f in files}
    out = script(name, d, *arguments)
    expect('fetching' not in out, f'fetched again:\n{out}')
    after = {f: os.stat(os.path.join(folder, f)).st_mtime_ns for folder, _, files in os.walk(f'{d}/out') for f in files}
    expect(before.keys() == after.keys() and all(after[f] == before[f] for f in before if f.endswith('.bin')), 'a second run wrote again')


def test_redpajama_1t(d):
    tokenizer(d)
    files = ['arxiv/arxiv_1.jsonl', 'arxiv/arxiv_2.jsonl', 'c4/c4-train.00000-of-01024.jsonl', 'common_crawl/2019-30/en_head_0000.json.gz.dedup.classifier.jsonl']
    for f in files:
        write(f'{d}/site/{f}', json_lines('text', f.split('/')[0], 3))
    zstd(f'{d}/site/{files[3]}')
    files[3] += '.zst'
    write(f'{d}/site/urls.txt', ''.join(f'https://data.example/redpajama-data-1T/v1.0.0/{f}\n' for f in files))
    base = ['--base', f'file://{d}/site']
    # A download that broke off goes on: what is there stays.
    write(f'{d}/out/raw/c4/c4-train.00000-of-01024.jsonl.part', json_lines('text', 'c4', 3)[:50])
    write(f'{d}/out/raw/arxiv/arxiv_1.jsonl.part', json_lines('text', 'arxiv', 3) + 'more than there is')
    script('redpajama_1t', d, *base)
    expect(decoded(d, 'arxiv').count('Document') == 6 and decoded(d, 'common_crawl').count('of common_crawl') == 3, 'documents')
    expect(decoded(d, 'c4') == ''.join(text('c4', i) for i in range(3)), decoded(d, 'c4'))
    everything_is_there(d, 'redpajama_1t', *base)
    expect('no subset' in script('redpajama_1t', d, *base, 'arxiv', 'poetry', code=1), 'a subset that is not there')


def test_redpajama_sample(d):
    tokenizer(d)
    for subset in ('arxiv', 'c4'):
        write(f'{d}/site/{subset}_sample.jsonl', json_lines('text', subset))
    script('redpajama_sample', d, '--base', f'file://{d}/site', 'arxiv', 'c4')
    expect(decoded(d, 'arxiv') == ''.join(text('arxiv', i) for i in range(5)), decoded(d, 'arxiv'))
    out = script('redpajama_sample', d, '--base', f'file://{d}/site', 'book', code=1)
    expect('HINT' in out and 'book_sample' in out, out)


def test_redpajama_v2(d):
    tokenizer(d)
    names = ['2023-06/0000/en_head', '2023-06/0000/en_middle', '2023-06/0001/en_head']
    write(f'{d}/site/listings/en-2023-06-head_middle.txt', ''.join(n + '\n' for n in names))
    for n in names:
        write(f'{d}/site/documents/{n}.json.gz', json_lines('raw_content', 'en', 4))
        signals = [{'id': f'{n}.json.gz/{i}', 'quality_signals': {'rps_doc_word_count': [[0, 70, 90.0 if i != 1 else 7.0]]}} for i in range(4)]
        write(f'{d}/site/quality_signals/{n}.signals.json.gz', ''.join(json.dumps(s) + '\n' for s in signals))
    base = ['--base', f'file://{d}/site', '2023-06', 'en', '2']
    script('redpajama_v2', d, *base, env={'KEEP': 'rps_doc_word_count>=50'})
    expect(decoded(d, 'en-2023-06') == ''.join(text('en', i) for _ in range(2) for i in (0, 2, 3)), decoded(d, 'en-2023-06'))
    expect(not os.path.exists(f'{d}/out/raw/documents/{names[2]}.json.gz'), 'fetched more files than asked for')
    everything_is_there(d, 'redpajama_v2', *base)
    # What the listing names and the place does not have is left out by name; of a web server as of a folder.
    os.unlink(f'{d}/site/quality_signals/{names[1]}.signals.json.gz')
    with serving(f'{d}/site') as address:
        for base in (f'file://{d}/site', address):
            subprocess.run(['rm', '-r', f'{d}/out'])
            out = script('redpajama_v2', d, '--base', base, '2023-06', 'en', '3', env={'KEEP': 'rps_doc_word_count>=50'})
            expect(names[1] in out and 'left out' in out and decoded(d, 'en-2023-06') == ''.join(text('en', i) for _ in range(2) for i in (0, 2, 3)), out)
            expect('there is no' in script('redpajama_v2', d, '--base', base, '2099-01', code=1), 'a snapshot that is not there')
    expect('this needs the internet' in script('redpajama_v2', d, '--base', address, '2023-14', code=1), 'no server')


def test_slimpajama(d):
    tokenizer(d)
    for path in ['train/chunk2/example_train_3.jsonl', 'train/chunk2/example_train_4.jsonl', 'validation/chunk1/example_holdout_0.jsonl']:
        write(f'{d}/site/{path}', json_lines('text', 'c4', 2))
        zstd(f'{d}/site/{path}')
    script('slimpajama', d, '--base', f'file://{d}/site', '2', '3', '4')
    expect(decoded(d, 'chunk2-3-4') == ''.join(text('c4', i) for _ in range(2) for i in range(2)), decoded(d, 'chunk2'))
    expect(decoded(d, 'validation').count('Document') == 2, 'validation')


def test_texts(d):
    tokenizer(d)
    write(f'{d}/site/input.txt', ''.join(text('story', i) for i in range(1000)))
    for part, n in (('train', 6), ('valid', 2)):
        write(f'{d}/site/TinyStoriesV2-GPT4-{part}.txt', ''.join(text('story', i) + '<|endoftext|>\n' for i in range(n)))
    script('tinyshakespeare', d, '--base', f'file://{d}/site')
    script('tinystories', d, '--base', f'file://{d}/site', '--out', f'{d}/out/stories')
    side = json.load(open(f'{d}/out/stories/train.json'))
    expect(side['train']['documents'] == 6, side)
    side = json.load(open(f'{d}/out/train.json'))
    expect(side['val']['documents'] >= 1 and sum(side[s]['text_bytes'] for s in ('train', 'val')) == os.path.getsize(f'{d}/site/input.txt'), side)


def test_fineweb(d):
    os.makedirs(f'{d}/site')
    for name in ('fineweb_val_000000', 'fineweb_train_000001', 'fineweb_train_000002'):
        write_shard(f'{d}/site/{name}.bin', range(1000))
    script('fineweb', d, '--base', f'file://{d}/site', '2')
    expect(sorted(f for f in os.listdir(f'{d}/out') if f.endswith('.bin')) == ['fineweb_train_000001.bin', 'fineweb_train_000002.bin', 'fineweb_val_000000.bin'], os.listdir(f'{d}/out'))
    write_shard(f'{d}/site/fineweb_train_000003.bin', [1, 60000])
    expect('60000' in script('fineweb', d, '--base', f'file://{d}/site', '3', code=1), 'an id that GPT-2 does not have')


def test_debian_texts(d):
    script('debian_texts', d)
    expect('In the beginning God created the heaven and the earth.' in
           subprocess.run([TOKENIZE, '--decode', f'{d}/out/bible_000000.bin'], capture_output=True, text=True).stdout, 'Genesis')
    everything_is_there(d, 'debian_texts')


if __name__ == '__main__':
    run_tests(globals())
