"""The tokenizer: tiktoken's ids from both engines, every text, any tokenizer, its files, the default one."""

import importlib.util
import itertools
import json
import os
import pickle
import random
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import rustbpe
import tiktoken
from tiktoken_ext import openai_public

import tokenizer as module
from test_dataloader import ByteTokenizer, make, rows_of, tokenized, write_shards
from tokenizer import HARD, PATTERNS, Engine, RustBPETokenizer, AnyTokenizer, build_encoding, encode_text


def pattern_of(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *args, **kwargs: {})    # no download
        return getattr(openai_public, name)()["pat_str"]


GPT4, NANOCHAT = PATTERNS["gpt4"], PATTERNS["nanochat"]
CL100K, R50K, O200K = map(pattern_of, ("cl100k_base", "r50k_base", "o200k_base"))
SOURCES = [path.read_bytes().decode() for path in sorted(Path(os.__file__).parent.glob("*.py"))]
RANKS, JSON = "tokenizer.tiktoken", "nanoloader.json"
needs_gigatoken = pytest.mark.skipif(not importlib.util.find_spec("gigatoken"), reason="no gigatoken")


@cache
def small():
    return RustBPETokenizer.train_from_iterator(iter(SOURCES[:60]), 1024)


def fresh(pattern=GPT4, ranks=None):
    enc = build_encoding(pattern, ranks or small().enc._mergeable_ranks, {"<|bos|>": 70_000})
    return RustBPETokenizer(enc, "<|bos|>")


@cache
def pairs(pattern):
    """Any two bytes merge, in random order, so that every wrong split shows."""
    tokens = [bytes([a, b]) for a in range(256) for b in range(256)]
    random.Random(0).shuffle(tokens)
    return fresh(pattern, {token: i for i, token in enumerate([*(bytes([i]) for i in range(256)), *tokens])})


@pytest.mark.parametrize("options", [(), (NANOCHAT,)])
def test_training_gives_rustbpes_merges_and_nanochats_special_tokens(options):
    texts, trained = SOURCES[:30], rustbpe.Tokenizer()
    tok = RustBPETokenizer.train_from_iterator(iter(texts), 600, *options)
    trained.train_from_iterator(iter(texts), 600 - 9, pattern=tok.enc._pat_str)
    assert tok.get_vocab_size() == 600 and tok.enc._pat_str == (*options, GPT4)[0]
    assert [tok.encode_special(name) for name in module.SPECIAL_TOKENS] == list(range(591, 600))
    assert tok.get_special_tokens() == set(module.SPECIAL_TOKENS) and tok.get_bos_token_id() == 591
    for text in SOURCES[60:70]:
        assert tok.encode(text) == trained.encode(text) and tok.decode(tok.encode(text)) == text
    assert tok.decode_single_token_bytes(97) == b"a"


def test_training_survives_hostile_documents(capsys):
    texts = [None, "", " " * 1_500_000 + "a", "\ud800", "ab" * 200_000]
    size = RustBPETokenizer.train_from_iterator(iter(texts), 5000).get_vocab_size()
    assert 265 < size < 400


def test_encode_is_nanochats():
    tok, draw = small(), random.Random(2)
    texts = ["".join(draw.choices([*HARD, "\ud800", "<|bos|>"], k=k % 30)) for k in range(300)]
    lists = [tok.enc.encode_ordinary(text) for text in texts]
    assert tok.encode(texts, num_threads=3) == lists == [tok(text) for text in texts]
    lists = [[1015, *ids] for ids in lists]
    assert tok.encode(texts, "<|bos|>") == lists == [tok(text, prepend=1015) for text in texts]


def test_documents_of_every_kind_in_one_chunk():
    tok, texts = small(), [SOURCES[3][:3000] + "é漢😀<|bos|>", "", "\ud800 a" + module.SEPARATOR]
    lists = [[] if text is None else [1015, *tok.enc.encode_ordinary(text)] for text in texts]
    ids, bounds = tok.encode_documents(texts, check=range(3))
    assert ids.tolist() == list(itertools.chain(*lists)) and ids.dtype == tok.dtype == np.uint16
    assert bounds.tolist() == np.cumsum([0, *map(len, lists)]).tolist() and bounds.dtype == np.int64
    want = [part.tolist() for part in tok.encode_documents(texts[:2])]
    for kind in pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()):
        array = pa.array(["x", *texts[:2], "y"], pa.string()).cast(kind).slice(1, 2)
        assert [part.tolist() for part in tok.encode_documents(array)] == want
    for nothing in [], pa.array(["a"]).slice(1):
        ids, bounds = tok.encode_documents(nothing)
        assert ids.tolist() == [] and bounds.tolist() == [0] * (len(nothing) + 1) and ids.dtype == tok.dtype
    assert fresh().dtype == np.uint32 and fresh().encode_documents(["a"])[0].tolist() == [70_000, 97]


@pytest.mark.parametrize("pattern", [GPT4, R50K, O200K, NANOCHAT], ids=["gpt4", "r50k", "o200k", "nanochat"])
def test_every_text_can_be_encoded(pattern):
    """Where tiktoken's regex fails, the module regex splits as tiktoken would, and as gigatoken does."""
    tok, enc, spaces = fresh(pattern), pairs(pattern).enc, " " * 1_000_000 + "a"
    for text in spaces, ("\n" + " " * 999) * 400 + "a", "a" * 1_000_000:
        ids = encode_text(tok.enc, text).tolist()
        assert tok.encode_documents([text])[0].tolist() == [70_000, *ids] and tok.decode(ids) == text
    with pytest.raises(ValueError, match="stack"):    # else: drop the module regex
        tok.enc.encode_to_numpy(spaces)
    failing = SimpleNamespace(encode_to_numpy=lambda text, **_: int("a ValueError"), _pat_str=pattern,
                              _encode_single_piece=enc._encode_single_piece)
    for text in module.hard_texts(small().enc) + SOURCES[:5]:
        assert encode_text(failing, text).tolist() == enc.encode_ordinary(text)


@needs_gigatoken
@pytest.mark.parametrize("name, pattern", [("gpt4", CL100K), ("gpt2", R50K), ("o200k", O200K)])
def test_gigatoken_gives_tiktokens_ids(name, pattern):
    tok, draw = pairs(pattern), random.Random(1)
    texts = ["".join(draw.choices([*HARD, "<|bos|>"], k=draw.randint(0, 40))) for _ in range(3000)]
    codes = [*range(0x3400), *range(0x3400, 0xD800, 20), *range(0xE000, 0x20000, 4), 0x20000, 0x10FFFF]
    characters = [*map(chr, codes), *module.NEWER_CHARACTERS[1:-1].replace("-", ""), "\U00033000"]
    texts += [*SOURCES[::9], *(f"a{c}a 1{c}1 {c}{c}'s{c}. {c}\n{c}A" for c in characters)]
    want = [[70_000, *ids] for ids in tok.enc.encode_ordinary_batch(texts)]
    for i in range(0, len(texts), 100):    # few at once: a newer character sends all of them to tiktoken
        ids, bounds = tok.encode_documents(texts[i:i + 100])
        assert [ids[a:b].tolist() for a, b in itertools.pairwise(bounds)] == want[i:i + 100]
    assert tok.engine.startswith("gigatoken") and module.choose_engine(tok.enc, 70_000)[0] == name
    raw = Engine(tok.enc, 70_000, name)._call_gigatoken("".join(texts[-9:]).encode())
    assert raw.tolist() != tok.enc.encode_ordinary("".join(texts[-9:])), "they agree: drop NEWER_CHARACTERS"


@needs_gigatoken
def test_the_engine_says_what_it_is_and_wrong_ids_are_found(monkeypatch):
    tok, raw = fresh(), Engine._call_gigatoken
    texts = [*(f"document {i} has text" for i in range(10_001))]
    want, bounds = tok.encode_documents(texts)
    assert re.fullmatch(r"gigatoken [\d.]+, checked against tiktoken", tok.engine)
    assert re.fullmatch(r"tiktoken [\d.]+ \(gigatoken does not know .*\)", fresh(NANOCHAT).engine)

    def wrong(*args):
        ids = raw(*args)
        ids[np.flatnonzero(ids == 70_000)[:1236][-1] + 1] += 1    # the 1,235th document, or else the last
        return ids

    monkeypatch.setattr(Engine, "_call_gigatoken", wrong)
    ids, _ = tok.encode_documents(texts, check=range(0, 10_000, 100))
    assert np.flatnonzero(ids != want).tolist() == [bounds[1235] + 1]
    with pytest.raises(ValueError, match=r"document 1235 of 10001: gigatoken .*NANOLOADER_ENGINE=tiktoken"):
        tok.encode_documents(texts, check=[0, 1235])
    assert "gigatoken is not used: it encodes " in fresh().engine
    monkeypatch.setattr(Engine, "_call_gigatoken", lambda *args: 1 / 0)
    assert "gigatoken is not used: ZeroDivisionError" in fresh().engine
    monkeypatch.setenv("NANOLOADER_ENGINE", "tiktoken")
    assert "as NANOLOADER_ENGINE says" in fresh().engine


@needs_gigatoken
def test_an_engine_serves_one_thread_at_a_time_forgets_words_and_is_dropped_when_it_fails(monkeypatch):
    tok, used, busy, raw, together = fresh(), {}, set(), Engine._call_gigatoken, threading.Barrier(3)

    def encode(engine, data):
        assert not data.endswith(b"fail") and engine not in busy
        busy.add(engine)
        if not together.broken:
            together.wait()    # three threads are in here at once
        result = raw(engine, data)
        busy.remove(engine)
        used.setdefault(engine, set()).add(engine.model)
        return result

    def encode_all():
        return [tok.encode_documents([text])[0].tolist() for text in SOURCES[:40]]

    want = encode_all()
    monkeypatch.setattr(Engine, "_call_gigatoken", encode)
    with ThreadPoolExecutor(3) as pool:
        assert [job.result() for job in [pool.submit(encode_all) for _ in range(3)]] == [want] * 3
    assert [len(models) for models in used.values()] == [1, 1, 1] and len(tok.idle) == 3
    together.abort()
    monkeypatch.setattr(module, "FORGET_AFTER", 1 << 17)
    assert encode_all() == want and len(used) == 3 and 1 < max(map(len, used.values())) < 20
    with pytest.raises(AssertionError):
        tok.encode_documents(["fail"])
    assert len(tok.idle) == 2 and encode_all() == want


def test_each_thread_has_its_own_tiktoken(monkeypatch):
    """tiktoken's regex caches are fast for one thread only: the first, which may be the loader's probe."""
    monkeypatch.setenv("NANOLOADER_ENGINE", "tiktoken")
    tok, threads, raw, together = fresh(), {}, Engine.encode, threading.Barrier(2)

    def encode(engine, texts):
        threads.setdefault(engine, set()).add(threading.get_ident())
        return raw(engine, texts)

    def encode_twice():
        together.wait()    # else one thread may do the work of both
        return [tok.encode_documents([text])[0].tolist() for text in ("a", "b")]

    monkeypatch.setattr(Engine, "encode", encode)
    tok.encode_documents(["a"])
    with ThreadPoolExecutor(2) as pool:
        first, second = (job.result() for job in [pool.submit(encode_twice) for _ in range(2)])
    assert first == second and [len(ids) for ids in threads.values()] == [1, 1, 1]


def stub(function=None, **methods):
    """A tokenizer with BOS 256; function: bytes of a text -> its ids, by nanochat's interface."""
    tok = SimpleNamespace(**{"get_bos_token_id": lambda: 256} | methods)
    if function:
        tok.encode = lambda texts, prepend, num_threads: (
            setattr(tok, "threads", num_threads) or [function(text.encode()) for text in texts])
    return tok


def by_documents(texts):
    return [part.tolist() for part in ByteTokenizer().encode_documents(texts)]


def test_every_interface_gives_the_same_documents_and_fingerprint():
    encoders = ours, documents, lists, *_ = [AnyTokenizer(tok) for tok in (
        small(), stub(dtype="uint16", encode_documents=by_documents), stub(lambda text: [256, *text]),
        stub(lambda text: [256, *text[::-1]]), stub(lambda text: [256, *text], get_vocab_size=lambda: 257))]
    for encoder in documents, lists:
        ids, bounds = encoder.encode(pa.array(["", "ab", None, "", "\xe9", None]).slice(1), threads=3)
        assert ids.tolist() == [256, 97, 98, 256, 256, 195, 169] and bounds.tolist() == [0, 3, 3, 4, 7, 7]
        assert ids.dtype == encoder.dtype and bounds.dtype.kind == "i" and encoder.bos == 256
        assert (encoder is documents or encoder.tokenizer.threads == 3)
        assert [part.tolist() for part in encoder.encode(pa.nulls(2, pa.string()))] == [[], [0, 0, 0]]
    assert [encoder.is_multithreaded for encoder in encoders] == [False, False, True, True, True]
    assert [encoder.dtype for encoder in encoders[:3]] == [np.uint16, np.uint16, np.uint32]
    assert documents.fingerprint == lists.fingerprint and ours.fingerprint == small().fingerprint()
    assert len({encoder.fingerprint for encoder in encoders}) == 4


@pytest.mark.parametrize("ids, seen", [([256, 70_000], "to 70000"), ([256, -1], "int64, -1 to"),
                                       ([256, 97.0], "float64"), ([256, 259], "integers from 0 to 258")])
def test_ids_that_would_wrap_are_errors(ids, seen):
    lists = stub(lambda text: [256, *text], get_vocab_size=lambda: 259)
    documents = stub(encode_documents=by_documents, get_vocab_size=lambda: 259)
    encoders = [AnyTokenizer(lists), AnyTokenizer(documents)]
    lists.encode, documents.encode_documents = lambda texts, **_: [ids], lambda texts: (ids, [0, 2])
    for encoder in encoders:
        with pytest.raises(ValueError, match=f"its ids are .*{seen}"):
            encoder.encode(pa.array(["b"]))


@pytest.mark.parametrize("tok, reason", [
    (object(), "object cannot be used: AttributeError.*as README shows"), (stub(), "cannot be used: Attrib"),
    (stub(get_bos_token_id=lambda: None), r"get_bos_token_id\(\) is None: does the tokenizer know"),
    (stub(lambda text: [*text]), "expected BOS .256. first"),
    (stub(lambda text: [256, 256, *text]), "more than one BOS"),
    (stub(encode=lambda texts, **_: [[256, 1], [256, 1]]), "cannot be used"),
    (stub(lambda text: [256, *text[:8191]]), "2, 1121 and 8192 tokens: turn padding and truncation off"),
    (stub(lambda text: [256, *text[-50:]]), "have 2, 51 and 51 tokens"),
    (stub(lambda text: [256, *text.ljust(512)]), "have 513, 1121 and 112001 tokens"),
    *((stub(encode_documents=lambda texts, bounds=bounds: ([256, 1] * 3, bounds)), r) for r, *bounds in (
        ("Error", 0.0, 2, 2, 4, 6), ("Error", 0, 2, 4, 6),
        ("expected 5 bounds from 0 to 6", 0, 2, 4, 7), ("Error", 0, 2, 4)))])
def test_a_tokenizer_that_cannot_be_used_is_one_line(tok, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        AnyTokenizer(tok)
    assert "\n" not in str(caught.value)


def test_the_readmes_wrapper_gives_all_tokens_of_hugging_faces_file(corpus):
    library, names = pytest.importorskip("tokenizers"), {}
    readme = Path(module.__file__).with_name("README.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(class Wrapped.*?)```", readme, re.DOTALL)[1], names)
    trained = library.ByteLevelBPETokenizer()
    trained.train_from_iterator(SOURCES[:20], 500, special_tokens=["<s>", "<pad>"], show_progress=False)
    trained.enable_truncation(64)
    trained.enable_padding(pad_id=1, pad_token="<pad>", length=64)
    theirs = library.Tokenizer.from_str(trained.to_str())
    assert len(theirs.encode(SOURCES[0]).ids) == len(theirs.encode("a").ids) == 64
    wrapped, texts = names["Wrapped"](theirs, "<s>"), module.parquets_iter_batched("train", data_dir=corpus)
    want = [i for text in itertools.chain(*texts) for i in [0, *theirs.encode(text).ids]]
    batch = next(make(corpus, tokenizer=wrapped, packing="flat", B=1, T=len(want) - 1, shuffle_seed=None,
                      chunk_bytes=10**6))
    assert list(rows_of(batch)[0]) == want and len(want) > 800
    with pytest.raises(ValueError, match=r"get_bos_token_id\(\) is None"):
        AnyTokenizer(names["Wrapped"](theirs, "<bos>"))


def test_save_load_copies_from_pretrained_and_token_bytes(tmp_path, monkeypatch):
    tok, folder = small(), str(tmp_path / "t")
    tok.save(folder)
    assert tiktoken.load.load_tiktoken_bpe(folder + "/tokenizer.tiktoken") == tok.enc._mergeable_ranks
    again = RustBPETokenizer.from_dict(json.loads(json.dumps(tok.as_dict())))
    for other in (again, RustBPETokenizer.from_directory(folder)):
        assert other.fingerprint() == tok.fingerprint() and other.get_bos_token_id() == 1015
        assert other.encode(SOURCES[9], "<|bos|>") == tok.encode(SOURCES[9], "<|bos|>")
    special = {**tok.enc._special_tokens, "<|new|>": 2000}
    others = [tok, fresh(), fresh(R50K), pairs(GPT4), RustBPETokenizer(tok.enc, "<|user_end|>"),
              RustBPETokenizer(build_encoding(GPT4, tok.enc._mergeable_ranks, special), "<|bos|>")]
    assert len({other.fingerprint() for other in others}) == 6
    monkeypatch.setattr(os, "replace", lambda *names: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        others[1].save(folder)
    assert RustBPETokenizer.from_directory(folder).fingerprint() == tok.fingerprint()
    assert sorted(os.listdir(folder)) == ["nanoloader.json", "tokenizer.tiktoken"]
    enc = build_encoding(R50K, tok.enc._mergeable_ranks, {"<|endoftext|>": 3000})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": enc}.get)
    tok, text = RustBPETokenizer.from_pretrained("gpt2"), SOURCES[2] + "漢字 é 😀"
    assert tok.encode_documents([text])[0].tolist() == [3000, *enc.encode_ordinary(text)]
    n_bytes = module.get_token_bytes(tok)
    assert n_bytes.shape == (3001,) and str(n_bytes.dtype) == "torch.int32" and n_bytes[1015:].sum() == 0
    assert n_bytes[tok.encode(text)].sum() == len(text.encode())


@pytest.mark.parametrize("name, old, new, reason", [
    (RANKS, b"", None, "No such file"), (JSON, b"", None, "No such file"), (RANKS, b" 500\n", b"", "Value"),
    (RANKS, b" 500\n", b" 2500\n", "was changed"), (RANKS, b" 500\n", b" 501\n", "two tokens have"),
    (RANKS, b"AA== 0\n", b"", "not a token"), (JSON, b"\n}", b"", "JSON"), (JSON, b"{", b"\xff", "Error"),
    (JSON, b"pattern", b"pat", "KeyError"),
    (JSON, b"{\n", b"[" * 200_000, "RecursionError"), (JSON, b"{1,3}", b"{1,4}", "was changed"),
    (JSON, b": 1016", b": 8589934592", "Overflow"), (JSON, b": 1016", b': "x"', "TypeError"),
    (JSON, b": 1015", b": 65", "two tokens have"), (JSON, b'ken": "<|bos|>"', b'ken": "a"', "KeyError")])
def test_damaged_files_are_one_line(tmp_path, name, old, new, reason):
    small().save(str(tmp_path))
    before = (tmp_path / name).read_bytes()
    assert old in before, "nothing would be damaged"
    (tmp_path / name).unlink() if new is None else (tmp_path / name).write_bytes(before.replace(old, new, 1))
    with pytest.raises(ValueError, match=f"no tokenizer of ours, or a damaged one .*{reason}") as caught:
        RustBPETokenizer.from_directory(str(tmp_path))
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)
    assert str(caught.value).endswith("; tiktoken's: see README")


def test_all_tools_find_the_tokenizer_by_one_rule(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path / "base"))
    one, same, other = (write_shards(tmp_path / folder / "my data", [[SOURCES[a:a + 9]], [["val"]]])
                        for folder, a in (("one", 0), ("same", 0), ("other", 9)))
    tok, folder = module.find_tokenizer(None, [one], 300)
    assert module.get_tokenizer(folder).fingerprint() == tok.fingerprint() and tok.get_vocab_size() == 300
    line = "training a tokenizer of 300 tokens, once: .*/base/tokenizer-my data-[0-9a-f]{8}-300\n"
    assert re.fullmatch(line, capsys.readouterr().out)
    assert module.find_tokenizer(None, [same], 300)[1] == folder and capsys.readouterr().out == ""
    folders = {module.find_tokenizer(None, sources, size)[1] for sources, size in (
        ([one], 301), ([other], 300), ([one, other], 300), ([other, one], 300))}
    assert len({folder, *folders}) == 4 and any("my data+my data" in path for path in folders)
    assert module.find_tokenizer(folder, [other], 999)[1] == folder == module.trained_dir([one + "/"], 300)


def test_the_command_takes_the_sources_of_a_mixture(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path / "base"))
    data = [write_shards(tmp_path / str(at), [[SOURCES[at:at + 9]], [["val"]]]) for at in (0, 9)]
    for given in (["--data", *data], ["--data", data[1], "--data", data[0]]):
        module.main([*given, "--vocab_size", "400"])
        [folder] = (tmp_path / "base").glob("tokenizer-*400")
        assert f"saved to {folder}" in capsys.readouterr().out
        assert str(folder) == module.trained_dir(data, 400)
        shutil.rmtree(folder)


def test_the_command_saves_where_the_tools_look_and_overwrites_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANOLOADER_BASE_DIR", str(tmp_path / "base"))
    val, data = SOURCES[9:20], write_shards(tmp_path / "data", [[SOURCES[:9]], [SOURCES[9:20]]])
    module.main(["--data", data, "--vocab_size", "400", "--pattern", "nanochat"])
    (tok, folder), printed = module.find_tokenizer(None, [data], 400), capsys.readouterr().out
    ratio = sum(len(text.encode()) for text in val) / sum(map(len, tok.encode(val)))
    assert f"trained 400 tokens, {ratio:.2f} bytes per token" in printed and tok.enc._pat_str == NANOCHAT
    assert f"engine: {tok.engine}\nsaved to {folder}\n" in printed and capsys.readouterr().out == ""
    tokens, new = tokenized(data, str(tmp_path / "tokens")), str(tmp_path / "new")
    for flags, line in (([data, "--vocab_size", "400"], "holds a tokenizer that checkpoints"),
                        ([data, "--out", folder], "holds a tokenizer that checkpoints"),
                        ([tokens, "--out", new], f"{tokens} holds tokens, and a tokenizer is"),
                        ):
        with pytest.raises(SystemExit, match=f"^error: .*{line}"):
            module.main(["--data", *flags])
    assert module.get_tokenizer(folder).fingerprint() == tok.fingerprint() and not os.path.exists(new)
