"""dev/recipes/chat_template.py: ids are apply_chat_template's, and the answers are learned."""

import datetime
import itertools
import json
import re
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from dataloader import Encoder
from dataset import UserError, write_shard
from dev.import_tokenizer import hard_texts
from dev.recipes import chat_template as module
from dev.recipes.chat_template import ChatTemplate, as_transformers
from dev.tests.cases import is_like, read_cases
from dev.tests.test_templates import BOS, HI, chat, tokenizer_for
from dev.tests.test_tokenizer import fresh, with_special_tokens_first_and_between
from tokenizer import print_once

library = pytest.importorskip("tokenizers")
PreTrainedTokenizerFast = pytest.importorskip("transformers").PreTrainedTokenizerFast

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Qwen 3's habits: thoughts are dropped before the last question, and after it, answers without any
# get an empty block; tool results are a user's. And Llama's: contents are trimmed.
QWEN = """
{%- set last = namespace(query=-1) %}
{%- for m in messages if m.role == 'user' %}{% set last.query = messages.index(m) %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- set text = m.content.split('</think>')[-1] | trim %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>' + text + '</tool_response><|im_end|>\n' }}
    {%- elif m.role == 'assistant' and loop.index0 > last.query %}
        {{- '<|im_start|>assistant\n' }}
        {{- '' if '</think>' in m.content else '<think>\n\n</think>\n\n' }}
        {{- m.content | trim + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
DATED = "{{ strftime_now('%d %b %Y') }}" + CHATML
PAIRS = HI, ("assistant", "Yo"), ("user", "So"), ("assistant", "Oh")
TURNS = chat(*PAIRS)

def templated(template, **arguments):
    return ChatTemplate(as_transformers(tokenizer_for("chatml"), template), **arguments)

def learned_by(own, messages, **tools):
    """The learned text. Ids are those of the library."""
    ids, mask = own.render_conversation({"messages": messages, **tools})
    given = [{key: message[key] for key in message if key != "weight"} for message in messages]
    want = own.tokenizer.apply_chat_template(given, **tools, **own.arguments)["input_ids"]
    assert ids[-len(want):] == want and len(ids) == len(mask)
    return own.decode([*itertools.compress(ids, mask)])

def shown(template, messages, **arguments):
    own = templated(template, **arguments)
    text = module.show(own, messages)
    if "today" not in arguments:    # which the library does not know
        learned_by(own, messages)
    return text

@pytest.mark.parametrize("template, case, lines", read_cases("chat_templates.txt"))
def test_a_chat_becomes_what_chat_templates_txt_says(capsys, template, case, lines):
    template = QWEN if template == "QWEN" else template.replace("\\n", "\n")
    arguments = json.loads(case)
    if isinstance(arguments, list):
        arguments = {"messages": arguments}
    print_once.cache_clear()
    try:
        found = shown(template, **arguments)
    except UserError as error:
        found = f"error: {error}"
    found = capsys.readouterr().err + found.replace("\n", "\\n")
    assert is_like(found, lines), found

def test_parts_are_joined_tools_rendered_and_a_budget_cuts():
    own = templated("{{ tools[0]['name'] | tojson }}" + CHATML)
    tools = {"tools": [{"name": "<\u6f22'>"}]}
    assert learned_by(own, TURNS, **tools) == "Yo<|im_end|>Oh<|im_end|>"
    conversation = {"messages": TURNS, **tools}
    ids, mask = own.render_conversation(conversation)
    assert own.render_conversation(conversation, 7) == (ids[:7], mask[:7])
    parts = [{"type": "text", "text": text} for text in "Oh"]
    conversation["messages"] = chat(*PAIRS[:-1], ("assistant", parts))
    assert own.render_conversation(conversation) == (ids, mask)

ANSWERS = """{"system": "Be", "messages": [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "No", "weight": 0},
    {"role": "user", "content": "So"},
    {"role": "assistant", "content": "<think>hm</think> Yo "},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "\u6f22"}]}"""

@pytest.mark.skipif(not shutil.which("jq"), reason="no jq")
def test_the_advice_keeps_the_answers():
    """The jq command of the docstring makes each answer the last of a chat, which is learned."""
    [words] = re.findall(r"jq -c '(.*?)' OLD", module.__doc__, re.S)
    command = ["jq", "-c", words]
    found = subprocess.run(command, input=ANSWERS, text=True, capture_output=True, check=True)
    records = [json.loads(line) for line in found.stdout.splitlines()]
    assert [one["system"] for one in records] == ["Be", "Be"]
    learned = [learned_by(templated(QWEN), one["messages"]) for one in records]
    assert learned == ["<think>hm</think> Yo<|im_end|>", "<think>\n\n</think>\n\n\u6f22<|im_end|>"]

def encoded(own, kind, text):
    """As by the loader."""
    shard = SimpleNamespace(kind=kind)
    [ids] = Encoder(own).encode(shard, 0, np.arange(1), pa.array([text]))
    return ids.tolist()

WITH_A_NAME = """[
    {"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "Yo"}]"""

def test_the_loader_takes_it():
    """Text and chats. In a text, names are plain; in a chat, as in the library."""
    own = templated(CHATML)
    text = "a <|im_end|> 12345\n\nb"
    ids = tokenizer_for("chatml").encode(text)
    assert encoded(own, "text", text) == [own.get_bos_token_id(), *ids]
    ids = encoded(own, "messages", WITH_A_NAME)
    end = own.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(~end) == 2 and ids.count(end) == 1

def test_its_tokenizers_are_used_by_nobody_else():
    """transformers changes a tokenizer's state in each call, so threads must not share one."""
    theirs = as_transformers(tokenizer_for("chatml"), CHATML)
    own = ChatTemplate(theirs)
    used = theirs, own.tokenizer, own.for_texts
    theirs("a", truncation=True, max_length=1, split_special_tokens=True)
    ids = encoded(own, "messages", WITH_A_NAME)
    encoded(own, "text", "a")
    states = [
        (one.backend_tokenizer.encode_special_tokens, one.backend_tokenizer.truncation is None)
        for one in used]
    assert states == [(True, False), (False, True), (True, True)]
    theirs.add_tokens(["Yo"])
    theirs.chat_template = QWEN
    assert encoded(own, "messages", WITH_A_NAME) == ids

def test_ids_may_have_holes():
    special = {BOS: 70_000, "<|im_start|>": 80_000, "<|im_end|>": 90_000}
    own = ChatTemplate(as_transformers(fresh(special=special), CHATML))
    assert max(encoded(own, "messages", json.dumps(TURNS))) == 90_000
    assert own.get_vocab_size() == 90_001

def test_what_cannot_be_used_is_refused():
    plain = library.Tokenizer(library.models.BPE({"a": 0}, []))
    without_bos = PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=CHATML)
    with pytest.raises(UserError, match=r"no token opens documents .bos is None.: pass bos="):
        ChatTemplate(without_bos)
    with pytest.raises(UserError, match=r"function .*: transformers.utils.get_json_schema"):
        templated(CHATML, tools=[chat])
    for name, word in ("PAD", "PAD"), ("\u0120MASK", " MASK"):
        with pytest.raises(UserError, match=f"would read '{word}' in a text as {name}"):
            as_transformers(fresh(special=[BOS, name]), CHATML)

def test_a_template_may_be_passed_and_several_need_a_name():
    tokenizer = as_transformers(tokenizer_for("chatml"), None)
    with pytest.raises(UserError, match="has a chat template, or chat_template=, its text"):
        ChatTemplate(tokenizer)
    text = templated(CHATML).render(TURNS)
    assert ChatTemplate(tokenizer, chat_template=CHATML).render(TURNS) == text
    tokenizer.chat_template = {"a": CHATML, "b": QWEN}
    assert ChatTemplate(tokenizer, chat_template="a").render(TURNS) == text
    with pytest.raises(UserError, match="pass chat_template=, a name or a text"):
        ChatTemplate(tokenizer).render(TURNS)

def test_the_fingerprint_covers_template_arguments_and_a_date_that_is_written():
    def fingerprint(template=CHATML, **arguments):
        return templated(template, **arguments).fingerprint()

    own = templated(CHATML)
    own.tokenizer(["a"], truncation=True, max_length=3)
    assert own.fingerprint() == fingerprint() == fingerprint(today="2024-07-26")
    others = [
        fingerprint(QWEN), fingerprint(enable_thinking=False), fingerprint(bos="<|im_start|>"),
        fingerprint(DATED), fingerprint(DATED, today="2024-07-26"),
        fingerprint(chat_template=DATED), fingerprint(chat_template=DATED, today="2024-07-26")]
    assert len({own.fingerprint(), *others}) == 8

def test_ours_as_transformers_has_the_same_ids():
    """Also with tokens that are found in a text."""
    ours = with_special_tokens_first_and_between()
    own = ChatTemplate(as_transformers(ours, CHATML))
    texts = hard_texts(ours.enc, ["<think>"])
    assert own.encode(texts) == ours.encode(texts)

def test_the_command_shows_a_chat_of_today(tmp_path, monkeypatch, capsys):
    as_transformers(tokenizer_for("chatml"), DATED).save_pretrained(tmp_path / "model")
    for split, answer in (("train", "Yo"), ("val", "Oh")):
        line = json.dumps(chat(HI, ("assistant", answer)))
        write_shard(f"{tmp_path}/chats/{split}.parquet", [pa.array([line])], "messages")
    monkeypatch.setattr(sys, "argv", ["", f"{tmp_path}/model", f"{tmp_path}/chats"])
    days = [datetime.date.today()]
    runpy.run_path(module.__file__, run_name="__main__")
    days.append(datetime.date.today())
    turns = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yo<|im_end|>]]\n\n"
    assert capsys.readouterr().out in [f"{BOS}{day:%d %b %Y}{turns}" for day in days]
    config = tmp_path / "model/tokenizer_config.json"
    config.write_text(config.read_text().replace(f'"bos_token": "{BOS}"', '"bos_token": null'))
    with pytest.raises(SystemExit, match=r"^error: no token opens"):
        runpy.run_path(module.__file__, run_name="__main__")
