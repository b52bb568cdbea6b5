"""
Chats: conversations to shards, and to ids with and without a loss.

    python -m pytest dev/tests/test_chats.py
"""

import itertools
import json
import random
import re
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dataset
from dev import prepare
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
    ({"a": 1}, "expected messages as"), (["Hi", "Hello"], "expected messages as"), (7, "expected messages")]


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


@pytest.fixture
def shards(tmp_path):
    """A folder of 200 conversations, the folder of a tokenizer, and the conversations in order."""
    write_input(tmp_path / "in.jsonl", "jsonl", list(make_chats(200)))
    prepare.convert([str(tmp_path / "in.jsonl")], str(tmp_path / "chats"))
    tokenizer_with().save(str(tmp_path / "tokenizer"))
    return tmp_path


def test_token_shards_hold_ids_without_a_loss_as_negative_ones(shards, capsys):
    arguments = "tokenize", shards / "chats", "--tokenizer", shards / "tokenizer", "--out", shards / "tokens"
    assert command(*arguments) is None
    texts, tokens = all_of(shards / "chats"), all_of(shards / "tokens")
    for text, made in zip(texts, tokens, strict=True):
        assert (made.kind, made.dtype) == ("tokens", "<i4")
        assert (made.text_bytes, made.group_sizes) == (text.text_bytes, text.group_sizes)
        for row_group in range(len(made.group_sizes)):
            ids, bounds = encode_conversations(tokenizer_with(), text.read(row_group).to_pylist())
            stored = [np.frombuffer(one, "<i4").tolist() for one in made.read(row_group).to_pylist()]
            assert stored == [ids[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    capsys.readouterr()
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
