"""
Text to token ids and back: a byte-pair tokenizer in GPT-4's style, trained by rustbpe, run by tiktoken.

    python tokenizer.py --vocab-size 32768      # train on the data at hand, save, print bytes per token

The trade-off: each thread has a tiktoken Encoding of its own, because one that is shared is fast only in the
first thread that uses it. A copy costs 8 MB and 0.01 s; two threads then encode 1.7 times as much as with one
Encoding between them (`python dataloader.py --bench`, 2 cores, 2026-11).
"""

import argparse
import base64
import functools
import hashlib
import json
import os
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import rustbpe
import tiktoken

from dataset import (
    errors_in_one_line,
    find_data,
    get_base_dir,
    list_shards,
    parquets_iter_batched,
    write_whole,
)

# nanochat's special tokens; their ids follow those of the merges. All but the first are for chat.
SPECIAL_TOKENS = ["<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>",
                  "<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"]

# nanochat's split pattern: GPT-4's, but for numbers of at most two digits, which suits small vocabularies
SPLIT_PATTERN = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
                 r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")

# ---------------------------------------------------------------------------------------------------------
# Cutting a document (UTF-8 bytes) without changing its tokens

# A cut is safe where one of these ends: there every pattern in SAFE_PATTERNS ends a token.
CUT = (
    rb"[0-9A-Za-z](?=[^'0-9A-Za-z\x80-\xff])"    # a letter or digit, then an ASCII sign that is no apostrophe
    # anything but a space, then a space; by its last UTF-8 byte: U+00A0, U+2003 and such end in the others
    rb"|[!-~\x8b-\x9e\xa1-\xa7\xaa-\xae\xb0-\xbf](?= )"
    # a Chinese or Japanese letter, then a comma or full stop of theirs: that text has no spaces
    rb"|(?:[\xe5-\xe9][\x80-\xbf]{2}|\xe3(?:\x81[\x81-\xbf]|\x82[\x80-\x96\xa1-\xbf]|\x83[\x80-\xba]))"
    rb"(?=\xe3\x80[\x81\x82]|\xef\xbc[\x81\x8c\x9f])"
)
FIRST_CUT, LAST_CUT = re.compile(CUT), re.compile(rb"(?s:.*)(?:" + CUT + rb")")

# The split patterns (first digits of their sha256) that test_dataloader.py checks this for. With any other
# pattern only documents longer than LONGEST_RUN are cut, so that a limit saves less.
SAFE_PATTERNS = {
    "4513fed735f5b87d",    # SPLIT_PATTERN
    "bf51d578af571878",    # tiktoken's gpt2, r50k_base and p50k_base
    "f021c3d976978e62",    # cl100k_base
    "2d1b8dc11e89af71",    # o200k_base
}

PART = 1 << 16           # bytes: long documents are encoded in parts of up to this size
LONGEST_RUN = 1 << 18    # bytes without a safe cut given to tiktoken at once; a million spaces overflow it


def next_cut(data, start: int, part: int) -> int:
    """
    The end of the part that begins at `start`: the last safe cut within `part` bytes, else the first behind
    them, else, safe or not, after LONGEST_RUN bytes.
    """
    if len(data) - start <= part:
        return len(data)
    found = LAST_CUT.match(data, start, start + part)
    found = found or FIRST_CUT.search(data, start + part - 4, start + LONGEST_RUN)
    if found:
        return found.end()
    end = min(start + LONGEST_RUN, len(data))
    if end < len(data):    # not between the bytes of one character, of which at most three look like this
        end -= next((back for back in range(4) if data[end - back] & 0xC0 != 0x80), 0)
    return end


def to_bytes(text: str) -> bytes:
    """UTF-8, each lone surrogate as U+FFFD, which is what tiktoken's encode_ordinary makes of it."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def split_parts(text: str) -> Iterator[str]:
    """A document for rustbpe, whose regex engine fails on the runs that tiktoken's fails on."""
    data, start = to_bytes(text), 0
    while start < len(data):
        end = next_cut(data, start, LONGEST_RUN)
        yield str(data[start:end], "utf-8")
        start = end


# ---------------------------------------------------------------------------------------------------------
# Saved as two text files: the ranks in tiktoken's own format, the rest as JSON

RANKS_FILE, JSON_FILE, FORMAT = "tokenizer.tiktoken", "tokenizer.json", "nanoloader tokenizer 1"


def build_encoding(pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding("nanoloader", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def format_ranks(ranks: dict[bytes, int]) -> bytes:
    """A token in base64, a space, its rank; one a line."""
    in_order = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in in_order)


def hash_description(description: dict) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def read_saved(path: str, remedy: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise FileNotFoundError(f"no tokenizer here: {path} does not exist; {remedy}") from None


def load_saved(tokenizer_dir: str) -> tuple[tiktoken.Encoding, str]:
    """The Encoding and its BOS's name; a file that is missing, torn or changed is an error that names it."""
    json_path, ranks_path = (os.path.join(tokenizer_dir, name) for name in (JSON_FILE, RANKS_FILE))
    remedy = f"train one on your data: python tokenizer.py --data DIR --out {tokenizer_dir}"
    try:
        saved = json.loads(read_saved(json_path, remedy))
        form, fingerprint = saved.pop("format"), saved.pop("fingerprint")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{json_path} is torn, or not ours but Hugging Face's; {remedy}") from None
    if form != FORMAT:
        raise ValueError(f"{json_path} has the format {form!r}, expected {FORMAT!r}; {remedy}")
    if hash_description(saved) != fingerprint:
        raise ValueError(f"{json_path} was changed: its fingerprint is not that of its contents; {remedy}")
    ranks_text = read_saved(ranks_path, remedy)
    if hashlib.sha256(ranks_text).hexdigest() != saved["ranks_sha256"]:
        raise ValueError(f"{ranks_path} is torn, changed or another tokenizer's: its sha256 is not the "
                         f"one in {JSON_FILE}; {remedy}")
    lines = (line.split() for line in ranks_text.splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return build_encoding(saved["pattern"], ranks, saved["special_tokens"]), saved["bos_token"]


# ---------------------------------------------------------------------------------------------------------
# The tokenizer

DOCUMENTS_PER_TASK = 16    # of encode(list)
BYTES_PER_TOKEN = 2    # a first guess, on the low side, for how much text a limit takes
SMALLEST_PIECE = 128    # bytes: what is encoded at once when little is missing to a limit


class RustBPETokenizer:
    """
    nanochat's tokenizer: the same names, arguments and results, without its pickle.

    Every text can be encoded, in time that grows as its length: a special token's name in it is plain text, a
    lone surrogate counts as U+FFFD. The tokens are tiktoken's, except where 256 KiB (LONGEST_RUN) have no
    safe cut: a run of 300,000 spaces or letters is encoded in parts of 256 KiB.
    """

    def __init__(self, enc: tiktoken.Encoding, bos_token: str):
        self.enc, self.bos_token = enc, bos_token
        self.bos_token_id = self.encode_special(bos_token)
        self.dtype = np.dtype(np.uint16 if enc.n_vocab <= 1 << 16 else np.uint32)
        self.cuts_are_safe = hashlib.sha256(enc._pat_str.encode()).hexdigest()[:16] in SAFE_PATTERNS
        self.local = threading.local()
        self.executor, self.executor_pid = None, None

    @classmethod
    def train_from_iterator(cls, text_iterator: Iterable[str], vocab_size: int) -> "RustBPETokenizer":
        """
        Learn `vocab_size` tokens: 256 bytes, merges and the special tokens, in the order of their ids.

        Text with too few pairs to merge gives a smaller vocabulary, and a warning that says how small.
        """
        smallest = 256 + len(SPECIAL_TOKENS)
        if vocab_size < smallest:
            raise ValueError(f"vocab_size {vocab_size} is too small: bytes and special tokens alone take "
                             f"{smallest}; ask for more, such as --vocab-size 4096")
        trained = rustbpe.Tokenizer()
        parts = (part for text in text_iterator if text is not None for part in split_parts(text))
        trained.train_from_iterator(parts, vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
        ranks = {bytes(token): rank for token, rank in trained.get_mergeable_ranks()}
        special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        size = len(ranks) + len(special)
        if size < vocab_size:
            warnings.warn(f"the vocabulary has {size} tokens, not {vocab_size}: this text has no more pairs "
                          f"to merge; train on more text, or ask for {size}", stacklevel=2)
        return cls(build_encoding(SPLIT_PATTERN, ranks, special), SPECIAL_TOKENS[0])

    @classmethod
    def from_directory(cls, tokenizer_dir: str) -> "RustBPETokenizer":
        """What `save` wrote, checked against its hashes. Nothing is unpickled."""
        return cls(*load_saved(tokenizer_dir))

    @classmethod
    def from_pretrained(cls, tiktoken_name: str) -> "RustBPETokenizer":
        """One of tiktoken's own, such as "gpt2", which it may download; <|endoftext|> serves as BOS."""
        return cls(tiktoken.get_encoding(tiktoken_name), "<|endoftext|>")

    @classmethod
    def from_dict(cls, saved: dict) -> "RustBPETokenizer":
        lines = (line.split() for line in saved["ranks"].encode().splitlines())
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        return cls(build_encoding(saved["pattern"], ranks, saved["special_tokens"]), saved["bos_token"])

    def as_dict(self) -> dict:
        ranks = format_ranks(self.enc._mergeable_ranks).decode()
        return {**self.description, "ranks": ranks, "fingerprint": self.fingerprint()}

    def save(self, tokenizer_dir: str) -> None:
        os.makedirs(tokenizer_dir, exist_ok=True)
        saved = {"format": FORMAT, **self.description, "fingerprint": self.fingerprint()}
        write_whole(os.path.join(tokenizer_dir, RANKS_FILE), format_ranks(self.enc._mergeable_ranks))
        write_whole(os.path.join(tokenizer_dir, JSON_FILE), (json.dumps(saved, indent=1) + "\n").encode())

    @functools.cached_property
    def description(self) -> dict:
        """All that decides the ids, as plain JSON; the ranks by their sha256."""
        return {"pattern": self.enc._pat_str, "special_tokens": self.enc._special_tokens,
                "bos_token": self.bos_token,
                "ranks_sha256": hashlib.sha256(format_ranks(self.enc._mergeable_ranks)).hexdigest()}

    def fingerprint(self) -> str:
        """Hex sha256 over ranks, pattern and special tokens: tokenizers that share it give the same ids."""
        return hash_description(self.description)

    def get_vocab_size(self) -> int:
        return self.enc.n_vocab

    def get_special_tokens(self) -> set[str]:
        return self.enc.special_tokens_set

    def get_bos_token_id(self) -> int:
        return self.bos_token_id

    def id_to_token(self, id: int) -> str:
        return self.enc.decode([id])

    def encode_special(self, text: str) -> int:
        try:
            return self.enc.encode_single_token(text)
        except KeyError:
            names = ", ".join(sorted(self.enc.special_tokens_set))
            raise KeyError(f"{text!r} is not one token; the special ones are {names}") from None

    def decode(self, ids: Sequence[int]) -> str:
        return self.enc.decode(ids)

    def encode(self, text, prepend=None, append=None, num_threads: int = 8):
        """
        A str -> its ids, a list, in this thread. A list of str -> a list of lists, by `num_threads` threads.

        prepend, append: None or a special token, by name or id, to stand before or behind each text.
        """
        before, behind = self._as_ids(prepend), self._as_ids(append)
        if isinstance(text, str):
            return [*before, *self._encode_text(text), *behind]
        if isinstance(text, list):
            return [[*before, *ids, *behind] for ids in self._encode_list(text, num_threads)]
        raise ValueError(f"cannot encode a {type(text).__name__}: expected a str or a list of str")

    __call__ = encode

    def _as_ids(self, token) -> list[int]:
        return [] if token is None else [self.encode_special(token) if isinstance(token, str) else token]

    def _encode_text(self, text) -> list[int]:
        return np.concatenate(self._encode_parts(text)).tolist()

    def _encode_list(self, texts: list[str], num_threads: int) -> list[list[int]]:
        """`num_threads` workers take the next few documents until none are left; results keep their order."""
        results: list = [None] * len(texts)
        tasks = deque(slice(i, i + DOCUMENTS_PER_TASK) for i in range(0, len(texts), DOCUMENTS_PER_TASK))

        def work():
            while tasks:
                try:
                    task = tasks.popleft()
                except IndexError:    # another worker was quicker
                    return
                results[task] = [self._encode_text(text) for text in texts[task]]

        if self.executor_pid != os.getpid():    # threads do not survive a fork
            # It starts a thread only when none is idle, so no more than are asked for.
            self.executor, self.executor_pid = ThreadPoolExecutor(256, "tokenizer"), os.getpid()
        for worker in [self.executor.submit(work) for _ in range(min(max(1, num_threads), len(tasks)))]:
            worker.result()
        return results

    def encode_documents(self, texts: Sequence, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """
        A chunk of documents -> (ids, bounds), in this thread: document i is ids[bounds[i]:bounds[i + 1]].

        texts: each a str, or UTF-8 as bytes or memoryview; it gets a BOS in front. None has no tokens at all.
        limit: only the first `limit` tokens of each are wanted, BOS included. They are exactly whole[:limit];
        the text behind them is not encoded, decoded or checked.
        ids: 1-D, self.dtype. bounds: int64, len(texts) + 1.
        """
        documents, bounds = [], np.zeros(len(texts) + 1, np.int64)
        for i, text in enumerate(texts):
            try:
                parts = [] if text is None else self._encode_parts(text, limit)
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                raise ValueError(f"document {i} of {len(texts)} in this chunk is not UTF-8: {error.reason}, "
                                 f"byte 0x{byte:02x}; re-encode it or take it out") from None
            n_tokens = 0 if text is None else 1 + sum(map(len, parts))
            bounds[i + 1] = bounds[i] + (n_tokens if limit is None else min(n_tokens, limit))
            documents.append(parts)
        ids = np.empty(bounds[-1], self.dtype)
        for parts, at, end in zip(documents, bounds.tolist(), bounds[1:].tolist(), strict=False):
            ids[at:end][:1] = self.bos_token_id
            for part in parts:
                ids[at + 1:end][:len(part)] = part[:end - at - 1]
                at += len(part)
        return ids, bounds

    def _encode_parts(self, text, limit: int | None = None) -> list[np.ndarray]:
        """A document's ids (uint32, no BOS), part by part: all, or enough for `limit` with its BOS."""
        # A document that is short, given the limit, is encoded at once. A character has at most four bytes.
        at_once = LONGEST_RUN if limit is None else min(limit, LONGEST_RUN)
        if isinstance(text, str):
            if 4 * len(text) <= LONGEST_RUN and len(text) <= at_once:
                try:
                    return [self._encode_piece(text)]
                except UnicodeEncodeError:
                    pass
            text = to_bytes(text)
        if len(text) <= at_once:
            return [self._encode_piece(str(text, "utf-8"))]
        parts, start, part_end, missing = [], 0, 0, None if limit is None else limit - 1
        while start < len(text) and (missing is None or missing > 0):
            if start == part_end:
                part_end = next_cut(text, start, PART if self.cuts_are_safe else LONGEST_RUN)
            end = part_end
            if missing and self.cuts_are_safe:
                bytes_per_token = 0.95 * start / (limit - 1 - missing) if start else BYTES_PER_TOKEN
                size = max(SMALLEST_PIECE, int(missing * bytes_per_token))
                found = FIRST_CUT.search(text, start + size, part_end)
                end = found.end() if found else part_end
            parts.append(self._encode_piece(str(text[start:end], "utf-8")))
            missing = missing and missing - len(parts[-1])
            start = end
        return parts

    def _encode_piece(self, text: str) -> np.ndarray:
        """By this thread's own Encoding, as an array: it has no Python object per token."""
        if not hasattr(self.local, "enc"):
            # Given no special tokens, it would be 40 % slower: the regex for them would match everywhere.
            enc = self.enc
            self.local.enc = build_encoding(enc._pat_str, enc._mergeable_ranks, enc._special_tokens)
        return self.local.enc.encode_to_numpy(text, disallowed_special=())


# ---------------------------------------------------------------------------------------------------------
# What the other files call

def default_tokenizer_dir() -> str:
    return os.path.join(get_base_dir(), "tokenizer")


def get_tokenizer(tokenizer_dir: str | None = None) -> RustBPETokenizer:
    """The saved tokenizer, by default the one that `python tokenizer.py` saved last."""
    return RustBPETokenizer.from_directory(tokenizer_dir or default_tokenizer_dir())


def find_tokenizer(tokenizer_dir: str | None, sources: Sequence[str],
                   vocab_size: int) -> tuple[RustBPETokenizer, str]:
    """
    (tokenizer, its folder): the one given; or what `python tokenizer.py` made, for data of your own; or one
    that is trained now, on the first 100 MB, and kept under a name that tells data and vocabulary size.
    """
    folder = tokenizer_dir or default_tokenizer_dir()
    first = os.path.basename(next(iter(sources)).rstrip("/"))
    there = os.path.exists(os.path.join(folder, JSON_FILE))
    if not tokenizer_dir and (first.startswith("builtin-") or not there):
        digest = hashlib.sha256(json.dumps(sorted(map(name_and_shards, sources))).encode()).hexdigest()[:8]
        folder = f"{default_tokenizer_dir()}-{first}-{digest}-{vocab_size}"
        if not os.path.exists(os.path.join(folder, JSON_FILE)):
            for path in sources:
                if list_shards(path, "train")[0].kind == "tokens":
                    raise ValueError(f"{path} holds tokens; pass what made them: --tokenizer DIR")
            print(f"training a tokenizer of {vocab_size:,} tokens, once: {folder}", flush=True)
            RustBPETokenizer.train_from_iterator(some_text(sources, 10**8), vocab_size).save(folder)
    return RustBPETokenizer.from_directory(folder), folder


def name_and_shards(source: str) -> list:
    """Of its train split: other data under the same name gets a tokenizer of its own."""
    return [os.path.basename(source.rstrip("/")), *((s.name, s.size) for s in list_shards(source, "train"))]


def some_text(sources: Sequence[str], limit: int) -> Iterator[str]:
    """The first documents of each source, `limit` characters in all."""
    for path in sources:
        left = limit / len(sources)
        for text in (text for batch in parquets_iter_batched("train", data_dir=path) for text in batch):
            if left <= 0:
                break
            left -= len(text)
            yield text


def get_token_bytes(tokenizer: RustBPETokenizer | None = None, device="cpu"):
    """
    The bytes of text that each token stands for, int32 (vocab,), 0 for special tokens: for bits per byte.

    Counted on the raw bytes: a token that is half a character would decode to U+FFFD, which has three.
    """
    import torch

    enc = (tokenizer or get_tokenizer()).enc
    n_bytes = np.zeros(enc.n_vocab, np.int32)
    for token, id in enc._mergeable_ranks.items():
        n_bytes[id] = len(token)
    return torch.from_numpy(n_bytes).to(device)


# ---------------------------------------------------------------------------------------------------------
# python tokenizer.py

def documents_with_progress(batches: Iterable[list[str]], max_chars: int) -> Iterator[str]:
    n_documents, n_chars, began, printed = 0, 0, time.time(), time.time()
    for text in (text for batch in batches for text in batch):
        n_documents, n_chars = n_documents + 1, n_chars + len(text)
        yield text
        if time.time() - printed > 1 or n_chars >= max_chars:
            printed = time.time()
            took = printed - began
            print(f"{n_documents:>10,} documents {n_chars / 1e6:>9,.1f} M characters {took:>6.1f} s",
                  flush=True)
        if n_chars >= max_chars:
            break
    took = time.time() - began
    print(f"read {n_documents:,} documents, {n_chars / 1e6:,.1f} M characters, in {took:.1f} s; merging",
          flush=True)


def bytes_per_token(tokenizer: RustBPETokenizer, batches: Iterable[list[str]], max_bytes: int) -> float:
    n_bytes = n_tokens = 0
    for batch in batches:
        n_bytes += sum(len(to_bytes(text)) for text in batch)
        n_tokens += len(tokenizer.encode_documents(batch)[0]) - len(batch)    # BOS stands for no bytes
        if n_bytes >= max_bytes:
            break
    return n_bytes / max(1, n_tokens)


def main():
    parser = argparse.ArgumentParser(description="Train a tokenizer on the train split and save it.")
    parser.add_argument("--vocab-size", type=int, default=32768, help="tokens, the special ones included")
    parser.add_argument("--data", help="folder or URI of parquet shards (default: the data at hand)")
    parser.add_argument("--out", help="folder to save it in (default: where get_tokenizer looks)")
    parser.add_argument("--max-chars", type=int, default=2 * 10**9, help="train on at most so much text")
    flags = parser.parse_args()
    with errors_in_one_line():
        train_and_save(flags)


def train_and_save(flags):
    began, data_dir, out = time.time(), find_data(flags.data), flags.out or default_tokenizer_dir()
    documents = documents_with_progress(parquets_iter_batched("train", data_dir=data_dir), flags.max_chars)
    tokenizer = RustBPETokenizer.train_from_iterator(documents, flags.vocab_size)
    tokenizer.save(out)
    ratio = bytes_per_token(tokenizer, parquets_iter_batched("val", data_dir=data_dir), 10**7)
    print(f"trained {tokenizer.get_vocab_size():,} tokens in {time.time() - began:.1f} s")
    print(f"{ratio:.2f} bytes per token on val documents\nsaved to {out}")


if __name__ == "__main__":
    main()
