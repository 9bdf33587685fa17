"""Questions and documents: the embedded world, JSONL, HotpotQA. Cold-start demonstrations.

A question is a dict {"id", "question", "answers"} and maybe "documents" [{"id", "title", "text"}], which then are all that
is searched for it. In the embedded world every question brings its own documents with facts drawn anew, so nothing can be
known by heart: an answer is found by searching and kept by remembering.

    questions = world_questions(8, seed=0, split="test")
"""
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from retriever import Retriever

# ---- the embedded world: people, places and things ----

FIRST = "Ada Bela Cora Dina Edda Fenn Gita Hugo Ines Jonas Kira Lars Mira Nils Olga Piet Quin Rosa Sven Toma Ulla Vera Willem Yara".split()
FAMILY = "Berg Carr Dahl Frost Holm Lind North Stone".split()
TOWN = "Alder Brack Corwen Dorn Elmet Farrow Gilt Harl Ister Jura Kelso Lorne Marl Nidd Orrin Pell Ravn Selk Tarn Usk Velden Wick Yarrow Zell".split()
PART = "Bay Cross Gate Hill Mill Park Side Well".split()
RIVER = "Amble Brue Clyst Dove Ebble Fal Glyme Hodder Irfon Kenn Leven Medway Neet Otter Plym Rye Swale Teme Ure Wye".split()
ARM = "Beck Brook Run Water".split()
THING = "bell chair clock crown cup drum fan harp key lamp mask mirror ring robe sword vase".split()
STUFF = "amber brass glass iron ivory jade silver velvet".split()
KIND = {"person": (FIRST, FAMILY), "town": (TOWN, PART), "river": (RIVER, ARM), "thing": (THING, STUFF)}
# relation -> (kind of entity, kind of value)
RELATION = {"birthplace": ("person", "town"), "teacher": ("person", "person"), "hero": ("person", "person"), "river": ("town", "river"),
            "mayor": ("town", "person"), "port": ("town", "town"), "maker": ("thing", "person"), "home": ("thing", "town")}
REMARK = {"person": ("trade", "baker clerk farmer miller potter smith".split()), "town": ("tree", "ash beech elm lime oak pine".split()),
          "thing": ("colour", "black blue green grey red white".split())}  # what documents say besides, and nobody asks
SHAPES = [(1, 1, 1), (1, 1, 1), (1, 1), (1, 1, 1, 1), (2, 1), (1, 2), (2,)]  # hops of each part of a question


def draw_name(rng: random.Random, kind: str, taken: set) -> str:
    """A full name whose first word, by which everybody is called, is not taken. The second follows from it seven times in ten."""
    first, second = KIND[kind]
    i = rng.choice([i for i, word in enumerate(first) if word not in taken])
    taken.add(first[i])
    return f"{first[i]} {second[i % len(second)] if rng.random() < 0.7 else rng.choice(second)}"


def draw_path(rng: random.Random, hops: int, used: set) -> list[str]:
    """Relations to follow one after the other; no relation is used twice in a question."""
    free = [r for r in RELATION if r not in used]
    paths = [[r] for r in free] if hops == 1 else [[r, s] for r in free for s in free if r != s and RELATION[r][1] == RELATION[s][0]]
    return rng.choice(paths)


def describe(rng: random.Random, entity: str, relation: str, value: str) -> dict:
    """The document of an entity: its title, the fact, the value right behind its relation, and a remark before or after."""
    remark, words = REMARK[RELATION[relation][0]]
    facts = [f"{relation} {value}", f"{remark} {rng.choice(words)}"]
    rng.shuffle(facts)
    return {"title": entity, "text": f"{entity} has {facts[0]}, {facts[1]}."}


def world_question(rng: random.Random, shape=None) -> dict:
    """One question with its own documents, and "steps": its searches as (part, entity, relation, value)."""
    taken, used, steps, parts, answers, documents = set(), set(), [], [], [], []
    for part, hops in enumerate(shape or rng.choice(SHAPES)):
        path = draw_path(rng, hops, used)
        used.update(path)
        entity = draw_name(rng, RELATION[path[0]][0], taken).split()[0]
        parts.append(" ".join(f"{word}'s" for word in (entity, *path[:-1])) + f" {path[-1]}")
        for relation in path:
            value = draw_name(rng, RELATION[relation][1], taken)
            steps.append((part, entity, relation, value))
            documents.append(describe(rng, entity, relation, value))
            entity = value.split()[0]
        answers.append(f"{relation} {value}")
    for _, entity, relation, _ in steps:                       # others that mention the entity, so that ranking matters
        fitting = [r for r, (_, kind) in RELATION.items() if kind == RELATION[relation][0]]
        if fitting:
            r = rng.choice(fitting)
            other = draw_name(rng, RELATION[r][0], taken).split()[0]
            documents.append(describe(rng, other, r, f"{entity} {rng.choice(KIND[RELATION[r][1]][1])}"))
    rng.shuffle(documents)
    documents = [{"id": str(i), **document} for i, document in enumerate(documents)]
    return {"question": "Find " + ", ".join(parts) + ".", "answers": ["; ".join(answers)], "documents": documents, "steps": steps}


def split_of(question: dict) -> str:
    """train, dev or test: by the combination of entities asked about, so that no combination is in two of them."""
    names = sorted(entity for _, entity, _, _ in question["steps"])
    return ("test", "dev", *["train"] * 8)[zlib.crc32("|".join(names).encode()) % 10]


def world_questions(n: int, seed: int, split: str, shape=None) -> list[dict]:
    """n questions of a split; the same for the same seed."""
    rng, questions = random.Random(f"{seed} {split}"), []
    while len(questions) < n:
        question = world_question(rng, shape)
        if split_of(question) == split:
            questions.append({"id": f"world-{split}-{seed}-{len(questions)}", **question})
    return questions


# ---- the tiny policy ----

WORLD_INSTRUCTIONS = "{question}"
WORLD_TEMPLATE = ("{% for m in messages %}{{ '<|im_start|> ' + m['role'] + ' ' + m['content'] + ' <|im_end|> ' }}{% endfor %}"
                  "{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}")


def world_tokenizer() -> PreTrainedTokenizerFast:
    """Word level: one token a word, a tag or a punctuation mark; the same interface as any BPE tokenizer."""
    words = sorted({w for lists in KIND.values() for words in lists for w in words} | set(RELATION)
                   | {w for remark, words in REMARK.values() for w in (remark, *words)})
    words += ("the The of has is Find Next Nothing yet I have them all system user assistant You are a helpful assistant No results for That turn held no "
              "action End with one search access or answer There document named has pages shown").split()
    tags = [f"<{slash}{tag}>" for tag in ("mem", "think", "search", "access", "answer", "information") for slash in ("", "/")]
    vocabulary = dict.fromkeys(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", *tags, *".,;:[]&'\"", "'s", *map(str, range(10)), "lt", "gt", *words])
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?[a-z]+>|'s\b|\w+|[^\w\s]"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   additional_special_tokens=["<|im_start|>"], chat_template=WORLD_TEMPLATE,
                                   clean_up_tokenization_spaces=False)


def world_policy(folder, seed: int) -> str:
    """Write the tiny policy, a Qwen2 of 0.35 M random parameters, and its tokenizer to a folder, to be loaded like any other."""
    tokenizer = world_tokenizer()
    config = Qwen2Config(vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         intermediate_size=256, max_position_embeddings=2048, rope_theta=1000.0, tie_word_embeddings=True)
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# ---- cold-start demonstrations: lists of (role, text, trained); role is question, policy or result ----

def recall(steps) -> str:
    """The memory's text: a phrase a part, the value right behind its relation; what a later hop has replaced is left out."""
    return " ".join(f"{relation} {value}." for relation, value in {part: (r, v) for part, _, r, v in steps}.values()) or "Nothing yet."


def answer_pieces(question: dict, known, everything: bool = False) -> list:
    """The gold answer part by part; a fact that the context does not hold is shown but not trained, or the policy learns to guess."""
    facts, pieces = {f"{relation} {value}" for _, _, relation, value in known}, []
    for fact in question["answers"][0].split("; "):
        pieces += [("policy", ";", True)] * bool(pieces) + [("policy", fact, everything or fact in facts)]
    return pieces


def world_demonstration(rng: random.Random, kind: str, keep: float, guess: float) -> list:
    """One scripted episode, or a part of one, of a fresh training question.

    full: the whole conversation; compressed: one turn from what it sees at evaluation; recall: question, a memory, and the
    answer from that alone; history: a conversation so far, and the answer from that. Every known fact enters a memory with
    probability `keep`. In the last two a share `guess` trains unknown values too, so that P of a missing fact is low.
    """
    question = next(q for q in iter(lambda: world_question(rng), None) if split_of(q) == "train")
    retriever, steps = Retriever(question["documents"]), question["steps"]
    kept = lambda facts: [s for s in facts if rng.random() < keep]
    result = lambda k: retriever.search(steps[k][1], 1)

    def act(k):                                                # think and act, as the script does when k facts are known
        if k < len(steps):
            return [("policy", f"<think>Next {steps[k][1]}.</think><search>{steps[k][1]}</search>", True)]
        return [("policy", "<think>I have them all.</think><answer>", True), *answer_pieces(question, known), ("policy", "</answer>", True)]

    out, k = [("question", question["question"], False)], rng.randint(1, len(steps))
    if kind == "compressed":
        before = kept(steps[:k - 1])
        if k > 1:
            out += [("policy", f"<mem>{recall(before)}</mem>", False)]
        known = before + [steps[k - 1]]
        out += [*untrained(act(k - 1)), ("result", result(k - 1), False), ("policy", "<mem>", False)]
        return out + [("policy", f"{recall(kept(known))}</mem>", True), *act(k)]
    if kind == "recall":
        known = kept(steps[:k])
        out += [("policy", f"<mem>{recall(known)}</mem>", False)]
    else:
        known, last = steps[:k], len(steps) if kind == "full" else k - 1
        for j in range(last + 1):
            known = steps[:j]
            if j:
                out += [("policy", "<mem>", False), ("policy", f"{recall(kept(known))}</mem>", True)]
            out += act(j) + ([("result", result(j), False)] if j < len(steps) else [])
        if kind == "full":
            return out
        out, known = untrained(out), steps[:k]
    return out + [("policy", "\n<think>\n...\n</think>\n<answer>\n", True), *answer_pieces(question, known, rng.random() < guess),
                  ("policy", "\n</answer>", True)]


def untrained(pieces: list) -> list:
    return [(role, text, False) for role, text, _ in pieces]


def world_demonstrations(seed: int, keep: float, steps: int):
    """Batches of demonstrations, one a step, the kinds in turn; guessing is trained in the second half only."""
    rng = random.Random(f"{seed} demonstrations")
    mix = (["full"] * 16, ["compressed"] * 32, ["recall"] * 16 + ["history"] * 8)
    for step in range(steps):
        yield [world_demonstration(rng, kind, keep, 0.3 if 2 * step > steps else 0.0) for kind in mix[step % 3]]


# ---- files ----

@dataclass
class Data:
    """What a run trains and is evaluated on."""
    train: Iterator[dict]                                      # endless
    eval: list[dict]
    retriever: Retriever | None                                # over the shared corpus; None where questions bring their documents
    instructions: str                                          # the first user message, with {question}


def read_json_lines(path) -> Iterator[tuple[int, dict]]:
    """(line number, object) of each non-blank line; a byte-order mark and Windows line ends are fine."""
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: not valid JSON ({error.msg}); mend or delete the line") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, line {number}: a JSON object is needed, not {type(row).__name__}")
                yield number, row


def read_questions(path) -> tuple[list[dict], list[dict]]:
    """(questions, the documents that came with them) of a JSONL file or of HotpotQA's .json, told apart by content.

    JSONL: "question", "answer" or "answers" or "golden_answers", and maybe "id" and "documents". A missing id is made from the line number.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no question file {path}; --data takes JSONL or HotpotQA's .json")
    with open(path, encoding="utf-8-sig") as file:
        start = file.read(1024).lstrip()[:1]
        file.seek(0)
        rows = enumerate(json.load(file), 1) if start == "[" else read_json_lines(path)
        questions, documents = [], {}
        for number, row in rows:
            where = f"{path}, {'entry' if start == '[' else 'line'} {number}"
            answers = next((row[key] for key in ("answers", "golden_answers", "answer") if row.get(key) not in (None, "", [])), None)
            if not isinstance(row.get("question"), str) or not row["question"].strip() or answers is None:
                raise ValueError(f"{where}: needs a \"question\" and an \"answer\" (or \"answers\", \"golden_answers\")")
            answers = [str(a) for a in answers] if isinstance(answers, list) else [str(answers)]
            name = next((row[key] for key in ("id", "_id") if row.get(key) is not None), f"line-{number}")
            question = {"id": str(name), "question": row["question"], "answers": answers}
            if "documents" in row:
                question["documents"] = row["documents"]
            for title, sentences in row.get("context", []):    # HotpotQA's paragraphs
                documents.setdefault((title, "".join(sentences)), {"id": str(len(documents)), "title": title, "text": "".join(sentences)})
            questions.append(question)
    if not questions:
        raise ValueError(f"{path} holds no question")
    return questions, list(documents.values())


def read_corpus(path) -> list[dict]:
    """Documents of a JSONL file with "id", "title", "text"."""
    if not Path(path).is_file():
        raise ValueError(f"there is no corpus file {path}; --corpus takes JSONL with id, title and text")
    documents = []
    for number, row in read_json_lines(path):
        if not isinstance(row.get("title"), str) or not isinstance(row.get("text"), str):
            raise ValueError(f"{path}, line {number}: a document needs a \"title\" and a \"text\"")
        documents.append({"id": str(row.get("id", number)), "title": row["title"], "text": row["text"]})
    if not documents:
        raise ValueError(f"{path} holds no document")
    return documents


def endless(questions: list[dict], seed: int) -> Iterator[dict]:
    """The questions in a new random order each time round."""
    rng = random.Random(f"{seed} order")
    while True:
        yield from rng.sample(questions, len(questions))


def load_data(data: str | None, corpus: str | None, seed: int, eval_questions: int, eval_split: str, instructions: str) -> Data:
    """The embedded world without `data`; else a question file, of which `eval_questions` are held out, and its corpus."""
    if data is None:
        rng = random.Random(f"{seed} train")
        stream = (q for q in iter(lambda: world_question(rng), None) if split_of(q) == "train")
        return Data(stream, world_questions(eval_questions, seed, eval_split), None, WORLD_INSTRUCTIONS)
    questions, documents = read_questions(data)
    if corpus is not None:
        documents = read_corpus(corpus)
    if not documents and not all(q.get("documents") for q in questions):
        raise ValueError(f"{data} brings no documents to search; give them with --corpus")
    if eval_questions >= len(questions):
        raise ValueError(f"{data} holds {len(questions)} questions, so --eval-questions {eval_questions} leaves none to train on")
    questions = random.Random(0).sample(questions, len(questions))   # the same held-out questions for every seed
    return Data(endless(questions[eval_questions:], seed), questions[:eval_questions], Retriever(documents) if documents else None, instructions)
