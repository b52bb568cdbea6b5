"""Cases in dev/tests/data/*.txt: a line each, and below it, indented, what it becomes."""

import doctest
import re
from pathlib import Path

DATA = Path(__file__).parent / "data"

def read_cases(name):
    """
    [(the words after the last $, a line, the indented lines after it), ...]
    A title after # ends what $ says. After a line such as HI = "hi", each HI stands for "hi".
    """
    cases, words, names = [], "", {}
    for line in (DATA / name).read_text(encoding="utf-8").splitlines():
        for short, long in names.items():
            line = line.replace(short, long)
        if found := re.match(r"(\S+) = (.*)", line):
            names[found[1]] = found[2]
            continue
        match line[:1]:
            case "#":
                words = ""
            case "$":
                words = line[1:].strip()
            case " ":
                cases[-1][-1].append(line.strip())
            case _ if line:
                cases.append((words, line, []))
    return cases

def is_like(text, lines):
    """"..." in the lines stands for anything."""
    return doctest.OutputChecker().check_output("\n".join(lines), text, doctest.ELLIPSIS)
