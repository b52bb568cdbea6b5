"""
Records of other tools -> the documents of a shard: text, or chats as a list of messages.

dev/convert.py reads records from files, and calls make_document for each. The tables USES and ROLES
have all names that are read. Other columns are dropped, and the report says so.
Other keys of a message are an error, since they may say not to learn it.
"""

import collections
import contextlib
import itertools
import json
import re

from dataset import UserError
from tokenizer import ALL_ROLES, EMPTY, NANOCHAT, read_message, read_messages

# --------------------------------------------------------------------------------------------------
# Documents

REFUSED = (
    "conversations that nanochat's template cannot render; train.py will stop there unless its "
    "tokenizer uses another template (to leave them out: --skip_bad)")
OTHER_TYPES = (
    "choose another column with --text_key, cast bytes to strings, write pandas' columns as "
    "records (df.to_json(NEW, orient='records', lines=True)), or for conversations, add "
    "--messages_key NAME; for ids of tokens, see nanoGPT's tokens in dev/loops.md")
# Names of special tokens: of tiktoken, Hugging Face, Gemma and DeepSeek
SPECIAL = re.compile(rb"<(\|\w+\|>|/s>|[be]os>|\w+_of_turn>|\xef\xbd\x9c[^>\s']{1,60}>)")
OTHER_FORMS = "; to bring it into this form: see Other forms of data in dev/loops.md"
EXAMPLE = {"role": "user", "content": "Hi"}

def make_document(record, flags, place, report):
    """(text as UTF-8, kept values). In the report: its kind, and what is dropped of it."""
    record = as_dict(record, flags)
    kept = {name: lookup(record, name) for name in flags.keep}
    record = {key: value for key, value in record.items() if key not in flags.ignore_keys}
    kind, columns = find_document(record, flags)
    if kind == "messages":
        messages = make_messages(record, columns, flags.ignore_keys)
        try:
            read_messages(messages, NANOCHAT)
        except UserError as error:
            if flags.skip_bad:
                raise
            report.add(REFUSED, f"{place}: {error}")
        text = json.dumps(messages, ensure_ascii=False)
        for name in USES["weight"]:
            weight = weight_of(record.get(name))
            if weight == 0:
                report.add(f"skipped conversations whose {name} is false", place)
                return b"", kept
            if weight == 1:
                del record[name]
    else:
        [column] = columns
        text = lookup(record, column)
        if text in EMPTY:
            report.add(f"skipped documents whose {column!r} is null or empty", place)
            return b"", kept
        if not isinstance(text, str):
            raise UserError(f"{column!r} holds {type(text).__name__}, not a string; {OTHER_TYPES}")
    text = text.encode()
    read = columns_of([*columns, *flags.keep])
    for key, value in record.items():
        if value not in EMPTY and key not in read:
            check_verdict(kind, key, value)
            report.add(f"dropped column {key}", place)
    report.add(kind, place)
    report_signs(kind, text, place, report)
    return text, kept

def check_verdict(kind, key, value):
    """UserError if a column says not to learn a chat."""
    if kind == "messages" and value == "rejected":
        raise UserError(f"{key!r} is 'rejected'; to learn it nevertheless: --ignore_keys {key}")

def report_signs(kind, text, place, report):
    """What in a text may show damage, or that it holds several documents."""
    if kind == "text" and text.startswith((b'{"', b'[{"')):
        report.add("texts that are JSON (if lines of a file are documents, name it .jsonl)", place)
    if b"\0" in text:
        report.add("texts with NUL bytes, as in damaged files or UTF-16 (iconv -f UTF-16LE -t "
                   "UTF-8 OLD > NEW)", place)
    special = SPECIAL.search(text)
    if special:
        name = special[0].decode()
        report.add(f"texts with {name}, a special token's name, which is plain text here (if plain "
                   f"text ends there: --split_at '{name}'; to remove it: sed 's#{name}##g' OLD > "
                   "NEW)", place)

def as_dict(record, flags):
    """Of a record, which may also be a list of messages."""
    if isinstance(record, bytes):
        record = load_json(record)
    if isinstance(record, Exception):
        raise record
    if isinstance(record, list):
        record = {flags.messages_key or "messages": record}
    if not isinstance(record, dict):
        raise UserError(f"expected an object such as {{'text': 'Hello'}}; saw {record!r:.200}; "
                        "of an array of texts: jq -c '.[] | {text: .}' OLD > NEW.jsonl")
    return record

# What columns are for: one of "chat" has a conversation, or one of "ask" a question (to which "add"
# is added) and one of "answer" its answer. "chosen" may also answer a conversation. "history" has
# pairs before the question. Those of "weight" say whether to learn it, also as keys of a message.
USES = {
    "text": "text",
    "chat": "messages conversations",
    "ask": "prompt question instruction",
    "answer": "completion response answer output chosen",
    "add": "input context",
    "system": "system system_prompt",
    "history": "history",
    "weight": "weight loss train loss_weight label"}
USES = {use: names.split() for use, names in USES.items()}

def columns_to_read(flags):
    """{use: columns}, of documents. Each column has one use."""
    key = flags.messages_key
    if flags.text_key:
        return {"text": [flags.text_key]}
    if not key:
        return USES
    own = columns_of([key])
    uses = {use: [name for name in names if name not in own] for use, names in USES.items()}
    return uses | {"text": [], "chat": {key} - {*USES["ask"]}, "ask": [key]}

def needed_columns(flags):
    """Others may have values that Python lacks."""
    return columns_of([*itertools.chain(*columns_to_read(flags).values()), *flags.keep])

def find_columns(record, flags):
    """({use: columns with a value}, columns of a document that are empty)"""
    found, empty = collections.defaultdict(list), []
    for use, keys in columns_to_read(flags).items():
        is_needed = use in ("text", "chat", "ask", "answer") or (use == "add" and found["answer"])
        for key in keys:
            value = lookup(record, key, NOT_READ)
            if value is NOT_READ:
                continue
            if value not in EMPTY:
                found[use].append(key)
            elif is_needed:
                empty.append(key)
    found["chat"] = [key for key in found["chat"] if not is_text(lookup(record, key))]
    return found, empty

def find_document(record, flags):
    """(kind, columns) of a document: ('text', ['text']), ('messages', ['prompt', 'response'])"""
    found, empty = find_columns(record, flags)
    text, chat, answers = found["text"], found["chat"][:1], found["answer"]
    question = chat or found["ask"] + found["add"]
    if chat:
        answers = [key for key in answers if key == "chosen"]
    if question and answers:
        for same in (chat or found["ask"], answers):
            if len(same) > 1:
                raise UserError(f"it has {same[0]!r} and {same[1]!r}, which mean the same; to "
                                f"leave out one: --ignore_keys {same[1]}")
        chat = question + answers
    if text and chat:
        raise UserError(f"it has both {text[0]!r} and {chat[0]!r}; choose: --text_key {text[0]}, "
                        f"or for conversations --messages_key {chat[0]}")
    if text:
        return "text", text
    if chat:
        return "messages", chat
    if empty:
        return "text", empty[:1]
    if question:
        raise UserError(
            f"{question[0]!r} is a question, but there is no answer, such as 'completion'; saw "
            f"{[*record]!r:.300}; to read a column as text: --text_key NAME{OTHER_FORMS}")
    key = flags.text_key or flags.messages_key or "text"
    raise UserError(
        f"no text or conversation under {key!r} ({lookup(record, key)!r:.99}); saw "
        f"{[*record]!r:.300} (in CSV, line 1 has the names); name the key with --text_key (a.b for "
        f"b in a), or for conversations or questions with --messages_key{OTHER_FORMS}")

def is_text(value):
    """... and not a conversation written as JSON."""
    return isinstance(value, str) and not CHAT.match(value)

def lookup(record, key, missing=None):
    """record["a"]["b"] for the key 'a.b', unless there is a key 'a.b'. A null in "a" is one."""
    if key in record or "." not in key:
        return record.get(key, missing)
    head, _, rest = key.partition(".")
    value = record.get(head, missing)
    if value is None:
        return None
    return lookup(value, rest, missing) if isinstance(value, dict) else missing

def columns_of(keys):
    """Of a key 'a.b', the column is 'a.b' or 'a'."""
    return {*keys, *(key.partition(".")[0] for key in keys)}

# --------------------------------------------------------------------------------------------------
# Conversations
#
# Shards hold them as JSON: [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}, ...].
# A content may be a list of parts, {"type": "text", "text": "Hello"}. A message with
# "weight": 0 is masked. convert checks that some template in tokenizer.py can render its role and
# parts; encoding checks the tokenizer's own template.

# Names of ShareGPT's dumps, LLaMA-Factory, Cohere, Gemini and OpenAI; "User" is "user"
ASSISTANTS = "gpt chatgpt chatbot bot bing model function_call"
ROLES = {"human": "user", "observation": "tool", "function": "tool"}
ROLES |= dict.fromkeys(ASSISTANTS.split(), "assistant")
CHAT = re.compile(r"""\s*\[\s*\{.*["'](role|from)["']\s*:""", re.DOTALL)    # written as a text

def weight_of(value):
    """Of a mark, which may be false, 0, 0.0, true, 1 and their names in CSV. Others stay."""
    with contextlib.suppress(ValueError):
        return json.loads(str(value).lower())
    return value

def make_messages(record, columns, ignore_keys):
    """Messages as shards hold them. What is read beside the columns leaves the record."""
    question, *others = [lookup(record, column) for column in columns]
    if others:
        messages = read_pair([question, *others], ignore_keys)
    else:
        messages = clean(None, question, ignore_keys)
    history = record.get("history")
    if history and "history" not in columns:
        del record["history"]
        is_pairs = all(
            isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in history)
        if not is_pairs:
            raise UserError(
                "expected pairs of texts, [['Hi', 'Hello'], ...], under 'history'; saw "
                f"{history!r:.200}; to leave it out: --ignore_keys history")
        pairs = [read_pair(pair, ignore_keys) for pair in history]
        begin = int(messages[0]["role"] == "system")
        messages[begin:begin] = itertools.chain(*pairs)
    learned = [
        message["content"] for message in messages
        if message["role"] == "assistant" and message.get("weight", 1)]
    if not (learned and all(learned)):
        raise UserError(
            "expected an assistant's message to learn, and none that is empty, unless its weight "
            f"is 0; saw {messages!r:.200}")
    for name in USES["system"]:
        if record.get(name) and messages[0]["role"] != "system":
            system = [{"role": "system", "content": record.pop(name)}]
            messages = clean("system", system, ignore_keys) + messages
    return messages

def read_pair(values, ignore_keys):
    """The messages of a question, what is added to it, and an answer."""
    question, *added, answer = values
    if added:
        if {*map(type, [question, *added])} != {str}:
            raise UserError(
                f"expected texts to join, as in {' and '.join(USES['add'])}; saw "
                f"{[question, *added]!r:.200}; to leave a column out: --ignore_keys NAME")
        question = "\n\n".join([question, *added])
    questions = clean("user", question, ignore_keys)
    for message in questions:    # TRL's prompt may be a list of messages
        if message["role"] == "assistant":
            message.setdefault("weight", 0)
    answers = clean("assistant", answer, ignore_keys)
    asked, answered = ([message["content"] for message in some] for some in (questions, answers))
    if answered[:len(asked)] == asked:    # `chosen` may be a whole chat
        return answers
    if answers[0]["role"] == questions[-1]["role"]:
        raise UserError(
            f"{answered!r:.200} does not answer {asked!r:.200}; to leave out one of these columns: "
            "--ignore_keys NAME, or --messages_key of the other")
    return questions + answers

def clean(role, content, ignore_keys):
    """Messages as shards hold them. The content may be a text of this role."""
    if isinstance(content, str) and CHAT.match(content):
        content = load_json(content)
    messages = content
    if isinstance(content, str):
        messages = [{"role": role, "content": content}]
    if isinstance(content, dict):
        messages = [content]
    is_chat = isinstance(messages, list) and all(
        isinstance(message, dict) and {"role", "from"} & message.keys() for message in messages)
    if not is_chat:
        raise UserError(
            f"expected a text, or messages such as {EXAMPLE}; saw {content!r:.300}{OTHER_FORMS}")
    cleaned = []
    for i, message in enumerate(messages):
        try:
            cleaned.append(clean_message(message, ignore_keys))
        except Exception as error:
            raise UserError(
                f"message {i}: {error}; saw {message!r:.300}, expected something like {EXAMPLE}"
                f"{OTHER_FORMS}") from error
    return cleaned

def clean_message(message, ignore_keys):
    """Its role, content and weight. Another key with a value is a UserError: it may matter."""
    message = {    # parquet has null for what others have
        key: value for key, value in message.items()
        if value is not None and key not in ignore_keys}
    for name, ours in ("from", "role"), ("value", "content"):
        if name in message and ours not in message:
            message[ours] = message.pop(name)
    role = str(message.get("role")).lower()
    kept = {"role": ROLES.get(role, role), "content": message.get("content")}
    weights = [weight_of(message.pop(key)) for key in USES["weight"] if key in message]
    if weights:
        kept["weight"] = min(weights)
    read_message(message | kept, ALL_ROLES, NANOCHAT)    # refuses other keys and weights
    return kept

# --------------------------------------------------------------------------------------------------
# JSON

def load_json(text):
    """NaN is null. text: a str or UTF-8"""
    if isinstance(text, bytes):    # Python would also read UTF-16
        text = text.decode("utf-8-sig")
    return json.loads(text, object_pairs_hook=dict_of_pairs, parse_constant=lambda name: None)

def dict_of_pairs(pairs):
    """If a key is repeated, Python keeps the last value. Here, it is an error."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise UserError(f"a key is there twice: {pairs!r:.300}; remove one")
    return record

NOT_READ = ...    # neither null nor text

