#!/usr/bin/env python3
"""Links to lines in the Markdown files, [`text`](file#L12), must point at a line that holds the text.

    dev/test/readme_links.py          says which do not, exit code 1
    dev/test/readme_links.py --fix    moves them to the first line that does
"""
import glob, os, re, sys

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))
LINK = re.compile(r'\[`([^`]+)`\]\(([^)#]+)#L(\d+)\)')


def main():
    wrong = []
    for page in [os.path.join(ROOT, 'README.md')] + sorted(glob.glob(os.path.join(ROOT, 'docs/*.md'))):
        with open(page) as f:
            text = f.read()

        def repair(match):
            words, path, line = match.group(1), match.group(2), int(match.group(3))
            target = os.path.join(os.path.dirname(page), path)
            lines = open(target).read().splitlines() if os.path.exists(target) else []
            if 0 < line <= len(lines) and words in lines[line - 1]:
                return match.group(0)
            found = next((i + 1 for i, content in enumerate(lines) if words in content), None)
            if found is None or '--fix' not in sys.argv:
                wrong.append(f'{os.path.relpath(page, ROOT)}: `{words}` is not at {path}#L{line}' + (f', but at line {found}' if found else ', nor anywhere in it'))
                return match.group(0)
            return f'[`{words}`]({path}#L{found})'
        fixed = LINK.sub(repair, text)
        if fixed != text:
            with open(page, 'w') as f:
                f.write(fixed)
    print('\n'.join(wrong) if wrong else 'all links to lines hold')
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())
