"""
Records of other tools -> the documents of a shard: text, or chats as a list of messages.

dev/convert.py reads records from files, and calls make_document for each. USES, SYSTEM, WEIGHTS
and ROLES have the names that are read. Other columns are dropped, and the report says so.
Other keys of a message are an error, since they may say not to learn it.
"""

import collections
import json
import re

from dataset import UserError
from tokenizer import ALL_ROLES, EMPTY, NANOCHAT, read_messages

# --------------------------------------------------------------------------------------------------
# Documents

OTHER_TYPES = (
    "choose another column with --text_key, write pandas' columns as "
    "records (df.to_json(NEW, orient='records', lines=True)), or for conversations, add "
    "--messages_key NAME; for ids of tokens, see dev/recipes/token_files.py")
# Names of special tokens: of tiktoken, Hugging Face, Gemma and DeepSeek
SPECIAL = re.compile(rb"<(\|\w+\|>|/s>|[be]os>|\w+_of_turn>|\xef\xbd\x9c[^>\s']{1,60}>)")
OTHER_FORMS = "; to bring it into this form: see Other forms of data in dev/recipes/forms.md"

def make_document(record, flags, say):
    """
    (text as UTF-8, kept values). The text is empty if the document is skipped.
    say(what): for the report, such as the document's kind, and what is dropped of it
    """
    if isinstance(record, Remark):
        say(record)
        return b"", {}
    record = as_dict(record, flags)
    kept = record.pop(KEPT, None)    # a row of Arrow
    if not kept:
        kept = {name: lookup(record, name) for name in flags.keep}
    for name in flags.ignore_keys:
        record.pop(name, None)
    kind, columns = find_document(record, flags)
    values = [lookup(record, column) for column in columns]
    for name in columns_of(columns):    # what is read leaves the record
        record.pop(name, None)
    if kind == "messages":
        messages = make_messages(values, record, flags, say)
        text = json.dumps(messages, ensure_ascii=False)
        if not is_learned(record, flags, say):
            return b"", kept
    else:
        [text] = values
        if text in EMPTY:
            say(f"skipped documents whose {columns[0]!r} is null or empty")
            return b"", kept
        if not isinstance(text, str):
            raise UserError(
                f"{columns[0]!r} holds {type(text).__name__}, not a string; {OTHER_TYPES}")
    text = text.encode()
    for name, value in record.items():
        if value not in EMPTY and name not in columns_of(flags.keep):
            if kind == "messages" and value == "rejected":
                raise UserError(
                    f"{name!r} is 'rejected'; to train on it anyway: --ignore_keys {name}")
            say(f"dropped column {name}")
    say(kind)
    report_signs(kind, text, say)
    return text, kept

def is_learned(record, flags, say):
    """False if a mark of a conversation says so. UserError if one says anything but yes or no."""
    lost = [name for name in LOST if record.get(name)]
    for name in WEIGHTS:
        match weight_of(record.get(name)):
            case 0:
                say(f"skipped conversations whose {name} is false")
                return False
            case 1:
                del record[name]
            case int() | float() | list() | dict() as weight if weight not in EMPTY:
                lost.append(name)
    lost = [name for name in lost if name not in columns_of(flags.keep)]
    if lost:
        names = " ".join(lost)
        raise UserError(
            f"its {names} would be lost (a weight of 0 or 1 in each message says what to learn, "
            f"and shards hold no tools); to drop it: --ignore_keys {names}")
    return True

def report_signs(kind, text, say):
    """What in a text may show damage, or that it holds several documents."""
    if kind == "text" and text.startswith((b'{"', b'[{"')):
        say("texts that are JSON (if lines of a file are documents, name it .jsonl)")
    if b"\0" in text:
        say("texts with NUL bytes (damaged?)")
    if b"\xef\xbb\xbf" in text:
        say("texts with a byte order mark (of files that were joined?)")
    special = SPECIAL.search(text)
    if special:
        name = special[0].decode()
        say(f"texts that contain {name}, which is plain text here, not a special token (if it "
            f"separates documents: --split_at '{name}'; to remove it: sed 's#{name}##g' OLD > NEW)")

def as_dict(record, flags):
    """What a reader yields -> {column: value}. A record may also be a list of messages."""
    if isinstance(record, bytes):
        record = load_json(record)
    match record:
        case dict():
            return record
        case list():
            return {flags.messages_key or "messages": record}
        case Exception():
            raise record
    raise UserError(f"expected an object such as {{'text': 'Hello'}}; saw {record!r:.200}; "
                    "of an array of texts: jq -c '.[] | {text: .}' OLD > NEW.jsonl")

def by_name(table):
    """{"user": "human bob"} -> {"human": "user", "bob": "user"}"""
    return {
        name: use for use, names in table.items()
        for name in names.split()}

# What columns are for: one of "chat" has a conversation, or one of "ask" a question (to which "add"
# is added) and one of "answer" its answer. "chosen" may also answer a conversation. In this order,
# a record's columns are looked for.
USES = by_name({
    "text": "text",
    "chat": "messages conversations",
    "ask": "prompt question instruction",
    "answer": "completion response answer output chosen",
    "add": "input context"})
# Beside a conversation, one of SYSTEM has the system's message, and "history" pairs of texts that
# come before it. Those of WEIGHTS say whether to learn it, also as keys of a message.
SYSTEM = ["system", "system_prompt"]
WEIGHTS = ["weight", "loss", "train", "loss_weight", "label"]
# These say what to learn of a conversation, or add to it: not read, so they are an error.
LOST = [
    "weights", "loss_weights", "mask", "loss_mask", "loss_masks", "assistant_mask",
    "assistant_masks", "mask_history", "train_on_inputs", "tool", "tools", "functions",
    "systemInstruction", "system_instruction", "system_message"]

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
    return {key: "ask" if USES.get(key) == "ask" else "chat"} | {
        name: use for name, use in USES.items()
        if use in ("answer", "add") and name not in columns_of([key])}

def needed_columns(flags):
    """Others may have values that Python lacks."""
    beside_chats = [] if flags.text_key else [*SYSTEM, "history", *WEIGHTS, *LOST]
    return columns_of([*columns_to_read(flags), *beside_chats])

def find_document(record, flags):
    """(kind, columns) of a document: ('text', ['text']), ('messages', ['prompt', 'response'])"""
    found, empty = collections.defaultdict(list), []    # found: {use: columns with a value}
    text, chat, answers = found["text"], found["chat"], found["answer"]
    for column, use in columns_to_read(flags).items():
        value = lookup(record, column, NOT_READ)
        if value is NOT_READ or (chat and column != "chosen"):
            continue
        if use == "chat" and isinstance(value, str) and not CHAT.match(value):
            use = "ask" if flags.messages_key else "no use"
        if value not in EMPTY:
            found[use].append(column)
        elif use != "add" or answers:
            empty.append(column)
    question = chat + found["ask"] + found["add"]
    if chat or (question and answers):
        for same in text + question[:1], found["ask"], answers:
            if len(same) > 1:
                raise UserError(
                    f"it has {same[0]!r} and {same[1]!r}, of which one is read; to read one as "
                    "text: --text_key NAME; to leave out one: "
                    f"--ignore_keys {same[0]} or --ignore_keys {same[1]}")
        return "messages", question + answers
    if text or empty:
        return "text", text or empty[:1]
    key = flags.text_key or flags.messages_key or "text"
    raise UserError(
        f"no text or conversation under {key!r} ({lookup(record, key)!r:.99}); saw "
        f"{[*record]!r:.300} (in CSV, line 1 has the names; a question such as 'prompt' needs an "
        "answer such as 'completion'); name the key with --text_key (a.b for b in a), or for "
        f"conversations or questions with --messages_key{OTHER_FORMS}")

def lookup(record, key, missing=None):
    """record["a"]["b"] for the key 'a.b', unless there is a key 'a.b'. A null in "a" is one."""
    for name in [key] if key in record else key.split("."):
        if isinstance(record, dict):
            record = record.get(name, missing)
        elif record is not None:
            return missing
    return record

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
ROLES = by_name({
    "user": "human",
    "assistant": "gpt chatgpt chatbot bot bing model function_call",
    "tool": "observation function"})
CHAT = re.compile(r"""\s*\[\s*\{.*["'](role|from)["']\s*:""", re.DOTALL)    # written as a text

def make_messages(values, record, flags, say):
    """Messages as shards hold them. What is read of the record, beside the values, leaves it."""
    messages = read_turns(values, flags)
    begin = int(messages[0]["role"] == "system")
    history = record.pop("history", None) or []
    for pair in reversed(history):
        match pair:
            case [str(), str()]:
                messages[begin:begin] = read_turns(pair, flags)
            case _:
                raise UserError(
                    "expected pairs of texts, [['Hi', 'Hello'], ...], under 'history'; saw "
                    f"{history!r:.200}; to leave it out: --ignore_keys history")
    for name in SYSTEM:
        if record.get(name) and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": record.pop(name)})
    try:
        read_messages(messages, NANOCHAT)
    except UserError as error:
        if flags.skip_bad:
            raise
        read_messages(messages, NANOCHAT._replace(roles=ALL_ROLES))    # no template has others
        say("conversations that nanochat's template cannot render; train.py will stop there unless "
            "its tokenizer uses another template (to leave them out: --skip_bad)", f": {error}")
    learned = [
        message["content"] for message in messages
        if message["role"] == "assistant" and message.get("weight", 1)]
    if not learned or not all(learned):
        raise UserError(
            "expected at least one assistant message to train on, and none that is empty, unless its "
            f"weight is 0; saw {messages!r:.200}")
    return messages

def read_turns(values, flags):
    """The messages of a question, of what is added to it, and of an answer; or of a chat alone."""
    *asked, answer = values
    answers = clean("assistant", answer, flags)
    if not asked:
        return answers
    question, *added = asked
    if added:
        if {*map(type, asked)} != {str}:
            raise UserError(
                "the columns of a question are joined, so each must hold a string; saw "
                f"{asked!r:.200}; to leave a column out: --ignore_keys NAME")
        question = "\n\n".join(asked)
    questions = clean("user", question, flags)
    repeated = answers[:len(questions)]
    if repeated == questions:    # `chosen` may be a whole chat
        return answers
    is_same_speaker = answers[0]["role"] == questions[-1]["role"]
    if is_same_speaker or said(repeated) == said(questions):
        raise UserError(
            f"{answers!r:.200} does not answer {questions!r:.200}; to leave out one of these "
            "columns: --ignore_keys NAME, or --messages_key of the other")
    for message in questions:    # TRL's prompt may be a list of messages
        if message["role"] == "assistant":
            message.setdefault("weight", 0)
    return questions + answers

def said(messages):
    """Without weights: if only they differ, which ones count?"""
    return [(message["role"], message["content"]) for message in messages]

def clean(role, content, flags):
    """Messages as shards hold them, before they are checked. The content may be a text."""
    match content:
        case str() if CHAT.match(content):
            content = load_json(content.encode())
        case str():
            content = {"role": role, "content": content}
        case [str(first), *_] if first.lstrip().startswith("{"):    # List(Json()) of datasets
            content = [load_json(text.encode()) for text in content]
        case {"role": list()} | {"from": list()}:    # its Sequence: an object of lists
            turns = zip(*content.values(), strict=True)
            content = [dict(zip(content, turn, strict=True)) for turn in turns]
    messages = content if isinstance(content, list) else [content]
    if {*map(type, messages)} != {dict}:
        raise UserError(
            "expected a text, or messages such as {'role': 'user', 'content': 'Hi'}; saw "
            f"{content!r:.300}{OTHER_FORMS}")
    cleaned = []
    for message in messages:
        message = {    # parquet has null for what others have
            key: value for key, value in message.items()
            if value is not None and key not in flags.ignore_keys}
        ours = {}
        for name, theirs in ("role", "from"), ("content", "value"):
            key = name if name in message else theirs
            ours[name] = message.pop(key, None)
        role = str(ours["role"]).lower()
        ours["role"] = ROLES.get(role, role)
        weights = [weight_of(message.pop(key)) for key in WEIGHTS if key in message]
        if 1 in weights and ours["role"] != "assistant":
            raise UserError(
                f"a message of role {ours['role']!r} has a weight, but only answers are learned; "
                f"to drop all weights: --ignore_keys {' '.join(WEIGHTS)}")
        if weights:
            ours["weight"] = min(weights, key=lambda weight: weight == 1)    # the first other
        cleaned.append(ours | {    # read_messages refuses other keys: they may matter
            key: value for key, value in message.items() if value not in EMPTY})
    return cleaned

def weight_of(value):
    """Of a mark, which may be false, 0, 0.0, true, 1 and their names in CSV. Others stay."""
    try:
        return json.loads(str(value).lower())
    except ValueError:
        return value

# --------------------------------------------------------------------------------------------------
# JSON

def load_json(data):
    """
    NaN is null. A text may have tabs and line ends as they are. data: UTF-8 (Python itself would
    also read UTF-16)
    """
    return json.loads(
        data.decode("utf-8-sig"), object_pairs_hook=dict_of_pairs,
        parse_constant=lambda name: None, strict=False)

def dict_of_pairs(pairs):
    """If a key is repeated, Python keeps the last value. Here, it is an error."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise UserError(f"a key occurs twice: {pairs!r:.300}; remove one")
    return record

class Remark(str):
    """In place of a record: what a reader has to say, for the report."""

NOT_READ = ...    # neither null nor text
KEPT = "nanoloader.kept"    # a record's key: a row of a table's columns to keep

