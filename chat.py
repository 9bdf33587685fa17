"""The messages of an episode as token ids: what the model's chat template writes around them, and texts that nobody trusts.

    chat = Chat(tokenizer)
    ids = chat.prompt("Who wrote Faust?")                      # system, user, assistant header
"""
import re

PLAIN_CHAT_TEMPLATE = (  # for models that bring none
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
TAGS = ("mem", "think", "search", "access", "answer", "information")  # of the agent's protocol
SYSTEM = "You are a helpful assistant."  # always passed, so a template's own default never slips in


def first_line(error: Exception) -> str:
    """What an error says in one line; its name, if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class Chat:
    """What the model's chat template writes around the messages, as token ids.

    The template is rendered once with stand-ins and cut there. Contents are encoded apart from it and never as special tokens,
    so a template that drops earlier thoughts, or text that spells a control token, cannot change the stream.
    """

    def __init__(self, tokenizer):
        def render(*messages):
            return tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in messages], tokenize=False, add_generation_prompt=True)

        turns = ("assistant", "@2@"), ("user", "@3@")
        try:
            try:
                text = render(("system", SYSTEM), ("user", "@1@"), *turns)
            except Exception:                                  # some models know no system role
                text = render(("user", f"{SYSTEM}\n\n@1@"), *turns)
        except Exception as error:                             # whatever a template may raise
            raise ValueError(f"the tokenizer's chat template cannot be rendered ({first_line(error)}); give the tokenizer a plain one") from error
        if re.findall("@[123]@", text) != ["@1@", "@2@", "@3@"]:
            raise ValueError("the tokenizer's chat template drops or reorders messages; give the tokenizer a plain chat_template")
        opening, _, to_user, header = re.split("@[123]@", text)
        header = re.sub(r"<think>\s*$", "", header)             # a turn's own tags are the policy's, and <mem> comes first
        self.tokenizer = tokenizer
        self.opening, self.to_user, self.header = (tokenizer.encode(piece, add_special_tokens=False) for piece in (opening, to_user, header))
        self.special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        controls = [t.content for t in tokenizer.added_tokens_decoder.values()
                    if not t.special and t.content[:1] == "<" and t.content[-1:] == ">" and t.content.strip("</>") not in TAGS]
        self.controls = re.compile("|".join(map(re.escape, controls)) or r"(?!)")        # as <tool_call> in Qwen2.5's vocabulary, which is not "special"
        self.mem = self.encode("<mem>")
        self.stops = {tokenizer.eos_token_id, *[i for i in self.to_user[:1] if i in self.special]} - {None}
        self.closes = [">" in (t or "") for t in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]  # may end a tag

    def encode(self, text: str) -> list[int]:
        """Ids of untrusted text: no special token comes out of it, and lone surrogates do not raise."""
        text = text.encode("utf-8", "replace").decode()
        cuts = [0, *(match.start() + 1 for match in self.controls.finditer(text)), len(text)]
        if len(cuts) > 2:
            return [i for start, end in zip(cuts, cuts[1:]) for i in self.encode(text[start:end])]
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if self.special.isdisjoint(set(ids) - {self.tokenizer.unk_token_id}) or len(text) < 2:
            return ids
        return [i for c in text for i in self.encode(c)]       # a vocabulary in which a control token is a word, too: by characters

    def decode(self, ids: list[int]) -> str:
        """Text view of sampled ids; special tokens are left out by id."""
        return self.tokenizer.decode([i for i in ids if i not in self.special], clean_up_tokenization_spaces=False)

    def may_close(self, token: int) -> bool:
        return token < len(self.closes) and self.closes[token]

    def prompt(self, question: str) -> list[int]:
        """[system, user] and the assistant header: `prompt_ids`."""
        return self.opening + self.encode(question) + self.header

    def messages(self, messages: list[dict]) -> list[int]:
        """Ids of [system, user, assistant, user, assistant, …, user] and the next assistant header."""
        ids = self.prompt(messages[1]["content"])
        for assistant, user in zip(messages[2::2], messages[3::2]):
            ids += self.encode(assistant["content"]) + self.to_user + self.encode(user["content"]) + self.header
        return ids
