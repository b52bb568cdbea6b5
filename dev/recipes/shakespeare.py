"""
Make shards of Tiny Shakespeare (1.1 MB), split as nanoGPT splits it: the first 90% are for training.

    curl -O https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    python dev/recipes/shakespeare.py input.txt shakespeare
    python train.py --data shakespeare --steps 1200 --vocab_size 1024 --noise 0.05 --table_decay 14
"""

import re
import sys
from pathlib import Path

import pyarrow as pa

sys.path.insert(0, ".")    # run this in the folder of dataset.py
from dataset import write_shard

source, out = sys.argv[1:]
text = Path(source).read_text()
n = int(0.9 * len(text))
for split, part in (("train", text[:n]), ("val", text[n:])):
    documents = re.findall(r"(?s).{2000}.*?\n\n|.+", part)    # cut at the next blank line
    write_shard(f"{out}/{split}.parquet", [pa.array(documents)])
    print(f"{out}/{split}.parquet: {len(documents)} documents")
