#!/usr/bin/env python3
"""GPT-2's byte-level BPE, written from its published rule, and goldens made with it: the oracle of llmc/gpt2_bpe.cpp.

  make_gpt2_goldens.py [--out dev/golden/gpt2]      needs regex; the same bytes each time
  make_gpt2_goldens.py --compare [--gpt2 FOLDER]    this program against tiktoken and Hugging Face tokenizers (PyPI), on every code point and
                                                    on random texts; FOLDER holds GPT-2's own encoder.json and vocab.bpe
"""
import argparse, array, functools, json, os, random, zlib
import regex

HERE = os.path.dirname(os.path.abspath(__file__))
RULE = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
CHARACTER = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + i) for i, b in enumerate(sorted(set(range(256)) - set(PRINTABLE)))}
END_OF_TEXT = '<|endoftext|>'


def words(text):
    return regex.findall(RULE, text)


def written(data):
    return ''.join(CHARACTER[b] for b in data)


class Gpt2:
    def __init__(self, vocab, merges):
        self.vocab, self.rank = vocab, {pair: i for i, pair in enumerate(merges)}
        self.word = functools.lru_cache(1 << 16)(self.word)

    def word(self, word):
        parts = [CHARACTER[b] for b in word.encode()]
        while True:
            pairs = [p for p in zip(parts, parts[1:]) if p in self.rank]
            if not pairs:
                return [self.vocab[p] for p in parts]
            best, merged, i = min(pairs, key=self.rank.get), [], 0
            while i < len(parts):
                n = 2 if tuple(parts[i:i + 2]) == best else 1
                merged.append(''.join(parts[i:i + n]))
                i += n
            parts = merged

    def __call__(self, text):
        return [i for w in words(text) for i in self.word(w)]


# --- A small vocabulary of our own

TEXT = """In the beginning the trainer reads its text, and there's nothing in it that it won't keep: tabs\tand spaces,    numbers like 1234567890, 3.14159, 2026,
and marks!!! (such as these), "quotes", --dashes--, a_b_c, x += 1; y == 2; <tags>, http://www.example.org/path?query=1&more=2#end.
We'll see that they're merged as they've been merged before; I'm sure of that, I'd say; isn't it? It's the one's, the two's and the three's.
    for (int i = 0; i < n; i++) {
        total += values[i];
    }

    return total;
Größe, Straße, naïve café, señor, œuvre. Привет, как дела? Хорошо, спасибо. Καλημέρα κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया। 你好，世界。你好吗？ こんにちは世界。 안녕하세요 세계.
The rank of a merge is the order in which it was learned: the most frequent pair first, then the next, then the next, until there are enough of them.
😀😀😀 👩‍👩‍👧 e\u0301a\u0300 ١٢٣ ⅣⅤ ½ ²³ \u00a0\u3000\u2003
"""


def train(text, merges):
    counts = {}
    for w in words(text):
        parts = tuple(CHARACTER[b] for b in w.encode())
        counts[parts] = counts.get(parts, 0) + 1
    learned = []
    while len(learned) < merges:
        pairs = {}
        for parts, n in counts.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] = pairs.get(pair, 0) + n
        best = max(pairs, key=lambda p: (pairs[p], p))
        learned.append(best)
        after = {}
        for parts, n in counts.items():
            merged, i = [], 0
            while i < len(parts):
                k = 2 if parts[i:i + 2] == best else 1
                merged.append(''.join(parts[i:i + k]))
                i += k
            after[tuple(merged)] = after.get(tuple(merged), 0) + n
        counts = after
    return learned


# --- What is compared

def in_contexts(code):
    """A text with this character beside letters, numbers, marks, white space, an apostrophe, itself, and at both ends."""
    c = chr(code)
    return f"{c}a{c}b {c} x1{c}1 2'{c}s!{c}'t\n{c}  {c}{c}\t{c}'s{c}'re,{c}"


def code_points(first, last):
    return [c for c in range(first, last) if not 0xD800 <= c < 0xE000]


BLOCK = 1024


def block_checksum(first):
    """CRC-32 of the lengths in bytes of all words of the texts of a block of code points, as little-endian 32-bit integers."""
    lengths = [len(w.encode()) for c in code_points(first, first + BLOCK) for w in words(in_contexts(c))]
    return zlib.crc32(array.array('i', lengths).tobytes())


POOLS = ["abcdefghij", "theand in", "ABC", "0123456789", " ", "  \n\t\r", "'", "'s't're've'm'll'd'S'RE", ".,!?-_=+<>(){}[]\"#@/\\|", "éüßñœ", "Приветмир", "αβγ", "שלום", "你好世界吗", "😀👩\u200d👧",
         "\u0301\u0300\u0308", "\u00a0\u3000\u2003\u2028\u0085\u200b", "½²Ⅳ١", "\x00\x01\x1c\x1f\x7f", "\ufffd\ufeff\uffff", "\U0001f600\U000e0041\U0010ffff", END_OF_TEXT]


def random_texts(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        text = ''
        for _ in range(rng.randrange(1, 9)):
            pool = rng.choice(POOLS)
            text += pool if rng.random() < 0.1 else ''.join(rng.choice(pool) for _ in range(rng.randrange(1, 7)))
        yield text


def random_words(count, seed):
    """Words that merge much, some of them long."""
    rng = random.Random(seed)
    letters = sorted(set(TEXT.lower()) & set('abcdefghijklmnopqrstuvwxyz'))
    parts = ['the', 'merge', 'next', 'then', 'it', 'is', 'n', 'e', 't', 'h', 'r', 'and', 'that', 's', 'in', 'o', 'en']
    for i in range(count):
        length = rng.randrange(2, 40) if i < count - 4 else 500
        yield ' ' * rng.randrange(2) + ''.join(rng.choice(parts if i % 2 else letters) for _ in range(length))


def wild_merges(count, seed):
    """Merges in an order that no training gives: the result of one may be part of another that comes before it, or of two."""
    rng = random.Random(seed)
    tokens, merges = ['a', 'b', 'c'], set()
    while len(merges) < count:
        pair = (rng.choice(tokens), rng.choice(tokens))
        if len(''.join(pair)) <= 6:
            merges.add(pair)
            tokens.append(''.join(pair))
    merges = sorted(merges)
    rng.shuffle(merges)
    return merges


def make(out):
    os.makedirs(out, exist_ok=True)
    texts = [TEXT, '', ' ', 'a', 'aaaaaaaa', ' ' * 20, '\n\n\n', ' \n \n x', "'s", "don't we'll 'RE", END_OF_TEXT, *random_texts(200, 1), *random_words(50, 2)]
    rng = random.Random(3)
    wild_texts = [''.join(rng.choice('abc'[:rng.randrange(1, 4)]) for _ in range(rng.randrange(1, 40) if i else 400)) for i in range(300)]
    with open(f'{out}/texts.jsonl', 'w', encoding='ascii') as f:
        for name, merges, of_name in (('', train(TEXT, 300), texts), ('wild-', wild_merges(60, 4), wild_texts)):
            alphabet = [CHARACTER[b] for b in PRINTABLE + sorted(set(range(256)) - set(PRINTABLE))]
            vocab = {t: i for i, t in enumerate([*alphabet, *dict.fromkeys(a + b for a, b in merges), END_OF_TEXT])}
            with open(f'{out}/{name}vocab.json', 'w', encoding='ascii') as g:
                json.dump(vocab, g)
                g.write('\n')
            with open(f'{out}/{name}merges.txt', 'w', encoding='utf-8') as g:
                g.write('#version: 0.2\n' + ''.join(f'{a} {b}\n' for a, b in merges))
            encode = Gpt2(vocab, merges)
            for t in of_name:
                f.write(json.dumps({'vocab': f'{name}vocab.json', 'text': t, 'ids': encode(t)}, separators=(',', ':')) + '\n')
    with open(f'{out}/words.crc32', 'w', encoding='ascii') as f:
        f.writelines(f'{block_checksum(first):08x}\n' for first in range(0, 0x110000, BLOCK))


def compare(folder):
    import tiktoken, tokenizers
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    with open(f'{folder}/encoder.json', encoding='utf-8') as f:
        vocab = json.load(f)
    with open(f'{folder}/vocab.bpe', encoding='utf-8') as f:
        merges = [tuple(line.split()) for line in f.read().split('\n')[1:-1]]
    ours = Gpt2(vocab, merges)
    ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=f'{folder}/vocab.bpe', encoder_json_file=f'{folder}/encoder.json')
    tik = tiktoken.Encoding('gpt2', pat_str=RULE, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50256})
    hf = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(f'{folder}/encoder.json', f'{folder}/vocab.bpe'))
    hf.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    others = {'tiktoken ' + tiktoken.__version__: lambda t: tik.encode(t, disallowed_special=()), 'tokenizers ' + tokenizers.__version__: lambda t: hf.encode(t).ids}
    for name, other in others.items():
        differ = sum(ours(t) != other(t) for t in random_texts(20000, 2))
        print(f'{name}: {differ} of 20000 random texts differ')
        differ = [c for c in code_points(0, 0x110000) if ours(in_contexts(c)) != other(in_contexts(c))]
        kinds = {k: sum(bool(regex.match(k, chr(c))) for c in differ) for k in (r'\p{L}', r'\p{N}', r'\s', r'\p{Cn}')}
        print(f'{name}: {len(differ)} code points differ in some context; by regex {regex.__version__}: {kinds}; first: {[hex(c) for c in differ[:5]]}', flush=True)


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument('--out', default=os.path.join(HERE, '../golden/gpt2'))
    flags.add_argument('--compare', action='store_true')
    flags.add_argument('--gpt2', default=os.path.join(HERE, '../../../shared/data/gpt2-tokenizer'))
    o = flags.parse_args()
    compare(o.gpt2) if o.compare else make(o.out)


if __name__ == '__main__':
    main()
