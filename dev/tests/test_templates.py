"""Chats: the text of each template and what has a loss, then what is refused."""

import itertools
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tokenizer as module
from dataloader import encode_conversations
from dataset import UserError
from tokenizer import RustBPETokenizer, build_encoding

BOS = "<|bos|>"
NAMES = {
    "nanochat": module.SPECIAL_TOKENS, "chatml": [BOS, "<|im_start|>", "<|im_end|>"],
    "llama3": [BOS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "none": [BOS, "<|im_start|>", "<|user_start|>"]}

@cache
def tokenizer_for(template):
    """With merges, such as "\\n\\n" and "\\n\\n\\n"."""
    text = Path(__file__).read_text(encoding="utf-8") + 99 * "a\n\nb\n\n\nc "
    ranks = RustBPETokenizer.train_from_iterator([text], 700).enc._mergeable_ranks
    special = {name: len(ranks) + i for i, name in enumerate(NAMES[template])}
    return RustBPETokenizer(build_encoding(module.GPT4_PATTERN, ranks, special), BOS)

def chat(*pairs, **more):
    """("user", "Hi") -> {"role": "user", "content": "Hi"}; more: keys of the last message."""
    messages = [{"role": role, "content": content} for role, content in pairs]
    messages[-1] |= more
    return messages

HI = ("user", "Hi")
PARTS = [
    {"type": "text", "text": "look"}, {"type": "python", "text": "1+1"},
    {"type": "python_output", "text": "two"}, {"type": "text", "text": "so"}]

@pytest.mark.parametrize("template, messages, text, with_loss", [
    ("nanochat", chat(HI, ("assistant", "Yo")),
     "<|bos|><|user_start|>Hi<|user_end|><|assistant_start|>Yo<|assistant_end|>",
     "Yo<|assistant_end|>"),
    ("nanochat", chat(("system", "Be kind"), HI), "<|bos|><|user_start|>Be kind\n\nHi<|user_end|>",
     ""),
    # Not in turns, which nanochat's own refuses
    ("nanochat", chat(("assistant", "Yo"), HI, HI),
     "<|bos|><|assistant_start|>Yo<|assistant_end|>" + 2 * "<|user_start|>Hi<|user_end|>",
     "Yo<|assistant_end|>"),
    ("nanochat", chat(HI, ("assistant", PARTS)),
     "<|bos|><|user_start|>Hi<|user_end|><|assistant_start|>look<|python_start|>1+1"
     "<|python_end|><|output_start|>two<|output_end|>so<|assistant_end|>",
     "look<|python_start|>1+1<|python_end|>so<|assistant_end|>"),
    ("nanochat", chat(HI, ("assistant", PARTS[:1]), weight=0),
     "<|bos|><|user_start|>Hi<|user_end|><|assistant_start|>look<|assistant_end|>", ""),
    ("chatml", chat(("developer", "Be kind"), HI, ("assistant", "Yo"), tool_calls=None, name=""),
     "<|bos|><|im_start|>developer\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
     "<|im_start|>assistant\nYo<|im_end|>\n", "Yo<|im_end|>"),
    ("chatml", chat(HI, ("assistant", [PARTS[0], PARTS[3]])),
     "<|bos|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nlookso<|im_end|>\n",
     "lookso<|im_end|>"),
    ("llama3", chat(HI, ("assistant", "f(1)"), weight=0) + chat(("tool", "2"), ("assistant", "")),
     "<|bos|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\nf(1)<|eot_id|>"
     "<|start_header_id|>tool<|end_header_id|>\n\n2<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n<|eot_id|>", "<|eot_id|>"),
])
def test_text_and_losses_of_a_conversation(template, messages, text, with_loss):
    """A conversation in which all is masked is no training data."""
    tok = tokenizer_for(template)
    ids, mask = tok.render_conversation({"messages": messages})
    assert ids == tok.enc.encode(text, allowed_special="all")
    assert tok.decode([*itertools.compress(ids, mask)]) == with_loss
    assert tok.render_conversation({"messages": messages}, 7) == (ids[:7], mask[:7])
    lines = [json.dumps(messages)]
    if with_loss:
        found, bounds = encode_conversations(tok, lines)
        assert found.tolist() == np.where(mask, ids, np.invert(ids)).tolist()
        assert bounds.tolist() == [0, len(ids)]
    else:
        with pytest.raises(UserError, match=r"nothing to train on; .* saw \[{\"role\""):
            encode_conversations(tok, lines)

@pytest.mark.parametrize("template, messages, words", [
    ("nanochat", chat(("tool", "Yo")),
     "message 0: .* role 'assistant' or 'system' or 'user'; saw .*Yo"),
    ("nanochat", chat(("system", "Hi"), ("assistant", "Yo")),
     "\\['system', 'assistant'\\]; expected 'user' after 'system'"),
    ("nanochat", chat(("system", "a"), ("system", "b"), HI),
     "message 1: expected .* role 'assistant' or 'user'; saw .*'b'"),
    ("nanochat", chat(("system", 5), HI), "message 0: .* saw .*5"),
    ("nanochat", [], "nothing to train on"),
    ("nanochat", chat(("user", PARTS[1:2])), "message 0: expected text, .* of type text; saw"),
    ("nanochat", chat(HI, ("assistant", [{"type": "text"}])), "message 1: expected text, or"),
    ("nanochat", ["Hi"], "message 0: .* saw 'Hi'"),
    ("nanochat", [{"a": 1}], "message 0: expected a message of role"),
    ("chatml", chat(("assistant", None), tool_calls=[1]), "expected text, or parts .*; saw .*tool_calls"),
    ("chatml", [{"role": "user", "content": [{"type": "text", "text": "Hi", "loss": False}]}],
     "message 0: its loss would be lost .*; to drop it: .*; saw"),
    ("chatml", chat(HI, ("assistant", "Yo"), loss=False),
     "message 1: its loss would be lost .*; to drop it: .*; saw"),
    ("chatml", chat(("assistant", "Hi"), weight=0.5), "weight is 0.5; expected 0 or 1; saw .*0.5"),
    ("llama3", chat(HI, ("assistant", PARTS)), "message 1: .* type text; saw"),
    ("none", chat(HI), r"cannot render chats.*it has .*<\|user_start\|>.*Train a tokenizer")])
def test_a_bad_message_is_shown(template, messages, words):
    with pytest.raises(UserError, match=words):
        encode_conversations(tokenizer_for(template), [json.dumps(messages)])

def test_a_template_and_a_text_share_no_token():
    """Three ends of lines would be one token. All of a text has a loss."""
    tok = tokenizer_for("llama3")
    assert len(tok.encode("\n\n\n")) == 1
    ids, mask = tok.render_conversation({"messages": chat(("assistant", "\nYo"))})
    assert tok.decode([*itertools.compress(ids, mask)]) == "\nYo<|eot_id|>"

def test_names_of_special_tokens_in_a_message_are_plain_text():
    tok = tokenizer_for("nanochat")

    def n_special(text):
        parts = [{"type": "text", "text": text}, {"type": "python", "text": text}]
        messages = chat(("system", text), ("user", text), ("assistant", parts))
        ids, _ = tok.render_conversation({"messages": messages})
        return np.count_nonzero(tok.token_bytes[ids] == 0)

    assert n_special("hello") == n_special("<|bos|>") == n_special("<|assistant_end|>") == 7

@pytest.mark.parametrize("template", ["nanochat", "chatml", "llama3"])
def test_prompt_ends_where_the_answer_begins(template):
    tok = tokenizer_for(template)
    messages = chat(HI, ("assistant", "Yo"), ("user", "So"), ("assistant", "Oh"))
    prompt = tok.render_for_completion({"messages": messages})
    ids, mask = tok.render_conversation({"messages": messages})
    assert prompt == ids[:len(prompt)]
    assert tok.decode(ids[len(prompt):]).startswith("Oh<|")
    assert mask[len(prompt) - 1:len(prompt) + 1] == [0, 1]
    with pytest.raises(UserError, match="expected an assistant message at the end"):
        tok.render_for_completion({"messages": messages[:3]})

def test_any_tokenizer_may_render_by_itself():
    """With nanochat's arguments, whose default cuts at 2,048 tokens."""
    def render_conversation(conversation, max_tokens=2048):
        n = len(conversation["messages"])
        return ([7] + n * [9])[:max_tokens], ([0] + n * [1])[:max_tokens]

    own = SimpleNamespace(render_conversation=render_conversation)
    ids, bounds = encode_conversations(own, [json.dumps(3000 * ["Hi"])])
    assert (ids.tolist(), bounds.tolist()) == ([~7, *3000 * [9]], [0, 3001])

@pytest.mark.parametrize("line", ["{", '{"messages": []}'])
def test_a_line_that_is_no_list_is_shown(line):
    with pytest.raises(UserError, match=r"expected a list of messages as JSON; saw"):
        encode_conversations(tokenizer_for("nanochat"), [line])
