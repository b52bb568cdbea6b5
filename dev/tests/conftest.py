"""The fixtures of test_dataloader.py, for the tests in this folder too."""

import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "0")    # several tests run at a time: see train.py
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from test_dataloader import base_dir_of_the_tests, corpus, tokenizer  # noqa: F401
