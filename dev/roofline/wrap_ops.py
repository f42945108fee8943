#!/usr/bin/env python3
"""dev/roofline/wrap_ops.py llmc/ops.h > traced_ops.h: for each op of the table in ops.h a function of the same name in namespace traced,
which notes the call with its arguments and its cost (llmc/timed_ops.h) and then makes it, and a macro that sends the program's calls there (step_ops.cpp).
"""
import re
import sys

DECLARATION = re.compile(r'(template <[^>]*>\s*)?([\w:<>]+)\s+(\w+)\(([^;]*)\);')
# What an op that is not made gives instead.
RESULTS = {'double': '1.0', 'std::vector<double>': 'std::vector<double>(pieces.size(), 1.0)'}


def wrapper(template, result, name, arguments):
    names = [re.search(r'(\w+)$', argument.strip()).group(1) for argument in arguments.split(',')]
    fields = ', '.join(f'{{"{n}", traced::value({n})}}' for n in names if n != 'run')
    call = f'BACKEND::{name}({", ".join(names)})'
    body = f'if (call.made()) {{ {call}; }}' if result == 'void' else f'return call.made() ? {call} : {RESULTS[result]};'
    return (f'{template or "inline "}{result} {name}({" ".join(arguments.split())}) {{\n'
            f'    const Call call(run, "{name}", [&] {{ return json{{{fields}}}; }}, [&] {{ return costs::{name}({", ".join(names)}); }});\n    {body}\n}}\n')


def main():
    text = open(sys.argv[1]).read()
    table = text[text.index('namespace BACKEND {'):text.rindex('}  // namespace BACKEND')]
    table = re.sub(r'//[^\n]*', '', table)
    ops = [m.groups() for m in DECLARATION.finditer(table) if 'Run& run' in m.group(4)]
    if not ops:
        sys.exit(f'wrap_ops.py: no op in {sys.argv[1]}')
    print('// Made by dev/roofline/wrap_ops.py from llmc/ops.h.\nnamespace traced {')
    for op in ops:
        print(wrapper(*op))
    print('}  // namespace traced')
    for name in sorted({op[2] for op in ops}):
        print(f'#define {name} traced::{name}')


if __name__ == '__main__':
    main()
