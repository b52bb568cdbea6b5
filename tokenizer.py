"""
Text to token ids and back: a byte-pair tokenizer, trained by rustbpe and run by tiktoken or, where it is
installed, by gigatoken, which gives the same ids about ten times as fast (pip install gigatoken).

    python tokenizer.py --vocab_size 32768    # train on the default data, save, print bytes per token

Without --out it is saved where train.py and dev/ look for the tokenizer of this data and vocabulary size.
The loader also takes your own tokenizer: any object with get_bos_token_id() and either
encode_documents(texts) -> (ids, bounds) or nanochat's encode(texts, prepend=BOS, num_threads=N) -> lists.

The trade-off: with GPT-4's split pattern, gigatoken encodes 72 M tokens per CPU second; nanochat's pattern
(--pattern nanochat) needs tiktoken, 4 M. Both give 4.3 bytes per token (32,768 tokens, built-in corpus).
"""

import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import random
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import regex
import rustbpe
import tiktoken
from tqdm import tqdm

import dataset
from dataset import find_data, get_base_dir, list_shards, locked, parquets_iter_batched, write_atomic

# nanochat's special tokens; their ids follow those of the merges. All but the first are for chat.
SPECIAL_TOKENS = ["<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>",
                  "<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"]

# How text is split before bytes are merged. gpt4: cl100k_base's, as written in tiktoken
PATTERNS = {
    "gpt4": (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
             r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"),
    "nanochat": (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
                 r"|\s*[\r\n]|\s+(?!\S)|\s+")}

# ---------------------------------------------------------------------------------------------------------
# Engines: tiktoken, the reference, and gigatoken

def encode_text(enc: tiktoken.Encoding, text: str) -> np.ndarray:
    """tiktoken's ids of any text without lone surrogates."""
    try:
        return enc.encode_to_numpy(text, disallowed_special=())
    except ValueError:    # a million spaces overflow its regex engine's stack, but not this one's
        words = regex.finditer(enc._pat_str, text)
        return np.array([id for word in words for id in enc._encode_single_piece(word[0])], np.uint32)

def replace_surrogates(text: str) -> str:
    """A lone surrogate counts as U+FFFD, as in tiktoken's encode_ordinary."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

# gigatoken's names of the split patterns of tiktoken's gpt2, cl100k_base and o200k_base, by their sha256
SCHEMES = {"bf51d578af571878": "gpt2", "f021c3d976978e62": "gpt4", "2d1b8dc11e89af71": "o200k"}

# All characters that tiktoken 0.14 (Unicode 16) and gigatoken 0.10 (Unicode 17) may classify differently,
# and their first UTF-8 bytes: a search for these runs at 7 GB/s, the regex at 0.8 GB/s.
NEWER_CHARACTERS = (
    "[\u0295\u088f\u0c5c\u0cdc\u1acf-\u1aeb\ua7ce-\ua7d4\ua7f1\U00010940-\U00010959\U00010ec5-\U00010efb"
    "\U00011b60-\U00011b67\U00011db0-\U00011de9\U00016ea0-\U00016ed3\U00016ff2-\U00016ff6"
    "\U000187f8-\U000187ff\U00018d09-\U00018df2\U0001e6c0-\U0001e6ff\U0002b73a-\U0002b73f"
    "\U0002cea2-\U0002cead\U000323b0-\U00033479]")
NEWER_BYTES = b"\xca\xe0\xe1\xea\xf0"

def has_newer_characters(texts: list[bytes]) -> bool:
    suspects = [text for text in texts if not text.isascii() and any(b in text for b in NEWER_BYTES)]
    found = pc.match_substring_regex(pa.array(suspects, pa.large_string()), NEWER_CHARACTERS)
    return bool(pc.any(found).as_py())

# Separates documents; gigatoken encodes it as BOS. One call per chunk: 0.7 of the time of its batches.
SEPARATOR = "\x02\x1cdocument\x1c\x03"

# gigatoken remembers every word: 0.13 GB after 440 MB of code, 2 GB after 270 MB of random letters.
FORGET_AFTER = 1 << 29    # bytes of text

class Engine:
    """
    tiktoken, or with a scheme gigatoken: the same ids about ten times as fast. A tiktoken serves one thread:
    others take 1.3 times the CPU (its regex caches lock; 2 cores, 2026-11). A gigatoken runs one at a time.
    """
    def __init__(self, enc: tiktoken.Encoding, bos: int, scheme: str | None):
        self.enc = build_encoding(enc._pat_str, enc._mergeable_ranks, enc._special_tokens)
        self.bos, self.scheme, self.model, self.n_bytes = bos, scheme, None, 0

    def encode(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """(ids, bounds) as encode_documents returns them."""
        if self.scheme and texts and not has_newer_characters(texts):
            ids = self._call_gigatoken(SEPARATOR.encode().join([b"", *texts]))
            begins = np.flatnonzero(ids == self.bos)
            if len(begins) == len(texts):    # else one contains SEPARATOR
                return ids, np.append(begins, len(ids))
        if len(texts) == 1:
            ids = np.append(np.uint32(self.bos), encode_text(self.enc, texts[0].decode()))
            return ids, np.array([0, len(ids)])
        arrays = [self.encode([text])[0] for text in texts]    # one by one: few of them need tiktoken
        return np.concatenate([np.zeros(0, np.uint32), *arrays]), np.cumsum([0, *map(len, arrays)])

    def _call_gigatoken(self, data):
        import gigatoken
        if self.model is None or self.n_bytes > FORGET_AFTER:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "ranks.tiktoken")
                path.write_bytes(format_ranks(self.enc._mergeable_ranks))
                self.model = gigatoken.Tokenizer.from_tiktoken(path, self.scheme, {SEPARATOR: self.bos})
            self.n_bytes = 0
        self.n_bytes += len(data)
        # Only its batch calls release the GIL. parallel=True would start threads, which a fork loses.
        return self.model.encode_batch_padded(gigatoken.BytesSource(data), 0, parallel=False)[0][0]

HARD = [*"aZs'\u017f \t\n\r.,/-_!\0\x1c\x85\xa0\u2003\u2028\u3000\ufeff1\xe9\u0430\u05d0\u0e31\u1eeb\u01c5",
        *"\u02b0\u6f22\u3042\u30fc\uac00\ufe0f\ufffd\xb2\xbd\u0664\u0967\u3007\uff11\u2167\u0378",
        "\U00020000", "\U0001f600", "\U0001d7d8", "\U0001f468\u200d\U0001f469", "e\u0301", "\u0915\u094d",
        "'s", "'RE", "ll", "  ", "\r\n", "12", "345"]

def hard_texts(enc: tiktoken.Encoding) -> list[str]:
    """What an engine may get wrong: hard characters next to each other, runs of them, and every token."""
    draw = random.Random(0)
    texts = ["".join(draw.choices(HARD, k=20)) for _ in range(1000)]
    texts += [character * n for character in HARD for n in (7, 100)]
    tokens = [token.decode(errors="ignore") for token in enc._mergeable_ranks]
    return texts + ["\n".join(tokens[i:i + 8]) for i in range(0, len(tokens), 8)]

def choose_engine(enc: tiktoken.Encoding, bos: int) -> tuple[str | None, str]:
    """The scheme, or None for tiktoken; the engine's name, and why it was chosen."""
    wanted = os.environ.get("NANOLOADER_ENGINE", "gigatoken")
    scheme = SCHEMES.get(hashlib.sha256(enc._pat_str.encode()).hexdigest()[:16])
    if wanted == "tiktoken":
        reason = "as NANOLOADER_ENGINE says"
    elif wanted != "gigatoken":
        raise ValueError(f"NANOLOADER_ENGINE={wanted}: expected tiktoken or gigatoken")
    elif not scheme:
        reason = "gigatoken does not know this split pattern"
    elif importlib.util.find_spec("gigatoken") is None:
        reason = "pip install gigatoken makes it ten times as fast"
    elif error := compare_engines(enc, bos, scheme):
        reason = f"gigatoken is not used: {error}"
    else:
        return scheme, f"gigatoken {importlib.metadata.version('gigatoken')}, checked against tiktoken"
    return None, f"tiktoken {tiktoken.__version__} ({reason})"

def compare_engines(enc, bos, scheme):
    """None, or gigatoken's error, or a few hard texts among which it encodes one differently."""
    texts, engine, exact = hard_texts(enc), Engine(enc, bos, scheme), Engine(enc, bos, None)
    try:
        for i in range(0, len(texts), 50):    # few at once: those with a newer character go one by one
            documents = [text.encode() for text in texts[i:i + 50]]
            if not all(map(np.array_equal, engine.encode(documents), exact.encode(documents))):
                return f"it encodes one of {texts[i:i + 50]!r:.200}... differently"
    except KeyboardInterrupt:
        raise
    except BaseException as error:    # a panic in Rust is not an Exception
        return f"{type(error).__name__}: {error}"

# ---------------------------------------------------------------------------------------------------------
# The tokenizer, saved as two text files: the ranks in tiktoken's own format, the rest as JSON

LARGEST_VOCABULARY = 1 << 24
RANKS_FILE, JSON_FILE = "tokenizer.tiktoken", "nanoloader.json"

def build_encoding(pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> tiktoken.Encoding:
    """An Encoding, after checks of what tiktoken would panic at, or accept and encode wrongly."""
    ids = [*ranks.values(), *set(special.values())]    # o200k_harmony has two names for one special token
    if len(set(ids)) < len(ids) or any(type(id) is not int or not 0 <= id < LARGEST_VOCABULARY for id in ids):
        raise ValueError(f"the ids are not different integers from 0 to {LARGEST_VOCABULARY - 1:,}")
    if missing := {bytes([i]) for i in range(256)} - ranks.keys():
        raise ValueError(f"the byte {min(missing)} is not a token, so not every text can be encoded")
    return tiktoken.Encoding("nanoloader", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

def format_ranks(ranks: dict[bytes, int]) -> bytes:
    """A token in base64, a space, its rank; one per line."""
    in_order = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in in_order)

class RustBPETokenizer:
    """
    nanochat's tokenizer: the same names, arguments and results, without its pickle.

    RustBPETokenizer(enc, bos_token) takes any tiktoken Encoding and the name of its BOS. Every text can be
    encoded. The ids are tiktoken's; the name of a special token in a text is plain text.
    """
    def __init__(self, enc: tiktoken.Encoding, bos_token: str):
        if bos_token not in enc._special_tokens:
            raise ValueError(f"BOS is {bos_token!r}; the special tokens are {sorted(enc._special_tokens)}")
        self.enc, self.bos_token, self.bos_token_id = enc, bos_token, enc._special_tokens[bos_token]
        self.dtype = np.dtype(np.uint16 if enc.n_vocab <= 1 << 16 else np.uint32)
        self.idle: list[Engine] = []      # gigatoken's: they remember words, so any thread reuses them
        self.local = threading.local()    # tiktoken's: see Engine

    @classmethod
    def train_from_iterator(cls, text_iterator: Iterable[str], vocab_size: int,
                            pattern: str = PATTERNS["gpt4"]) -> "RustBPETokenizer":
        """
        Learn `vocab_size` tokens: 256 bytes, merges and the special tokens, in the order of their ids. Text
        with too few pairs to merge gives a smaller vocabulary, and a warning with its size.
        """
        if vocab_size < (smallest := 256 + len(SPECIAL_TOKENS)):
            raise ValueError(f"{vocab_size:,} tokens: expected {smallest} or more")
        trained, longest = rustbpe.Tokenizer(), 1 << 17    # its regex engine has tiktoken's limit
        texts = (replace_surrogates(text) for text in text_iterator if text)
        pieces = (text[i:i + longest] for text in texts for i in range(0, len(text), longest))
        trained.train_from_iterator(pieces, vocab_size - len(SPECIAL_TOKENS), pattern=pattern)
        ranks = {bytes(token): rank for token, rank in trained.get_mergeable_ranks()}
        special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        if (size := len(ranks) + len(special)) < vocab_size:
            print(f"warning: {size} tokens, not {vocab_size}: the text has no more pairs", file=sys.stderr)
        return cls(build_encoding(pattern, ranks, special), SPECIAL_TOKENS[0])

    @classmethod
    def from_directory(cls, tokenizer_dir: str) -> "RustBPETokenizer":
        """What `save` wrote. A file that is missing, truncated or changed is an error."""
        try:
            ranks = Path(tokenizer_dir, RANKS_FILE).read_bytes().decode()
            return cls.from_dict({**json.loads(Path(tokenizer_dir, JSON_FILE).read_bytes()), "ranks": ranks})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{tokenizer_dir} holds no tokenizer of ours, or a damaged one "
                             f"({type(error).__name__}: {error}); copy it again, train one: "
                             "python tokenizer.py --out DIR, or convert a tokenizer.json: "
                             "python -m dev.prepare import_tokenizer; tiktoken's: see README") from None

    @classmethod
    def from_pretrained(cls, tiktoken_name: str) -> "RustBPETokenizer":
        """One of tiktoken's own, such as "gpt2", which it may download; <|endoftext|> serves as BOS."""
        return cls(tiktoken.get_encoding(tiktoken_name), "<|endoftext|>")

    @classmethod
    def from_dict(cls, saved: dict) -> "RustBPETokenizer":
        """What as_dict returned, checked against its fingerprint."""
        lines = (line.split() for line in saved["ranks"].splitlines())
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        tokenizer = cls(build_encoding(saved["pattern"], ranks, saved["special_tokens"]), saved["bos_token"])
        if tokenizer.fingerprint() != saved["fingerprint"]:
            raise ValueError("it was changed: its fingerprint is not that of its contents")
        return tokenizer

    def as_dict(self) -> dict:
        """The whole tokenizer in text and numbers, to be kept in a checkpoint."""
        ranks = format_ranks(self.enc._mergeable_ranks)
        parts = {"pattern": self.enc._pat_str, "special_tokens": self.enc._special_tokens,
                 "bos_token": self.bos_token, "ranks_sha256": hashlib.sha256(ranks).hexdigest()}
        fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return {**parts, "fingerprint": fingerprint, "ranks": ranks.decode()}

    def __reduce__(self):
        """Copies and pickles hold as_dict; engines are made again."""
        return type(self).from_dict, (self.as_dict(),)

    def save(self, tokenizer_dir: str) -> None:
        os.makedirs(tokenizer_dir, exist_ok=True)
        saved = self.as_dict()
        write_atomic(os.path.join(tokenizer_dir, RANKS_FILE), saved.pop("ranks").encode())
        write_atomic(os.path.join(tokenizer_dir, JSON_FILE), (json.dumps(saved, indent=1) + "\n").encode())

    def fingerprint(self) -> str:
        """Hex sha256 of ranks, pattern and special tokens: tokenizers that share it give the same ids."""
        return self.as_dict()["fingerprint"]

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
        return self.enc.encode_single_token(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.enc.decode(ids)

    def encode(self, text, prepend=None, append=None, num_threads: int = 8):
        """
        A str -> the list of its ids; texts -> a list of such lists, by `num_threads` threads.
        prepend, append: None or a special token, by name or id, to put before or after each text.
        """
        def encode_one(text):
            return [*before, *encode_text(self.enc, replace_surrogates(text)).tolist(), *after]

        before, after = self._as_ids(prepend), self._as_ids(append)
        if isinstance(text, str):
            return encode_one(text)
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(encode_one, text))

    __call__ = encode

    def _as_ids(self, token) -> list[int]:
        return [] if token is None else [self.encode_special(token) if isinstance(token, str) else token]

    @functools.cached_property
    def _engine(self) -> tuple[str | None, str]:
        return choose_engine(self.enc, self.bos_token_id)

    @property
    def engine(self) -> str:
        """What encodes documents, and why, such as "gigatoken 0.10.0, checked against tiktoken"."""
        return self._engine[1]

    def encode_documents(self, texts: Sequence[str | None] | pa.Array,
                         check: Iterable[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """
        (ids, bounds): document i is ids[bounds[i]:bounds[i + 1]], BOS first; None has no tokens. Thread-safe.
        check: documents to encode also with tiktoken; a difference is a ValueError.
        ids: 1-D, self.dtype. bounds: int64, len(texts) + 1.
        """
        if isinstance(texts, pa.Array):
            documents = texts.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
        else:
            documents = [None if text is None else replace_surrogates(text).encode() for text in texts]
        scheme = self._engine[0]
        idle = self.idle if scheme else vars(self.local).setdefault("idle", [])
        try:
            engine = idle.pop()
        except IndexError:
            engine = Engine(self.enc, self.bos_token_id, scheme)
        ids, bounds = engine.encode([text for text in documents if text is not None])
        idle.append(engine)    # not reached by an engine that has failed
        bounds = bounds[np.cumsum([0, *(text is not None for text in documents)])]    # None has no tokens
        ids = ids.astype(self.dtype)
        for i in check:
            want = [] if documents[i] is None else encode_text(self.enc, documents[i].decode())
            if not np.array_equal(ids[bounds[i]:bounds[i + 1]][1:], want):
                raise ValueError(f"document {i} of {len(documents)}: {self.engine}: its ids differ from "
                                 "tiktoken's; resume with NANOLOADER_ENGINE=tiktoken")
        return ids, bounds

    def render_conversation(self, conversation: dict, max_tokens: int | None = None) -> tuple[list, list]:
        """nanochat's: {"messages": [...]} -> (ids, mask); mask: 1 for tokens with a loss, else 0."""
        ids = encode_conversations(self, [json.dumps(conversation["messages"])])[0][:max_tokens]
        return np.maximum(ids, ~ids).tolist(), (ids >= 0).astype(int).tolist()

# ---------------------------------------------------------------------------------------------------------
# Any tokenizer: ours, one with the same encode_documents(texts), or one with nanochat's encode(list)

PROBE = 10 * ("It's 3 o'clock: THE QUICK brown Fox jumps over-the-lazy dog\n  if x[0]:\r\n\treturn -x[0]\n"
              "\xc9l\xe8ve \u043c\u0438\u0440 \u6f22\u5b57 \U0001f600")

class AnyTokenizer:
    """
    What the loader calls: encode(Arrow array of texts) -> (ids, bounds), as encode_documents returns them.

    bos, dtype: of its ids. fingerprint: its own, or else a hash of its ids for PROBE.
    is_multithreaded: whether it starts threads itself; then one thread of a loader at a time calls it.
    """
    def __init__(self, tokenizer):
        self.tokenizer, self.dtype = tokenizer, np.dtype(getattr(tokenizer, "dtype", np.uint32))
        self.is_ours = isinstance(tokenizer, RustBPETokenizer)
        self.is_multithreaded = not hasattr(tokenizer, "encode_documents")
        try:
            self.bos = tokenizer.get_bos_token_id()
            self.size = int(getattr(tokenizer, "get_vocab_size", lambda: 1 << 32)())
            reason = self._find_fault()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason:
            raise ValueError(f"{type(tokenizer).__name__} cannot be used: {reason}; it needs "
                             "get_bos_token_id() and encode(texts, prepend, num_threads), as README shows")
        self.bos = int(self.bos)
        if hasattr(tokenizer, "fingerprint"):
            self.fingerprint = tokenizer.fingerprint()

    def encode(self, array: pa.Array, check: Iterable[int] = (), threads: int = 8):
        """check: see encode_documents. threads: for a tokenizer that starts its own."""
        if self.is_ours:
            return self.tokenizer.encode_documents(array, check)
        texts = array.to_pylist()
        if not self.is_multithreaded:
            ids, bounds = self.tokenizer.encode_documents(texts)
            return self._as_dtype(ids), np.asarray(bounds)
        strings = [text for text in texts if text is not None]
        lists = self.tokenizer.encode(strings, prepend=self.bos, num_threads=threads)
        arrays = [self._as_dtype(ids) for ids in lists]
        bounds = np.cumsum([0, *map(len, arrays)])[np.cumsum([0, *(text is not None for text in texts)])]
        return np.concatenate([np.zeros(0, self.dtype), *arrays]), bounds

    def _as_dtype(self, ids):
        """ValueError if ids would wrap or be rounded. Of a signed dtype, ~t is token t without a loss."""
        ids = np.asarray(ids)
        largest = min(np.iinfo(self.dtype).max, self.size - 1)
        least = ~largest if self.dtype.kind == "i" else 0
        if len(ids) and (ids.dtype.kind not in "iu" or ids.min() < least or ids.max() > largest):
            raise ValueError(f"its ids are {ids.dtype}, {ids.min()} to {ids.max()}; expected integers from "
                             f"{least} to {largest}, by its `dtype` (default uint32) and get_vocab_size()")
        return ids.astype(self.dtype, copy=False)

    def _find_fault(self):
        """None, or why it cannot be used; in one call on texts of 1, 1,000 and 100,000 characters."""
        if self.bos is None:
            return "get_bos_token_id() returned None: does the tokenizer know this BOS?"
        ids, bounds = self.encode(pa.array(["a", None, PROBE, 100 * PROBE]))
        if bounds.dtype.kind not in "iu" or len(bounds) != 5 or bounds[0] or bounds[-1] != len(ids):
            return f"for 4 texts it returned bounds {bounds}; expected 5 integers from 0 to {len(ids)}"
        small, null, middle, large = np.diff(bounds).tolist()
        if null or (ids[bounds[[0, 2, 3]]] != self.bos).any() or np.count_nonzero(ids == self.bos) != 3:
            return f"not every text begins with BOS ({self.bos}) and has no other, or None has tokens"
        if small > 16 or large < 90 * middle:
            return (f"texts of 1, 1,000 and 100,000 characters have {small}, {middle} and {large} tokens: "
                    "turn padding and truncation off (Hugging Face: no_padding(), no_truncation())")
        seen = [self.size, int(self.bos), ids[:bounds[3]].tolist(), bounds.tolist()]
        self.fingerprint = hashlib.sha256(json.dumps(seen).encode()).hexdigest()

def as_encoder(tokenizer) -> AnyTokenizer:
    """Adapt any tokenizer to the loader; ValueError, with a pointer to a wrapper, if it is unusable."""
    return tokenizer if isinstance(tokenizer, AnyTokenizer) else AnyTokenizer(tokenizer)

# ---------------------------------------------------------------------------------------------------------
# Chats: lists of messages, [{"role": "user", "content": "Hi"}, ...]

# What stands around a part of an answer, by its type
TEXT = {"text": ("", "")}
TOOLS = TEXT | {"python": ("<|python_start|>", "<|python_end|>"),
                "python_output": ("<|output_start|>", "<|output_end|>")}
# By the special token that tells them: what opens a message, closes it, and follows it; {} is its role
TEMPLATES = {
    "<|user_start|>": ("<|{}_start|>", "<|{}_end|>", "", TOOLS),                               # nanochat's
    "<|im_start|>": ("<|im_start|>{}\n", "<|im_end|>", "\n", TEXT),                            # ChatML
    "<|eot_id|>": ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", "", TEXT)}      # Llama 3's

def render(messages: list[dict], template: tuple, mark: Callable) -> list[tuple]:
    """
    [(text, or mark(special tokens), whether it has a loss), ...]: what an assistant writes has a loss, what
    python answered has none. ValueError if roles are out of order, or content is of another type.
    """
    (opening, closing, after, kinds), pieces, roles = template, [], itertools.cycle(["user", "assistant"])
    try:
        if messages[0]["role"] == "system" and kinds is TOOLS:    # nanochat's user says what the system does
            text = messages[0]["content"] + "\n\n" + messages[1]["content"]
            messages = [{**messages[1], "content": text}, *messages[2:]]
        for i, message in enumerate(messages):
            role, parts = message["role"], message["content"]
            if role != (expected := "system" if role == "system" and i == 0 else next(roles)):
                raise ValueError(f"expected a message of role {expected!r}, saw {message!r:.100}")
            is_answer = role == "assistant"
            if not is_answer or isinstance(parts, str):
                parts = [{"type": "text", "text": parts}]
            pieces.append((mark(opening.format(role)), False))
            for part in parts:
                has_loss, (begin, end) = is_answer and part["type"] != "python_output", kinds[part["type"]]
                pieces += [(mark(begin), has_loss), (part["text"] + "", has_loss), (mark(end), has_loss)]
            pieces += [(mark(closing.format(role)), is_answer), (mark(after), False)]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError("expected messages as {'role': 'user', 'content': 'Hi'}, and an assistant's content "
                         f"also as parts of type {', '.join(kinds)}; saw {messages!r:.200}") from error
    return pieces

def encode_conversations(tokenizer, lines: Sequence[str | None], check_every: int = 1000):
    """
    (ids, bounds) of messages as JSON, as encode_documents returns them, but ids are int32, and ~t is a token
    t without a loss. One call encodes all texts. A tokenizer that is not ours renders them itself.
    """
    its_own = getattr(type(tokenizer), "render_conversation", None)
    is_ours = its_own is RustBPETokenizer.render_conversation
    known = [name for name in TEMPLATES if is_ours and name in tokenizer.get_special_tokens()]
    if not (known if is_ours else its_own):
        raise ValueError("this tokenizer cannot render chats: it lacks nanochat's, ChatML's and Llama 3's "
                         "special tokens, or render_conversation(conversation, max_tokens) -> (ids, mask)")
    mark = functools.cache(lambda text: np.array(tokenizer.enc.encode(text, allowed_special="all"), "i4"))
    pieces, ends = [], [0]
    for i, line in enumerate(lines):
        try:
            if line is not None and is_ours:
                pieces.append((mark(tokenizer.bos_token), False))
                pieces += render(json.loads(line), TEMPLATES[known[0]], mark)
            elif line is not None:
                ids, mask = tokenizer.render_conversation({"messages": json.loads(line)}, 1 << 31)
                pieces.append((np.where(mask, ids, ~np.array(ids)).astype(np.int32), True))
        except Exception as error:
            raise ValueError(f"conversation {i} of {len(lines)}: {error!r}") from error
        ends.append(len(pieces))
    texts = [piece for piece, _ in pieces if isinstance(piece, str)]
    ids, bounds = tokenizer.encode_documents(texts, range(0, len(texts), check_every)) if texts else ([], [0])
    ids = np.asarray(ids, np.int32)
    encoded = (ids[a + 1:b] for a, b in itertools.pairwise(bounds))    # without BOS
    arrays = [next(encoded) if isinstance(piece, str) else piece for piece, _ in pieces]
    lengths = list(map(len, arrays))
    ids, losses = np.frombuffer(b"".join(arrays), np.int32), [has_loss for _, has_loss in pieces]
    return np.where(np.repeat(losses, lengths), ids, ~ids), np.cumsum([0, *lengths])[ends]

# ---------------------------------------------------------------------------------------------------------
# What the other files call

get_tokenizer = RustBPETokenizer.from_directory    # nanochat's name

def is_saved(tokenizer_dir: str) -> bool:
    return os.path.exists(os.path.join(tokenizer_dir, JSON_FILE))

def find_tokenizer(tokenizer_dir: str | None, sources: Sequence[str], vocab_size: int):
    """
    (tokenizer, its folder), by the rule of all tools: the one given; else the one trained on this data with
    this vocabulary size; else that one is trained now, on the first 100 M characters.
    """
    if tokenizer_dir:
        return RustBPETokenizer.from_directory(tokenizer_dir), tokenizer_dir
    folder = trained_dir(sources, vocab_size)
    with locked(folder):    # one process of a node trains, the others wait for it
        if not is_saved(folder):
            print(f"training a tokenizer of {vocab_size:,} tokens, once: {folder}", flush=True)
            RustBPETokenizer.train_from_iterator(some_text(sources, 10**8), vocab_size).save(folder)
    return RustBPETokenizer.from_directory(folder), folder

def maker_of(shard: dataset.Shard) -> str:
    """For messages: the folder of the tokenizer of a token shard, as tokenize recorded it, or found again."""
    extra = dataset.read_footer(shard)[0].metadata
    recorded = extra.get(b"nanoloader.tokenizer_dir", b"FOLDER").decode()
    for folder in (recorded, *map(str, Path(get_base_dir()).glob("tokenizer*"))):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if json.loads(Path(folder, JSON_FILE).read_bytes())["fingerprint"] == shard.fingerprint:
                return folder
    return f"{recorded} (not found here)"

def trained_dir(sources: Sequence[str], vocab_size: int) -> str:
    """Where the tokenizer of these sources is kept: named after them, their shards' digest, and its size."""
    entries = []
    for source in sources:
        shards = list_shards(source, "train")
        if shards[0].kind == "tokens":
            raise ValueError(f"{source} holds tokens, and a tokenizer is trained on text: pass the text they "
                             f"were made from (--data), or what made them: --tokenizer {maker_of(shards[0])}")
        name = os.path.basename(source.partition("?")[0].removesuffix("/index.json").rstrip("/"))
        entries.append([name, [[shard.name, shard.text_bytes] for shard in shards]])
    entries.sort()
    names = re.sub(r"[^\w.+-]", "_", "+".join(name for name, _ in entries))[:100]
    digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:8]
    return os.path.join(get_base_dir(), f"tokenizer-{names}-{digest}-{vocab_size}")

def some_text(sources: Sequence[str], limit: int, split: str = "train") -> Iterator[str]:
    """The first documents of each source, `limit` characters in all."""
    for source in sources:
        left, is_chats = limit / len(sources), list_shards(source, split)[0].kind == "messages"
        for text in itertools.chain.from_iterable(parquets_iter_batched(split, data_dir=source)):
            if left <= 0:
                break
            if is_chats:
                pieces = render(json.loads(text), TEMPLATES["<|user_start|>"], len)
                text = "\n".join(piece for piece, _ in pieces if isinstance(piece, str))
            left -= len(text)
            yield text

def get_token_bytes(tokenizer: RustBPETokenizer, device="cpu"):
    """The bytes of text of each token, int32 (vocab,), 0 for special tokens: for bits per byte."""
    import torch
    n_bytes = np.zeros(tokenizer.get_vocab_size(), np.int32)
    for token, id in tokenizer.enc._mergeable_ranks.items():
        n_bytes[id] = len(token)    # not decoded: half a character would be U+FFFD, which has three
    return torch.from_numpy(n_bytes).to(device)

# ---------------------------------------------------------------------------------------------------------
# python tokenizer.py

def main(argv: list[str] | None = None) -> None:
    parser = dataset.Parser(description="Train a tokenizer on the train split and save it.")
    parser.add_argument("--vocab_size", type=int, default=32768, help="tokens, the special ones included")
    parser.add_argument("--data", nargs="+", action="extend", metavar="DIR",
                        help="folder or URI of shards, or those of a mixture (default: as in train.py)")
    parser.add_argument("--out", help="folder to save it in (default: where train.py and dev/ look for it)")
    parser.add_argument("--pattern", choices=PATTERNS, default="gpt4", help="what splits text (default gpt4)")
    parser.add_argument("--max_chars", type=int, default=2 * 10**9, help="characters to train on, at most")
    flags = parser.parse_args(argv)
    with dataset.errors_in_one_line():
        data = flags.data or [find_data()]
        default = trained_dir(data, flags.vocab_size)    # also refuses token shards
        out = flags.out or default
        if is_saved(out):
            raise ValueError(f"{out} holds a tokenizer that checkpoints and token shards may need; "
                             "pass another folder with --out, or move this one away")
        texts = tqdm(some_text(data, flags.max_chars), "read", unit=" documents", delay=1)
        tokenizer = RustBPETokenizer.train_from_iterator(texts, flags.vocab_size, PATTERNS[flags.pattern])
        tokenizer.save(out)
        val = list(some_text(data, 10**7, "val"))
        n_tokens = len(tokenizer.encode_documents(val)[0]) - len(val)    # without BOS
        ratio = sum(len(text.encode()) for text in val) / max(1, n_tokens)
        print(f"trained {tokenizer.get_vocab_size():,} tokens, {ratio:.2f} bytes per token on val documents\n"
              f"engine: {tokenizer.engine}\nsaved to {out}")

if __name__ == "__main__":
    main()
