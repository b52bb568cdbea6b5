"""
Chats: the text of each template and what has a loss, then ids beside those of the whole text.

    python -m pytest dev/tests/test_templates.py
"""

import itertools
import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import tokenizer
from dataset import UserError
from tokenizer import (
    PATTERNS,
    SPECIAL_TOKENS,
    AnyTokenizer,
    RustBPETokenizer,
    build_encoding,
    encode_conversations,
)

BOS = "<|bos|>"
NAMES = {
    "nanochat": SPECIAL_TOKENS,
    "chatml": [BOS, "<|im_start|>", "<|im_end|>"],
    "llama3": [BOS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]}

@cache
def tokenizer_for(template):
    """With merges, such as "\\n\\n" and "\\n\\n\\n"."""
    text = Path(__file__).read_text(encoding="utf-8") + 99 * "a\n\nb\n\n\nc "
    ranks = RustBPETokenizer.train_from_iterator([text], 700).enc._mergeable_ranks
    special = {name: len(ranks) + i for i, name in enumerate(NAMES[template])}
    return RustBPETokenizer(build_encoding(PATTERNS["gpt4"], ranks, special), BOS)

def chat(*pairs, **more):
    """("user", "Hi") -> {"role": "user", "content": "Hi"}; more: keys of the last message."""
    messages = [{"role": role, "content": content} for role, content in pairs]
    messages[-1] |= more
    return messages

def rendered(template, messages):
    tokenizer = tokenizer_for(template)
    ids, mask = tokenizer.render_conversation({"messages": messages})
    return tokenizer.decode(ids), tokenizer.decode([*itertools.compress(ids, mask)])

PARTS = [
    {"type": "text", "text": "look"}, {"type": "python", "text": "1+1"},
    {"type": "python_output", "text": "two"}, {"type": "text", "text": "so"}]
CALL = [("user", "Hi"), ("assistant", "f(1)"), ("tool", "2"), ("assistant", "It is 2")]

@pytest.mark.parametrize("template, messages, text, with_loss", [
    ("nanochat", chat(("user", "Hi"), ("assistant", "Yo")),
     "<|bos|><|user_start|>Hi<|user_end|><|assistant_start|>Yo<|assistant_end|>",
     "Yo<|assistant_end|>"),
    ("nanochat", chat(("system", "Be kind"), ("user", "Hi")),
     "<|bos|><|user_start|>Be kind\n\nHi<|user_end|>", ""),
    ("nanochat", chat(("user", "Hi"), ("assistant", PARTS)),
     "<|bos|><|user_start|>Hi<|user_end|><|assistant_start|>look<|python_start|>1+1"
     "<|python_end|><|output_start|>two<|output_end|>so<|assistant_end|>",
     "look<|python_start|>1+1<|python_end|>so<|assistant_end|>"),
    ("nanochat", chat(("user", "Hi"), ("assistant", PARTS[:1]), weight=0),
     "<|bos|><|user_start|>Hi<|user_end|><|assistant_start|>look<|assistant_end|>", ""),
    ("nanochat", chat(("user", "<|bos|>"), ("assistant", "<|user_end|>"), weight=1),
     "<|bos|><|user_start|><|bos|><|user_end|><|assistant_start|><|user_end|><|assistant_end|>",
     "<|user_end|><|assistant_end|>"),
    ("chatml", chat(("developer", "Be kind"), ("user", "Hi"), ("assistant", "Yo")),
     "<|bos|><|im_start|>developer\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
     "<|im_start|>assistant\nYo<|im_end|>\n", "Yo<|im_end|>"),
    ("chatml", chat(("user", "Hi"), ("assistant", [PARTS[0], PARTS[3]])),
     "<|bos|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nlookso<|im_end|>\n",
     "lookso<|im_end|>"),
    ("llama3", chat(*CALL),
     "<|bos|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\nf(1)<|eot_id|>"
     "<|start_header_id|>tool<|end_header_id|>\n\n2<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\nIt is 2<|eot_id|>",
     "f(1)<|eot_id|>It is 2<|eot_id|>"),
    ("llama3", [*chat(*CALL[:2], weight=0), *chat(("user", "No"), ("assistant", "Yo"))],
     "<|bos|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\nf(1)<|eot_id|>"
     "<|start_header_id|>user<|end_header_id|>\n\nNo<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>", "Yo<|eot_id|>")])
def test_text_and_losses_of_a_conversation(template, messages, text, with_loss):
    assert rendered(template, messages) == (text, with_loss)

@pytest.mark.parametrize("template, with_loss", [
    ("chatml", "Yo<|im_end|>"), ("llama3", "Yo<|eot_id|>")])
def test_message_that_begins_with_a_newline_has_the_ids_of_the_whole_text(template, with_loss):
    """A token that begins in the header, as "\\n\\n" does in "assistant\\n\\nYo", has no loss."""
    tokenizer = tokenizer_for(template)
    messages = chat(("user", "\nHi"), ("assistant", "\nYo"))
    text, seen = rendered(template, messages)
    ids, _ = tokenizer.render_conversation({"messages": messages})
    assert ids == tokenizer.enc.encode(text, allowed_special="all")
    assert seen == with_loss
    assert tokenizer.encode("\n\n\n") != 2 * tokenizer.encode("\n\n")[:1], "nothing would merge"

# --------------------------------------------------------------------------------------------------
# Drawn conversations

WORDS = ["hello", " World", "\n", "\n\n", "  ", "日本", "é", "12345", "'s", "", "def f(x):"]

def draw_text(draw, words):
    return "".join(draw.choices(words, k=draw.randrange(9)))

def by_nanochats_rules(tokenizer, messages):
    """One piece after the other. -> [(id, whether it has a loss), ...]"""
    tokens = [(tokenizer.get_bos_token_id(), 0)]

    def put(name, text, has_loss):
        pieces = [tokenizer.encode(text)]
        if name:
            ends = [tokenizer.encode_special(f"<|{name}_{end}|>") for end in ("start", "end")]
            pieces = [ends[:1], *pieces, ends[1:]]
        tokens.extend((id, has_loss) for id in itertools.chain(*pieces))

    if messages[0]["role"] == "system":
        system, user, *others = messages
        text = system["content"] + "\n\n" + user["content"]
        messages = [{"role": "user", "content": text}, *others]
    for message in messages:
        content, learned = message["content"], message.get("weight", 1)
        if message["role"] == "user":
            put("user", content, 0)
            continue
        tokens.append((tokenizer.encode_special("<|assistant_start|>"), 0))
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            name = {"text": None, "python": "python", "python_output": "output"}[part["type"]]
            put(name, part["text"], 0 if name == "output" else learned)
        tokens.append((tokenizer.encode_special("<|assistant_end|>"), learned))
    return tokens

def draw_chat(draw):
    words = WORDS + SPECIAL_TOKENS
    messages = chat(("system", draw_text(draw, words)))[:draw.randrange(2)]
    for i in range(draw.randint(1, 5)):
        content = draw_text(draw, words)
        if i % 2 and draw.random() < 0.5:
            types = draw.choices(["text", "python", "python_output"], k=draw.randrange(4))
            content = [{"type": type, "text": draw_text(draw, words)} for type in types]
        pair = ("assistant" if i % 2 else "user", content)
        messages += chat(pair, weight=draw.randrange(2))
    return messages

@pytest.mark.parametrize("engine", ["tiktoken", "gigatoken"])
def test_drawn_conversations_follow_nanochats_rules(engine, monkeypatch):
    """All in one call, with nulls between them; and each by itself, cut to max_tokens."""
    if engine == "gigatoken":
        pytest.importorskip("gigatoken")
    monkeypatch.setenv("NANOLOADER_ENGINE", engine)
    tokenizer, draw = tokenizer_for.__wrapped__("nanochat"), random.Random(1)
    chats = [draw_chat(draw) for _ in range(200)]
    ids, bounds = encode_conversations(tokenizer, [None, *map(json.dumps, chats), None])
    assert tokenizer.choice.name.startswith(engine)
    assert ids.dtype == np.int32
    assert bounds[1] == 0 and bounds[-2] == bounds[-1] == len(ids)
    for messages, (begin, end) in zip(chats, itertools.pairwise(bounds[1:-1]), strict=True):
        want = by_nanochats_rules(tokenizer, messages)
        assert ids[begin:end].tolist() == [id if has_loss else ~id for id, has_loss in want]
        cut = tokenizer.render_conversation({"messages": messages}, 7)
        assert [*zip(*cut, strict=True)] == want[:7]

@pytest.mark.parametrize("template, opening, closing", [
    ("chatml", "<|im_start|>{}\n", "<|im_end|>\n"),
    ("llama3", "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>")])
def test_drawn_conversations_have_the_ids_of_the_whole_text(template, opening, closing):
    tokenizer, draw = tokenizer_for(template), random.Random(2)
    for _ in range(200):
        roles = draw.choices(["user", "assistant", "tool", "system"], k=3)
        messages = chat(*[(role, draw_text(draw, WORDS)) for role in roles])
        text = BOS
        for message in messages:
            text += opening.format(message["role"]) + message["content"] + closing
        ids, mask = tokenizer.render_conversation({"messages": messages})
        assert ids == tokenizer.enc.encode(text, allowed_special="all")
        assert (1 in mask) == ("assistant" in roles)

def test_only_nulls_have_no_tokens():
    ids, bounds = encode_conversations(tokenizer_for("nanochat"), [None, None])
    assert ids.tolist() == [] and bounds.tolist() == [0, 0, 0]

def test_prompt_ends_where_the_answer_begins():
    for template in NAMES:
        tokenizer = tokenizer_for(template)
        messages = chat(("user", "Hi"), ("assistant", "Yo"), ("user", "So"), ("assistant", "Oh"))
        prompt = tokenizer.render_for_completion({"messages": messages})
        ids, mask = tokenizer.render_conversation({"messages": messages})
        assert prompt == ids[:len(prompt)]
        assert tokenizer.decode(ids[len(prompt):]).startswith("Oh<|")
        assert mask[len(prompt) - 1:len(prompt) + 1] == [0, 1]

def test_a_prompt_never_loses_the_last_message():
    for messages in ([], chat(("user", "Hi"), ("assistant", "Yo"), ("user", "LAST QUESTION"))):
        with pytest.raises(UserError, match="expected an assistant's message at the end"):
            tokenizer_for("chatml").render_for_completion({"messages": messages})

def test_a_header_may_have_any_characters(monkeypatch):
    """A template's own: no byte of its header has a loss."""
    own = tokenizer.CHATML._replace(header="→ {} →")
    monkeypatch.setattr(tokenizer, "TEMPLATES", [own])
    assert rendered("chatml", chat(("assistant", "Yo")))[1] == "Yo<|im_end|>"

# --------------------------------------------------------------------------------------------------
# A tokenizer that renders by itself

class Spelled(RustBPETokenizer):
    """Has a loss for all but the first message; nanochat's arguments."""
    def render_conversation(self, conversation, max_tokens=2048):
        ids, mask = [self.bos_token_id], [0]
        for i, message in enumerate(conversation["messages"]):
            new = self.encode(message["content"])
            ids += new
            mask += len(new) * [min(i, 1)]
        return ids[:max_tokens], mask[:max_tokens]

class Shouting(RustBPETokenizer):
    def render_conversation(self, conversation, max_tokens=None):
        messages = [{**one, "content": one["content"].upper()} for one in conversation["messages"]]
        return super().render_conversation({"messages": messages}, max_tokens)

def test_a_subclass_may_render_by_itself():
    enc = tokenizer_for("nanochat").enc
    spelled = Spelled(enc, BOS)
    messages = chat(("x", "question"), ("y", 3000 * "answer "))
    ids, bounds = encode_conversations(spelled, [json.dumps(messages), None])
    question, answer = [spelled.encode(one["content"]) for one in messages]
    assert ids.tolist() == [~spelled.bos_token_id, *(~id for id in question), *answer]
    assert bounds.tolist() == [0, len(ids), len(ids)]
    shouting = Shouting(enc, BOS)
    ids, _ = encode_conversations(shouting, [json.dumps(chat(("user", "Hi")))])
    assert shouting.decode(~ids) == "<|bos|><|user_start|>HI<|user_end|>"

# --------------------------------------------------------------------------------------------------
# What is refused

@pytest.mark.parametrize("template, messages, words", [
    ("nanochat", chat(("assistant", "Yo")), "message 0: expected .* role 'user'; saw .*Yo"),
    ("nanochat", chat(("user", "Hi"), ("user", "Ho")), "message 1: .* 'assistant'; saw .*Ho"),
    ("nanochat", chat(("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d")),
     "message 1: expected .* role 'user'; saw .*'b'"),
    ("nanochat", chat(("system", "a")), "expected messages of users and assistants"),
    ("nanochat", [], "expected messages of users and assistants"),
    ("nanochat", chat(*CALL), "message 2: .* role 'user'; saw .*'tool'"),
    ("nanochat", chat(("user", PARTS[1:2])), "message 0: expected parts of type text; saw"),
    ("nanochat", chat(("user", "Hi"), ("assistant", [{"type": "image", "text": ""}])),
     "message 1: expected parts of type text or python or python_output; saw .*image"),
    ("nanochat", chat(("user", "Hi"), ("assistant", None)), "message 1: .* saw .*None"),
    ("nanochat", chat(("user", "Hi"), ("assistant", [{"type": "text"}])), "message 1: 'text'"),
    ("nanochat", ["Hi"], "message 0: .* saw 'Hi'"), ("nanochat", [{"a": 1}], "message 0: 'role'"),
    ("nanochat", chat(("user", "Hi"), ("assistant", ""), tool_calls=[{"f": 1}]),
     "message 1: its tool_calls would be lost"),
    ("chatml", chat(("assistant", "Hi"), reasoning_content="Hm"), "its reasoning_content would"),
    ("chatml", chat(("assistant", "Hi"), refusal="No"), "its refusal would be lost"),
    ("chatml", chat(("assistant", "Hi"), audio={"id": 1}), "its audio would be lost"),
    ("chatml", chat(("assistant", "Hi"), weight=0.5), "expected a weight of 0 or 1; saw .*0.5"),
    ("chatml", chat(("assistent", "Hi")), "role 'system' or .*; saw .*assistent"),
    ("llama3", chat(("user", "Hi"), ("assistant", PARTS)), "message 1: .* type text; saw")])
def test_a_bad_message_is_shown(template, messages, words):
    with pytest.raises(UserError, match=words):
        encode_conversations(tokenizer_for(template), [json.dumps(messages)])

def test_keys_without_content_are_no_error():
    messages = chat(("assistant", "Yo"), tool_calls=None, refusal=None, audio=None, name="me")
    assert rendered("chatml", messages)[1] == "Yo<|im_end|>"

class Foreign:
    def get_bos_token_id(self):
        return 0

    def get_special_tokens(self):
        return set(NAMES["chatml"])

def test_a_tokenizer_without_the_tokens_of_a_template_is_refused():
    """Also where it has some of them: the others would be encoded as text."""
    ranks = tokenizer_for("nanochat").enc._mergeable_ranks
    special = {BOS: 2000, "<|im_start|>": 2001, "<|user_start|>": 2002}
    lacking = RustBPETokenizer(build_encoding(PATTERNS["gpt4"], ranks, special), BOS)
    line = json.dumps(chat(("user", "Hi")))
    with pytest.raises(UserError, match=r"cannot render chats.*it has .*<\|user_start\|>$"):
        encode_conversations(lacking, [line])
    with pytest.raises(UserError, match="Foreign cannot render chats; it needs render_conversation"):
        encode_conversations(Foreign(), [line])
    assert AnyTokenizer(lacking).bos == 2000, "text needs no template"
