"""dev/import_tokenizer.py: small ones of each kind, trained here, have the library's ids."""

import functools
import json
import os
import re
import shlex
import sys
import unicodedata
from pathlib import Path

import pytest

from dev import import_tokenizer as module
from dev.tests.cases import is_like, read_cases
from tokenizer import RustBPETokenizer, build_encoding

library = pytest.importorskip("tokenizers")

TEXTS = [
    *Path(module.__file__).read_text().split("\n\n"),
    *("f\u00fcr \u65e5\u672c \U0001f642 \0 12345 don't  \t\n stop " * n for n in (1, 9)),
    "e\u0301 x<a>x <a> ", " <a>\n", "12345 Ab", " qxzj",
    "<think>\n1</think>\n\n a<think>b <think><think>s <thinks> \u65e5</think>12<|endoftext|>x ",
    "   y     z think <think> \t    </thin"]
FLAGS = dict.fromkeys(["special", "single_word", "lstrip", "rstrip", "normalized"], False)
CASES = read_cases("tokenizer_json.txt")

@functools.cache
def train():
    """A byte-level BPE such as GPT-2's, as its tokenizer.json describes it."""
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>", "<|pad|>"], show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(TEXTS, trainer)
    made.enable_truncation(5)    # as many files have it
    return made.to_str()

def changed(changes):
    """{"model.type": "BPE"} changes this key. None removes it, and a list is appended."""
    described = json.loads(train())
    for path, value in changes.items():
        *parents, name = path.split(".")
        part = functools.reduce(dict.get, parents, described)
        if value is None:
            del part[name]
        elif isinstance(value, list):
            part[name] += value
        else:
            part[name] = value
    for id, token in enumerate(described.get("added_tokens", []), 598):
        token |= FLAGS | {"id": id} | token
    return described

@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """convert(described, *words) runs the command -> what it prints, or its error."""
    monkeypatch.chdir(tmp_path)

    def run(described, *words):
        Path("tokenizer.json").write_text(json.dumps(described))
        try:
            module.main(["tokenizer.json", "--out", "out", *words])
        except SystemExit as ended:
            assert not Path("out").exists()
            return ended.code
        return capsys.readouterr().out.strip()

    return run

@pytest.mark.parametrize("flags, changes, lines", CASES)
def test_a_tokenizer_json_becomes_what_the_cases_say(convert, flags, changes, lines):
    """Ids are the library's, of either engine, and decode gives the text."""
    described = changed(json.loads(changes))
    printed = convert(described, *shlex.split(flags))
    assert is_like(printed, lines), printed
    if printed.startswith("error"):
        return
    theirs = library.Tokenizer.from_str(json.dumps(described))
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True
    # Names of the template are never found in a text, whatever the file says.
    texts = [text for text in TEXTS if "<|im" not in text]
    if "NFC" in printed:
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    want = [encoded.ids for encoded in theirs.encode_batch(texts, add_special_tokens=False)]
    ours = RustBPETokenizer.from_directory("out")
    assert ours.encode(texts) == [ours.encode(text) for text in texts] == want
    assert [ours.decode(ids) for ids in want] == texts

PARTS = {"normalizer": library.normalizers, "pre_tokenizer": library.pre_tokenizers,
         "decoder": library.decoders, "post_processor": library.processors}
NOT_PARTS = {    # a Precompiled normalizer is SentencePiece's, a binary
    "Normalizer", "PreTokenizer", "Decoder", "DecodeStream", "PostProcessor", "Precompiled"}

def test_cases_have_each_option_that_the_library_knows():
    all_changes = [json.loads(changes) for _, changes, _ in CASES]
    described = json.loads(train())
    options = {*described, *(f"model.{name}" for name in described["model"])}
    changed_options = {path for changes in all_changes for path in changes}
    assert options - changed_options == {"version", "model.vocab"}
    assert {*described["added_tokens"][0]} == {"id", "content", *FLAGS}
    for part, classes in PARTS.items():
        types = {changes[part]["type"] for changes in all_changes if part in changes}
        known = {name for name, member in vars(classes).items() if isinstance(member, type)}
        assert types == known - NOT_PARTS

def test_a_tokenizer_is_written_to_a_local_folder(convert, capsys):
    for out in ("s3://bucket/x", ""):
        assert convert(changed({}), "--out", out) == 2
        assert f"cannot write to '{out}'; name a local folder" in capsys.readouterr().err
    assert os.listdir() == ["tokenizer.json"]

PAD = FLAGS | {"content": "<|pad|>", "special": True}
CALL = FLAGS | {"content": "<call>"}

@pytest.mark.parametrize("name, contents, seen, converted", [
    ("tokenizer_config.json", {}, None, None),
    ("tokenizer_config.json", {"added_tokens_decoder": {"1": PAD}}, None, None),
    ("tokenizer_config.json", {"added_tokens_decoder": {"600": CALL}}, "'<call>', 600", "601 tokens"),
    ("tokenizer_config.json", {"eos_token": "<call>"}, "'<call>', 600", "601 tokens"),
    ("tokenizer_config.json", {"additional_special_tokens": ["<call>"]}, "'<call>', 600", "601 tokens"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"1": PAD | {"special": False, "lstrip": True}}},
     "<|pad|>", "has lstrip in its token '<|pad|>'"),
    ("tokenizer_config.json", {"add_prefix_space": True, "tokenizer_class": "GPT2Tokenizer"},
     "", "puts a space in front"),
    ("added_tokens.json", {"<call>": 600}, "'<call>', 600", "601 tokens"),
    ("special_tokens_map.json", {"eos_token": "<call>"}, "'<call>', 600", "601 tokens")])
def test_files_next_to_it_are_read_as_transformers_does(convert, name, contents, seen, converted):
    """What they change is refused, and the command in the error writes one file with all."""
    pytest.importorskip("transformers")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    Path("tokenizer_config.json").write_text(json.dumps(config))
    if name == "tokenizer_config.json":
        contents = config | contents
    Path(name).write_text(json.dumps(contents))
    printed = convert(changed({}))
    if seen is None:
        assert printed.startswith("600 tokens")
        return
    assert re.search(rf"as another tokenizer .see .*{re.escape(seen)}", printed)
    exec(re.search(r'python -c "(.*)"', printed)[1])
    for path in Path().glob("NEW/*"):
        path.replace(path.name)
    described = json.loads(Path("tokenizer.json").read_text())
    assert converted in convert(described)

def test_without_transformers_files_next_to_it_are_refused(convert, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    Path("tokenizer_config.json").write_text("{}")
    error = convert(changed({}))
    assert "tokenizer_config.json may change tokenizer.json, and" in error
    assert "pip install transformers, or, to convert tokenizer.json without" in error

@pytest.mark.parametrize("text, words", [
    ("", "EOF while parsing"), ("{", "EOF while parsing"), ("{}", "Model missing"),
    ('{"config": {"pattern": "a"}, "vocab": []}', "tekken.json, see dev/recipes/own_tokenizer.py")])
def test_what_is_no_tokenizer_json_is_one_line(tmp_path, capfd, text, words):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    words = f"^error: .*json is not Hugging Face's tokenizer.json: .*{words}"
    with pytest.raises(SystemExit, match=words):
        module.main([str(tmp_path), "--out", str(tmp_path / "out")])
    assert capfd.readouterr() == ("", "")

def test_tokenizers_keep_their_fingerprint():
    """Token shards record it."""
    special = {"<|bos|>": 256, "<think>": 257}
    enc = build_encoding("a", {bytes([i]): i for i in range(256)}, special)
    found = [RustBPETokenizer(enc, "<|bos|>", added).fingerprint()
             for added in ([], ["<think>"], ["<|bos|>"])]
    assert found[0].startswith("e394bf7bb5d16b5c")
    assert found[1].startswith("6183e645ed6f6ae1")
    assert len({*found}) == 3

@pytest.mark.parametrize("words", [[], ["--bos", "<s>"]])
def test_a_file_without_special_tokens_gets_one_as_the_error_says(convert, words):
    described = changed({"added_tokens": None})
    vocab = described["model"]["vocab"]
    described["model"]["vocab"] = {name: vocab[name] - 2 for name in vocab if vocab[name] > 1}
    error = convert(described, *words)
    assert "has no special token" in error and "it has none at all" in error
    exec(re.search(r'python -c "(.*)"', error)[1])
    bos = (words or ["<|begin_of_text|>"])[-1]
    assert f"BOS: {bos};" in convert(json.loads(Path("bos.json").read_text()), *words)
