"""
Hugging Face's tokenizer.json -> our two text files, if it is a byte-level BPE (GPT-2, Llama 3,
Qwen 2 and 3). Needs: pip install tokenizers

    python -m dev.import_tokenizer tokenizer.json --out my_llama

tiktoken merges the pair whose result has the lowest id, `tokenizers` the pair that is first in its
list. Both give the same ids if the list is in the order of the ids, which is checked with hard
texts before the files are written.
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("usage: python -m dev.import_tokenizer FILE, typed where dataset.py is")

import itertools
import json
import random
import unicodedata
from pathlib import Path

from tiktoken_ext.openai_public import r50k_pat_str

from dataset import Parser, UserError, divide, errors_in_one_line, expand_home, local_folder
from tokenizer import (
    RustBPETokenizer,
    build_encoding,
    find_lost_bytes,
    find_template,
    texts_of_tokens,
)

BOS_NAMES = ("<|begin_of_text|>", "<|endoftext|>", "<|bos|>", "<s>")

# ByteLevel writes each byte as a printable character: itself, or one from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE}
BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(UNPRINTABLE)}

STRIPS = "lstrip", "rstrip", "single_word"    # spaces around a token are lost, or decide

def import_tokenizer(path, out, bos=None):
    """Convert, check and save. Returns lines for the screen; an error says what is in the way."""
    from tokenizers import Tokenizer

    try:
        theirs = Tokenizer.from_file(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:    # Rust's panic, at some damaged files, is no Exception
        raise UserError(
            f"{path} is not Hugging Face's tokenizer.json: {error!r} (for other formats, such as "
            "Mistral's tekken.json, see dev/recipes/own_tokenizer.py)") from error
    described = describe(theirs)
    ours = convert(described, bos, path)
    texts = hard_texts(ours.enc, ours.added_tokens)
    is_nfc = described["normalizer"] == {"type": "NFC"}
    if is_nfc:
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    for text in find_differences(ours, theirs, texts):
        raise UserError(f"{path}: this tokenizer would encode {text[:80]!r} differently here")
    check_folder(ours, theirs, texts, path)
    ours.save(out)
    special = ", ".join(sorted(ours.get_special_tokens() - {*ours.added_tokens}))
    lines = [
        f"{ours.get_vocab_size():,} tokens in {out}; {len(texts):,} hard texts gave the same ids",
        f"BOS: {ours.bos_token}; the names of special tokens are plain text in documents: "
        f"{special:.300}"]
    if ours.added_tokens:
        added = ", ".join(ours.added_tokens)
        lines.append(f"these names in a text are one token each: {added:.300}")
    if ours.template.roles:
        turns = [("user", "Hi"), ("assistant", "Yo")]
        messages = [{"role": role, "content": content} for role, content in turns]
        ids, _ = ours.render_conversation({"messages": messages})
        lines.append(
            f"chats are written so: {ours.decode(ids)!r}; if the model's chat template does it in "
            "another way: dev/recipes/chat_template.py")
    if is_nfc:
        lines.append("its NFC normalizer is not applied: normalize your text first")
    return "\n".join(lines)

def check_folder(ours, theirs, texts, path):
    """transformers also takes tokens and options from other files in the folder."""
    names = "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"
    names = [name for name in names if Path(path).with_name(name).exists()]
    if not names:
        return
    folder, names = Path(path).parent, " and ".join(names)
    alone = f"to convert {path} without {names}, copy it to a folder of its own"
    try:
        from transformers import AutoTokenizer

        read = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer
    except Exception as error:
        raise UserError(
            f"{names} may change {path}, and transformers, which knows, failed: {error!r:.300}. "
            f"Either pip install transformers, or, {alone}") from error
    tokens = {*read.get_vocab().items()} ^ {*theirs.get_vocab().items()}
    for seen in [*sorted(tokens), *find_differences(ours, read, texts)]:
        raise UserError(
            f"transformers reads {path} with {names} as another tokenizer (see {seen!r:.80}); to "
            "write that one into NEW/tokenizer.json: python -c \"from transformers import "
            f"AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('NEW')\"; {alone}")

def describe(theirs):
    """
    tokenizer.json, with the defaults of what an old file lacks. Names of our chat template are
    special tokens, never found in a text; some files say otherwise.
    """
    described = json.loads(theirs.to_str())
    added_tokens = described["added_tokens"]
    template = find_template([token["content"] for token in added_tokens])
    for token in added_tokens:
        token["special"] |= token["content"] in template.special_tokens
    return described

def find_differences(ours, theirs, texts):
    """The texts whose ids differ, or whose ids do not give the text."""
    theirs = type(theirs).from_str(json.dumps(describe(theirs)))
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True    # "<|eos|>" in a text is plain text
    wanted = theirs.encode_batch(texts, add_special_tokens=False)
    encoded = divide(*ours.encode_documents(texts))
    for text, found, want in zip(texts, encoded, wanted, strict=True):
        ids = found[1:].tolist()
        if ids != want.ids or ours.decode(ids) != text:
            yield text

def hard_texts(enc, added=()):
    """Hard characters and runs of them, in any order; every token; names that touch or overlap."""
    draw = random.Random(0)
    names = [*enc.special_tokens_set]
    pieces = [*HARD, *sorted(names)[:20], *added]

    def piece():
        return draw.choice(pieces) * draw.choice([1, 1, 1, 9])

    texts = ["".join(piece() for _ in range(20)) for _ in range(1000)]
    pairs = [*itertools.product(added, names), *itertools.product(names, added)]
    for first, second in pairs:
        for i in range(len(second)):
            if first.endswith(second[:i]):
                texts.append(first + second[i:])
    return texts + texts_of_tokens(enc)

HARD = [
    *"aZs'\u017f \t\n\r.,/-_!\0\x1c\x85\xa0\u2003\u2028\u3000\ufeff1\xe9\u0430\u05d0",
    *"\u0e31\u1eeb\u01c5\u02b0\u6f22\u3042\u30fc\uac00\ufe0f\ufffd\xb2\xbd\u0664\u0967\u3007",
    *"\uff11\u2167\u0378",
    "\U00020000", "\U0001f600", "\U0001d7d8", "\U0001f468\u200d\U0001f469", "e\u0301",
    "\u0915\u094d", "'s", "'RE", "ll", "  ", "\r\n", "12", "345"]

def convert(described, bos, path):
    """A RustBPETokenizer with the same ids; what has no counterpart in tiktoken is refused."""
    def check(condition, seen):
        if not condition:
            raise UserError(
                f"{path} {seen}; only a byte-level BPE such as GPT-2's is converted; for others, "
                "see dev/recipes/own_tokenizer.py")

    model = described["model"]
    normalizer = described["normalizer"] or {}
    check(model["type"] == "BPE", f"is a {model['type']} model")
    check(not model["byte_fallback"], "has byte_fallback, as SentencePiece models do")
    if normalizer.get("normalizers") != []:    # no steps
        kind = normalizer.get("type")
        check(kind in (None, "NFC"), f"has the normalizer {kind}")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        check(not model[option], f"uses {option}")
    pattern = pattern_of(described["pre_tokenizer"] or {}, check)
    special, added = {}, []
    for token in described["added_tokens"]:
        special[token["content"]] = token["id"]
        if not token["special"]:
            added.append(token["content"])
    found = [*added, *find_template(special).special_tokens]    # in texts or in chats
    for token, option in itertools.product(described["added_tokens"], STRIPS):
        is_used = token["content"] in found and token[option]
        check(not is_used, f"has {option} in its token {token['content']!r}")
    ranks = ranks_of(model, special, check)
    ids = {*ranks.values()}
    special = {name: id for name, id in special.items() if id not in ids or name in added}
    bos_token = choose_bos(bos, special, path)
    try:
        enc = build_encoding(pattern, ranks, special)
    except Exception as error:
        check(False, f"has a pattern or an id that tiktoken refuses ({error})")
    return RustBPETokenizer(enc, bos_token, added)

def choose_bos(bos, special, path):
    """The given one, or the first of the usual names that the file has."""
    wanted = [bos] if bos else BOS_NAMES
    found = [name for name in wanted if name in special]
    if found:
        return found[0]
    how = f"name one of its own by --bos: {', '.join(special):.300}"
    if not special:
        how = (
            "it has none at all; to write bos.json, which has one: python -c \"from tokenizers "
            f"import Tokenizer as T; t = T.from_file('{path}'); "
            f"t.add_special_tokens(['{wanted[0]}']); t.save('bos.json')\"")
    raise UserError(
        f"{path} has no special token {' or '.join(wanted)} to open documents; {how}")

def ranks_of(model, special, check):
    """{bytes: id} of all tokens but the special ones; those that no merge makes become special."""
    vocab = model["vocab"]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    merged = ["".join(merge) for merge in merges]
    order = [vocab[token] for token in merged]
    check(order == sorted(order), "has merges that are not in the order of their tokens' ids")
    merged = {*merged}
    ranks = {}
    for token, id in vocab.items():
        # tiktoken looks up whole words first; tokenizers only with ignore_merges.
        is_whole_word = model["ignore_merges"] and token not in special
        if token not in merged and token not in BYTE_OF and not is_whole_word:
            special.setdefault(token, id)
            continue
        check({*token} <= BYTE_OF.keys(), f"has the token {token!r}, which is not bytes")
        if token not in merged:
            for i in range(1, len(token)):
                pair = token[:i], token[i:]
                can_merge = vocab.keys() >= {*pair}
                check(not can_merge, f"has no merge for {pair}, which tiktoken would merge")
        ranks[bytes(map(BYTE_OF.get, token))] = id
    check(not find_lost_bytes(ranks), "lacks tokens of single bytes (train it with "
          "initial_alphabet=pre_tokenizers.ByteLevel.alphabet())")
    return ranks

def pattern_of(pre_tokenizer, check):
    """The one regular expression that splits the text."""
    steps = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    types = [step.get("type") for step in steps]
    is_known = types in (["ByteLevel"], ["Split", "ByteLevel"])
    check(is_known, f"splits text in these steps: {types}")
    split, level = steps[0], steps[-1]
    check(not level["add_prefix_space"], "puts a space in front of a text (add_prefix_space)")
    check(level["use_regex"] == (split is level), "splits text twice, or not at all (use_regex)")
    if split is level:
        return r50k_pat_str    # GPT-2's, which ByteLevel has built in
    how = split["behavior"], split["invert"]
    is_plain = how in (("Isolated", False), ("Removed", True)) and "Regex" in split["pattern"]
    check(is_plain, f"splits text at {split['pattern']} in the way {how}")
    return split["pattern"]["Regex"]

def main(argv=None):
    parser = Parser(
        "python -m dev.import_tokenizer",
        description="Convert a Hugging Face tokenizer.json that is a byte-level BPE (GPT-2, Llama 3, "
                    "Qwen), so that train.py and the loader can use it.",
        epilog="example: python -m dev.import_tokenizer tokenizer.json --out my_llama")
    parser.add_argument("file", type=expand_home, help="a tokenizer.json, or its folder")
    parser.add_argument(
        "--out", required=True, type=local_folder, help="new folder to save it in")
    parser.add_argument(
        "--bos", metavar="TOKEN",
        help=f"token before each document (default: the first that exists of {', '.join(BOS_NAMES)})")
    flags = parser.parse_args(argv)
    path = flags.file
    if Path(path).is_dir():
        path += "/tokenizer.json"
    with errors_in_one_line():
        print(import_tokenizer(path, flags.out, flags.bos))

if __name__ == "__main__":
    main()
