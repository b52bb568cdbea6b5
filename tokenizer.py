"""
Text to token ids and back: a byte-pair tokenizer in GPT-4's style, trained by rustbpe, run by tiktoken or,
where it is installed, by gigatoken, which gives the same ids about ten times as fast (pip install gigatoken).

    python tokenizer.py --vocab_size 32768      # train on the data at hand, save, print bytes per token

The trade-off: each thread that encodes has a copy of the engine, since a shared one is fast in one thread
only. A copy costs 8 MB and 0.01 s (tiktoken), or 22 MB, its memory of words and 0.05 s (gigatoken).
"""

import argparse
import base64
import collections
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import random
import re
import shlex
import tempfile
import threading
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import rustbpe
import tiktoken

from dataset import (
    cores,
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
# Documents to pieces: a piece is a document, or part of one that is longer than tiktoken's regex can bear

# A cut is safe where one of these ends: there SPLIT_PATTERN and tiktoken's own patterns end a token.
CUT = (
    rb"[0-9A-Za-z](?=[^'0-9A-Za-z\x80-\xff])"    # a letter or digit, then an ASCII sign that is no apostrophe
    # anything but a space, then a space; by its last UTF-8 byte: U+00A0, U+2003 and such end in the others
    rb"|[!-~\x8b-\x9e\xa1-\xa7\xaa-\xae\xb0-\xbf](?= )"
    # a Chinese or Japanese letter, then a comma or full stop of theirs: that text has no spaces
    rb"|(?:[\xe5-\xe9][\x80-\xbf]{2}|\xe3(?:\x81[\x81-\xbf]|\x82[\x80-\x96\xa1-\xbf]|\x83[\x80-\xba]))"
    rb"(?=\xe3\x80[\x81\x82]|\xef\xbc[\x81\x8c\x9f])"
)
NEXT_CUT, LAST_CUT = re.compile(CUT), re.compile(rb"(?s:.*)(?:" + CUT + rb")")
LAST_CHARACTER = re.compile(rb"(?s:.+)(?=[^\x80-\xbf])")    # ends before the first byte of one

LONGEST_PIECE = 1 << 18    # bytes; a million spaces overflow tiktoken's stack


def to_pieces(data) -> list:
    """Each but the last ends at the last safe cut within LONGEST_PIECE, or else as a character does."""
    pieces, start = [], 0
    while len(data) - start > LONGEST_PIECE:
        end = start + LONGEST_PIECE
        found = LAST_CUT.match(data, start, end) or LAST_CHARACTER.match(data, start, end + 1)
        end = found.end() if found else end
        pieces.append(data[start:end])
        start = end
    return [*pieces, data[start:]]


def safe_cuts_around(data, place: int, start: int) -> tuple[int, int]:
    """The last safe cut before a place, or else `start`; the next one behind it, or else the end."""
    before, behind = LAST_CUT.match(data, start, place), NEXT_CUT.search(data, place)
    return before.end() if before else start, behind.end() if behind else len(data)


def to_bytes(text) -> bytes:
    """UTF-8; of a str each lone surrogate as U+FFFD, which is what tiktoken's encode_ordinary makes of it."""
    if not isinstance(text, str):
        return bytes(text)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


# ---------------------------------------------------------------------------------------------------------
# Engines: engine.encode(pieces) -> (ids, bounds), from any thread
#
# Piece i is ids[bounds[i]:bounds[i + 1]], a BOS in front.

class TiktokenEngine:
    """Always there, and the judge of the other."""

    def __init__(self, enc: tiktoken.Encoding, bos: int):
        self.enc, self.bos, self.local = enc, np.array([bos], np.uint32), threading.local()

    def encode(self, pieces: Sequence) -> tuple[np.ndarray, np.ndarray]:
        if not hasattr(self.local, "enc"):
            # Without special tokens it would be 40 % slower: the regex for them would match everywhere.
            enc = self.enc
            self.local.enc = build_encoding(enc._pat_str, enc._mergeable_ranks, enc._special_tokens)
        arrays = []
        for piece in pieces:
            ids = self.local.enc.encode_to_numpy(str(piece, "utf-8"), disallowed_special=())
            arrays.append(np.concatenate([self.bos, ids]))
        return join(arrays)


def join(arrays: Sequence[np.ndarray], dtype: type | np.dtype = np.uint32) -> tuple[np.ndarray, np.ndarray]:
    """The ids of each piece -> (ids, bounds)."""
    return np.concatenate([np.zeros(0, dtype), *arrays]), np.cumsum([0, *map(len, arrays)])


def split(ids: np.ndarray, bounds: np.ndarray) -> Iterator[np.ndarray]:
    """The ids of each piece."""
    return (ids[begin:end] for begin, end in itertools.pairwise(bounds.tolist()))


# gigatoken has split patterns of its own and takes no other. Their names, by the sha256 of the pattern:
SCHEMES = {
    "4513fed735f5b87d": "qwen2",    # SPLIT_PATTERN, but for digits, which come one by one: see pair_digits
    "bf51d578af571878": "gpt2",    # tiktoken's gpt2, r50k_base and p50k_base
    "f021c3d976978e62": "gpt4",    # cl100k_base
    "2d1b8dc11e89af71": "o200k",    # o200k_base
}

# Stands between pieces, as a special token, so that one call encodes them all.
BETWEEN = b"\x02\x1cpiece\x1c\x03"

# gigatoken remembers all words for ever: 170 MB after 464 MB of source code, 2 GB after 270 MB of random
# letters. After so many bytes of text a model is made anew, which takes 0.05 s.
FORGET_AFTER = 1 << 28


class GigatokenEngine:
    """
    gigatoken: tiktoken's ids about ten times as fast, all pieces in one call that lets other threads run.

    What it cannot encode, or not as tiktoken does, goes to tiktoken.
    """

    def __init__(self, enc: tiktoken.Encoding, bos: int):
        import gigatoken

        self.gigatoken, self.enc, self.bos = gigatoken, enc, bos
        self.idle = []    # models that no thread encodes with, and how many bytes of text each has seen
        self.exact, self.failures = TiktokenEngine(enc, bos), []
        self.dtype = np.min_scalar_type(enc.n_vocab)    # BETWEEN has this id
        self.ranks_file = format_ranks(enc._mergeable_ranks)
        self.scheme, self.pairs = SCHEMES[hash_pattern(enc)], None
        if self.scheme == "qwen2":
            ranks = enc._mergeable_ranks
            self.zero = ranks[b"0"]
            self.pairs = np.array([ranks.get(b"%02d" % number, -1) for number in range(100)])
            if [ranks[b"%d" % digit] for digit in range(10)] != list(range(self.zero, self.zero + 10)):
                raise ValueError("the ids of the digits are not in a row")
        self.odd = odd_characters(r"\p{N}|\p{Cn}" if self.scheme == "qwen2" else r"\p{Cn}")

    def make_model(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "ranks.tiktoken")
            with open(path, "wb") as file:
                file.write(self.ranks_file)
            return self.gigatoken.Tokenizer.from_tiktoken(
                path, pretokenizer=self.scheme, special_tokens={BETWEEN.decode(): self.enc.n_vocab})

    def encode(self, pieces: Sequence) -> tuple[np.ndarray, np.ndarray]:
        data = BETWEEN.join([b"", *pieces])
        if data.isascii() or not len(odd := self.find_odd(data)):
            return self.encode_joined(pieces, data)
        return self.encode_around(pieces, odd)

    def find_odd(self, text: bytes) -> np.ndarray:
        """Where the characters begin that need tiktoken; an error where the text is not UTF-8."""
        array = np.frombuffer(text, np.uint8)
        at = np.flatnonzero(array > 127)
        begins = array[at] > 191
        characters = array[at].tobytes().decode()
        if (array[at[~begins] - 1] < 128).any():    # a character with ASCII in its midst
            str(text, "utf-8")
        return at[begins][self.odd[np.frombuffer(characters.encode("utf-32-le"), np.uint32)]]

    def encode_around(self, pieces, odd):
        """By tiktoken only from a safe cut before each of the characters at `odd` to one behind it."""
        starts = np.cumsum([len(BETWEEN), *(len(piece) + len(BETWEEN) for piece in pieces)])
        places = collections.defaultdict(list)
        for i, place in zip(np.searchsorted(starts, odd, "right") - 1, odd, strict=True):
            places[i].append(place - starts[i])
        plain, exact, is_odd, begins = [], [], [], [0]
        for i, piece in enumerate(pieces):
            done = 0
            for place in places.get(i, ()):
                if place >= done:
                    begin, end = safe_cuts_around(piece, place, done)
                    plain.append(piece[done:begin])
                    exact.append(piece[begin:end])
                    is_odd += [False, True]
                    done = end
            plain.append(piece[done:])
            is_odd.append(False)
            begins.append(len(is_odd))
        of_plain, of_exact = split(*self.encode_joined(plain)), split(*self.exact.encode(exact))
        return drop_inner_bos(*join([next(of_exact if odd else of_plain) for odd in is_odd]), begins)

    def encode_joined(self, pieces, data=None):
        try:
            ids = self.call(data or BETWEEN.join([b"", *pieces]))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:    # a panic in Rust is no Exception
            return self.encode_without(pieces, f"{type(error).__name__}: {error}")
        ids = ids.astype(self.dtype)
        if self.pairs is not None:
            ids = pair_digits(ids, self.zero, self.pairs)
        begins = np.flatnonzero(ids == self.enc.n_vocab)
        if len(begins) != len(pieces):    # a text that has BETWEEN
            return self.encode_without(pieces, f"{len(pieces)} pieces came back as {len(begins)}")
        ids[begins] = self.bos
        return ids, np.append(begins, len(ids))

    def encode_without(self, pieces, reason):
        """One of them cannot be encoded, for this reason: by tiktoken, the others one by one."""
        if len(pieces) > 1:
            return join([self.encode([piece])[0] for piece in pieces])
        self.failures.append(reason)
        return self.exact.encode(pieces)

    def call(self, data):
        """
        By a model that no other thread uses meanwhile: they would wait for each other. So one that is idle is
        not locked in a fork either; and one that has failed does not come back.
        """
        try:
            model, n_bytes = self.idle.pop()
        except IndexError:
            model, n_bytes = self.make_model(), 0
        # Only its calls for batches let other threads run; "padded" to one row, the ids come as they are; for
        # a list in place of a BytesSource it would import awkward, which takes 0.6 s.
        source = self.gigatoken.BytesSource(data)
        ids = model.encode_batch_padded(source, 0, parallel=False)[0][0]
        if n_bytes + len(data) < FORGET_AFTER:
            self.idle.append((model, n_bytes + len(data)))
        return ids


@functools.cache
def odd_characters(pattern: str) -> np.ndarray:
    r"""
    Which characters, by code point, tiktoken and gigatoken may treat differently.

    \p{Cn}: not yet in the Unicode version of tiktoken (16), but perhaps a letter in gigatoken's (17).
    \p{N}: digits beyond ASCII, which pair_digits does not know.
    """
    enc = build_encoding(pattern, {bytes([i]): i for i in range(256)}, {})
    characters = "".join(map(chr, [*range(128, 0xD800), *range(0xE000, 0x40000)]))
    found = enc.decode(enc.encode_ordinary(characters))
    odd = np.zeros(0x110000, bool)
    odd[np.frombuffer(found.encode("utf-32-le"), np.uint32)] = True
    odd[0x40000:] = True    # nothing is there yet
    return odd


def pair_digits(ids, zero, pairs):
    r"""
    Ids in which each digit is a token -> those of \p{N}{1,2}: two by two from the start of a run of digits.

    zero: the id of the digit 0. pairs: for 00 to 99 the id of both, -1 where there is none.
    Example: 1 2 3 . 4 5 -> 12 3 . 45
    """
    digit = ids - ids.dtype.type(zero)    # wraps round in tokens that are none
    is_digit = digit < 10
    two = is_digit[:-1] & is_digit[1:]
    at = np.flatnonzero(two)
    place = at - np.maximum.accumulate(at * ~two[at - 1])    # in its run
    at = at[place & 1 == 0]
    pair = pairs[10 * digit[at] + digit[at + 1]]
    if (pair < 0).any():
        at, pair = at[pair >= 0], pair[pair >= 0]
    ids[at] = pair
    keep = np.ones(len(ids), bool)
    keep[at + 1] = False
    return ids[keep]


HARD = ["a", "Z", "s", "ll", "'", "'s", "'RE", "\u017f", " ", "  ", "\t", "\n", "\r\n", "\r", ".", ",", "/",
        "-", "_", "!", "\0", "\x1c", "\x85", "\xa0", "\u2003", "\u2028", "\u3000", "\ufeff", "1", "12", "345",
        "\xe9", "e\u0301", "\u0430", "\u05d0", "\u0915\u094d", "\u0e31", "\u1eeb", "\u01c5", "\u02b0",
        "\u6f22", "\u3042", "\u30fc", "\uac00", "\U00020000", "\U0001f600", "\U0001f468\u200d\U0001f469",
        "\ufe0f", "\ufffd"]
ODD = ["\xb2", "\xbd", "\u0664", "\u0967", "\u3007", "\uff11", "\u2167", "\U0001d7d8", "\u0378", "\u088f"]


def hard_texts(enc: tiktoken.Encoding) -> list[bytes]:
    """What an engine may get wrong: hard characters next to each other, runs of them, and every token."""
    draw = random.Random(0)
    texts = ["".join(draw.choices(HARD, k=20)) for _ in range(1000)]
    texts += ["".join(draw.choices(HARD + ODD, k=20)) for _ in range(100)]
    texts += [character * n for character in HARD + ODD for n in (7, 100)]
    tokens = [token for token in enc._mergeable_ranks if token.decode(errors="ignore").encode() == token]
    return [text.encode() for text in texts] + [b"\n".join(tokens[i:i + 8]) for i in range(0, len(tokens), 8)]


def choose_engine(enc: tiktoken.Encoding, bos: int) -> tuple[TiktokenEngine | GigatokenEngine, str]:
    """The engine, and its name and why it is this one, to be printed."""
    exact, exact_name = TiktokenEngine(enc, bos), f"tiktoken {tiktoken.__version__}"
    wanted = os.environ.get("NANOLOADER_ENGINE", "gigatoken")
    if wanted not in ("gigatoken", "tiktoken"):
        raise ValueError(f"NANOLOADER_ENGINE={wanted}: expected tiktoken or gigatoken")
    if wanted == "tiktoken":
        return exact, f"{exact_name}, as NANOLOADER_ENGINE says"
    if hash_pattern(enc) not in SCHEMES:
        return exact, f"{exact_name} (gigatoken does not know this split pattern)"
    if importlib.util.find_spec("gigatoken") is None:
        return exact, f"{exact_name} (pip install gigatoken makes it ten times as fast)"
    name = f"gigatoken {importlib.metadata.version('gigatoken')}"
    try:
        engine, pieces = GigatokenEngine(enc, bos), hard_texts(enc)
        (ids, bounds), (want, _) = engine.encode(pieces), exact.encode(pieces)
        if engine.failures:
            raise ValueError(engine.failures[0])
        if (at := first_difference(ids, want)) is not None:
            piece = pieces[np.searchsorted(bounds, at, "right") - 1]
            raise ValueError(f"it encodes {piece[:80].decode(errors='replace')!r} differently")
    except Exception as error:
        return exact, f"{exact_name} ({name} is not used: {error})"
    return engine, f"{name}, checked against tiktoken"


def first_difference(ids, want):
    n = min(len(ids), len(want))
    at = np.flatnonzero(ids[:n] != want[:n])
    if len(at):
        return int(at[0])
    return None if len(ids) == len(want) else n


# ---------------------------------------------------------------------------------------------------------
# Saved as two text files: the ranks in tiktoken's own format, the rest as JSON

LARGEST_VOCABULARY = 1 << 24
RANKS_FILE, JSON_FILE, FORMAT = "tokenizer.tiktoken", "nanoloader.json", "nanoloader tokenizer 1"


def build_encoding(pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding("nanoloader", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def format_ranks(ranks: dict[bytes, int]) -> bytes:
    """A token in base64, a space, its rank; one a line."""
    in_order = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in in_order)


def parse_ranks(text: bytes) -> dict[bytes, int]:
    lines = (line.split() for line in text.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def describe(pattern: str, special: dict[str, int], bos_token: str, ranks: bytes) -> dict:
    """All that decides the ids, as plain JSON; the ranks by their sha256."""
    return {"pattern": pattern, "special_tokens": special, "bos_token": bos_token,
            "ranks_sha256": hashlib.sha256(ranks).hexdigest()}


def hash_description(description: dict) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def hash_pattern(enc: tiktoken.Encoding) -> str:
    return hashlib.sha256(enc._pat_str.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------
# The tokenizer

DOCUMENTS_PER_TASK = 16    # of encode(list)
BYTES_PER_TASK = 1 << 22    # of encode_documents: several threads encode a chunk with more, where they may


class RustBPETokenizer:
    """
    nanochat's tokenizer: the same names, arguments and results, without its pickle.

    RustBPETokenizer(enc, bos_token) makes one of any tiktoken Encoding and the name of its BOS; `engine` says
    what encodes, `engine_failures` how many documents tiktoken had to encode in its place.
    Every text can be encoded, in time that grows as its length: a special token's name in it is plain text, a
    lone surrogate counts as U+FFFD. The ids are tiktoken's, except where 256 KiB (LONGEST_PIECE) have no
    safe cut: a run of 300,000 spaces or letters is encoded in pieces of 256 KiB.
    """

    def __init__(self, enc: tiktoken.Encoding, bos_token: str):
        self.enc, self.bos_token = enc, bos_token
        self.bos_token_id = self.encode_special(bos_token)
        self.dtype = np.dtype(np.uint16 if enc.n_vocab <= 1 << 16 else np.uint32)
        self.lock = threading.Lock()
        self.executor, self.executor_pid = None, None

    @classmethod
    def train_from_iterator(cls, text_iterator: Iterable[str], vocab_size: int) -> "RustBPETokenizer":
        """
        Learn `vocab_size` tokens: 256 bytes, merges and the special tokens, in the order of their ids.

        Text with too few pairs to merge gives a smaller vocabulary, and a warning that says how small.
        """
        smallest = 256 + len(SPECIAL_TOKENS)
        if not smallest <= vocab_size <= LARGEST_VOCABULARY:
            raise ValueError(f"{vocab_size:,} tokens: expected {smallest} (bytes and special "
                             f"tokens) to {LARGEST_VOCABULARY:,}, such as --vocab_size 32768")
        trained = rustbpe.Tokenizer()
        # rustbpe's regex engine fails on the runs that tiktoken's fails on.
        parts = (str(piece, "utf-8") for text in text_iterator if text is not None
                 for piece in to_pieces(to_bytes(text)))
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
        """What `save` wrote. A file that is missing, torn or changed is an error. Nothing is unpickled."""
        json_path, ranks_path = Path(tokenizer_dir, JSON_FILE), Path(tokenizer_dir, RANKS_FILE)
        remedy = f"train one on your data: python tokenizer.py --data DIR --out {shlex.quote(tokenizer_dir)}"
        if ranks_path.exists() and not json_path.exists():
            old_path = Path(tokenizer_dir, "tokenizer.json")    # its name in the first edition
            remedy = f"if {old_path} is ours, rename it; else {remedy}"
        try:
            saved = {**json.loads(json_path.read_bytes()), "ranks": ranks_path.read_bytes().decode()}
            if saved["format"] != FORMAT:
                raise ValueError(f"the format is {saved['format']!r}, expected {FORMAT!r}")
            return cls.from_dict(saved)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"no tokenizer here: {error.filename} does not exist; {remedy}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{json_path} or {ranks_path} is torn, changed or not ours "
                             f"({type(error).__name__}: {error}); {remedy}") from None

    @classmethod
    def from_pretrained(cls, tiktoken_name: str) -> "RustBPETokenizer":
        """One of tiktoken's own, such as "gpt2", which it may download; <|endoftext|> serves as BOS."""
        return cls(tiktoken.get_encoding(tiktoken_name), "<|endoftext|>")

    @classmethod
    def from_dict(cls, saved: dict) -> "RustBPETokenizer":
        """What as_dict returned, checked against its fingerprint."""
        pattern, special, bos_token = saved["pattern"], saved["special_tokens"], saved["bos_token"]
        ranks = saved["ranks"].encode()
        if hash_description(describe(pattern, special, bos_token, ranks)) != saved["fingerprint"]:
            raise ValueError("this tokenizer was changed: its fingerprint is not that of its contents")
        return cls(build_encoding(pattern, parse_ranks(ranks), special), bos_token)

    def as_dict(self) -> dict:
        """The whole tokenizer in text and numbers, to be kept in a checkpoint."""
        ranks = format_ranks(self.enc._mergeable_ranks).decode()
        return {**self.description, "fingerprint": self.fingerprint(), "ranks": ranks}

    def __reduce__(self):
        """Copies and pickles are made of as_dict; threads and engines are made anew."""
        return type(self).from_dict, (self.as_dict(),)

    def save(self, tokenizer_dir: str) -> None:
        os.makedirs(tokenizer_dir, exist_ok=True)
        saved = {"format": FORMAT, **self.as_dict()}
        write_whole(os.path.join(tokenizer_dir, RANKS_FILE), saved.pop("ranks").encode())
        write_whole(os.path.join(tokenizer_dir, JSON_FILE), (json.dumps(saved, indent=1) + "\n").encode())

    @functools.cached_property
    def description(self) -> dict:
        enc = self.enc
        return describe(enc._pat_str, enc._special_tokens, self.bos_token, format_ranks(enc._mergeable_ranks))

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

    def decode_single_token_bytes(self, id: int) -> bytes:
        return self.enc.decode_single_token_bytes(id)

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
            return [*before, *self._encode_texts([text])[0], *behind]
        if isinstance(text, list):
            return [[*before, *ids, *behind] for ids in self._encode_list(text, num_threads)]
        raise ValueError(f"cannot encode a {type(text).__name__}: expected a str or a list of str")

    __call__ = encode

    def _as_ids(self, token) -> list[int]:
        return [] if token is None else [self.encode_special(token) if isinstance(token, str) else token]

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        return [ids[1:].tolist() for ids in split(*self.encode_documents(texts))]

    def _encode_list(self, texts: list[str], num_threads: int) -> list[list[int]]:
        if self.executor_pid != os.getpid():    # threads do not survive a fork
            # It starts a thread only when none is idle, so no more than are asked for.
            self.executor, self.executor_pid = ThreadPoolExecutor(256, "tokenizer"), os.getpid()
        tasks = [texts[i:i + DOCUMENTS_PER_TASK] for i in range(0, len(texts), DOCUMENTS_PER_TASK)]
        results = share(self._encode_texts, tasks, self.executor, num_threads - 1)
        return [ids for result in results for ids in result]

    @functools.cached_property
    def _engine(self) -> tuple:
        with self.lock:
            return self.__dict__.get("_engine") or choose_engine(self.enc, self.bos_token_id)

    @property
    def engine(self) -> str:
        """What encodes, and why, such as "gigatoken 0.10.0, checked against tiktoken"."""
        return self._engine[1]

    @property
    def engine_failures(self) -> int:
        """Documents that gigatoken failed on and tiktoken encoded."""
        return len(getattr(self._engine[0], "failures", ()))

    def encode_documents(self, texts: Sequence | pa.Array, check: Iterable[int] = (),
                         executor: Executor | None = None) -> tuple[np.ndarray, np.ndarray]:
        """
        A chunk of documents -> (ids, bounds): document i is ids[bounds[i]:bounds[i + 1]].

        texts: each a str, or UTF-8 as bytes or memoryview; it gets a BOS in front. None has no tokens at all.
        check: documents that tiktoken encodes, too; a difference is a ValueError.
        executor: its idle threads help with a chunk of more than BYTES_PER_TASK; this may be one of them.
        ids: 1-D, self.dtype. bounds: int64, len(texts) + 1.
        """
        if isinstance(texts, pa.Array):
            texts = texts.cast(pa.large_binary()).to_pylist()
        documents = [text if type(text) is bytes else to_bytes(text) for text in texts if text is not None]
        sizes = [0, *map(len, documents)]
        try:
            if max(sizes) <= LONGEST_PIECE and sum(sizes) <= BYTES_PER_TASK:
                ids, bounds = self._engine[0].encode(documents)
            else:
                ids, bounds = self._encode_pieces(documents, executor)
        except UnicodeDecodeError:
            raise ValueError(find_what_is_no_text(texts)) from None
        if len(documents) < len(texts):
            bounds = with_nulls(bounds, [text is not None for text in texts])
        ids = ids.astype(self.dtype, copy=False)
        for i in check:
            self._check(i, texts, ids[bounds[i]:bounds[i + 1]])
        return ids, bounds

    def _encode_pieces(self, documents, executor):
        """Long documents as several pieces; tasks of about BYTES_PER_TASK for this thread and its helpers."""
        parts = [to_pieces(document) for document in documents]
        pieces = [piece for part in parts for piece in part]
        place = np.cumsum([0, *map(len, pieces)]) // BYTES_PER_TASK
        cuts = [0, *(np.flatnonzero(np.diff(place[:-1])) + 1), len(pieces)]
        tasks = [pieces[a:b] for a, b in itertools.pairwise(cuts)]
        results = share(self._engine[0].encode, tasks, executor, cores() - 1)
        ids, bounds = join([ids for result in results for ids in split(*result)])
        return drop_inner_bos(ids, bounds, np.cumsum([0, *map(len, parts)]))

    def _check(self, i, texts, ids):
        engine, text = self._engine[0], texts[i]
        if isinstance(engine, TiktokenEngine) or text is None:
            return
        pieces = to_pieces(to_bytes(text))
        want, bounds = engine.exact.encode(pieces)
        want, _ = drop_inner_bos(want, bounds, [0, len(pieces)])
        if (at := first_difference(ids, want)) is not None:
            raise ValueError(f"document {i} of {len(texts)} in this chunk, token {at}: {self.engine}, gives "
                             f"{ids[at:at + 1]}, tiktoken {want[at:at + 1]}; to go on without it: "
                             "NANOLOADER_ENGINE=tiktoken")


def share(work: Callable, tasks: Sequence, executor: Executor | None, n_helpers: int) -> list:
    """
    [work(task) for task in tasks], by this thread and up to `n_helpers` of the executor's.

    Waits for no helper that has not begun: threads of the executor that call this for each other do not hang.
    """
    results: list = [None] * len(tasks)
    queue = iter(enumerate(tasks))

    def take():
        for i, task in queue:
            results[i] = work(task)

    helpers = [executor.submit(take) for _ in tasks[1:n_helpers + 1]] if executor else []
    try:
        take()
    finally:
        list(queue)    # nothing is left for them where this thread failed
        running = [helper for helper in helpers if not helper.cancel()]
    for helper in running:
        helper.result()
    return results


def with_nulls(bounds: np.ndarray, valid: Sequence[bool]) -> np.ndarray:
    """Bounds of the documents that are valid -> of all; the others have no tokens."""
    lengths = np.zeros(len(valid), np.int64)
    lengths[np.array(valid, bool)] = np.diff(bounds)
    return np.concatenate([[0], np.cumsum(lengths)])


def drop_inner_bos(ids, bounds, begins):
    """Of pieces whose documents begin at the pieces `begins` (and the end): only those keep their BOS."""
    inner = np.ones(len(bounds), bool)
    inner[begins] = False
    inner = bounds[inner]
    outer = bounds[begins]
    return np.delete(ids, inner), outer - np.searchsorted(inner, outer)


def find_what_is_no_text(texts) -> str:
    for i, text in enumerate(texts):
        try:
            str(b"" if text is None else to_bytes(text), "utf-8")
        except UnicodeDecodeError as error:
            return (f"document {i} of {len(texts)} in this chunk is not UTF-8: {error.reason}, "
                    f"byte 0x{error.object[error.start]:02x}; re-encode it or take it out")
    raise AssertionError("every document is UTF-8")


# ---------------------------------------------------------------------------------------------------------
# Any tokenizer: ours, one of the same encode_documents(texts), or one of nanochat's encode(list)

WRAPPER = """a tokenizer needs get_bos_token_id() and an encode that prepends, as in
    class Wrapped:
        def get_bos_token_id(self):
            return BOS
        def encode(self, texts, prepend=None, num_threads=8):
            return [[prepend, *ids] for ids in YOURS.encode_batch(texts)]    # lists of ints"""


class AnyTokenizer:
    """
    What the loader calls: encode(Arrow array of texts) -> (ids, bounds), as encode_documents returns them.

    bos, dtype: of its ids. fingerprint: its own, or else a hash of what it makes of some texts.
    threads_of_its_own: one thread of a loader at a time calls it.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.dtype = tokenizer, np.dtype(getattr(tokenizer, "dtype", np.uint32))
        self.is_ours = isinstance(tokenizer, RustBPETokenizer)
        self.threads_of_its_own = not hasattr(tokenizer, "encode_documents")
        if not self.is_ours:
            self._prove()
        self.bos = int(tokenizer.get_bos_token_id())
        self.fingerprint = tokenizer.fingerprint() if hasattr(tokenizer, "fingerprint") else self._probe()

    @property
    def engine_failures(self) -> int:
        return getattr(self.tokenizer, "engine_failures", 0)

    def encode(self, array: pa.Array, check: Iterable[int] = (), executor: Executor | None = None,
               threads: int = 8) -> tuple[np.ndarray, np.ndarray]:
        """threads: of a tokenizer that has its own; else see encode_documents."""
        if self.is_ours:
            return self.tokenizer.encode_documents(array, check, executor)
        texts = array.cast(pa.large_binary()).to_pylist()
        if not self.threads_of_its_own:
            ids, bounds = self.tokenizer.encode_documents(texts)
            return self._as_dtype(ids), np.asarray(bounds, np.int64)
        strings = [str(text, "utf-8") for text in texts if text is not None]
        lists = self.tokenizer.encode(strings, prepend=self.tokenizer.get_bos_token_id(), num_threads=threads)
        ids, bounds = join([self._as_dtype(ids) for ids in lists], self.dtype)
        return ids, with_nulls(bounds, [text is not None for text in texts])

    def _as_dtype(self, given):
        given = np.asarray(given)
        ids = given.astype(self.dtype)
        if not np.array_equal(ids, given):    # they would wrap
            raise ValueError(f"its ids, {given.min()} to {given.max()}, are not all {self.dtype}, as its "
                             "`dtype` says (default uint32)")
        return ids

    def _prove(self):
        """That it has one of the faces, and puts BOS in front."""
        name = type(self.tokenizer).__name__
        try:
            bos = self.tokenizer.get_bos_token_id()
            ids, bounds = self.encode(pa.array(["a", None, "a"]))
            ids, bounds = ids.tolist(), bounds.tolist()
        except Exception as error:
            raise ValueError(f"{name} cannot be used ({type(error).__name__}: {error}); {WRAPPER}") from error
        half = len(ids) // 2
        if half < 2 or ids != 2 * [bos, *ids[1:half]] or bounds != [0, half, half, 2 * half]:
            raise ValueError(f"{name} makes the ids {ids} with the bounds {bounds} of ['a', None, 'a'], "
                             f"without BOS ({bos}) in front of each 'a' and no other; {WRAPPER}")

    def _probe(self) -> str:
        size = getattr(self.tokenizer, "get_vocab_size", lambda: None)()
        results = [None if size is None else int(size), self.bos]
        for text in probes():
            try:
                results.append(self.encode(pa.array([text]))[0].tolist())
            except Exception:    # letters of ASCII may be all that it knows
                results.append(None)
        return hashlib.sha256(json.dumps(results).encode()).hexdigest()


def as_encoder(tokenizer) -> AnyTokenizer:
    """What the loader calls, of any tokenizer; one that cannot be used is an error with a wrapper for it."""
    return tokenizer if isinstance(tokenizer, AnyTokenizer) else AnyTokenizer(tokenizer)


def probes() -> Iterator[str]:
    """A text each of 14 scripts: 24 characters, their numbers, and the names that Unicode never changes."""
    for first in (0x61, 0xC0, 0x3B1, 0x430, 0x5D0, 0x621, 0x905, 0x3042, 0x4E00, 0xAC00, 0x2200, 0x2600,
                  0x1F400, 0x1F600):
        codes = range(first, first + 24)
        yield "\n".join(f"    def f{code}(x):\treturn '{chr(code)}'   # {unicodedata.name(chr(code)).lower()}"
                        for code in codes) + "".join(map(chr, codes)) + "  \r\n\n"


# ---------------------------------------------------------------------------------------------------------
# What the other files call

def default_tokenizer_dir() -> str:
    return os.path.join(get_base_dir(), "tokenizer")


def get_tokenizer(tokenizer_dir: str | None = None) -> RustBPETokenizer:
    """The saved tokenizer; by default what `python tokenizer.py` saved, else the only one of train.py's."""
    if not tokenizer_dir and not is_saved(default_tokenizer_dir()):
        trained = sorted(filter(is_saved, glob.glob(glob.escape(default_tokenizer_dir()) + "-*")))
        if len(trained) > 1:
            raise ValueError(f"several tokenizers were trained; choose one: get_tokenizer({trained[0]!r}), "
                             + ", ".join(map(repr, trained[1:])))
        tokenizer_dir = trained[0] if trained else None
    return RustBPETokenizer.from_directory(tokenizer_dir or default_tokenizer_dir())


def is_saved(tokenizer_dir: str) -> bool:
    return os.path.exists(os.path.join(tokenizer_dir, JSON_FILE))


def find_tokenizer(tokenizer_dir: str | None, sources: Sequence[str],
                   vocab_size: int) -> tuple[RustBPETokenizer, str]:
    """
    (tokenizer, its folder): the one given; or what `python tokenizer.py` made, for data of your own; or one
    that is trained now, on the first 100 MB, and kept under a name that tells data and vocabulary size.
    """
    folder = tokenizer_dir or default_tokenizer_dir()
    first = os.path.basename(next(iter(sources)).rstrip("/"))
    if not tokenizer_dir and (first.startswith("builtin-") or not is_saved(folder)):
        digest = hashlib.sha256(json.dumps(sorted(map(name_and_shards, sources))).encode()).hexdigest()[:8]
        folder = f"{default_tokenizer_dir()}-{first}-{digest}-{vocab_size}"
        if not is_saved(folder):
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
        for text in itertools.chain.from_iterable(parquets_iter_batched("train", data_dir=path)):
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

    if isinstance(tokenizer, (str, torch.device)):    # nanochat calls get_token_bytes(device)
        tokenizer, device = None, tokenizer
    enc = (tokenizer or get_tokenizer()).enc
    n_bytes = np.zeros(enc.n_vocab, np.int32)
    for token, id in enc._mergeable_ranks.items():
        n_bytes[id] = len(token)
    return torch.from_numpy(n_bytes).to(device)


# ---------------------------------------------------------------------------------------------------------
# python tokenizer.py

def documents_with_progress(batches: Iterable[list[str]], max_chars: int) -> Iterator[str]:
    n_documents, n_chars, began, printed = 0, 0, time.time(), time.time()
    for text in itertools.chain.from_iterable(batches):
        n_documents, n_chars = n_documents + 1, n_chars + len(text)
        yield text
        if n_chars >= max_chars:
            break
        if time.time() - printed > 1:
            printed = time.time()
            print(f"{n_documents:>10,} documents {n_chars / 1e6:>9,.1f} M characters "
                  f"{printed - began:>6.1f} s", flush=True)
    print(f"read {n_documents:,} documents, {n_chars / 1e6:,.1f} M characters, in "
          f"{time.time() - began:.1f} s; merging", flush=True)


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
    parser.add_argument("--vocab_size", type=int, default=32768, help="tokens, the special ones included")
    parser.add_argument("--data", help="folder or URI of parquet shards (default: the data at hand)")
    parser.add_argument("--out", help="folder to save it in (default: where get_tokenizer looks)")
    parser.add_argument("--max_chars", type=int, default=2 * 10**9, help="train on at most so much text")
    flags = parser.parse_args()
    with errors_in_one_line():
        train_and_save(flags)


def train_and_save(flags):
    began, data_dir, out = time.time(), find_data(flags.data), flags.out or default_tokenizer_dir()
    if is_saved(out):
        old = shlex.quote(out.rstrip("/"))
        raise ValueError(f"{out} holds a tokenizer that checkpoints and token shards may need; name another "
                         f"folder with --out, or move this one: mv {old} {old}.old")
    documents = documents_with_progress(parquets_iter_batched("train", data_dir=data_dir), flags.max_chars)
    tokenizer = RustBPETokenizer.train_from_iterator(documents, flags.vocab_size)
    tokenizer.save(out)
    ratio = bytes_per_token(tokenizer, parquets_iter_batched("val", data_dir=data_dir), 10**7)
    print(f"trained {tokenizer.get_vocab_size():,} tokens in {time.time() - began:.1f} s")
    print(f"{ratio:.2f} bytes per token on val documents\nsaved to {out}\nengine: {tokenizer.engine}")


if __name__ == "__main__":
    main()
