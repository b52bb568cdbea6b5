"""
Train on chats as a model's own chat template writes them: transformers renders and encodes.
Needs: pip install transformers

    python dev/recipes/chat_template.py MODEL my_chats    # shows a chat, with [[what is learned]]

MODEL is a name on Hugging Face, or a folder. In your own loop:

    from transformers import AutoTokenizer
    tokenizer = ChatTemplate(AutoTokenizer.from_pretrained(MODEL), enable_thinking=False)
    loader = PackedLoader(tokenizer, B, T, "train", data_dir="my_chats", packing="wholefit")

Text and ids are those of apply_chat_template, after BOS if the template does not write it. So the
name of a special token in a message becomes that token, unless you pass
sanitize_control_tokens=True. A template that writes today's date writes that of `today`, also after
midnight. To resume on another day, pass the day on which the run began: today="2026-11-28".

What is learned is what the template marks with {% generation %}. Without marks, it is each answer,
from the end of its prompt to its last special token. For that, the prompt, and the chat up to the
answer, must be the beginning of the whole chat. Some templates change earlier answers (Qwen 3's
drops their thoughts). To learn these, make each answer the last one of a chat:

    jq -c 'del(.messages) as $rest | .messages as $all | range($all | length) as $i | $all[$i]
        | select(.role == "assistant" and .weight != 0)
        | $rest + {messages: (($all[:$i] | map(.weight = 0)) + [.])}' OLD.jsonl > NEW.jsonl
"""

import copy
import datetime
import functools
import itertools
import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, ".")    # run this in the folder of dataloader.py
from dataset import UserError, errors_in_one_line, json_sha256, list_shards, messages_of
from dev.import_tokenizer import BYTE_OF
from tokenizer import EMPTY, format_ranks, print_once

OTHER_WAY = (
    "make each answer the last one of a chat (the jq command in dev/recipes/chat_template.py), "
    "without what the template drops of masked messages (thoughts, texts beside calls), or mark "
    "answers in the template with {% generation %}")

CLOCK = re.compile(r"""strftime_now\((["'])(.*?)\1\)""")
CALLS_FLOAT = "'float' object is not callable"

KEEP_OR_DROP = (
    "change the chat (for thoughts: the jq command in dev/recipes/chat_template.py), or pass the "
    "argument or chat_template= that keeps it. python -m dev.convert makes weights of loss, train, "
    "loss_weight and label; to drop a key: its --ignore_keys KEY")

OBJECTS = (
    "jq -c '(.messages[].tool_calls[]?.function.arguments | strings) |= fromjson' OLD > NEW")

# Keys of a message
KNOWN = {"role", "content", "weight", "tool_calls", "tool_call_id"}
THOUGHTS = {"reasoning_content", "reasoning", "thinking"}    # of masked answers, they may be dropped

PROBE = "zqxzqx"    # a content that no template changes, and that no other text has
QUESTION = {"role": "user", "content": PROBE}

class ChatTemplate:
    """
    tokenizer: a fast one of transformers. bos: the token that opens documents (default: its
    bos_token or eos_token). today: the date for templates that write it, such as "2026-11-28"
    (default: the real one). arguments: of apply_chat_template, or variables of the template.
    """
    def __init__(self, tokenizer, bos=None, today=None, **arguments):
        if not tokenizer.is_fast or not (tokenizer.chat_template or "chat_template" in arguments):
            raise UserError("expected a fast tokenizer of transformers that has a chat template, or "
                            "chat_template=, its text")
        # Copies: each call of transformers changes its tokenizer's state, and yours may be in use.
        self.tokenizer, self.for_texts = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
        self.special, self.arguments = {*tokenizer.added_tokens_decoder}, arguments
        self.today = datetime.date.fromisoformat(today or datetime.date.today().isoformat())
        bos = bos or tokenizer.bos_token or tokenizer.eos_token
        self.bos_id = bos and tokenizer.get_vocab().get(bos)
        if self.bos_id is None:
            raise UserError(f"no token opens documents (bos is {bos!r}): pass bos=, one of its own")
        try:
            self.fingerprint()
        except TypeError as error:
            raise UserError(
                f"{error}; expected arguments of text and numbers (for a function as a tool: "
                "transformers.utils.get_json_schema(FUNCTION))") from error
        self.takes_parts = False
        if not self._writes_contents():
            self.takes_parts = True
            self.takes_parts = self._writes_contents()

    def get_bos_token_id(self):
        return self.bos_id

    def get_vocab_size(self):
        return 1 + max(self.tokenizer.get_vocab().values())    # there may be holes

    def encode(self, texts, prepend=None, num_threads=1):
        """Ids of documents of text, in which the names of special tokens are plain text."""
        before = [] if prepend is None else [prepend]
        encoded = self.for_texts(texts, add_special_tokens=False, split_special_tokens=True)
        return [before + ids for ids in encoded["input_ids"]]

    def decode(self, ids):
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def fingerprint(self):
        """A hash of the vocabulary, the template, its arguments, and the date if it reads that."""
        described = json.loads(self.tokenizer.backend_tokenizer.to_str())
        del described["truncation"], described["padding"]    # each call sets them
        templates = str([self.tokenizer.chat_template, self.arguments.get("chat_template")])
        today = "strftime_now" in templates and self.today.isoformat()
        if today:
            print_once(f"the chat template can write today's date; to resume: today={today!r}")
        return json_sha256([
            described, self.tokenizer.special_tokens_map, self.tokenizer.chat_template,
            self.arguments, self.bos_id, today])

    # Chats

    def render(self, messages, tools=None, **more):
        """The text of a chat."""
        return self._apply(messages, tools, tokenize=False, sanitize_control_tokens=False, **more)

    def render_conversation(self, conversation, max_tokens=None):
        """{"messages": [...]}, and "tools" if there are some -> (ids, mask)"""
        messages, tools = conversation["messages"], conversation.get("tools")

        @functools.cache
        def ids_of(n, **more):
            """Of the first n messages."""
            return self._apply(messages[:n], tools, **more)["input_ids"]

        ids = ids_of(len(messages))
        mask = self._read_marks(messages, tools) if self._may_have_marks(tools) else None
        if mask is None:
            mask = len(ids) * [0]
            for i, message in enumerate(messages):
                if is_answer(message) and message.get("weight") != 0:
                    start = self._find_start(i, messages, ids_of)
                    stop = self._find_stop(i, messages, tools, ids_of, start)
                    mask[start:stop] = (stop - start) * [1]
        self._check_nothing_is_dropped(messages, tools)
        self._warn_if_no_token_ends_answers(ids, mask)
        if ids[0] != self.bos_id:
            ids, mask = [self.bos_id, *ids], [0, *mask]
        return ids[:max_tokens], mask[:max_tokens]

    def _template(self, tools):
        """The template in use, with `today` in place of the clock."""
        try:
            template = self.tokenizer.get_chat_template(
                self.arguments.get("chat_template"), tools or self.arguments.get("tools"))
        except ValueError as error:    # of several templates, none is the default
            raise UserError(f"{error}; pass chat_template=, a name or a text") from error
        return CLOCK.sub(lambda call: repr(self.today.strftime(call[2])), template)

    def _may_have_marks(self, tools):
        """The library cannot both use marks and sanitize."""
        has_word = re.search(r"\{%-?\s*generation\s*-?%\}", self._template(tools))
        return has_word and not self.arguments.get("sanitize_control_tokens")

    def _apply(self, messages, tools, **more):
        """transformers' apply_chat_template. A content is one text, or one part if it must be."""
        arguments = self.arguments | more | {"chat_template": self._template(tools)}
        arguments["strftime_now"] = 0.5    # a template that calls a float raises CALLS_FLOAT
        if tools:
            arguments["tools"] = tools
        messages = [*map(for_template, messages)]
        for message in messages:
            if self.takes_parts and isinstance(message.get("content"), str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        try:
            return self.tokenizer.apply_chat_template(messages, **arguments)
        except Exception as error:    # of jinja, or what the template itself raises
            if CALLS_FLOAT in str(error):
                raise UserError(
                    "the chat template reads the clock with a format that is no text in quotes: "
                    "pass chat_template=, a copy in which the date stands") from error
            raise UserError(
                f"the chat template refuses this chat: {error!r:.300}; if it needs a content where "
                f"there is none, write \"\"; if arguments must be objects, not texts: {OBJECTS}"
            ) from error

    def _writes_contents(self):
        """Templates of some vision models take no text as a content, only a list of parts."""
        try:
            return PROBE in self.render([QUESTION])
        except UserError:
            return False

    def _check_nothing_is_dropped(self, messages, tools):
        """
        Mark the end of each content, call, learned thought and value of another key, such as loss:
        the rendered text must have all marks. The mark of arguments that are a text has a quote: it
        changes if they are written in quotes.
        """
        marks, marked = {}, []

        def mark(text, i, what, quote=""):
            name = f"zq{quote}{len(marks)}zq"
            marks[name] = f"message {i}: the template drops its {what}, {text.strip()!r:.60}"
            return text + name

        for i, message in enumerate(map(for_template, messages)):
            content, is_learned = message.get("content"), messages[i].get("weight") != 0
            known = KNOWN if is_learned else KNOWN | THOUGHTS
            for key in message.keys() - known:
                if message[key] not in EMPTY:
                    message[key] = mark(str(message[key]), i, key)
            if content and isinstance(content, str):
                thoughts, end, answer = content.rpartition("</think>")
                if is_learned and thoughts.removeprefix("<think>").strip():
                    thoughts = mark(thoughts, i, "thoughts")
                if answer:
                    answer = mark(answer, i, "content")
                message["content"] = thoughts + end + answer
            calls = copy.deepcopy(message.get("tool_calls") or [])
            for call in calls:
                function = call.get("function", call)
                function["name"] = mark(function["name"], i, "call of")
                arguments = function.get("arguments")
                if isinstance(arguments, str):
                    what = f"arguments, or quotes this text (to make objects: {OBJECTS})"
                    function["arguments"] = mark(arguments, i, what, '"')
            if calls:
                message["tool_calls"] = calls
            marked.append(message)
        text = self.render(marked, tools)
        for name, problem in marks.items():
            if name not in text:
                raise UserError(f"{problem}: {KEEP_OR_DROP}")
        for tool in tools or self.arguments.get("tools") or []:
            if tool.get("function", tool)["name"] not in text:
                raise UserError(f"the template drops the tool {tool!r:.99}; leave out tools")

    def _warn_if_no_token_ends_answers(self, ids, mask):
        """GLM's template has none: these models stop at the next <|user|>, which is not learned."""
        learned = [*itertools.compress(ids, mask)]
        rest = learned[self._after_last_special(learned):]
        if self.decode(rest).strip():
            print_once(
                "the chat template ends answers with no special token, so the model does not learn "
                "to stop (to change this, pass another chat_template=)")

    def _after_last_special(self, ids):
        """The index after the last special token; 0 if there is none."""
        ends = [at for at, id in enumerate(ids, 1) if id in self.special]
        return max(ends, default=0)

    def _count_special(self, ids):
        return sum(id in self.special for id in ids)

    def _read_marks(self, messages, tools):
        """The mask of all that is marked, except in answers of weight 0. None without marks."""
        def marked(messages):
            """[(id, mark), ...]"""
            found = self._apply(messages, tools, return_assistant_tokens_mask=True)
            return [*zip(found["input_ids"], found["assistant_masks"], strict=True)]

        def end_of_marks(n):
            """Those of the first n messages, which is the same when the chat goes on."""
            part, following = messages[:n], messages[n:n + 1]
            if not part or not following:
                return len(whole) if part else 0
            if is_answer(part[-1]):
                part += [QUESTION] if is_answer(following[0]) else following
            part = marked(part)
            stop = max((at for at, (_, mark) in enumerate(part, 1) if mark), default=0)
            same = n_common(part, whole)
            if same < stop:
                changed = [[id for id, _ in pairs[same:]] for pairs in (part, whole)]
                raise UserError(f"message {n - 1}: {self._changes(*changed)}")
            return stop

        whole = marked(messages)
        mask = [mark for _, mark in whole]
        if not any(mask):    # a comment may have the word
            return None
        for i, message in enumerate(messages):
            if is_answer(message) and message.get("weight") == 0:
                start, stop = end_of_marks(i), end_of_marks(i + 1)
                mask[start:stop] = (stop - start) * [0]
        return mask

    def _find_start(self, i, messages, ids_of):
        """Where the prompt of answer i ends, which must be the beginning of the chat."""
        if i == 0:
            raise UserError(
                "message 0: an answer needs a prompt, and templates render no empty chat; give "
                "this answer weight 0, or put a message of the user before it")
        ids, prompt = ids_of(len(messages)), ids_of(i, add_generation_prompt=True)
        n = n_common(ids, prompt)
        if n < len(prompt):
            raise UserError(
                f"message {i}: its prompt ends with {self.decode(prompt[n:])!r:.60}, but the chat "
                f"has {self.decode(ids[n:])!r:.60}: pass the argument that lets the template open "
                "answers as in the chat, such as enable_thinking=False, or remove line ends at the "
                f"beginning of the answer, or {OTHER_WAY}")
        return n

    def _find_stop(self, i, messages, tools, ids_of, start):
        """Where answer i ends. A line end after its last special token does not count."""
        ids, alone = ids_of(len(messages)), ids_of(i + 1)
        n_own = self._check_ends(messages[:i], tools)
        stop = n_common(ids, alone)
        if stop < len(alone):
            is_last = stop + 1 == len(alone)
            if is_last and n_own == 1 and self._is_other_end(ids[stop:], tools):
                stop += 1    # gpt-oss
            elif not is_last or n_own < 2:    # Phi 3 ends each chat with one more token
                raise UserError(f"message {i}: {self._changes(alone[stop:], ids[stop:])}")
        end = start + self._after_last_special(ids[start:stop])
        if n_own and not self.decode(ids[end:stop]).strip():
            stop = end
        return stop

    def _is_other_end(self, ids, tools):
        """Whether they are a special token, then the token that opens messages."""
        question = self._apply([QUESTION], tools)["input_ids"]
        prompt = self._apply([QUESTION], tools, add_generation_prompt=True)["input_ids"]
        opening = added(question, prompt)[:1]
        return ids[1:2] == opening != [] and ids[0] in self.special

    def _check_ends(self, before, tools):
        """The number of special tokens after an answer. UserError if its opening is elsewhere."""
        chat = [*before, {"role": "assistant", "content": PROBE}]
        opening, _, ending = self.render(chat, tools).partition(PROBE)
        asked = self.render(before, tools)
        prompt = self.render(before, tools, add_generation_prompt=True)
        if prompt == asked and opening.rstrip() != asked.rstrip():
            raise UserError(
                f"message {len(before)}: its prompt ends too early, at "
                f"{opening[len(asked):]!r:.60}: the template needs {{% if add_generation_prompt %}} "
                "with what opens an answer")
        goes_on = self.render([*chat, QUESTION], tools)
        extra = added(goes_on.partition(PROBE)[2], ending)
        if extra and asked.endswith(extra) and opening.startswith(asked):
            raise UserError(
                f"the chat template ends each chat with {ending!r:.99}, which opens an answer: pass "
                "chat_template=, a copy that opens one in {% if add_generation_prompt %} only")
        return self._count_special(self.tokenizer(ending, add_special_tokens=False)["input_ids"])

    def _changes(self, alone, ids):
        return ("the template changes it when the chat goes on, from "
                f"{self.decode(alone)!r:.60} to {self.decode(ids)!r:.60}: {OTHER_WAY}")

def for_template(message):
    """A message without our weight. A content that is a list of texts becomes one text."""
    if message.get("weight") not in (None, 0, 1):
        raise UserError(f"expected a weight of 0 or 1; saw {message!r:.200}")
    message = {key: value for key, value in message.items() if key != "weight"}
    parts = message.get("content")
    if isinstance(parts, list):
        if any(part.get("type") != "text" for part in parts):
            raise UserError(f"expected parts of type text; saw {parts!r:.200}")
        message["content"] = "".join(part["text"] for part in parts)
    return message

def is_answer(message):
    return message["role"] == "assistant"

def n_common(a, b):
    """The number of elements that both lists begin with."""
    n = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        n += 1
    return n

def added(before, after):
    """What `after` has in addition to what both lists begin with."""
    return after[n_common(before, after):]

def show(tokenizer, messages):
    """The text of a chat, with [[ and ]] around what is learned."""
    ids, mask = tokenizer.render_conversation({"messages": messages})
    text, start, was_learned = "", 0, 0
    for at, is_learned in enumerate([*mask, 0]):
        if is_learned != was_learned:
            text += tokenizer.decode(ids[start:at]) + ("[[" if is_learned else "]]")
            start, was_learned = at, is_learned
    return text + tokenizer.decode(ids[start:])

# --------------------------------------------------------------------------------------------------
# A template of your own, with a tokenizer of ours

def as_transformers(tokenizer, chat_template, eos_token=None):
    """A tokenizer of tokenizer.py as one of transformers, with this template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    enc = tokenizer.enc
    with tempfile.TemporaryDirectory() as folder:    # it reads ranks only from files
        path = Path(folder, "ranks")
        path.write_text(format_ranks(enc._mergeable_ranks))
        vocab, merges = TikTokenConverter().extract_vocab_merges_from_model(str(path))
    theirs = Tokenizer(models.BPE(vocab | enc._special_tokens, merges, ignore_merges=True))
    pattern = enc._pat_str.replace("{1,3}+", "{1,3}")    # in Oniguruma, this "+" repeats
    theirs.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    theirs.decoder = decoders.ByteLevel()
    theirs.add_tokens([
        AddedToken(name, normalized=False, special=name not in tokenizer.added_tokens)
        for name in enc._special_tokens])
    theirs.encode_special_tokens = True
    for name in enc._special_tokens:    # in a text, the vocabulary has it as a word
        word = bytes(BYTE_OF.get(character, 0) for character in name).decode(errors="ignore")
        for text in name, word:
            if theirs.encode(text).ids != tokenizer.encode(text):
                raise UserError(f"transformers would read {text!r:.80} in a text as {name}")
    return PreTrainedTokenizerFast(
        tokenizer_object=theirs, bos_token=tokenizer.bos_token, eos_token=eos_token,
        chat_template=chat_template)

if __name__ == "__main__":
    from transformers import AutoTokenizer

    with errors_in_one_line():
        model, folder = sys.argv[1:]
        theirs = AutoTokenizer.from_pretrained(model)
        tokenizer = ChatTemplate(theirs)
        row_group = list_shards(folder, "train")[0].read(0)
        print(show(tokenizer, messages_of(row_group[0].as_py())))
