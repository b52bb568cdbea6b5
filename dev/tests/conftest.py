"""The fixtures of test_dataloader.py for the rooms in this folder, which import its helpers themselves."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from test_dataloader import base_dir_of_the_tests, corpus  # noqa: F401
