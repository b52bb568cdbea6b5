"""dev/recipes/chat_template.py: ids and text are apply_chat_template's, and the answers are learned."""

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
import pyarrow.parquet as pq
import pytest

from dataloader import Encoder
from dataset import UserError
from dev.import_tokenizer import hard_texts
from dev.recipes import chat_template as module
from dev.recipes.chat_template import ChatTemplate, as_transformers
from dev.tests.test_templates import BOS, HI, chat, tokenizer_for
from tokenizer import GPT4_PATTERN, RustBPETokenizer, build_encoding, print_once

PreTrainedTokenizerFast = pytest.importorskip("transformers").PreTrainedTokenizerFast

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MARKED = CHATML.replace(
    "{{ m.content }}<|im_end|>\n", "{% if m.role == 'assistant' %}{%- generation -%}{{ m.content }}END"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}")

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
        {{- '<|im_start|>assistant\n' + ('' if '</think>' in m.content else '<think>\n\n</think>\n\n') }}
        {{- m.content | trim + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
TURNS = chat(HI, ("assistant", "Yo"), ("user", "So"), ("assistant", "Oh"))
LONG = chat(HI, ("assistant", "<think>hm</think> Yo "), ("user", " So"), ("assistant", "f()"),
            ("tool", "2"), ("assistant", "Oh\n"))

def templated(template, **arguments):
    return ChatTemplate(as_transformers(tokenizer_for("chatml"), template), **arguments)

def learned_by(own, messages, **more):
    """The learned text. Ids and text are those of the library."""
    ids, mask = own.render_conversation({"messages": messages, **more})
    given = [{key: message[key] for key in message if key != "weight"} for message in messages]
    want = own.tokenizer.apply_chat_template(given, **more, **own.arguments)["input_ids"]
    assert ids[-len(want):] == want and ids[:-len(want)] in ([], [own.get_bos_token_id()])
    assert len(ids) == len(mask) and ids.count(own.get_bos_token_id()) == 1
    return own.decode([*itertools.compress(ids, mask)])

@pytest.mark.parametrize("template, messages, learned", [
    (CHATML, chat(HI, ("assistant", "Yo")), "Yo<|im_end|>"),
    (CHATML, LONG, "<think>hm</think> Yo <|im_end|>f()<|im_end|>Oh\n<|im_end|>"),
    # As GLM: no end
    (CHATML.replace("<|im_end|>\n", ""), chat(HI, ("assistant", "Yo"), HI), "Yo"),
    # The same, where a text has the name of a special token and a line end
    (CHATML.replace("<|im_end|>\n", ""), chat(HI, ("assistant", "Yo<|im_end|>\n"), ("user", "So")),
     "Yo<|im_end|>\n"),
    # Marks learn what they say, here not the end
    (MARKED.replace("END", ""), TURNS, "YoOh"),
    (QWEN, LONG[2:], "<think>\n\n</think>\n\nf()<|im_end|><think>\n\n</think>\n\nOh<|im_end|>"),
    ("{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else m.content }}"
     "{% endfor %}", TURNS, "YoOh"),
    ("{{ tools[0]['name'] | tojson }}" + CHATML, chat(HI, ("assistant", "Yo")), "Yo<|im_end|>")])
def test_answers_are_learned(template, messages, learned):
    own = templated(template)
    more = {"tools": [{"name": "<\u6f22'>"}]} if "tools" in template else {}
    assert learned_by(own, messages, **more) == learned
    if learned == "YoOh":
        messages = [*messages]
        messages[1] = messages[1] | {"weight": 0}
        assert learned_by(own, messages) == "Oh"

def shown(template, messages, **arguments):
    """Without what our chats begin with."""
    text = module.show(templated(template, **arguments), messages)
    return text.removeprefix(BOS + "<|im_start|>user\nHi<|im_end|>")

@pytest.mark.parametrize("template, want", [
    # Phi 3 writes one more token at the end of a chat, unless it opens an answer
    (CHATML.replace("{% endif %}", "{% else %}{{ bos_token }}{% endif %}"),
     "\n<|im_start|>assistant\n[[Yo<|im_end|>]]\n<|im_start|>user\nSo<|im_end|>\n"
     f"<|im_start|>assistant\n[[Oh<|im_end|>\n{BOS}]]"),
    # The same without any other end of a message
    (CHATML.replace("<|im_end|>\n", "{{ '<|im_end|>' if m.role == 'user' }}")
     .replace("{% endif %}", "{% else %}{{ bos_token }}{% endif %}"),
     "<|im_start|>assistant\n[[Yo]]<|im_start|>user\nSo<|im_end|>"
     f"<|im_start|>assistant\n[[Oh{BOS}]]"),
    # gpt-oss ends the last answer with another token, either always or unless it opens an answer
    *((CHATML.replace("<|im_end|>\n", "{{ bos_token if loop.last and m.role == 'assistant'"
                      f"{more} else '<|im_end|>' }}}}"),
       "<|im_start|>assistant\n[[Yo<|im_end|>]]<|im_start|>user\nSo<|im_end|>"
       f"<|im_start|>assistant\n[[Oh{BOS}]]")
      for more in ("", " and not add_generation_prompt"))])
def test_another_token_may_end_a_chat_or_its_last_answer(template, want):
    assert shown(template, TURNS) == want

@pytest.mark.parametrize("more", ["", "{% if not add_generation_prompt %}{{ bos_token }}{% endif %}"])
@pytest.mark.parametrize("end", ["<|im_end|>\n", "{{ '<|im_end|>\n' if not loop.last }}"])
def test_all_that_is_marked_of_an_answer_of_weight_0_is_masked(end, more):
    messages = chat(*((m["role"], m["content"]) for m in TURNS[:2]), weight=0) + TURNS[2:]
    template = MARKED.replace("END", end) + more
    text = shown(template, messages)
    before, learned, _ = re.split(r"\[\[|\]\]", text)
    assert "Yo<|im_end|>\n<|im_start|>" in before
    assert learned.rstrip("\n") in ("Oh", "Oh<|im_end|>")

def test_parts_are_joined_and_a_budget_cuts():
    own = templated(CHATML)
    parts = [{"type": "text", "text": "Y"}, {"type": "text", "text": "o"}]
    ids, mask = own.render_conversation({"messages": chat(HI, ("assistant", parts))})
    messages = chat(HI, ("assistant", "Yo"))
    assert (ids, mask) == own.render_conversation({"messages": messages})
    assert own.render_conversation({"messages": messages}, 7) == (ids[:7], mask[:7])
    assert own.render(messages) == own.decode(ids[1:])
    assert module.show(own, messages) == (
        f"{BOS}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Yo<|im_end|>]]\n")

CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]

@pytest.mark.parametrize("template, messages, words", [
    (QWEN, LONG, r"message 1: the template changes it when the chat goes on, from .*make each answer"),
    (CHATML.replace("assistant\n", "assistant\n<think>\n"), chat(HI, ("assistant", "Yo")),
     r"message 1: its prompt ends with '<think>\\n', but the chat has 'Yo<.*enable_thinking=False"),
    (CHATML.split("{% if")[0].replace("content }}", "content }}{{ m.tool_calls }}"),
     chat(HI, ("assistant", ""), tool_calls=CALLS), "needs {% if add_generation_prompt"),
    (CHATML, chat(HI, ("assistant", ""), tool_calls=CALLS), "drops its call of, 'add'"),
    (QWEN.replace("+ text + '</tool", "+ '</tool"), LONG[2:],
     "message 2: the template drops its content, '2'"),
    (CHATML.replace("<|im_end|>\n", "{{ bos_token if loop.last and m.role == 'assistant' }}"), TURNS,
     "message 1: the template changes it"),
    *((template.replace("m.content }}", "m.content.split('</think>')[-1] }}"),
       chat(HI, ("assistant", "<think>Hi</think>Hi")), "message 1: the template drops its thoughts, ")
      for template in (CHATML, MARKED)),
    (CHATML, chat(HI, ("assistant", "Yo"), reasoning_content="Hm"), "drops its reasoning_content, 'Hm'"),
    (CHATML.replace("in messages", "in messages if m.role != 'system'"),
     chat(("user", "Be brief"), ("system", "brief"), ("assistant", "Be brief")),
     "message 1: the template drops its content, 'brief'"),
    (CHATML, chat(("assistant", "Yo"), HI, ("assistant", "Oh")),
     "message 0: an answer needs a prompt, .*; give this answer weight 0"),
    (CHATML, chat(HI, ("assistant", "\n\nYo")), "remove line ends at the beginning"),
    (CHATML.split("{% if")[0], chat(HI, ("assistant", "Yo")), "needs {% if add_generation_prompt"),
    (CHATML.replace("m.content", "m.content[0].text"), chat(HI, ("assistant", "Yo")),
     "message 0: the template drops its content, 'Hi'"),
    ("{{ raise_exception('No roles') }}", chat(HI, ("assistant", "Yo")), "refuses .*No roles"),
    (CHATML, chat(HI, ("assistant", [{"type": "image"}])), "expected parts of type text; saw"),
    (CHATML, [], "refuses this chat: .*empty conversation")])
def test_what_cannot_be_masked_exactly_is_refused(template, messages, words):
    with pytest.raises(UserError, match=words):
        templated(template).render_conversation({"messages": messages})

def test_marks_that_cannot_be_found_are_refused():
    """An answer is written in another way if a question follows."""
    block = ("{{ '<think></think>' if not messages[loop.index0:] | selectattr('role', 'equalto', 'user')"
             " | list }}")
    template = MARKED.replace("END", "<|im_end|>\n").replace("{%- generation -%}", block + "{% generation %}")
    messages = chat(HI, ("assistant", "f()"), ("tool", "2"), ("assistant", "Oh"), weight=0)
    with pytest.raises(UserError, match="message 2: the template changes it"):
        learned_by(templated(template), messages + chat(("user", "So"), ("assistant", "Yo")))
    assert learned_by(templated(template), messages) == "f()<|im_end|>\n"

@pytest.mark.skipif(not shutil.which("jq"), reason="no jq")
def test_the_advice_keeps_the_answers():
    """The jq command of the docstring makes each answer the last of a chat, which is learned."""
    [words] = re.findall(r"jq -c '(.*?)' OLD", module.__doc__, re.S)
    masked = chat(("user", "So"), ("assistant", "No"), weight=0)
    record = {"system": "Be", "messages": LONG + masked + chat(("user", "And"), ("assistant", "\u6f22"))}
    found = subprocess.run(["jq", "-c", words], input=json.dumps(record), text=True,
                           capture_output=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in found]
    assert [one["system"] for one in records] == 4 * ["Be"]
    assert [learned_by(templated(QWEN), one["messages"]) for one in records] == [
        "<think>hm</think> Yo<|im_end|>",
        *(f"<think>\n\n</think>\n\n{text}<|im_end|>" for text in ("f()", "Oh", "\u6f22"))]

def test_the_loader_takes_it():
    """Text and chats. In a text, names are plain; in a chat, as in the library."""
    own = templated(CHATML)
    text = "a <|im_end|> 12345\n\nb"
    [encoded] = Encoder(own).encode(SimpleNamespace(kind="text"), 0, np.arange(1), pa.array([text]))
    assert encoded.tolist() == [own.get_bos_token_id(), *tokenizer_for("chatml").encode(text)]
    lines = pa.array([json.dumps(chat(("user", "<|im_end|>"), ("assistant", "Yo")))])
    shard = SimpleNamespace(kind="messages")
    [encoded] = Encoder(own).encode(shard, 0, np.arange(1), lines)
    end = own.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert np.count_nonzero(encoded == ~end) == 2 and np.count_nonzero(encoded == end) == 1

@pytest.mark.parametrize("template", [CHATML, MARKED.replace("END", "<|im_end|>")])
def test_names_in_messages_can_be_plain_text(template):
    """The library refuses to sanitize a text, or with marks."""
    own = templated(template, sanitize_control_tokens=True)
    messages = chat(("user", "<|im_end|>"), ("assistant", "<|im_start|>"))
    ids, mask = own.render_conversation({"messages": messages})
    end = own.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 2
    assert own.decode([*itertools.compress(ids, mask)]) == "<|im_start|><|im_end|>"

def test_answers_that_no_token_ends_are_told_once(capsys):
    """As GLM's. What follows the token, such as a line end, does not count."""
    for end in ("<|im_end|>", ""):
        print_once.cache_clear()
        for template in (CHATML.replace("<|im_end|>", end), MARKED.replace("END", end + "\n")):
            learned_by(templated(template), TURNS)
        said = capsys.readouterr().err
        assert said.count("ends answers with no special token") == (end == "")

def test_a_switch_may_be_taken_out():
    """As Nemotron's /no_think: this drops no message."""
    template = CHATML.replace("m.content", "m.content.replace('/no_think', '')")
    assert learned_by(templated(template), chat(("user", "/no_think"), ("assistant", "Yo"))) == (
        "Yo<|im_end|>")

def test_ids_may_have_holes():
    special = {BOS: 70_000, "<|im_start|>": 80_000, "<|im_end|>": 90_000}
    ranks = tokenizer_for("chatml").enc._mergeable_ranks
    hollow = RustBPETokenizer(build_encoding(GPT4_PATTERN, ranks, special), BOS)
    own = ChatTemplate(as_transformers(hollow, CHATML))
    lines = pa.array([json.dumps(TURNS)])
    [ids] = Encoder(own).encode(SimpleNamespace(kind="messages"), 0, np.arange(1), lines)
    assert (own.get_vocab_size(), ids.max()) == (90_001, 90_000)

def test_what_cannot_be_used_is_refused():
    library = pytest.importorskip("tokenizers")
    plain = PreTrainedTokenizerFast(
        tokenizer_object=library.Tokenizer(library.models.BPE({"a": 0}, [])), chat_template=CHATML)
    with pytest.raises(UserError, match=r"no token opens documents .bos is None.: pass bos="):
        ChatTemplate(plain)
    with pytest.raises(UserError, match="bos is '<s>'"):
        templated(CHATML, bos="<s>")
    with pytest.raises(UserError, match=r"function .*: transformers.utils.get_json_schema"):
        templated(CHATML, tools=[chat])
    ranks = tokenizer_for("chatml").enc._mergeable_ranks
    for name, word in ("PAD", "PAD"), ("\u0120MASK", " MASK"):
        enc = build_encoding(GPT4_PATTERN, ranks, {BOS: 2000, name: 2001})
        with pytest.raises(UserError, match=f"would read '{word}' in a text as {name}"):
            as_transformers(RustBPETokenizer(enc, BOS), CHATML)

def test_the_fingerprint_covers_template_and_arguments():
    def fingerprint(*words, **arguments):
        return templated(*words, **arguments).fingerprint()

    own = templated(CHATML)
    before = own.fingerprint()
    own.tokenizer(["a"], truncation=True, max_length=3)
    assert before == own.fingerprint() == fingerprint(CHATML)
    known = {before, fingerprint(QWEN), fingerprint(CHATML, enable_thinking=False),
             fingerprint(CHATML, bos="<|im_start|>")}
    assert len(known) == 4

DATED = "{{ strftime_now('%d %b %Y') }}" + CHATML
# Llama 3.2's
OPTIONAL = """{% if date_string is not defined %}{% if strftime_now is defined %}
{% set date_string = strftime_now("%d %b %Y") %}{% endif %}{% endif %}{{ date_string }}""" + CHATML

@pytest.mark.parametrize("template, more", [
    (DATED, {}), (OPTIONAL, {}), (CHATML, {"chat_template": DATED}),
    (DATED, {"date_string": "1 May"})])
def test_a_template_that_writes_the_date_writes_that_of_today(template, more):
    """Whatever the clock says, so no row changes at midnight. Another day is another fingerprint."""
    real, own, other = [templated(template, **more, **day) for day in (
        {}, {"today": "2024-07-26"}, {"today": "2024-07-27"})]
    assert "26 Jul 2024" in own.render(TURNS) and "27 Jul 2024" in other.render(TURNS)
    ids, mask = own.render_conversation({"messages": TURNS})
    assert own.decode([*itertools.compress(ids, mask)]) == "Yo<|im_end|>Oh<|im_end|>"
    assert len({tokenizer.fingerprint() for tokenizer in (real, own, other)}) == 3
    assert f"{real.today:%d %b %Y}" in real.render(TURNS)

def test_the_date_to_resume_with_is_said(capsys):
    templated(DATED, today="2024-02-29")
    assert "to resume: today='2024-02-29'" in capsys.readouterr().err

def test_a_template_that_reads_the_clock_in_another_way_is_refused():
    own = templated("{% set f = '%Y' %}{{ strftime_now(f) }}" + CHATML)
    with pytest.raises(UserError, match="a copy in which the date stands"):
        own.render_conversation({"messages": TURNS})

def test_a_template_without_a_clock_is_the_same_on_each_day():
    assert templated(CHATML, today="2024-07-26").fingerprint() == templated(CHATML).fingerprint()

NAMED = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.name }}")

@pytest.mark.parametrize("key, value", [
    ("name", "Bob"), ("label", "bad"), ("loss", False), ("loss", True), ("train", 0), ("seen", [0]),
    ("thinking", ["Hm"])])
@pytest.mark.parametrize("template", [CHATML, MARKED.replace("END", "<|im_end|>")])
def test_a_key_that_the_template_does_not_read_is_refused(template, key, value):
    messages = chat(HI, ("assistant", "Yo"), **{key: value})
    words = f"message 1: the template drops its {key}, .*dev.convert makes .*--ignore_keys KEY"
    with pytest.raises(UserError, match=words):
        templated(template).render_conversation({"messages": messages})

def test_a_key_is_read_in_each_message():
    messages = [message | {"name": "Bob"} for message in chat(HI, ("assistant", "Yo"))]
    assert learned_by(templated(NAMED), messages) == "YoBob<|im_end|>"
    numbered = chat(HI, ("assistant", "Yo"), name=7)
    assert learned_by(templated(NAMED), numbered) == "Yo7<|im_end|>"
    own = templated(NAMED.replace("m.name", "m.name if m.role == 'user'"))
    with pytest.raises(UserError, match="message 1: the template drops its name, 'Bob'"):
        own.render_conversation({"messages": messages})

def test_keys_without_a_value_and_ids_of_calls_may_be_lost():
    """So may the thoughts of an answer that is not learned."""
    more = {"name": None, "thinking": "", "tool_calls": [], "tool_call_id": "1"}
    assert learned_by(templated(CHATML), chat(HI, ("assistant", "Yo"), **more)) == "Yo<|im_end|>"
    masked = chat(HI, ("assistant", "Yo"), weight=0, reasoning_content="Hm")
    assert learned_by(templated(CHATML), masked) == ""

@pytest.mark.parametrize("weight", [None, 1, True, 1.0, 0, False, 0.5, "0", "1", [], -1])
def test_a_weight_is_0_or_1(weight):
    messages = chat(HI, ("assistant", "Yo"), weight=weight)
    if weight in (None, 0, 1):
        learned = "" if weight == 0 else "Yo<|im_end|>"
        assert learned_by(templated(CHATML), messages) == learned
        return
    with pytest.raises(UserError, match="expected a weight of 0 or 1; saw "):
        templated(CHATML).render_conversation({"messages": messages})

def test_ours_as_transformers_has_the_same_ids():
    """Also with special tokens first and between, and with tokens that are found in a text."""
    ranks = tokenizer_for("chatml").enc._mergeable_ranks
    ranks = {token: 3 + rank + (rank > 300) for token, rank in ranks.items()}
    special = {BOS: 0, "<pad>": 304, "<think>": 2000}
    enc = build_encoding(tokenizer_for("chatml").enc._pat_str, ranks, special)
    ours = RustBPETokenizer(enc, BOS, ["<think>"])
    own = ChatTemplate(as_transformers(ours, CHATML))
    texts = hard_texts(enc, ["<think>"])
    assert own.encode(texts) == ours.encode(texts)

def test_the_command_shows_a_chat(tmp_path, monkeypatch, capsys):
    as_transformers(tokenizer_for("chatml"), OPTIONAL).save_pretrained(tmp_path / "model")
    (tmp_path / "chats").mkdir()
    for split, answer in (("train", "Yo"), ("val", "Oh")):
        line = json.dumps(chat(HI, ("assistant", answer)))
        pq.write_table(pa.table({"messages": [line]}), tmp_path / f"chats/{split}.parquet")
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "model"), str(tmp_path / "chats")])
    runpy.run_path(module.__file__, run_name="__main__")
    assert "assistant\n[[Yo<|im_end|>]]\n" in capsys.readouterr().out
    config = tmp_path / "model/tokenizer_config.json"
    config.write_text(config.read_text().replace(f'"bos_token": "{BOS}"', '"bos_token": null'))
    with pytest.raises(SystemExit, match=r"^error: no token opens"):
        runpy.run_path(module.__file__, run_name="__main__")
