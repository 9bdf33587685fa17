"""Cold-start demonstrations for real data: scripted from what an answer rests on, or chats that the user brings. No teacher model.

A demonstration is a list of pieces (role, text, trained) that train.render appends as the rollout would; role is question, policy or result.
The script searches the title of each supporting paragraph, carries its supporting sentences in the memory, and answers. Every result is
what the run's own retriever returns. What the visible context does not hold is shown but not trained, or the policy learns to guess: a title
that nothing has named yet, an answer whose facts the memory has lost.

    for batch in support_demonstrations(data, top_k=5, keep=1.0, seed=0, steps=200): ...
"""
import random
import re
import sys
from collections.abc import Iterator

from tqdm import tqdm

from agent_loop import neutralise, parse_action
from data import endless, read_rows
from chat import SYSTEM
from retriever import Retriever

ROWS = 16                                                      # demonstrations a step


# ---- scripted from supporting facts or decompositions ----

def facts_of(question: dict) -> list[tuple[str, list[str]]]:
    """The support, a (title, its sentences) for each title, in the order in which the titles come first."""
    facts = {}
    for title, sentence in question["support"]:
        facts.setdefault(title, []).append(sentence)
    return [(title, list(dict.fromkeys(sentences))) for title, sentences in facts.items()]


def shows(text: str, sentences: list[str]) -> bool:
    """Whether a tool's text holds all sentences, line breaks apart."""
    text = " ".join(text.split())
    return all(" ".join(sentence.split()) in text for sentence in sentences)


def names(text: str, title: str) -> bool:
    """Whether a text names a title, its "(band)" apart, so that a reader could think of searching it."""
    name = re.sub(r"\s*\([^()]*\)$", "", title).strip()
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE) is not None


def script(question: dict, retriever, top_k: int) -> list[tuple] | None:
    """The episode's steps (title, turn, result, fact that the result shows or None), or None if a fact cannot be found.

    A title is searched; if that does not show its sentences, it is searched together with the question, and then opened. Next comes the
    first title that something has named, if any is: hop by hop, as HotpotQA does not always list them.
    """
    steps, left, seen = [], facts_of(question), question["question"]
    while left:
        title, sentences = left.pop(next((i for i, (title, _) in enumerate(left) if names(seen, title)), 0))
        for thought, action, argument in ((f"{title} is needed.", "search", title),
                                          (f"That did not show {title}; more words may.", "search", f"{title} {question['question']}"),
                                          (f"That did not show {title} either; its page may be there.", "access", title)):
            argument = neutralise(argument)                    # as the policy would write it, and parse_action read it
            result = retriever.search(argument, top_k) if action == "search" else (retriever.access(argument) or [""])[0]
            fact = (title, sentences) if shows(result, sentences) else None
            steps.append((title, f"<think>{neutralise(thought)}</think><{action}>{argument}</{action}>", result, fact))
            seen += f"\n{result}"
            if fact:
                break
        else:
            return None
    return steps


def recall(facts) -> str:
    """The memory's text: a line a fact."""
    return neutralise("\n".join(f"{title}: {' '.join(sentences)}" for title, sentences in facts)) or "Nothing found yet."


def turn(facts: list | None, action: str, trained: bool) -> list:
    """One turn's pieces, without a memory if facts is None. The opening tag is the loop's; the memory is trained, the action if `trained`.

    What is trained alike stays one piece: it is encoded as a whole, as the policy would write it (`><` may be one token).
    """
    if facts is None:
        return [("policy", action, trained)]
    memory = f"{recall(facts)}</mem>"
    written = [("policy", memory + action, True)] if trained else [("policy", memory, True), ("policy", action, False)]
    return [("policy", "<mem>", False), *written]


def answer_turn(question: dict) -> str:
    return f"<think>That is all I need.</think><answer>{neutralise(question['answers'][0])}</answer>"


def full_conversation(question: dict, opening: str, steps: list, keep: float, rng: random.Random) -> list:
    """The whole episode under full history. A found fact enters each memory with probability `keep`; the context still holds it."""
    pieces, seen, found = [("question", opening, False)], question["question"], []
    for k, (title, action, result, fact) in enumerate(steps):
        pieces += turn(kept(found, keep, rng) if k else None, action, names(seen, title)) + [("result", result, False)]
        seen, found = f"{seen}\n{action}\n{result}", found + [fact] * (fact is not None)
    return pieces + turn(kept(found, keep, rng), answer_turn(question), True)


def compressed_prompt(question: dict, opening: str, steps: list, keep: float, rng: random.Random) -> list:
    """One turn, after k tool results, from the window of AgentMemory: the question, the turn before with its memory, the last result."""
    k = rng.randint(1, len(steps))
    before = kept([fact for _, _, _, fact in steps[:k - 1] if fact], keep, rng)
    _, action, result, fact = steps[k - 1]
    last = f"<mem>{recall(before)}</mem>{action}" if k > 1 else action
    known = before + [fact] * (fact is not None)
    pieces = [("question", opening, False), ("policy", last, False), ("result", result, False)]    # `last` is one piece, as in the window
    if k == len(steps):
        return pieces + turn(kept(known, keep, rng), answer_turn(question), len(known) == len(facts_of(question)))
    title, action, _, _ = steps[k]
    return pieces + turn(kept(known, keep, rng), action, names("\n".join((question["question"], last, result)), title))


def kept(facts: list, keep: float, rng: random.Random) -> list:
    """The facts that enter a memory, each with probability `keep`."""
    return [fact for fact in facts if rng.random() < keep]


def support_demonstrations(data, top_k: int, keep: float, seed: int, steps: int) -> Iterator[list]:
    """Batches of ROWS demonstrations, one a step: of each question drawn its full conversation and one of its compressed prompts.

    Raises ValueError if no question has support. Questions whose support the retriever does not show are passed over, and counted on stderr.
    """
    supported = [question for question in data.questions if question.get("support")]
    if not supported:
        raise ValueError("no question brings supporting facts or a decomposition whose sentences stand in its own paragraphs, so there is nothing "
                         "to script demonstrations from; leave out --cold-start-steps and --sft-only, or give chats with --sft-data")
    return scripted_batches(data, supported, top_k, keep, seed, steps)


def scripted_batches(data, supported: list[dict], top_k: int, keep: float, seed: int, steps: int) -> Iterator[list]:
    """The batches of `supported`, in a new random order each time round."""
    rng, questions, shown, missed = random.Random(f"{seed} demonstrations"), endless(supported, seed), set(), set()
    for _ in range(steps):
        batch = []
        while len(batch) < ROWS:
            question = next(questions)
            own = Retriever(question["documents"]) if question.get("documents") else data.retriever
            found = script(question, own, top_k)
            (missed if found is None else shown).add(question["id"])
            if found is not None:
                opening = data.instructions.replace("{question}", question["question"])
                batch += [form(question, opening, found, keep, rng) for form in (full_conversation, compressed_prompt)]
            elif len(missed) == len(supported):
                raise ValueError(f"of {len(supported)} questions none has its supporting sentences shown by searching and opening their titles: "
                                 "the corpus holds other text; leave out --corpus, or --cold-start-steps")
        yield batch
    bare = len(data.questions) - len(supported)
    tqdm.write(f"cold start: {len(shown)} questions demonstrated" + f", {len(missed)} passed over as no search showed their support" * bool(missed)
               + f", {bare} of {len(data.questions)} without supporting facts" * bool(bare), file=sys.stderr)


# ---- chats that the user brings ----

def chat_demonstrations(path, seed: int, steps: int) -> Iterator[list]:
    """Batches of ROWS chats of a file of {"messages": [{"role", "content"}, ...]}, in a new random order each time round.

    Raises ValueError with file and line for a chat that the loop could not have had.
    """
    pieces = [chat_pieces(row.get("messages"), where) for where, row in read_rows(path, "chat")]
    if not pieces:
        raise ValueError(f"{path} holds no chat")
    chats = endless(pieces, seed)
    return ([next(chats) for _ in range(ROWS)] for _ in range(steps))


def chat_pieces(messages, where: str) -> list:
    """The pieces of one chat: assistant messages are trained, but for an opening `<mem>`, which is the loop's."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        raise ValueError(f"{where}: needs \"messages\", a list of objects with a \"role\" and a \"content\" of text; a tool call is written into "
                         "the text, as <search>words</search>")
    if messages and messages[0].get("role") == "system":
        if messages[0]["content"] != SYSTEM:
            raise ValueError(f"{where}: the loop's system message is always \"{SYSTEM}\"; move yours to the first user message")
        messages = messages[1:]
    pieces = []
    for n, message in enumerate(messages, 1):
        role, text = message.get("role"), message["content"]
        if role not in (("assistant",) if n % 2 == 0 else ("user",) if n == 1 else ("user", "tool")):
            raise ValueError(f"{where}: message {n} is {role!r}; after an optional system message come a user's, then by turns an assistant's and "
                             "a user's or tool's")
        if role == "assistant":
            pieces += assistant_pieces(text.rstrip(), f"{where}: message {n}", first=n == 2, last=n == len(messages))
        else:                                                  # what is wrapped already is not wrapped again
            wrapped = re.fullmatch(r"\s*<information>(.*)</information>\s*", text, re.DOTALL)
            pieces.append(("question", text, False) if n == 1 else ("result", wrapped[1] if wrapped else text, False))
    if len(messages) < 2:
        raise ValueError(f"{where}: the chat has no assistant message, so there is nothing to train on")
    return pieces


def assistant_pieces(text: str, where: str, first: bool, last: bool) -> list:
    """One assistant message's pieces; a turn that the loop would have ended elsewhere is refused."""
    opening = re.match(r"\s*<mem>", text)
    if not opening and not first:
        raise ValueError(f"{where} does not open with <mem>, as the loop makes every turn from the second on; put the memory there")
    if parse_action(text)[0] is None or parse_action(text[:-1])[0] is not None:
        raise ValueError(f"{where} does not end with its one action, <search>…</search>, <access>…</access> or <answer>…</answer>, where the loop "
                         "ends a turn")
    if parse_action(text)[0] == "answer" and not last:
        raise ValueError(f"{where} answers, and the loop ends there; delete the messages after it")
    return [("policy", "<mem>", False), ("policy", text[opening.end():], True)] if opening else [("policy", text, True)]
