"""The agent loop (notes B6, A4, C3, A5): tags and actions, batched multi-turn generation, snapshots, compressed history.

A turn is `[<mem>…</mem>] <think>…</think>` and one action: `<search>`, `<access>` or `<answer>`. From the second turn on the
loop itself writes the opening `<mem>` (mask 0). Sampled ids are kept as they are: nothing is decoded and encoded again.
Letters: n rows that run, S tokens fed at once, V vocabulary. Left out: servers, asynchronous rollouts.

    trajectories = rollout(policy, tokenizer, questions, retriever, group_size=16)
"""
import re
import unicodedata
from dataclasses import dataclass, field

import torch

from chat import SYSTEM, TAGS, Chat
from policy import pad_right
from retriever import Retriever

ACTIONS = ("search", "access", "answer")
HISTORIES = ("full", "compressed", "none")                     # what a turn sees of the turns before it
INSTRUCTIONS = """Answer the question below. Work in turns. In every turn first think inside <think>…</think>, then take exactly one action:
<search>words</search> looks for documents, <access>title</access> opens one document (again for its next page), \
<answer>text</answer> ends with the final answer, as short as possible. Results come back inside <information>…</information>.
From the second turn on, begin with <mem>…</mem>: a summary of everything found so far that the answer needs. \
Earlier turns may be gone later, so what is not in your memory is lost.

Question: {question}"""
TAG = re.compile(rf"<(/?)({'|'.join(TAGS)})>")
BRACKETS = re.compile(r"[<≮﹤＜]([^<≮﹤＜>≯﹥＞]*)[>≯﹥＞]")      # with all characters that a tokenizer's normaliser may make < or > of
NOTICE = "That turn held no action. End a turn with one search, access or answer."


# ---- tags and actions (C3) ----

def parse_action(text: str) -> tuple[str | None, str]:
    """C3: the first complete action of a turn, ("search" | "access" | "answer" | None, argument).

    An action named inside `<mem>` or `<think>` is none, and one that is still open is none yet. Inside an action the
    last opening tag before the closing one counts, so `<search>a<search>b</search>` searches for b.
    """
    inside, start = None, 0
    for tag in TAG.finditer(text):
        closing, name = bool(tag[1]), tag[2]
        if inside in (None, *ACTIONS):
            if not closing and name in ("mem", "think", *ACTIONS):
                inside, start = name, tag.end()
            elif closing and name == inside:
                return name, text[start:tag.start()].strip()
        elif closing and name == inside:
            inside = None
    return None, ""


def neutralise(text: str) -> str:
    """Retrieved text with every tag of the protocol made plain text, so that a document can neither act nor answer.

    Also what only a tokenizer's normaliser (NFKC, lower case, accents and control characters out) would make a tag: ＜/Thínk＞.
    """
    def plain(match):
        name = "".join(filter(str.isalnum, unicodedata.normalize("NFKD", match[1]).casefold()))
        return f"&lt;{match[1]}&gt;" if name in TAGS else match[0]

    text = BRACKETS.sub(plain, text)
    return f" {text}" if unicodedata.combining(text[:1] or " ") else text      # else an accent would join the tag before it


def information(text: str) -> str:
    """The wrapped tool result: the body is already cut, so the closing tag is never lost."""
    return f"<information>{neutralise(text)}</information>"


# ---- compressed history (A5) ----

class AgentMemory:
    """A5: what the agent still sees at evaluation: the question, then what follows the second-last tool result."""

    def __init__(self, question: str):
        self.question = question                               # the whole first user message
        self.records = []                                      # (kind, text, short_text)

    def add(self, kind: str, text: str, short_text: str | None = None) -> None:
        """kind: llm_gen (without the forced `<mem>` that opened it) | search_results | webpage (short_text: 100 characters)."""
        if kind not in ("llm_gen", "search_results", "webpage"):
            raise ValueError(f"unknown record kind {kind!r}; use llm_gen, search_results or webpage")
        if short_text is None:
            short_text = text[:100] if kind == "webpage" else text
        self.records.append((kind, text, short_text))

    def prepare_prompt(self) -> list[dict]:
        """Chat messages: system, the question, then the window. Only the newest record shows a tool result whole."""
        results = [i for i, (kind, _, _) in enumerate(self.records) if kind != "llm_gen"]
        start = results[-2] + 1 if len(results) > 1 else 0     # after the second-last tool result, from the end
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.question}]
        for i, (kind, text, short_text) in enumerate(self.records[start:], start):
            if kind == "llm_gen":                              # the first turn of all has no memory, the others exactly one tag
                messages.append({"role": "assistant", "content": text if i == 0 else "<mem>" + text})
            else:
                messages.append({"role": "user", "content": text if i == len(self.records) - 1 else short_text})
        return messages


def window(memory: AgentMemory) -> list[dict]:
    """prepare_prompt's messages with the notice put where a turn brought no result, so that the roles alternate."""
    messages = []
    for message in memory.prepare_prompt() + [{"role": "assistant", "content": ""}]:
        if message["role"] == "assistant" and messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": information(NOTICE)})
        messages.append(message)
    return messages[:-1]


# ---- trajectories ----

@dataclass
class Trajectory:
    """One episode. Positions of masks, log-probabilities and spans count from the start of response_ids."""
    group_id: object                                           # which drawn question; unique in a batch
    question: dict
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)      # sampled, tool and template tokens, in order
    response_mask: list[int] = field(default_factory=list)     # 1 where the policy sampled the token
    rollout_logprobs: list[float] = field(default_factory=list)  # of the distribution that was sampled; 0 elsewhere
    mem_spans: list[tuple[int, int]] = field(default_factory=list)  # [start, end), tags included
    full_traj: list[list[int]] = field(default_factory=list)   # a memory turn each: the context before its forced <mem>
    mem_traj: list[list[int]] = field(default_factory=list)    # a memory turn each: prompt_ids + <mem>…</mem>
    turns: list[str] = field(default_factory=list)             # the policy's own text, its forced <mem> included
    context_lengths: list[int] = field(default_factory=list)   # tokens in the prompt of each turn
    stop_reason: str | None = None                             # answer | max_turns | max_tokens | context

    def append(self, ids, mask=0, logprobs=None) -> None:
        self.response_ids += ids
        self.response_mask += [mask] * len(ids)
        self.rollout_logprobs += logprobs or [0.0] * len(ids)


@dataclass
class Episode:
    """A trajectory while it runs: its tools, its memory records, and the tokens that wait to be fed."""
    trajectory: Trajectory
    retriever: object
    memory: AgentMemory
    pending: list[int]
    budget: int = 0                                            # tokens that this turn may still sample
    limit: str = "max_turns"                                   # what sets the budget, as a stop reason
    pages: dict = field(default_factory=dict)                  # a document's pages -> how many were asked for so far
    sampled: list[int] = field(default_factory=list)           # this turn
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Limits:
    """What bounds an episode; None is no bound."""
    max_turns: int
    max_response_tokens: int | None                            # of response_ids: sampled, tool and template tokens
    max_turn_tokens: int | None                                # sampled in one turn
    window: int | None                                         # the model's context
    top_k: int
    history: str                                               # of HISTORIES


def memory_block(chat: Chat, ids: list[int]) -> tuple[int, list[int]] | None:
    """A4: where the memory that opens a turn ends: (number of tokens, its ids cut exactly at `</mem>`), or None.

    The token that completes the tag may reach beyond it (`><`): it counts whole, and the cut copy re-encodes its first part.
    """
    for end in range(1, len(ids) + 1):
        if chat.may_close(ids[end - 1]) and "</mem>" in (text := chat.decode(ids[:end])):
            cut = text.index("</mem>") + len("</mem>")
            if TAG.findall(text[:cut]) != [("", "mem"), ("/", "mem")] or not text.lstrip().startswith("<mem>"):
                return None                                    # something nested, or not at the start
            if cut == len(text):
                return end, ids[:end]
            last = text[len(chat.decode(ids[:end - 1])):cut]
            return end, ids[:end - 1] + chat.encode(last)
    return None


# ---- the batched loop (B6) ----

def sample(logits, temperature: float, generator=None):
    """[n,V] -> (token [n], log-probability [n] of the distribution sampled); temperature 0 is greedy, a point mass."""
    logp = torch.log_softmax(logits.float() / (temperature or 1), -1)
    if logp[:, 0].isnan().any():                               # one logit that is not finite makes its whole row NaN
        raise ValueError("the policy's logits are not finite, so nothing can be sampled: its weights are damaged; go back to an earlier checkpoint")
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits))
    race = torch.empty_like(logp).exponential_(generator=generator)
    token = (logp.exp() / race).argmax(-1, keepdim=True)       # what multinomial does, without its checks, which wait for a GPU
    return token[:, 0], logp.gather(-1, token)[:, 0]


def feed(policy, cache, pieces: list[list[int]], counters):
    """Feed one chunk a row, padded on the right -> logits after each chunk [n,V]."""
    lengths = torch.tensor([len(piece) for piece in pieces])
    counters["prefilled"] += int(lengths.sum())
    return policy.step(pad_right(pieces, device=policy.device), lengths, cache)      # ids [n,S]


def retire(cache, batch: list[Episode], i: int, n: int) -> None:
    """Row i no longer runs: exchange it with the last running row n, in the cache and in the batch."""
    if i < n:
        if cache is not None:
            cache.swap(i, n)
        batch[i], batch[n] = batch[n], batch[i]


def forced(chat: Chat, episode: Episode) -> list[int]:
    """The ids that the loop itself puts at the start of this turn: `<mem>` from the second on."""
    return chat.mem if episode.trajectory.turns else []


def turn_is_over(chat: Chat, episode: Episode) -> bool:
    """A turn ends with a complete action, an end-of-turn token, or its token budget."""
    token = episode.sampled[-1]
    if token in chat.stops or len(episode.sampled) >= episode.budget:
        return True
    return chat.may_close(token) and parse_action(chat.decode(forced(chat, episode) + episode.sampled))[0] is not None


def sample_turn(policy, chat, cache, batch: list[Episode], logits, temperature, generator, counters) -> None:
    """One assistant turn of every episode, from the logits [n,V] after its context; batch[i] lies in cache row i."""
    n = len(batch)
    while n:
        token, logp = (x.tolist() for x in sample(logits, temperature, generator))
        for i in reversed(range(n)):
            batch[i].sampled.append(token[i])
            batch[i].logprobs.append(logp[i])
            if turn_is_over(chat, batch[i]):
                n -= 1
                retire(cache, batch, i, n)
                token[i] = token[n]
        if n:
            counters["decoded"] += n
            logits = policy.step(torch.tensor(token[:n], device=policy.device)[:, None], [1] * n, cache)


def act(episode: Episode, text: str, top_k: int) -> str | None:
    """Carry out the turn's action (C4) -> the text for `<information>`, or None after an answer."""
    action, argument = parse_action(text)
    if action == "answer":
        return None
    if action == "search":
        result = episode.retriever.search(argument, top_k)
        episode.memory.add("search_results", information(result))
    elif action == "access":
        pages = episode.retriever.access(argument)
        document = tuple(pages)                                # however it was named
        page = episode.pages[document] = episode.pages.get(document, 0) + 1
        result = (pages[page - 1] if page <= len(pages) else
                  f"{argument} has {len(pages)} pages, all shown." if pages else f"There is no document named {argument}.")
        episode.memory.add("webpage", information(result), information(result[:100]))
    else:
        result = NOTICE
    return result


def open_turn(chat: Chat, episode: Episode, limits: Limits, reply: list[int]) -> None:
    """Append the reply to the last turn and set what comes next, or stop with the reason before anything is generated."""
    t = episode.trajectory
    length = len(t.response_ids) + len(reply) + len(forced(chat, episode))
    context = len(t.prompt_ids) + length if limits.history == "full" else len(episode.pending)
    room = [((limits.window or 1 << 60) - context, "context"), ((limits.max_response_tokens or 1 << 60) - length, "max_tokens")]
    for left, reason in room:
        if left < 1:
            t.stop_reason = reason
            return
    t.append(reply)
    t.context_lengths.append(context)
    episode.budget, episode.limit = min(*room, (limits.max_turn_tokens or 1 << 60, "max_turns"))
    episode.sampled, episode.logprobs = [], []


def close_turn(chat: Chat, episode: Episode, limits: Limits, counters: dict) -> None:
    """A4: book a finished turn: its tokens, memory span and snapshots; then its action and what the next turn is fed."""
    t, opening = episode.trajectory, forced(chat, episode)
    ids, start = opening + episode.sampled, len(t.response_ids)
    counters["after_stop"] += parse_action(chat.decode(ids[:-1]))[0] is not None
    block = memory_block(chat, ids) if opening else None
    if block and limits.history == "full":
        t.full_traj.append(t.prompt_ids + t.response_ids)      # new lists: the context before the forced <mem>
        t.mem_traj.append(t.prompt_ids + block[1])
        t.mem_spans.append((start, start + block[0]))
    t.append(opening)
    t.append(episode.sampled, 1, episode.logprobs)
    t.turns.append(chat.decode(ids))
    episode.memory.add("llm_gen", chat.decode(episode.sampled))
    result = act(episode, t.turns[-1], limits.top_k)
    if result is None:
        t.stop_reason = "answer"
    elif len(t.turns) == limits.max_turns:
        cut = len(episode.sampled) == episode.budget and parse_action(t.turns[-1])[0] is None
        t.stop_reason = episode.limit if cut else "max_turns"
    else:
        closed = chat.to_user[:1] == episode.sampled[-1:]      # the policy wrote the end of its turn itself
        reply = chat.to_user[closed:] + chat.encode(information(result)) + chat.header
        episode.pending = episode.sampled[-1:] + reply + chat.mem    # a token sampled last was not fed yet
        if limits.history == "compressed":
            episode.pending = chat.messages(window(episode.memory)) + chat.mem
        elif limits.history == "none":
            episode.pending = t.prompt_ids + chat.mem
        open_turn(chat, episode, limits, reply)


def open_context(policy, batch: list[Episode], limits: Limits, counters):
    """A cache that holds each episode's pending tokens, and the logits after them; what several share is fed once."""
    which = {}                                                 # context -> its row
    rows = [which.setdefault(tuple(episode.pending), len(which)) for episode in batch]
    pieces = [list(context) for context in which]
    longest = max(map(len, pieces))
    most = longest + (limits.max_response_tokens or 1 << 60 if limits.history == "full" else max(e.budget for e in batch))
    shared = policy.new_cache(len(pieces), longest if len(pieces) < len(batch) else most)
    logits = feed(policy, shared, pieces, counters)
    if len(pieces) == len(batch):
        return shared, logits
    cache = policy.new_cache(len(batch), most)
    cache.copy_rows(shared, rows)
    return cache, logits[rows]


def waste(trajectories: list[Trajectory], counters: dict) -> dict:
    """Under full history: tokens fed beyond each distinct prompt and each response once, and steps of rows that had stopped."""
    prompts = {tuple(t.prompt_ids) for t in trajectories if t.turns}
    needed = sum(map(len, prompts)) + sum(len(t.response_ids) - 1 for t in trajectories if t.turns)
    stepped = sum(sum(t.response_mask) - len(t.turns) for t in trajectories)
    return {"fed_twice": counters["prefilled"] + counters["decoded"] - needed, "finished_rows_stepped": counters["decoded"] - stepped}


@torch.no_grad()
def rollout(policy, tokenizer, questions, retriever=None, *, group_size: int = 16, max_turns: int = 8,
            max_response_tokens: int | None = 4096, max_turn_tokens: int | None = None, temperature: float = 1.0,
            top_k: int = 5, history: str = "full", instructions: str = INSTRUCTIONS, generator=None,
            counters: dict | None = None, retriever_options: dict | None = None) -> list[Trajectory]:
    """B6: group_size episodes of every question, in one batch -> trajectories, question after question.

    questions: dicts {"question", "answers"}; for one that brings "documents" those alone are searched, by a Retriever(documents,
    **retriever_options). history "full" appends to one cache and is what training uses; "compressed" rebuilds each turn's context from
    AgentMemory; "none" shows every turn the question alone, neither memories nor results: what the policy answers by itself.
    Every sampling setting stands here: a checkpoint's generation config has no say.
    counters receives the tokens "prefilled" (fed in chunks), "decoded" (fed one by one) and sampled "after_stop".
    """
    if history not in HISTORIES:
        raise ValueError(f"unknown history {history!r}; use {', '.join(HISTORIES)}")
    chat, limits = Chat(tokenizer), Limits(max_turns, max_response_tokens, max_turn_tokens, policy.context_length, top_k, history)
    counters = {} if counters is None else counters
    counters.update(prefilled=0, decoded=0, after_stop=0)
    batch = []
    for group, question in enumerate(questions):
        own = Retriever(question["documents"], **(retriever_options or {})) if question.get("documents") else retriever
        message = instructions.replace("{question}", question["question"])
        prompt = chat.prompt(message)
        batch += [Episode(Trajectory(group, question, prompt), own, AgentMemory(message), prompt) for _ in range(group_size)]
    trajectories, cache = [e.trajectory for e in batch], None
    for episode in batch:
        open_turn(chat, episode, limits, [])
    while True:
        n = len(batch)
        for i in reversed(range(n)):
            if batch[i].trajectory.stop_reason:                # finished: never fed or stepped again
                n -= 1
                retire(cache, batch, i, n)
        batch = batch[:n]
        if not batch:
            return trajectories
        if cache is None or history != "full":
            cache, logits = open_context(policy, batch, limits, counters)
        else:
            logits = feed(policy, cache, [e.pending for e in batch], counters)
        sample_turn(policy, chat, cache, batch, logits, temperature, generator, counters)
        for episode in batch:
            close_turn(chat, episode, limits, counters)
