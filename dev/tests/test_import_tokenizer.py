"""dev/import_tokenizer.py: small ones of each kind, trained here, have the library's ids."""

import json
from pathlib import Path

import pytest

from dev import import_tokenizer as module
from tokenizer import RustBPETokenizer

library = pytest.importorskip("tokenizers")
ByteLevel = library.pre_tokenizers.ByteLevel

TEXTS = [
    *Path(__file__).read_text().split("\n\n"), *Path(module.__file__).read_text().split("\n\n"),
    *("f\u00fcr \u65e5\u672c \U0001f642 \0 12345 don't  \t\n stop " * n for n in (1, 9))]
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA.replace("{1,3}", "")

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

@pytest.mark.parametrize("pattern, changes", [
    (None, {}), (LLAMA, {}), (QWEN, {"normalizer": {"type": "NFC"}})],
    ids=["GPT-2", "Llama 3", "Qwen"])
def test_imported_tokenizer_gives_the_librarys_ids(tmp_path, convert, pattern, changes):
    described = train(pattern, **changes)
    if pattern == LLAMA:    # has words that no merge makes
        described["model"]["ignore_merges"] = True
        described["model"]["vocab"]["\u0120qxzj"] = 600
    printed = convert(described)
    theirs = library.Tokenizer.from_str(json.dumps(described))
    theirs.no_truncation()
    ours = RustBPETokenizer.from_directory(tmp_path / "out")
    for text in [*TEXTS, " qxzj"]:
        if "<|" not in text:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.get_bos_token_id() == 0 and len(ours.encode("<|endoftext|>")) > 1
    assert f"{theirs.get_vocab_size()} tokens in {tmp_path / 'out'}; " in printed
    assert "BOS: <|endoftext|>" in printed
    assert ("normalize your text first" in printed) == ("normalizer" in changes)
    with pytest.raises(SystemExit, match=r"^error: .* has a tokenizer, which"):
        convert(described)

def test_bos_is_chosen(convert):
    described = train()
    with pytest.raises(SystemExit, match=r"opens documents by --bos; its special tokens: <\|"):
        convert(described, "--bos", "<s>")
    del described["added_tokens"]    # then they are words that no merge makes
    assert "BOS: <|pad|>" in convert(described, "--bos", "<|pad|>")

def swapped(described):
    """Two merges in another order than their ids, as tiktoken cannot have them."""
    merges = described["model"]["merges"]
    merges[:2] = merges[1::-1]

def with_spaces(described):
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
    described["added_tokens"].append({"id": 600, "content": "    ", **flags})

def changed(part, **changes):
    return lambda described: described[part].update(changes)

@pytest.mark.parametrize("change, words", [
    (lambda described: described.update(normalizer={"type": "Lowercase"}), "normalizer Lowercase"),
    (lambda described: described.update(model={"type": "WordLevel", "vocab": {"a": 0},
                                               "unk_token": "a"}), "is a WordLevel model"),
    (changed("model", byte_fallback=True), "has byte_fallback, as SentencePiece models do"),
    (swapped, "has merges that are not in the order"),
    # A word of two tokens that only a lookup finds; tiktoken would merge them anywhere
    (lambda described: described["model"].update(
        ignore_merges=True, vocab={**described["model"]["vocab"], "qx": 600}),
     r"has no merge for \('q', 'x'\), which tiktoken would merge"),
    (lambda described: described.update(pre_tokenizer={"type": "Whitespace"}),
     r"splits text in these steps: \['Whitespace'\]"),
    (changed("pre_tokenizer", add_prefix_space=True), "puts a space in front"),
    (with_spaces, "tiktoken would encode"),
    (dict.clear, "is not Hugging Face's tokenizer")])
def test_what_cannot_be_imported_is_refused(tmp_path, convert, change, words):
    described = train()
    change(described)
    with pytest.raises(SystemExit, match=words):
        convert(described)
    assert not (tmp_path / "out").exists()
