"""
Documents as long as those of web text: functions and classes of the installed Python packages.

    python -m dev.functions 50000 > functions.jsonl
    python -m dev.prepare convert functions.jsonl --out functions

At most 10,000 bytes each: a few classes of a hundred times that would be most of the text.
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
    """The source of each top-level function and class of a file; none if it is not valid Python."""
    try:
        with open(path, encoding="utf-8") as file:
            code = file.read()
        tree = ast.parse(code)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    lines = code.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield "".join(lines[node.lineno - 1:node.end_lineno])


warnings.simplefilter("ignore", SyntaxWarning)    # about backslashes in other people's strings
files = sorted(glob.glob(f"{os.path.dirname(os.path.dirname(np.__file__))}/**/*.py", recursive=True))
random.Random(0).shuffle(files)
seen = set()
for text in (text for path in files for text in top_level(path)):
    if len(seen) == int(sys.argv[1]):
        break
    if text not in seen and len(text) <= 10_000:
        seen.add(text)
        print(json.dumps({"text": text}))
