#!/usr/bin/env python3
"""Writes llmc/unicode_tables.h: the code points that \\p{L}, \\p{N} and \\s match in PyPI's `regex`, the engine of GPT-2's own encoder.

  make_unicode_tables.py > llmc/unicode_tables.h      needs regex
"""
import importlib.metadata, re
import regex


def ranges(pattern):
    match, found = regex.compile(pattern).fullmatch, []
    for code in range(0x110000):
        if match(chr(code)):
            if found and found[-1][1] == code - 1:
                found[-1][1] = code
            else:
                found.append([code, code])
    return found


def unicode_version():
    description = importlib.metadata.metadata('regex').get_payload()
    return re.search(r'supports Unicode (\d+\.\d+)', description).group(1)


def main():
    print(f'''// unicode_tables.h: letters, numbers and white space as PyPI's regex {importlib.metadata.version("regex")} has them (Unicode {unicode_version()}): first and last code point of
// each run. Made by dev/reference/make_unicode_tables.py.
#pragma once

#include <cstdint>

struct CodePointRange {{
    uint32_t first, last;
}};
// clang-format off''')
    for name, pattern in (('LETTERS', r'\p{L}'), ('NUMBERS', r'\p{N}'), ('SPACES', r'\s')):
        found = ranges(pattern)
        print(f'constexpr CodePointRange UNICODE_{name}[] = {{  // {pattern}: {sum(b - a + 1 for a, b in found)} code points')
        for i in range(0, len(found), 8):
            print('    ' + ' '.join(f'{{0x{a:X}, 0x{b:X}}},' for a, b in found[i:i + 8]))
        print('};')
    print('// clang-format on')


if __name__ == '__main__':
    main()
