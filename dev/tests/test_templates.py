"""Chats: the text of each template and what has a loss, then what is refused."""

import itertools
import json
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from dataloader import encode_conversations
from dataset import UserError
from dev.tests.cases import is_like, read_cases
from dev.tests.test_tokenizer import fresh
from tokenizer import SPECIAL_TOKENS

BOS = "<|bos|>"
NAMES = {
    "nanochat": SPECIAL_TOKENS, "chatml": [BOS, "<|im_start|>", "<|im_end|>"],
    "llama3": [BOS, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "none": [BOS, "<|im_start|>", "<|user_start|>"]}

@cache
def tokenizer_for(template):
    return fresh(special=NAMES[template])

def chat(*pairs, **more):
    """("user", "Hi") -> {"role": "user", "content": "Hi"}; more: keys of the last message."""
    messages = [{"role": role, "content": content} for role, content in pairs]
    messages[-1] |= more
    return messages

HI = ("user", "Hi")

@pytest.mark.parametrize("template, messages, lines", read_cases("templates.txt"))
def test_text_and_losses_of_a_conversation(template, messages, lines):
    """A conversation in which all is masked is no training data."""
    tok, conversation = tokenizer_for(template), {"messages": json.loads(messages)}
    text, *learned = [line.replace("\\n", "\n") for line in lines]
    ids, mask = tok.render_conversation(conversation)
    assert ids == tok.enc.encode(text, allowed_special="all")
    assert tok.decode([*itertools.compress(ids, mask)]) == "".join(learned)
    assert tok.render_conversation(conversation, 7) == (ids[:7], mask[:7])
    if learned:
        found, bounds = encode_conversations(tok, [messages])
        assert found.tolist() == np.where(mask, ids, np.invert(ids)).tolist()
        assert bounds.tolist() == [0, len(ids)]
    else:
        with pytest.raises(UserError, match=r"nothing to train on; .* saw \[{\"role\""):
            encode_conversations(tok, [messages])

@pytest.mark.parametrize("template, messages, lines", read_cases("bad_messages.txt"))
def test_a_bad_message_is_shown(template, messages, lines):
    with pytest.raises(UserError) as error:
        encode_conversations(tokenizer_for(template), [messages])
    assert is_like(f"{error.value}", lines), error.value

def test_a_template_and_a_text_share_no_token():
    """Three ends of lines would be one token. All of a text has a loss."""
    tok = tokenizer_for("llama3")
    assert len(tok.encode("\n\n\n")) == 1
    ids, mask = tok.render_conversation({"messages": chat(("assistant", "\nYo"))})
    assert tok.decode([*itertools.compress(ids, mask)]) == "\nYo<|eot_id|>"

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
        ids, mask = [7, *n * [9]], [0, *n * [1]]
        return ids[:max_tokens], mask[:max_tokens]

    own = SimpleNamespace(render_conversation=render_conversation)
    ids, bounds = encode_conversations(own, [json.dumps(3000 * ["Hi"])])
    assert ids.tolist() == [~7, *3000 * [9]]
    assert bounds.tolist() == [0, 3001]
