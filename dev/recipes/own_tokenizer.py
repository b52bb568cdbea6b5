"""
Use a tokenizer of a different library. Here it is a tokenizer.json of Hugging Face, any kind of it. Its
BOS (beginning of sequence) is the token that begins each document:

    python dev/recipes/own_tokenizer.py tokenizer.json "<s>" my_shards

A byte-level BPE need not be wrapped: python -m dev.import_tokenizer makes it ours, which is faster.
"""

import sys

import tokenizers

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataloader import PackedLoader


class Wrapped:
    """
    The loader needs only these two methods. It also uses get_vocab_size() and fingerprint(), if there
    are any, and for chats render_conversation({"messages": [...]}, max_tokens), which returns ids and
    a mask of 0 and 1.

    A text must always give the same ids, so turn BPE dropout off. A BPE that lacks some bytes or
    characters, and has no token for unknown ones, silently drops them: the loader cannot see this.
    Train such a BPE again, with initial_alphabet=pre_tokenizers.ByteLevel.alphabet().
    """
    def __init__(self, tokenizer, bos):
        self.tokenizer, self.bos = tokenizer, tokenizer.token_to_id(bos)
        tokenizer.no_truncation()    # tokenizer.json can turn both on
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True    # "<|eos|>" in a document is plain text

    def get_bos_token_id(self):
        return self.bos

    def encode(self, texts, prepend=None, num_threads=1):
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [[prepend, *one.ids] for one in encoded]

if __name__ == "__main__":
    path, bos, data = sys.argv[1:]
    tokenizer = Wrapped(tokenizers.Tokenizer.from_file(path), bos)
    with PackedLoader(tokenizer, B=4, T=128, split="train", data_dir=data) as loader:
        inputs, targets = next(loader)
        print(tokenizer.tokenizer.decode(inputs[0].tolist(), skip_special_tokens=False))
