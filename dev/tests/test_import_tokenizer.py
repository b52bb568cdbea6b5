"""
dev/import_tokenizer.py: small tokenizers of each kind, trained here, against the library that runs them.

    python -m pytest dev/tests/test_import_tokenizer.py
"""

import json
import re
from pathlib import Path

import pytest

from dev import prepare
from dev.tests.test_prepare import command
from tokenizer import RustBPETokenizer

library = pytest.importorskip("tokenizers")

TEXTS = [*Path(__file__).read_text().split("\n\n"), *Path(prepare.__file__).read_text().split("\n\n"),
         *("f\u00fcr \u65e5\u672c \U0001f642 \0 12345 don't  \t\n stop " * n for n in (1, 9))]
LLAMA = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")    # Qwen's has one digit


def small_tokenizer(path, pattern=None, **changes):
    """The tokenizer.json of a byte-level BPE, split as GPT-2's, or by a pattern as Llama's and Qwen's."""
    level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = level
    if pattern:
        split = library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
        made.pre_tokenizer = library.pre_tokenizers.Sequence([split, level])
    trainer = library.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>", "<|pad|>"], show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(TEXTS, trainer)
    made.enable_truncation(5)    # as many files have it
    described = json.loads(made.to_str())
    if "model" in changes:    # Llama 3 has words that no merge makes
        described["model"]["vocab"]["\u0120qxzj"] = 600
    described["model"] |= changes.pop("model", {})
    described |= changes
    path.write_text(json.dumps(described))
    return made, described


@pytest.mark.parametrize("pattern, changes", [
    (None, {}), (LLAMA, {"model": {"ignore_merges": True}}),
    (LLAMA.replace("{1,3}", ""), {"normalizer": {"type": "NFC"}})], ids=["GPT-2", "Llama 3", "Qwen"])
def test_import_tokenizer(tmp_path, capsys, pattern, changes):
    """The saved tokenizer gives the library's ids; names of special tokens are plain text."""
    small_tokenizer(tmp_path / "tokenizer.json", pattern, **changes)
    theirs = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.no_truncation()
    arguments = ["import_tokenizer", tmp_path / "tokenizer.json", "--out", tmp_path / "out"]
    assert command(*arguments) is None
    words = capsys.readouterr().out
    assert f"{theirs.get_vocab_size()} tokens in" in words and "BOS: <|endoftext|>" in words
    assert ("normalize your text first" in words) == ("normalizer" in changes)
    ours = RustBPETokenizer.from_directory(str(tmp_path / "out"))
    for text in (text for text in [*TEXTS, " qxzj"] if "<|" not in text):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text)) == text
    assert len(ours.encode("<|endoftext|>")) > 1 and ours.get_bos_token_id() == 0
    assert "is not empty" in command(*arguments)
    arguments[-1] = tmp_path / "more"
    assert "--bos opens documents; special tokens: <|" in command(*arguments, "--bos", "<s>")
    assert command(*arguments, "--bos", "<|pad|>") is None
    described = json.loads((tmp_path / "tokenizer.json").read_text()) | {"added_tokens": []}
    for name in ("<|endoftext|>", "<|pad|>"):
        del described["model"]["vocab"][name]
    arguments[1].write_text(json.dumps(described))
    assert command(*arguments[:-1], tmp_path / "none").endswith("--bos opens documents; special tokens: None")


def swapped(described):
    """Two merges in another order than their ids, as tiktoken cannot have them."""
    merges = described["model"]["merges"]
    return {"model": described["model"] | {"merges": [merges[1], merges[0], *merges[2:]]}}


def without_merge(described):
    """A word of two tokens that only a lookup finds; tiktoken would merge them anywhere."""
    vocab = described["model"]["vocab"] | {"qx": 600}
    return {"model": described["model"] | {"vocab": vocab, "ignore_merges": True}}


SPACES = {"id": 600, "content": "    ", "single_word": False, "lstrip": False, "rstrip": False,
          "normalized": False, "special": False}


@pytest.mark.parametrize("change, message", [
    ({"normalizer": {"type": "Lowercase"}}, "has the normalizer Lowercase"),
    ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "is a WordLevel model"),
    ({"model": {"byte_fallback": True}}, "has byte_fallback, as SentencePiece models do"),
    ({"model": {"dropout": 0.1}}, "uses dropout"), (swapped, "has merges that are not in the order"),
    (without_merge, r"has no merge for \('q', 'x'\), which tiktoken would merge"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, r"splits text in these steps: \['Whitespace'\]"),
    ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                        "use_regex": True}}, "puts a space in front"),
    (lambda described: {"added_tokens": [*described["added_tokens"], SPACES]}, "tiktoken would encode"),
    (lambda described: 1 / 0, "is not a tokenizer.json")])
def test_what_cannot_be_imported_is_refused(tmp_path, change, message):
    path = tmp_path / "tokenizer.json"
    _, described = small_tokenizer(path)
    try:
        changed = described | (change(described) if callable(change) else change)
        if "type" not in changed["model"]:
            changed["model"] = described["model"] | changed["model"]
        path.write_text(json.dumps(changed))
    except ZeroDivisionError:
        path.write_text("[]")
    assert re.match(f"error: {path}.*{message}", command("import_tokenizer", path, "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_is_no_file_is_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "nothing.json"):
        with pytest.raises(ValueError, match="expected Hugging Face's"):
            prepare.import_tokenizer(str(path), str(tmp_path / "out"))
