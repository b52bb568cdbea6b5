"""
Records of other tools -> the documents of a shard: text, or chats as a list of messages.

dev/convert.py reads records from files, and calls make_document for each. USES, KEYS and ROLES have
the names that are read. Other columns are dropped and reported. Those that may say what not to
learn are an error, as are other keys of a message.
"""

import collections
import json
import re

from dataset import MARK, UserError
from tokenizer import ALL_ROLES, EMPTY, NANOCHAT, read_messages

# --------------------------------------------------------------------------------------------------
# Documents

OTHER_FORMS = "; to bring it into this form: see Other forms of data in dev/recipes/forms.md"

# What in a text may show damage, or that it holds several documents. Chats are JSON anyway. The
# special tokens are named as by tiktoken, Hugging Face, Gemma and DeepSeek.
SIGNS = {
    rb'\A\[?{"(?!role")': "texts that are JSON (if lines of a file are documents, name it .jsonl)",
    rb"\0": "texts with NUL bytes (damaged, or UTF-16?)",
    rb"\xef\xbb\xbf": "texts with a byte order mark (of files that were joined?)",
    rb"<(?:\|\w+\|>|/s>|[be]os>|\w+_of_turn>|\xef\xbd\x9c[^>\s']{1,60}>)":
        "texts that contain {0}, which is plain text here, not a special token (if it separates "
        "documents: --split_at '{0}'; to remove it: sed 's#{0}##g' OLD > NEW)"}

def make_document(record, flags, say):
    """
    (text as UTF-8, {name: value to keep}). Skipped documents have an empty text.
    say(what): for the report, such as the document's kind, and what is dropped of it
    """
    record = as_dict(record)
    kept = {name: record.get(name) for name in flags.keep}
    # Python would truncate times: they become texts. Raises for half a surrogate pair
    kept = kept and json.loads(
        json.dumps(kept, ensure_ascii=False, default=str).encode())
    lift(record, flags.text_key or flags.messages_key or "")
    for name in flags.ignore_keys:
        record.pop(name, None)
    kind, columns = find_document(record, flags)
    values = [record.pop(column) for column in columns]    # what is read leaves the record
    if kind == "messages":
        messages = make_messages(values, record, flags)
        text = json.dumps(messages, ensure_ascii=False)
        refuse_marks(record)
    else:
        [text] = values
        if text in EMPTY:
            say(f"skipped documents whose {columns[0]!r} is null or empty")
            return b"", kept
        if not isinstance(text, str):
            raise UserError(
                f"{columns[0]!r} holds {type(text).__name__}, not a string; choose another column "
                "with --text_key, or one of conversations with --messages_key; for ids of tokens, "
                f"see dev/recipes/token_files.py{OTHER_FORMS}")
    text = text.encode()
    for name, value in record.items():
        if value not in EMPTY and name not in flags.keep:
            say(f"dropped column {name}")
    say(kind)
    for pattern, what in SIGNS.items():
        sign = re.search(pattern, text)
        if sign:
            say(what.format(sign[0].decode()))
    return text, kept

def refuse_marks(record):
    """UserError if the rest of a record says what not to learn, or holds a part of the chat."""
    lost = []
    for name, value in sorted(record.items()):
        learns_all = KEYS.get(name) == "weight"    # True is harmless in a weight, False elsewhere
        is_mark = MARK.fullmatch(name) and value not in (*EMPTY, learns_all)
        if is_mark or value == "rejected":
            lost.append(name)
    if lost:
        raise UserError(
            f"its {' '.join(lost)} would be lost ({[record[name] for name in lost]!r:.99}); to "
            f"leave out such records: --skip_bad; to drop it: jq -c 'del(.{', .'.join(lost)})' OLD "
            f"> NEW.jsonl or, from messages as well, --ignore_keys {' '.join(lost)}{OTHER_FORMS}")

def as_dict(record):
    """What a reader yields -> {column: value}. A record may also be a list of messages."""
    if isinstance(record, bytes):
        record = load_json(record.decode("utf-8-sig"))
    match record:
        case dict():
            return record
        case list():
            return {"messages": record}
        case Exception():
            raise record
    raise UserError(
        f"expected an object such as {{'text': 'Hello'}}; saw {record!r:.200}{OTHER_FORMS}")

def by_name(table):
    """{"user": "human bob"} -> {"human": "user", "bob": "user"}"""
    return {
        name: use for use, names in table.items()
        for name in names.split()}

# What columns are for: one of "chat" has a conversation, or one of "ask" a question (to which "add"
# is added) and one of "answer" its answer. Columns are looked for in this order.
USES = by_name({
    "text": "text",
    "chat": "messages conversations",
    "ask": "prompt question instruction",
    "answer": "completion response answer output chosen",
    "add": "input context"})
# Keys of a message. Those for its weight are also columns: whether to learn a conversation.
KEYS = by_name({
    "role": "role from",
    "content": "content value",
    "weight": "weight loss train loss_weight label kto_tag"})

def columns_to_read(flags):
    """
    {column: use}. Under --messages_key, a list of messages is a conversation, but a question under
    a name such as "prompt". A text is a question.
    """
    key = flags.messages_key
    if flags.text_key:
        return {flags.text_key: "text"}
    if not key:
        return USES
    others = {
        name: use for name, use in USES.items()
        if use in ("answer", "add") and name != key}
    return {key: "ask" if USES.get(key) == "ask" else "chat"} | others

def is_needed(column, flags):
    """
    Whether to read a column. Others may have types that Python lacks. HALOs' "type" may be
    "rejected".
    """
    is_mark = MARK.fullmatch(column) or column == "type"
    if is_mark and not flags.text_key:
        return True
    return any(
        f"{key}.".startswith(f"{column}.")
        for key in [*flags.keep, *columns_to_read(flags)])

def find_document(record, flags):
    """(kind, columns) of a document: ('text', ['text']), ('messages', ['prompt', 'response'])"""
    found = collections.defaultdict(list)    # {use: columns with a value}
    text, chat, answers = found["text"], found["chat"], found["answer"]    # these lists grow
    for column, use in columns_to_read(flags).items():
        value = record.get(column, NOT_READ)
        if value is NOT_READ or chat:
            continue
        if value in EMPTY:
            use = "empty"
        elif use == "chat" and isinstance(value, str) and not CHAT.match(value):
            use = "ask"
        found[use].append(column)
    question = chat + found["ask"] + found["add"]
    if chat or (question and answers):
        for same in text + question[:1], chat + found["ask"], answers:
            if len(same) > 1:
                raise UserError(
                    f"it has {same[0]!r} and {same[1]!r}, of which one is read; to read one as "
                    "text: --text_key NAME; to leave out one: "
                    f"--ignore_keys {same[0]} or --ignore_keys {same[1]}")
        return "messages", question + answers
    text += found["empty"][:1]
    if text:
        return "text", text[:1]
    raise UserError(
        f"no text or conversation; looked for {' '.join(columns_to_read(flags))}; saw "
        f"{[*record]!r:.300} (a question needs an answer; in CSV, line 1 has the names, and \\x00 "
        f"if it is UTF-16); name the key: --text_key, or of chats: --messages_key{OTHER_FORMS}")

def lift(record, key):
    """
    If the key is 'a.b', its value becomes record["a.b"]. What is beside b in "a" becomes a column,
    and is read or dropped like one.
    """
    outer, _, last = key.partition(".")
    inside = record.get(outer)
    if key in record or not isinstance(inside, dict):
        return
    lift(inside, last)
    del record[outer]
    record |= dict_of_pairs([*record.items(), *inside.items()])    # raises if both have a name
    if last in inside:
        record[key] = record.pop(last)

# --------------------------------------------------------------------------------------------------
# Conversations
#
# Shards hold them as JSON: [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}, ...].
# A content may be a list of parts, {"type": "text", "text": "Hello"}. A message with
# "weight": 0 is masked. convert checks that some template in tokenizer.py can render its role and
# parts; encoding checks the tokenizer's own template.

# Names of ShareGPT's dumps, LLaMA-Factory, Cohere, Gemini and OpenAI; "User" is "user"
ROLES = by_name({
    "user": "human",
    "assistant": "gpt chatgpt chatbot bot bing model function_call",
    "tool": "observation function"})
CHAT = re.compile(r"""\s*\[\s*\{.*["'](role|from)["']\s*:""", re.DOTALL)    # as a string

def make_messages(values, record, flags):
    """Messages as shards hold them. Removes from the record what it reads."""
    messages = read_turns(values, flags)
    for name in "system", "system_prompt":    # beside the conversation
        if record.get(name) and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": record.pop(name)})
    # ALL_ROLES: some template has them. With --skip_bad, only nanochat's template counts.
    roles = NANOCHAT.roles if flags.skip_bad else ALL_ROLES
    read = read_messages(messages, NANOCHAT._replace(roles=roles))
    learned = [parts for _, parts, is_target in read if is_target]
    if not learned or [("text", "")] in learned:
        raise UserError(
            "expected at least one assistant message to train on, and none that is empty, unless "
            f"its weight is 0; saw {messages!r:.200}")
    return messages

def read_turns(values, flags):
    """The messages of a question, of what is added to it, and of an answer; or of a chat alone."""
    *asked, answer = values
    answers = clean("assistant", answer, flags)
    if not asked:
        return answers
    question = asked[0]
    if len(asked) > 1:
        if {*map(type, asked)} != {str}:
            raise UserError(
                "the columns of a question are joined, so each must hold a string; saw "
                f"{asked!r:.200}; to leave a column out: --ignore_keys NAME")
        question = "\n\n".join(asked)
    questions = clean("user", question, flags)
    if answers[0]["role"] in ("system", questions[-1]["role"]):
        raise UserError(
            f"{answers!r:.200} does not answer {questions!r:.200}; to leave out one of these "
            "columns: --ignore_keys NAME, or --messages_key of the other")
    for message in questions:    # TRL's prompt may be a list of messages
        if message["role"] == "assistant":
            message.setdefault("weight", 0)
    return questions + answers

def clean(role, content, flags):
    """Messages as shards hold them, before they are checked. The content may be a text."""
    match content:
        case str() if CHAT.match(content):
            content = load_json(content)
        case str():
            content = {"role": role, "content": content}
        case [str(), *_]:    # List(Json()) of datasets
            content = [*map(load_json, content)]
        case {"role": list()} | {"from": list()}:    # its Sequence: an object of lists
            turns = zip(*content.values(), strict=True)
            content = [dict(zip(content, turn, strict=True)) for turn in turns]
    messages = content if isinstance(content, list) else [content]
    for message in messages:
        if not isinstance(message, dict) or not {"role", "from"} & {*message}:
            raise UserError(
                "expected a text, or messages such as {'role': 'user', 'content': 'Hi'}; saw "
                f"{message!r:.300}{OTHER_FORMS} (of an array of records: name it .json)")
    return [clean_message(message, flags) for message in messages]

def clean_message(message, flags):
    """Keys that KEYS does not have stay, and read_messages refuses them: they may matter."""
    pairs = [
        (KEYS.get(key, key), value) for key, value in message.items()
        if value not in EMPTY and key not in flags.ignore_keys]    # parquet has null for no key
    message = {"role": None} | dict_of_pairs(pairs)
    role = str(message["role"]).lower()
    return message | {"role": ROLES.get(role, role)}

# --------------------------------------------------------------------------------------------------
# JSON

def load_json(text):
    """NaN is null. A text may have tabs and line ends as they are."""
    return json.loads(
        text, object_pairs_hook=dict_of_pairs, parse_constant=lambda name: None, strict=False)

def dict_of_pairs(pairs):
    """Like dict(pairs), but a repeated key is an error."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise UserError(f"a key occurs twice: {pairs!r:.300}; remove one (a CSV begins with names)")
    return record

NOT_READ = ...    # in place of a value: neither null nor text
