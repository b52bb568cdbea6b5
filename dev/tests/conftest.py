"""The fixtures of test_dataloader.py, for the tests in this folder too."""

import os
import sys

# `python3` and `torchrun` in scripts are this Python's, though its environment is not activated.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
os.environ.setdefault("GOMP_SPINCOUNT", "0")    # several tests run at a time: see train.py
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from test_dataloader import base_dir_of_the_tests, corpus, eight, tokenizer  # noqa: F401
