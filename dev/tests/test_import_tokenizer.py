"""dev/import_tokenizer.py: small ones of each kind, trained here, have the library's ids."""

import itertools
import json
import os
import pickle
import re
import unicodedata
from pathlib import Path

import pytest

from dataset import UserError
from dev import import_tokenizer as module
from dev.tests.test_tokenizer import LLAMA, QWEN
from test_dataloader import HERE
from tokenizer import RustBPETokenizer, build_encoding

library = pytest.importorskip("tokenizers")
ByteLevel = library.pre_tokenizers.ByteLevel

TEXTS = [
    *Path(__file__).read_text().split("\n\n"), *Path(module.__file__).read_text().split("\n\n"),
    *("f\u00fcr \u65e5\u672c \U0001f642 \0 12345 don't  \t\n stop " * n for n in (1, 9))]

def train(pattern=None, **changes):
    """A byte-level BPE, split as GPT-2's or by a pattern, as its tokenizer.json describes it."""
    level = ByteLevel(add_prefix_space=False, use_regex=not pattern)
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = level
    if pattern:
        split = library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
        made.pre_tokenizer = library.pre_tokenizers.Sequence([split, level])
    trainer = library.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>", "<|pad|>"], show_progress=False,
        initial_alphabet=ByteLevel.alphabet())
    made.train_from_iterator(TEXTS, trainer)
    made.enable_truncation(5)    # as many files have it
    return json.loads(made.to_str()) | changes

@pytest.fixture
def convert(tmp_path, capsys):
    """convert(described, *words) runs the command on a tokenizer.json. Returns what it prints."""
    def run(described, *words):
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(described))
        module.main([str(path), "--out", str(tmp_path / "out"), *words])
        return capsys.readouterr().out

    return run

def is_applied(described, folder):
    """False if it is refused. Otherwise, checks that ids are the library's, and decode gives the text."""
    folder.mkdir()
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(described))
    try:
        printed = module.import_tokenizer(str(path), folder / "out")
    except UserError:
        return False
    theirs = library.Tokenizer.from_str(json.dumps(described))
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True
    ours = RustBPETokenizer.from_directory(folder / "out")
    for text in [*TEXTS, "e\u0301 x<a>x <a> ", " <a>\n", "12345 Ab", " qxzj"]:
        if "NFC" in printed:
            text = unicodedata.normalize("NFC", text)
        if "<|" not in text:
            ids = ours.encode(text)
            assert ids == theirs.encode(text, add_special_tokens=False).ids
            assert ours.decode(ids) == text
    return True

@pytest.mark.parametrize("pattern, changes", [
    (None, {}), (LLAMA, {}), (QWEN, {"normalizer": {"type": "NFC"}})],
    ids=["GPT-2", "Llama 3", "Qwen"])
def test_imported_tokenizer_gives_the_librarys_ids(tmp_path, convert, pattern, changes):
    described = train(pattern, **changes)
    if pattern == LLAMA:    # has words that no merge makes
        described["model"]["ignore_merges"] = True
        described["model"]["vocab"]["\u0120qxzj"] = 600
    assert is_applied(described, tmp_path / "there")
    printed = convert(described)
    ours = RustBPETokenizer.from_directory(tmp_path / "out")
    assert ours.get_bos_token_id() == 0 and len(ours.encode("<|endoftext|>")) > 1
    assert f"{ours.get_vocab_size()} tokens in {tmp_path / 'out'}; " in printed
    assert "BOS: <|endoftext|>" in printed and "chats are written" not in printed
    assert ("normalize your text first" in printed) == ("normalizer" in changes)
    with pytest.raises(SystemExit, match=r"^error: .* has a tokenizer, which"):
        convert(described)

def test_what_an_old_file_lacks_is_read_as_by_the_library(tmp_path):
    """GPT-2's of 2022 has no model.type and no use_regex."""
    described = train()
    del described["pre_tokenizer"]["use_regex"]
    for name in ("type", "byte_fallback", "ignore_merges"):
        del described["model"][name]
    assert is_applied(described, tmp_path / "old")

@pytest.mark.parametrize("out", ["s3://bucket/x", ""])
def test_a_tokenizer_is_written_to_a_local_folder(tmp_path, monkeypatch, capsys, out):
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_text(json.dumps(train()))
    with pytest.raises(SystemExit):
        module.main(["tokenizer.json", "--out", out])
    assert f"cannot write to '{out}'; name a local folder" in capsys.readouterr().err
    assert os.listdir() == ["tokenizer.json"]

def lack(described, *lost):
    """Without the tokens of some single bytes."""
    for name, byte in module.BYTE_OF.items():
        if byte in lost:
            del described["model"]["vocab"][name]
    return described

def test_a_tokenizer_may_lack_bytes_that_no_text_has(tmp_path):
    """As GPT-NeoX's."""
    described = lack(train(), 0xC0, 0xC1, *range(0xF5, 0x100))
    assert is_applied(described, tmp_path / "neox")

@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize("ids, is_lost", [
    ({"<|pad|>": 1}, False), ({"<call>": 600}, True), ({"<|pad|>": 1, "<call>": 600}, True),
    ({"<|pad|>": 7}, True)])
def test_tokens_of_the_files_next_to_it_are_not_lost(
        tmp_path, monkeypatch, capsys, convert, name, ids, is_lost):
    usual = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
    decoder = {str(id): {"content": token, **usual} for token, id in ids.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ids if name == "added_tokens.json" else config | {"added_tokens_decoder": decoder}
    (tmp_path / name).write_text(json.dumps(found))
    if not is_lost:
        assert "600 tokens" in convert(train())
        return
    [lost] = [token for token in ids if ids[token] != 1]
    with pytest.raises(SystemExit, match=f"lacks the token '{re.escape(lost)}' with id") as error:
        convert(train())
    assert not (tmp_path / "out").exists()
    if lost != "<call>":
        return
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    exec(re.search(r'python -c "(.*)"', str(error.value))[1])
    capsys.readouterr()
    module.main(["NEW", "--out", "out"])
    printed = capsys.readouterr().out
    assert re.search("one token each: .*<call>", printed)
    assert RustBPETokenizer.from_directory("out").encode("<call>") == [600]

@pytest.mark.parametrize("text, words", [
    ("", "EOF while parsing"), ("{", "EOF while parsing"), ("{}", "Model missing"),
    ('{"config": {"pattern": "a"}, "vocab": []}', "tekken.json, see dev/recipes/own_tokenizer.py")])
def test_what_is_no_tokenizer_json_is_one_line(tmp_path, capfd, text, words):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    words = f"^error: .*json is not Hugging Face's tokenizer.json: .*{words}"
    with pytest.raises(SystemExit, match=words):
        module.main([str(path), "--out", str(tmp_path / "out")])
    assert capfd.readouterr() == ("", "")

def test_a_damaged_file_next_to_it_is_one_line(tmp_path, convert):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(SystemExit, match=r"^error: .*tokenizer_config.json is not JSON: Expecting"):
        convert(train())

TEXT_WITH_NAMES = (
    "<think>\n1</think>\n\n a<think>b <think><think>s <thinks> \u65e5</think>12<|endoftext|>x "
    "   y     z think <think> \t    </thin")
NAMES = ("<think>", "</think>", "<think>s", "    ")

@pytest.mark.parametrize("normalizer, normalized", [
    (None, False), (None, True), ({"type": "NFC"}, False), ({"type": "NFC"}, True)])
def test_added_tokens_are_found_in_text_as_by_the_library(
        tmp_path, convert, normalizer, normalized):
    """In documents of either engine, encode and chats. Special ones are plain text."""
    described = add(train(LLAMA, normalizer=normalizer), *NAMES, normalized=normalized)
    described = add(described, "<|im_start|>", "<|im_end|>", special=True)
    printed = convert(described)
    assert "one token each: <think>, </think>, <think>s" in printed
    assert r"chats are written so: '<|endoftext|><|im_start|>user\nHi<|im_end|>" in printed
    theirs = library.Tokenizer.from_str(json.dumps(described))
    theirs.no_truncation()
    theirs.encode_special_tokens = True
    want = theirs.encode(TEXT_WITH_NAMES, add_special_tokens=False).ids
    assert {600, 601, 602, 603} < {*want} and 0 not in want
    ours = RustBPETokenizer.from_directory(tmp_path / "out")
    assert ours.encode(TEXT_WITH_NAMES) == ours.encode([TEXT_WITH_NAMES])[0] == want
    for engine in (ours.engine, "tiktoken"):
        other = pickle.loads(pickle.dumps(ours))
        other.engine = engine
        ids, bounds = other.encode_documents(["<|pad|>", TEXT_WITH_NAMES, "", " a"])
        assert ids[bounds[1]:bounds[2]].tolist() == [0, *want]
    ids, _ = ours.render_conversation({"messages": [{"role": "user", "content": TEXT_WITH_NAMES}]})
    text = theirs.encode("user\n", add_special_tokens=False).ids
    end = theirs.encode("\n", add_special_tokens=False).ids
    assert ids == [0, 604, *text, *want, 605, *end]
    assert ours.decode(want) == TEXT_WITH_NAMES
    assert ours.token_bytes[want].sum() == len(TEXT_WITH_NAMES.encode())

def test_tokenizers_keep_their_fingerprint():
    """Token shards record it."""
    special = {"<|bos|>": 256, "<think>": 257}
    enc = build_encoding("a", {bytes([i]): i for i in range(256)}, special)
    assert RustBPETokenizer(enc, "<|bos|>").fingerprint().startswith("e394bf7bb5d16b5c")
    added = RustBPETokenizer(enc, "<|bos|>", ["<think>"])
    assert added.fingerprint().startswith("6183e645ed6f6ae1")
    fingerprints = {RustBPETokenizer(enc, "<|bos|>", added).fingerprint()
                    for added in ([], ["<think>"], ["<|bos|>"])}
    assert len(fingerprints) == 3

def test_bos_is_chosen(convert):
    names = [f"<|{i}|>" for i in range(30)]
    seen = r"no special token <s> to open documents; name .* by --bos: <\|endoftext\|>, .*<\|29\|>"
    with pytest.raises(SystemExit, match=seen):
        convert(add(train(), *names, special=True), "--bos", "<s>")
    described = train()
    del described["added_tokens"]    # then they are words that no merge makes
    assert "BOS: <|pad|>" in convert(described, "--bos", "<|pad|>")

@pytest.mark.parametrize("words", [[], ["--bos", "<s>"]])
def test_a_file_without_special_tokens_gets_one_as_the_error_says(
        tmp_path, monkeypatch, convert, words):
    monkeypatch.chdir(tmp_path)
    described = train()
    del described["added_tokens"]
    vocab = described["model"]["vocab"]
    described["model"]["vocab"] = {name: vocab[name] - 2 for name in vocab if vocab[name] > 1}
    with pytest.raises(SystemExit, match=r"has no special token .*it has none at all") as error:
        convert(described, *words)
    exec(re.search(r'python -c "(.*)"', str(error.value))[1])
    bos = (words or ["<|begin_of_text|>"])[-1]
    assert f"BOS: {bos};" in convert(json.loads(Path("bos.json").read_text()), *words)

def swapped(described):
    """Two merges in another order than their ids, as tiktoken cannot have them."""
    merges = described["model"]["merges"]
    merges[:2] = merges[1::-1]

def add(described, *names, **flags):
    """Tokens that are found in text, with ids from 600 on."""
    usual = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
    for id, name in enumerate(names, 598 + len(described["added_tokens"])):
        described["added_tokens"].append({"id": id, "content": name, **usual, **flags})
    return described

def changed(part, **changes):
    return lambda described: described[part].update(changes)

@pytest.mark.parametrize("change, words", [
    (lambda described: described.update(normalizer={"type": "Lowercase"}), "normalizer Lowercase"),
    (lambda described: described.update(model={"type": "WordLevel", "vocab": {"a": 0},
                                               "unk_token": "a"}), "is a WordLevel model"),
    (changed("model", byte_fallback=True), "has byte_fallback, as SentencePiece models do"),
    (lambda described: lack(described, 0xF4), "lacks tokens of single bytes"),
    (swapped, "has merges that are not in the order"),
    # A word of two tokens that only a lookup finds; tiktoken would merge them anywhere
    (lambda described: described["model"].update(
        ignore_merges=True, vocab={**described["model"]["vocab"], "qx": 600}),
     r"has no merge for \('q', 'x'\), which tiktoken would merge"),
    (lambda described: described.update(pre_tokenizer={"type": "Whitespace"}),
     r"splits text in these steps: \['Whitespace'\]"),
    (changed("pre_tokenizer", add_prefix_space=True), "puts a space in front"),
    (lambda described: add(described, "<a>", lstrip=True), "has lstrip in its token '<a>'"),
    # Found before others, or inside a special token, which Hugging Face takes as a whole
    (lambda described: add(add(described, "<ab>", normalized=True), "b>c"), "differently here"),
    (lambda described: add(described, "text|>"), "differently here"),
    # Their regex knows what tiktoken's does not
    (lambda described: described.update(train(r"\X")), r"tiktoken refuses .*Invalid escape: .X"),
    (dict.clear, "is not Hugging Face's tokenizer")])
def test_what_cannot_be_imported_is_refused(tmp_path, convert, change, words):
    described = train()
    change(described)
    with pytest.raises(SystemExit, match=words):
        convert(described)
    assert not (tmp_path / "out").exists()

# --------------------------------------------------------------------------------------------------
# Each option that the library knows is applied, or refused

PARTS = {"normalizer": library.normalizers, "pre_tokenizer": library.pre_tokenizers,
         "decoder": library.decoders, "post_processor": library.processors}
# The library's classes that are no part. (A Precompiled normalizer is SentencePiece's, a binary.)
NOT_PARTS = {"Normalizer", "PreTokenizer", "Decoder", "DecodeStream", "PostProcessor", "Precompiled"}
MODEL = {
    "type": "BPE", "dropout": 0.5, "unk_token": "<|pad|>", "continuing_subword_prefix": "##",
    "end_of_word_suffix": "</w>", "fuse_unk": True, "byte_fallback": True, "ignore_merges": True,
    "vocab": None, "merges": None}
FLAGS = ["single_word", "lstrip", "rstrip", "normalized"]
OTHERS = {
    "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 5000}, "direction": "Left", "pad_to_multiple_of": None,
                "pad_id": 1, "pad_type_id": 0, "pad_token": "<|pad|>"}}

def splits():
    """A Split before a ByteLevel, as most tokenizers have it, with any options."""
    patterns = {"String": "a"}, {"Regex": r"\p{L}+|\P{L}"}
    behaviors = "Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"
    both = False, True
    for pattern, behavior, invert, use_regex in itertools.product(patterns, behaviors, both, both):
        split = {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
        yield {"type": "Sequence", "pretokenizers": [split, level]}

@pytest.mark.parametrize("part", PARTS)
def test_each_part_that_the_library_knows_is_applied_or_refused(tmp_path, part):
    """One of each class is in data/tokenizer_parts.jsonl."""
    lines = (HERE / "dev/tests/data/tokenizer_parts.jsonl").read_text().splitlines()
    values = [line[part] for line in map(json.loads, lines) if part in line]
    classes = {name for name, member in vars(PARTS[part]).items() if isinstance(member, type)}
    assert {value["type"] for value in values} == classes - NOT_PARTS
    if part == "pre_tokenizer":
        values += splits()
    applied, usual = set(), train()
    for i, value in enumerate(values):
        if is_applied(usual | {part: value}, tmp_path / f"{i}"):
            applied.add(value["type"])
    want = {"normalizer": {"NFC", "Sequence"}, "pre_tokenizer": {"ByteLevel", "Sequence"}}
    assert applied == want.get(part, classes - NOT_PARTS)

def test_each_option_of_the_model_is_applied_or_refused(tmp_path):
    assert {*train()["model"]} == {*MODEL}
    assert {*train()} == {"version", "added_tokens", "model", *PARTS, *OTHERS}
    applied = set()
    for name, value in MODEL.items():
        described = train()
        if value is not None:
            described["model"][name] = value
        if is_applied(described, tmp_path / name):
            applied.add(name)
    for name, value in OTHERS.items():
        assert is_applied(train() | {name: value}, tmp_path / name)
    assert {*MODEL} - applied == {
        "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"}

@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("names", [["<a>"], ["<|im_start|>", "<|im_end|>"]])
def test_each_option_of_an_added_token_is_applied_or_refused(tmp_path, names, special):
    """Spaces around a special token matter only in chats, so only if the template has it."""
    assert {*train()["added_tokens"][0]} == {"id", "content", "special", *FLAGS}
    applied = set()
    for flag in FLAGS:
        described = add(train(), *names, **{flag: True, "special": special})
        if is_applied(described, tmp_path / flag):
            applied.add(flag)
    assert applied == ({*FLAGS} if special and names == ["<a>"] else {"normalized"})

def test_a_token_that_no_merge_makes_is_applied_or_refused(tmp_path):
    for i, ignore_merges in enumerate((False, True)):
        for k, word in enumerate(("\u0120qxzj", "qx", "<x>", "\u65e5")):
            described = train()
            described["model"]["vocab"][word] = 600
            described["model"]["ignore_merges"] = ignore_merges
            applied = is_applied(described, tmp_path / f"{i}{k}")
            assert applied == (not ignore_merges or k in (0, 2)), (word, ignore_merges)
