"""
Hugging Face's tokenizer.json -> our two text files, if it is a byte-level BPE (GPT-2, Llama 3, Qwen 2 and 3).

tiktoken merges the pair whose result has the lowest id, `tokenizers` the pair that is first in its list. Both
give the same ids if the list is in the order of the ids, which is proven on hard strings before the files are
written. Needs: pip install tokenizers
"""

import itertools
import json
import os
import unicodedata

from tiktoken_ext.openai_public import r50k_pat_str

from tokenizer import RustBPETokenizer, build_encoding, hard_texts

BOS_NAMES = ("<|begin_of_text|>", "<|endoftext|>", "<|bos|>", "<s>")

# ByteLevel writes each byte as a printable character: itself, or one from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(UNPRINTABLE)}

def import_tokenizer(path: str, out: str, bos: str | None = None) -> str:
    """Convert, prove and save; returns lines for the screen. ValueError says what cannot be converted."""
    from tokenizers import Tokenizer

    if os.path.isdir(out) and os.listdir(out):
        raise ValueError(f"{out} is not empty; name a new folder with --out")
    if not os.path.isfile(path):
        raise ValueError(f"{path} is no file; expected Hugging Face's tokenizer.json")
    with open(path, "rb") as file:
        data = file.read()
    try:
        described, theirs = json.loads(data), Tokenizer.from_buffer(data)
    except Exception as error:    # tokenizers raises no other class
        raise ValueError(f"{path} is not a tokenizer.json of Hugging Face: {error}") from error
    ours, is_nfc = convert(described, bos, path), bool(described.get("normalizer"))
    theirs.no_truncation()
    theirs.no_padding()
    texts = [unicodedata.normalize("NFC", text) if is_nfc else text for text in hard_texts(ours.enc)]
    ids, bounds = ours.encode_documents(texts)
    encoded = theirs.encode_batch(texts, add_special_tokens=False)
    for text, (a, b), want in zip(texts, itertools.pairwise(bounds), encoded, strict=True):
        found = ids[a + 1:b].tolist()
        if found != want.ids or ours.decode(found) != text:
            raise ValueError(f"{path}: tiktoken would encode {text[:80]!r} to other ids; nothing was written")
    ours.save(out)
    special = ", ".join(sorted(ours.get_special_tokens()))[:300]
    return (f"{ours.get_vocab_size():,} tokens in {out}; {len(texts):,} hard texts gave the same ids\n"
            f"BOS: {ours.bos_token}; the names of special tokens are plain text in documents: {special}"
            + "\nits NFC normalizer is not applied: normalize your text first" * is_nfc)

def convert(described, bos, path):
    """A RustBPETokenizer with the same ids; what has no counterpart in tiktoken is refused."""
    def check(condition, seen):
        if not condition:
            raise ValueError(f"{path} {seen}; only a byte-level BPE such as GPT-2's can be converted")

    model, normalizer = described["model"], described.get("normalizer") or {}
    check(model.get("type") == "BPE", f"is a {model.get('type')} model")
    check(not model.get("byte_fallback"), "has byte_fallback, as SentencePiece models do")
    check(normalizer.get("type") in (None, "NFC"), f"has the normalizer {normalizer.get('type')}")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        check(not model.get(option), f"uses {option}")
    pattern = pattern_of(described.get("pre_tokenizer") or {}, check)

    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    order = [model["vocab"]["".join(merge)] for merge in merges]
    check(order == sorted(order), "has merges that are not in the order of their tokens' ids")
    special = {token["content"]: token["id"] for token in described["added_tokens"]}
    merged, ranks = {"".join(merge) for merge in merges}, {}
    for token, id in model["vocab"].items():
        # tiktoken looks up whole words first; tokenizers only with ignore_merges.
        if token in merged or token in BYTE_OF or (model.get("ignore_merges") and token not in special):
            check({*token} <= BYTE_OF.keys(), f"has the token {token!r}, which is not bytes")
            pairs = ((token[:i], token[i:]) for i in range(1, len(token)) if token not in merged)
            two = next((pair for pair in pairs if model["vocab"].keys() >= {*pair}), None)
            check(not two, f"has no merge for {two}, which tiktoken would merge")
            ranks[bytes(map(BYTE_OF.get, token))] = id
        else:
            special.setdefault(token, id)
    check(all(bytes([i]) in ranks for i in range(256)), "lacks tokens of single bytes")
    ids = {*ranks.values()}
    special = {name: id for name, id in special.items() if id not in ids}
    bos = next((name for name in ([bos] if bos else BOS_NAMES) if name in special), None)
    if not bos:
        raise ValueError(f"{path}: --bos opens documents; special tokens: {', '.join(special)[:99] or None}")
    return RustBPETokenizer(build_encoding(pattern, ranks, special), bos)

def pattern_of(pre_tokenizer, check):
    """The one regular expression that splits the text."""
    steps = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    kinds = [step.get("type") for step in steps]
    check(kinds in (["ByteLevel"], ["Split", "ByteLevel"]), f"splits text in these steps: {kinds}")
    split, level = steps[0], steps[-1]
    check(not level["add_prefix_space"], "puts a space in front of a text (add_prefix_space)")
    check(level.get("use_regex", True) == (split is level), "splits text twice, or not at all (use_regex)")
    if split is level:
        return r50k_pat_str    # GPT-2's, which ByteLevel has built in
    how = split["behavior"], split["invert"]
    is_plain = how in (("Isolated", False), ("Removed", True)) and "Regex" in split["pattern"]
    check(is_plain, f"splits text at {split['pattern']} in the way {how}")
    return split["pattern"]["Regex"]
