"""
Chats: conversations to shards, and to ids with and without a loss.

    python -m pytest dev/tests/test_chats.py
"""

import collections
import itertools
import json
import random
import re
from functools import cache
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import dataset
import train
from dataloader import PACKINGS, Location, PackedLoader, Source, merge_states, wholefit
from dev import nanochat, prepare
from dev.tests.test_prepare import all_of, command, read_all
from dev.tests.test_tokenizer import GPT4, SOURCES
from test_dataloader import ByteTokenizer
from tokenizer import HARD, SPECIAL_TOKENS, RustBPETokenizer, build_encoding, encode_conversations

# ---------------------------------------------------------------------------------------------------------
# Conversations, and tokenizers with the special tokens of each template

WORDS = [*HARD, *SPECIAL_TOKENS, "<|im_end|>", "<|eot_id|>", "hello", " World", "\n", "def f(x):", "日本", ""]
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def make_chats(n, seed=0, words=WORDS, parts=("text", "python", "python_output")):
    """n lists of 2 to 12 messages: nanochat's roles and parts, with the names of special tokens as text."""
    draw = random.Random(seed)

    def text():
        return "".join(draw.choices(words, k=draw.randrange(12)))

    def answer():
        if draw.random() < 0.5:
            return text()
        return [{"type": draw.choice(parts), "text": text()} for _ in range(draw.randrange(4))]

    for number in range(n):
        chat = [{"role": "system", "content": text()}] if draw.random() < 0.3 else []
        for i in range(draw.randint(2, 12 - len(chat))):
            role = "assistant" if i % 2 else "user"
            chat.append({"role": role, "content": answer() if i % 2 else f"{number} {text()}"})
        yield chat


def as_lines(chats):
    return [json.dumps(chat) for chat in chats]


@cache
def tokenizer_with(special=tuple(SPECIAL_TOKENS)):
    """Few tokens, with these special ones; the first is BOS."""
    ranks = RustBPETokenizer.train_from_iterator(iter(SOURCES[:20]), 600).enc._mergeable_ranks
    named = {name: len(ranks) + i for i, name in enumerate(special)}
    return RustBPETokenizer(build_encoding(GPT4, ranks, named), special[0])


def slow_rendering(tokenizer, chat):
    """nanochat's rules again, one token at a time. -> [(id, mask), ...]"""
    tokens = [(tokenizer.get_bos_token_id(), 0)]

    def put(name, mask):
        tokens.append((tokenizer.encode_special(f"<|{name}|>"), mask))

    def put_text(text, mask):
        for id in tokenizer.encode(text):
            tokens.append((id, mask))

    system = ""
    for message in chat:
        if message["role"] == "system":
            system = message["content"] + "\n\n"
        elif message["role"] == "user":
            put("user_start", 0)
            put_text(system + message["content"], 0)
            put("user_end", 0)
            system = ""
        else:
            put("assistant_start", 0)
            if isinstance(message["content"], str):
                put_text(message["content"], 1)
            else:
                for part in message["content"]:
                    mask = 0 if part["type"] == "python_output" else 1
                    name = {"python": "python", "python_output": "output"}.get(part["type"])
                    if name:
                        put(name + "_start", mask)
                    put_text(part["text"], mask)
                    if name:
                        put(name + "_end", mask)
            put("assistant_end", 1)
    return tokens


# ---------------------------------------------------------------------------------------------------------
# Rendering


@pytest.mark.parametrize("engine", ["tiktoken", "gigatoken"])
def test_ids_and_masks_are_those_of_the_rules(monkeypatch, engine):
    """All of a chunk in one call, and each by itself, cut to max_tokens."""
    if engine == "gigatoken":
        pytest.importorskip("gigatoken")
    monkeypatch.setenv("NANOLOADER_ENGINE", engine)
    tokenizer, chats = tokenizer_with.__wrapped__(), list(make_chats(300))
    ids, bounds = encode_conversations(tokenizer, [None, *as_lines(chats)])
    assert engine in tokenizer.engine and ids.dtype == np.int32 and bounds[1] == 0
    assert [part.tolist() for part in encode_conversations(tokenizer, [None])] == [[], [0, 0]]
    for i, chat in enumerate(chats):
        want = slow_rendering(tokenizer, chat)
        assert ids[bounds[i + 1]:bounds[i + 2]].tolist() == [id if mask else ~id for id, mask in want]
        for limit in (None, 7):
            theirs = tokenizer.render_conversation({"messages": chat}, limit)
            assert list(zip(*theirs, strict=True)) == want[:limit]


def test_all_texts_are_encoded_in_one_call(monkeypatch):
    tokenizer, calls = tokenizer_with(), []
    original = RustBPETokenizer.encode_documents
    monkeypatch.setattr(RustBPETokenizer, "encode_documents",
                        lambda self, *args: calls.append(1) or original(self, *args))
    monkeypatch.setattr(RustBPETokenizer, "encode", None)
    assert len(encode_conversations(tokenizer, as_lines(make_chats(50)))[1]) == 51 and calls == [1]


@pytest.mark.parametrize("special, opening, closing, after", [
    (CHATML, "<|im_start|>{}\n", "<|im_end|>", "\n"),
    (LLAMA3, "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", "")], ids=["ChatML", "Llama 3"])
def test_other_templates(special, opening, closing, after):
    """The ids of the whole text, special tokens seen; a loss for what an assistant writes, and its end."""
    tokenizer, words = tokenizer_with(special), ["hello", "World", "def f(x):", "日本", "!"]
    for chat in make_chats(100, words=words, parts=["text"]):
        want, text = [], special[0]
        for message in chat:
            if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"][:1])
            before, body = opening.format(message["role"]), message["content"] + closing
            text += before + body + after
            mask = [0, int(message["role"] == "assistant"), 0]
            for part, has_loss in zip((before, body, after), mask, strict=True):
                want += [has_loss] * len(tokenizer.enc.encode(part, allowed_special="all"))
        ids, mask = tokenizer.render_conversation({"messages": chat})
        assert ids == tokenizer.enc.encode(text, allowed_special="all") and mask == [0, *want]
    with pytest.raises(ValueError, match="also as parts of type text; saw"):
        chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": [
            {"type": "python", "text": "1"}]}]
        tokenizer.render_conversation({"messages": chat})


class Spelled(RustBPETokenizer):
    """Has a template that we do not know."""
    def render_conversation(self, conversation, max_tokens=None):
        words = [(word, mask) for mask, message in enumerate(conversation["messages"])
                 for word in self.encode(message["content"])]
        ids, mask = zip((self.bos_token_id, 0), *words, strict=True)
        return ids[:max_tokens], mask[:max_tokens]


def test_a_tokenizer_may_render_by_itself():
    tokenizer = Spelled(tokenizer_with().enc, "<|bos|>")
    ids, bounds = encode_conversations(tokenizer, as_lines(
        [[{"content": "question"}, {"content": "answer"}], [{"content": "another one"}]]))
    words = list(map(tokenizer.encode, ("question", "answer", "another one")))
    assert ids.tolist() == [~tokenizer.bos_token_id, *(~id for id in words[0]), *words[1],
                            ~tokenizer.bos_token_id, *(~id for id in words[2])]
    assert bounds.tolist() == [0, 1 + len(words[0] + words[1]), len(ids)]
    for lacking in (ByteTokenizer(), tokenizer_with(("<|bos|>",))):
        with pytest.raises(ValueError, match=r"cannot render chats: it lacks .* Llama 3's"):
            encode_conversations(lacking, as_lines([[{"role": "user", "content": "Hi"}]]))


USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
BAD = [
    ([ASSISTANT], "expected a message of role 'user', saw .*Hello"),
    ([USER, USER], "expected a message of role 'assistant', saw .*Hi"),
    ([USER, ASSISTANT, {"role": "system", "content": ""}], "of role 'user', saw .*system"),
    ([USER, {"role": "assistant", "content": [{"type": "image", "text": ""}]}], "python_output; saw .*image"),
    ([USER, {"role": "assistant", "content": [{"type": "text"}]}], "python_output; saw "),
    ([USER, {"role": "assistant", "content": None}], "expected messages as .* None"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}]}, ASSISTANT], "expected messages as"),
    ([{"role": "system", "content": "x"}], "expected messages as"), ([], "expected messages as"),
    ({"a": 1}, "expected messages as"), (["Hi", "Hello"], "expected messages as"), (7, "expected messages"),
    ("Hi", "expected messages as .* saw 'Hi'")]


@pytest.mark.parametrize("messages, words", BAD)
def test_a_bad_conversation_is_named(messages, words):
    lines = as_lines([[USER, ASSISTANT], messages])
    with pytest.raises(ValueError, match=f"^conversation 1 of 2: ValueError.*{words}"):
        encode_conversations(tokenizer_with(), lines)


# ---------------------------------------------------------------------------------------------------------
# Shards: convert, tokenize, head, stats, verify


def write_input(path, kind, chats):
    """The same conversations in a form that convert reads."""
    columns = {"id": list(range(len(chats))), "messages": chats}
    if kind == "lists":
        path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    elif kind == "sharegpt":
        names = {"user": "human", "assistant": "gpt", "system": "system"}
        theirs = [[{"from": names[one["role"]], "value": one["content"]} for one in chat] for chat in chats]
        path.write_text("".join(json.dumps({"conversations": chat}) + "\n" for chat in theirs))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"id": 1, "messages": chat}) + "\n" for chat in chats))
    elif kind == "json":
        path.write_text(json.dumps([{"messages": chat} for chat in chats]))
    elif kind == "parquet":
        pq.write_table(pa.table(columns), path)
    else:    # a stream, as save_to_disk writes
        table = pa.table(columns)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)


@pytest.mark.parametrize("kind", ["jsonl", "lists", "json", "sharegpt", "parquet", "arrow"])
def test_convert_returns_every_conversation_once(tmp_path, capsys, kind):
    """All forms give the same shards; a folder of them is converted like any other input."""
    chats = [chat for chat in make_chats(200) if all(isinstance(one["content"], str) for one in chat)]
    path = tmp_path / f"in.{kind if kind in ('parquet', 'arrow', 'json') else 'jsonl'}"
    write_input(path, kind, chats)
    assert command("convert", path, "--out", tmp_path / "out") is None
    assert f"1 file -> {len(chats)} conversations, " in capsys.readouterr().out
    found = [json.loads(line) for line in read_all(tmp_path / "out")]
    assert sorted(map(str, found)) == sorted(map(str, chats)) and found != chats
    assert {shard.kind for shard in all_of(tmp_path / "out")} == {"messages"}
    assert dataset.read_index(str(tmp_path / "out"))["kind"] == "messages"
    assert command("convert", tmp_path / "out", "--out", tmp_path / "again") is None
    assert sorted(read_all(tmp_path / "again")) == sorted(read_all(tmp_path / "out"))


def test_parts_survive_and_keys_choose(tmp_path):
    chats = list(make_chats(100))
    lines = [json.dumps({"text": "a", "chat": chat, "n": i}) + "\n" for i, chat in enumerate(chats)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    for key, kind in (("--messages_key", "messages"), ("--text_key", "text")):
        value = "chat" if kind == "messages" else "text"
        out = tmp_path / kind
        assert command("convert", tmp_path / "in.jsonl", "--out", out, key, value, "--keep", "n") is None
        assert {shard.kind for shard in all_of(out)} == {kind}
    tables = [pq.read_table(shard.path).to_pylist() for shard in all_of(tmp_path / "messages")]
    rows = [row for table in tables for row in table]
    assert len(rows) == 100 and all(json.loads(row["messages"]) == chats[row["n"]] for row in rows)
    assert command("convert", tmp_path / "in.jsonl", "--out", tmp_path / "default") is None
    assert {shard.kind for shard in all_of(tmp_path / "default")} == {"text"}
    line = command("convert", tmp_path / "in.jsonl", "--out", tmp_path / "no", "--text_key", "chat")
    assert "for conversations, add --messages_key chat" in line


@pytest.mark.parametrize("messages, words", [*BAD, ([USER], "no message of an assistant"), (None, "None")])
def test_a_bad_conversation_is_a_bad_document(tmp_path, capsys, messages, words):
    good = [[USER, {"role": "assistant", "content": str(i)}] for i in range(40)]
    lines = [json.dumps({"messages": chat}) + "\n" for chat in [*good[:5], messages, *good[5:]]]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    line = command("convert", tmp_path / "in.jsonl", "--out", tmp_path / "out")
    assert re.search(rf"in.jsonl, line 6: .*{words}.*--skip_bad", line), line
    assert command("convert", tmp_path / "in.jsonl", "--out", tmp_path / "out", "--skip_bad") is None
    assert "skipped bad documents or files: 1; the first:\n  " in capsys.readouterr().out
    assert len(read_all(tmp_path / "out")) == 40


@pytest.mark.parametrize("messages, words", [
    ([{"role": "developer", "content": "Hi"}, USER, ASSISTANT], "expected a message of role 'user', saw {'r"),
    ([ASSISTANT], "expected a message of role 'user', saw"), ([], "expected messages as"),
    ([USER], "no message of an assistant"),
    ([USER, ASSISTANT], "a conversation, under 'messages', among texts; convert conversations by themselv")])
def test_what_is_wrong_with_the_first_conversations_is_said_without_a_key(tmp_path, messages, words):
    """... and conversations after texts are called that."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "book.txt").write_text("some text")
    for paths in [["in.jsonl"], ["in.jsonl", "book.txt"]][messages == [USER, ASSISTANT]:]:
        line = command("convert", *(tmp_path / path for path in paths), "--out", tmp_path / "out")
        assert f"in.jsonl, line 1: {words}" in line and "no key" not in line


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A folder with those of 200 conversations, of their tokens, and of a tokenizer."""
    folder = tmp_path_factory.mktemp("shards")
    write_input(folder / "in.jsonl", "jsonl", list(make_chats(200)))
    prepare.convert([str(folder / "in.jsonl")], str(folder / "chats"))
    tokenizer_with().save(str(folder / "tokenizer"))
    prepare.tokenize(str(folder / "chats"), str(folder / "tokens"), str(folder / "tokenizer"))
    return folder


def test_token_shards_hold_ids_without_a_loss_as_negative_ones(shards, capsys):
    texts, tokens = all_of(shards / "chats"), all_of(shards / "tokens")
    for text, made in zip(texts, tokens, strict=True):
        assert (made.kind, made.dtype, made.text_bytes) == ("tokens", "<i4", text.text_bytes)
        assert made.group_sizes == text.group_sizes
        for row_group in range(len(made.group_sizes)):
            ids, bounds = encode_conversations(tokenizer_with(), text.read(row_group).to_pylist())
            stored = [np.frombuffer(one, "<i4").tolist() for one in made.read(row_group).to_pylist()]
            assert stored == [ids[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    arguments = "tokenize", shards / "chats", "--tokenizer", shards / "tokenizer", "--out", shards / "tokens"
    assert command(*arguments) is None and " tokens in " in capsys.readouterr().out    # kept, not made again
    assert command("head", shards / "tokens", "--tokenizer", shards / "tokenizer") is None
    assert "<|user_start|>" in capsys.readouterr().out
    for folder in ("chats", "tokens"):
        assert command("verify", shards / folder) == 0
    capsys.readouterr()


def test_head_and_stats_know_conversations(shards, capsys):
    assert command("head", shards / "chats", "-n", "2", "--tokenizer", shards / "tokenizer") is None
    printed = capsys.readouterr().out
    documents = [json.loads(text) for text in read_all(shards / "chats")[:2]]
    for chat in documents:
        ids, _ = tokenizer_with().render_conversation({"messages": chat})
        assert f"{len(ids):,} tokens" in printed
    assert '"role": "user"' in printed
    assert command("stats", shards / "chats", "--tokenizer", shards / "tokenizer") is None
    printed = capsys.readouterr().out
    ids, _ = encode_conversations(tokenizer_with(), read_all(shards / "chats"))
    share = int(re.search(r"(\d+)% with a loss", printed)[1])
    assert abs(share - 100 * (ids >= 0).mean()) < 5 and "of JSON in a document" in printed


def test_nanochats_generators_refuse_conversations(shards):
    """They would train on JSON."""
    with pytest.raises(ValueError, match="holds messages, and nanochat's generators read text"):
        nanochat.check_shards(dataset.list_shards(str(shards / "chats"), "val"), 1)


def test_a_tokenizer_for_chats_is_trained_on_what_they_say(shards):
    from tokenizer import some_text

    said = list(some_text([str(shards / "chats")], 10**9))
    chats = [json.loads(line) for s in dataset.list_shards(str(shards / "chats"), "train")
             for i in range(len(s.group_sizes)) for line in s.read(i).to_pylist()]
    assert len(said) == len(chats)
    for text, chat in zip(said, chats, strict=True):
        contents = [one["content"] for one in chat]
        parts = [part for content in contents
                 for part in ([content] if isinstance(content, str) else [one["text"] for one in content])]
        assert [c for c in text if c != "\n"] == [c for c in "".join(parts) if c != "\n"]


# ---------------------------------------------------------------------------------------------------------
# Rows: every token of an answer is a target once, and only these are


def load(folder, T=40, **options):
    """The loaders of all ranks, which deliver rows in one epoch together."""
    world, options = options.pop("world", 1), {"split": "train", "epochs": 1, "num_lanes": 4} | options
    return [PackedLoader(tokenizer_with(), 3, T, data_dir=str(folder), rank=rank, world_size=world, **options)
            for rank in range(world)]


def count_targets(loaders, seen, steps=None):
    """Count, by document and token, the targets with a loss; each must be the token at its place."""
    for loader in loaders:
        for inputs, targets in itertools.islice(loader, steps):
            assert inputs.min() >= 0 and targets.min() >= -100
            for pieces, answers in zip(loader.pieces(), targets.tolist(), strict=True):
                at = {piece.offset + k: (piece.location, piece.start + k)
                      for piece in pieces for k in range(piece.stop - piece.start)}
                for i, token in enumerate(answers, 1):
                    if token >= 0:
                        seen[(*at[i], token)] += 1


def tokens_of_answers(shards, kind):
    """What count_targets should see: {(location, index, token): 1}"""
    want = collections.Counter()
    for shard in dataset.list_shards(str(shards / "chats"), "train"):
        for row_group in range(len(shard.group_sizes)):
            for row, line in enumerate(shard.read(row_group).to_pylist()):
                ids, mask = tokenizer_with().render_conversation({"messages": json.loads(line)})
                for i, (id, has_loss) in enumerate(zip(ids, mask, strict=True)):
                    if has_loss:
                        want[Location(f"{shards}/{kind}/{shard.name}", row_group, row), i, id] = 1
    return want


@pytest.mark.parametrize("kind", ["chats", "tokens"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("packing", PACKINGS)
def test_an_epoch_has_each_token_of_an_answer_once(shards, packing, world, kind):
    """Stop after 5 steps, go on with other ranks. bestfit drops tokens, and repeats none."""
    seen, want = collections.Counter(), tokens_of_answers(shards, kind)
    first = load(shards / kind, packing=packing, world=world)
    count_targets(first, seen, 5)
    state = merge_states([loader.state_dict() for loader in first])
    assert 0 < seen.total() < want.total() / 2
    rest = load(shards / kind, packing=packing, world=4 // world)
    for loader in rest:
        loader.load_state_dict(json.loads(json.dumps(state)))
    count_targets(rest, seen)
    for loader in [*first, *rest]:
        loader.close()
    assert seen == want if packing != "bestfit" else seen.keys() < want.keys() and max(seen.values()) == 1


def test_text_rows_of_a_mixture_are_those_without_chats(shards, tmp_path):
    """In each lane; and each batch has its share of chats."""
    with open(tmp_path / "text.jsonl", "w") as file:
        file.writelines(json.dumps({"text": f"{i} hello" * (i % 50)}) + "\n" for i in range(400))
    text, chats = str(tmp_path / "text"), str(shards / "chats")
    prepare.convert([str(tmp_path / "text.jsonl")], text)
    options = {"split": "train", "num_lanes": 4, "packing": "wholefit"}
    rows = {1: [[] for _ in range(4)], 2: [[] for _ in range(4)]}
    for n, data in ((1, {text: 1.0}), (2, {text: 0.7, chats: 0.3})):
        with PackedLoader(tokenizer_with(), 40, 30, data_dir=data, **options) as loader:
            for inputs, targets in itertools.islice(loader, 6):
                n_chats = 0
                for b, pieces in enumerate(loader.pieces()):
                    if pieces[0].location.path.startswith(text):
                        rows[n][b % 4].append((inputs[b].tolist(), targets[b].tolist()))
                    else:
                        n_chats += 1
                assert abs(n_chats - 12 * (n - 1)) <= 5
    for alone, mixed in zip(rows[1], rows[2], strict=True):
        assert len(mixed) > 20 and mixed == alone[:len(mixed)]


# ---------------------------------------------------------------------------------------------------------
# wholefit


def check_rows(lengths, R):
    """Every token once, and nothing is cut that fits. -> number of rows"""
    tokens, n_rows = [], 0
    for row in wholefit(lengths, R):
        assert row and sum(stop - start + (start > 0) for _, start, stop in row) <= R
        n_rows += 1
        for d, start, stop in row:
            tokens += [(d, i) for i in range(start, stop)]
            assert stop - start == lengths[d] or lengths[d] > R
    assert sorted(tokens) == [(d, i) for d, n in enumerate(lengths) for i in range(n)]
    return n_rows


def test_wholefit_on_all_small_lengths():
    for R, n in itertools.product((2, 3, 5), range(1, 5)):
        for lengths in itertools.product(range(1, 7), repeat=n):
            check_rows(lengths, R)


def test_wholefit_pads_little():
    """Less than best fit with a buffer of 100, the rule of nanochat's fine-tuning, and cuts no tails."""
    draw = random.Random(0)
    lengths = [min(600, 20 + int(draw.lognormvariate(4.5, 0.8))) for _ in range(4000)]
    R, buffer, rest, theirs = 513, [], [min(n, 513) for n in lengths], 0
    while buffer or rest:
        free, theirs = R, theirs + 1
        while True:
            buffer, rest = buffer + rest[:100 - len(buffer)], rest[100 - len(buffer):]
            if not (fits := [n for n in buffer if n <= free]):
                break
            buffer.remove(max(fits))
            free -= max(fits)
    n_rows = check_rows(lengths, R)
    assert n_rows <= theirs and sum(lengths) > 0.99 * R * n_rows


# ---------------------------------------------------------------------------------------------------------
# Training


TOY = ["--device", "cpu", "--depth", "1", "--seq_len", "64", "--batch_size", "4", "--eval_rows", "20"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run("--steps", 2) types `python train.py --steps 2` in a new folder. -> what it printed"""
    def type_in(*words):
        assert not train.main(list(map(str, words)))
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    return type_in


def test_a_model_is_fine_tuned_on_text_and_chats_and_answers(shards, run):
    """Rates are a tenth; no zlib line for chats; chats and their tokens are scored alike."""
    with open("text.jsonl", "w") as file:
        file.writelines(json.dumps({"text": f"{i} hello" * (1 + i % 50)}) + "\n" for i in range(400))
    prepare.convert(["text.jsonl"], "text")
    tokenizer, chats = ("--tokenizer", shards / "tokenizer"), shards / "chats"
    run(*TOY, *tokenizer, "--data", "text", "--steps", 2, "--out", "base")
    tune = *TOY[4:], "--init", "base/step_0000002.pt", "--packing", "wholefit", "--steps", 3
    printed = run(*tune, "--data", "text:0.5", f"{chats}:0.5", "--out", "tuned")
    assert re.search(r"bits per byte of text \(zlib -9: ", printed)
    assert re.search(rf"bits per byte of {chats}\n", printed)
    peaks = [max(record.get("lr", 0) for record in train.read_log(f"{out}/log.jsonl"))
             for out in ("base", "tuned")]
    assert 0 < peaks[1] < peaks[0] / 9
    resumed = run("--resume", "auto", "--out", "tuned", "--steps", 4)
    assert "step 4: val" in resumed
    scores = [re.search(r"val (\S+) bits", run("--eval", "tuned/step_0000004.pt", "--data", shards / kind))[1]
              for kind in ("chats", "tokens")]
    assert scores[0] == scores[1]
    answer = run("--chat", "What is this?", "--out", "tuned")
    assert len(answer) > 1 and "What is this?" not in answer and "<|assistant_end|>" not in answer


class Always(torch.nn.Module):
    """A model that is certain of one token."""

    def __init__(self, id):
        super().__init__()
        self.embedding, self.id = torch.nn.Embedding(1, 1), id

    def forward(self, inputs):
        return 1e4 * torch.nn.functional.one_hot(torch.full_like(inputs, self.id), 265).float()


def test_answer_without_an_end_says_so():
    tokenizer = RustBPETokenizer.train_from_iterator(["x"], 265)
    assert train.generate(Always(65), tokenizer, 8, [1], 5, 64, 1) == "AAAAA ... (no end after 5 tokens)"
    assert train.generate(Always(64), tokenizer, 8, [66], 5, 64) == "B"
    assert train.generate(Always(65), tokenizer, 8, [66], 2) == "BAA"


def test_fine_tuning_scales_all_rates(shards, run):
    """--lr with --init: the rates of the embeddings and the head follow that of the matrices."""
    peaks, original = [], train.make_optimizers

    def note(*arguments):
        optimizers = original(*arguments)
        peaks.append([rate for optimizer in optimizers for rate in optimizer.peak_rates])
        return optimizers

    common = ["--data", shards / "chats", "--steps", 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "make_optimizers", note)
        run(*TOY, *common, "--tokenizer", shards / "tokenizer", "--out", "base")
        for i, lr in enumerate(([], ["--lr", 0.02 / (1 + 1250 / 256) / 2])):
            run(*TOY[4:], *common, "--init", "base/step_0000001.pt", *lr, "--out", f"tuned{i}")
    for rates, share in zip(peaks[1:], (0.1, 0.5), strict=True):
        assert rates == pytest.approx([share * rate for rate in peaks[0]])


def test_evals_score_the_tokens_of_answers_once(shards):
    """A window is one conversation; a longer one has several, with context."""
    tokenizer, flags = tokenizer_with(), SimpleNamespace(seq_len=64, eval_rows=10**6, micro_batch_size=1)
    sources = [Source("", dataset.list_shards(str(shards / kind), "val"), 1, None, 1)
               for kind in ("chats", "tokens")]
    windows, same = (train.val_windows(tokenizer, source, flags) for source in sources)
    assert windows.zlib_bpb is None and torch.equal(windows.targets, same.targets)
    assert torch.equal(windows.inputs, same.inputs) and windows.inputs.min() >= 0
    answers = collections.Counter()
    lines = [line for i in range(len(sources[0].shards[0].group_sizes))
             for line in sources[0].shards[0].read(i).to_pylist()]
    for line in lines:
        ids, mask = tokenizer.render_conversation({"messages": json.loads(line)})
        answers.update(id for id, has_loss in zip(ids, mask, strict=True) if has_loss)
    assert collections.Counter(windows.targets[windows.targets >= 0].tolist()) == answers
    assert len(windows.inputs) > len(lines) > 3


def test_an_answer_ends_at_its_token():
    """What follows <|assistant_end|> is not printed, nor is the question."""
    tokenizer, end = tokenizer_with(), tokenizer_with().encode_special("<|assistant_end|>")
    told = [*tokenizer.encode("four"), end, *tokenizer.encode("five")]

    def model(inputs):
        logits = torch.zeros(1, inputs.size(1), tokenizer.get_vocab_size())
        for i, token in enumerate(told):
            logits[0, 2 + i, token] = 1e6
        return logits

    model.embedding = torch.nn.Embedding(1, 1)
    prompt = [tokenizer.get_bos_token_id(), *tokenizer.encode("2+")[:1], *tokenizer.encode("2")]
    assert len(prompt) == 3 and train.generate(model, tokenizer, 32, prompt, len(told), end, 3) == "four"
    assert train.generate(model, tokenizer, 32, prompt, len(told)).endswith("2four<|assistant_end|>five")


def test_sample_of_an_eval_shows_the_question_and_stops_after_its_answer(monkeypatch, capsys):
    """In a row of several answers, or of a part of one: then, no token is known to end it."""
    tokenizer, hello = tokenizer_with(), tokenizer_with().encode(ASSISTANT["content"])
    ids, mask = map(torch.tensor, tokenizer.render_conversation({"messages": [USER, ASSISTANT] * 2}))
    end = tokenizer.encode_special("<|assistant_end|>")
    monkeypatch.setattr(train, "count_nats", lambda *_: torch.ones(2))
    for T, said in ((len(ids) - 1, [*hello, end]), (mask.tolist().index(1), hello[:1])):
        said = itertools.cycle(said)

        def model(inputs, said=said):
            ids = torch.full_like(inputs, next(said))
            return 1e4 * torch.nn.functional.one_hot(ids, tokenizer.get_vocab_size()).float()

        model.embedding = torch.nn.Embedding(1, 1)
        targets = torch.where(mask > 0, ids, -100)
        windows = train.Windows(None, ids[None, :T], targets[None, 1:T + 1], None, 1.0)
        train.evaluate(1, model, tokenizer, {"chats": windows}, 1)
    whole, part = re.findall("sample: (.*)", capsys.readouterr().out)
    assert whole == "<|user_start|>Hi<|user_end|><|assistant_start|>Hello"
    assert part.endswith(64 * tokenizer.decode(hello[:1]) + " ... (no end after 64 tokens)")
