"""
Documents as long as those of web text, of what lies around: functions and classes of Python packages.

    python -m dev.functions 50000 > functions.jsonl
    python -m dev.prepare convert functions.jsonl --out functions

Of at most 10,000 bytes: a few classes of a hundred times that would be most of the text.
"""

import ast
import glob
import json
import os
import random
import sys
import warnings

import numpy as np


def top_level(path):
    """The source of each function and class that stands at the top level of a file."""
    try:
        with open(path, encoding="utf-8") as file:
            code = file.read()
        tree = ast.parse(code)
    except (OSError, ValueError, SyntaxError, RecursionError):    # not every file in a package is good Python
        return
    lines = code.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield "".join(lines[node.lineno - 1:node.end_lineno])


def main(n):
    warnings.simplefilter("ignore", SyntaxWarning)    # about backslashes in other people's strings
    files = sorted(glob.glob(f"{os.path.dirname(os.path.dirname(np.__file__))}/**/*.py", recursive=True))
    random.Random(0).shuffle(files)
    seen = set()
    for text in (text for path in files for text in top_level(path)):
        if len(seen) == n:
            break
        if text not in seen and len(text) <= 10_000:
            seen.add(text)
            print(json.dumps({"text": text}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
