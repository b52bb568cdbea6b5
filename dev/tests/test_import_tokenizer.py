"""
dev/import_tokenizer.py: small tokenizers of each kind, trained here, beside the library's ids.

    python -m pytest dev/tests/test_import_tokenizer.py
"""

import json
from pathlib import Path

import pytest

from dataset import UserError
from dev import import_tokenizer as module
from dev.import_tokenizer import import_tokenizer
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

def write(path, pattern=None, model=None, **changes):
    """A byte-level BPE, split as GPT-2's or by a pattern; returns its description."""
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
    described = json.loads(made.to_str()) | changes
    described["model"] |= model or {}
    if described["model"].get("ignore_merges"):    # Llama 3 has words that no merge makes
        described["model"]["vocab"]["\u0120qxzj"] = 600
    path.write_text(json.dumps(described))
    return described

@pytest.mark.parametrize("pattern, model, normalizer", [
    (None, None, None), (LLAMA, {"ignore_merges": True}, None), (QWEN, None, {"type": "NFC"})],
    ids=["GPT-2", "Llama 3", "Qwen"])
def test_imported_tokenizer_gives_the_librarys_ids(tmp_path, capsys, pattern, model, normalizer):
    path, out = tmp_path / "tokenizer.json", tmp_path / "out"
    write(path, pattern, model, normalizer=normalizer)
    module.main([str(path), "--out", str(out)])
    printed = capsys.readouterr().out
    theirs = library.Tokenizer.from_file(str(path))
    theirs.no_truncation()
    ours = RustBPETokenizer.from_directory(out)
    for text in [*TEXTS, " qxzj"]:
        if "<|" not in text:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.get_bos_token_id() == 0 and len(ours.encode("<|endoftext|>")) > 1
    assert f"{theirs.get_vocab_size()} tokens in {out}; " in printed
    assert "BOS: <|endoftext|>" in printed
    assert ("normalize your text first" in printed) == bool(normalizer)
    with pytest.raises(SystemExit, match=r"^error: .* is not empty"):
        module.main([str(path), "--out", str(out)])

def test_bos_is_chosen(tmp_path):
    path = tmp_path / "tokenizer.json"
    described = write(path)
    with pytest.raises(UserError, match=r"--bos opens documents; special tokens: <\|"):
        import_tokenizer(path, tmp_path / "new", "<s>")
    assert "BOS: <|pad|>" in import_tokenizer(path, tmp_path / "new", "<|pad|>")
    for name in ("<|endoftext|>", "<|pad|>"):
        del described["model"]["vocab"][name]
    path.write_text(json.dumps({**described, "added_tokens": []}))
    with pytest.raises(UserError, match="special tokens: None"):
        import_tokenizer(path, tmp_path / "none")

def swapped(described):
    """Two merges in another order than their ids, as tiktoken cannot have them."""
    first, second, *others = described["model"]["merges"]
    described["model"]["merges"] = [second, first, *others]

def without_merge(described):
    """A word of two tokens that only a lookup finds; tiktoken would merge them anywhere."""
    described["model"]["vocab"]["qx"] = 600
    described["model"]["ignore_merges"] = True

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
    (changed("model", dropout=0.1), "uses dropout"),
    (swapped, "has merges that are not in the order"),
    (without_merge, r"has no merge for \('q', 'x'\), which tiktoken would merge"),
    (lambda described: described.update(pre_tokenizer={"type": "Whitespace"}),
     r"splits text in these steps: \['Whitespace'\]"),
    (changed("pre_tokenizer", add_prefix_space=True), "puts a space in front"),
    (with_spaces, "tiktoken would encode"),
    (dict.clear, "is not a tokenizer.json")])
def test_what_cannot_be_imported_is_refused(tmp_path, change, words):
    path = tmp_path / "tokenizer.json"
    described = write(path)
    change(described)
    path.write_text(json.dumps(described))
    with pytest.raises(UserError, match=words):
        import_tokenizer(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()

def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nothing.json"):
        with pytest.raises(UserError, match="expected Hugging Face's"):
            import_tokenizer(path, tmp_path / "out")
