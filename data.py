"""Questions and documents as people have them: JSONL, HotpotQA; or the embedded world's.

A question is a dict {"question", "answers", "id"}, and maybe "documents" [{"id", "title", "text"}], which then are all that is searched for it.

    questions, documents = read_questions("hotpot_dev_distractor_v1.json")
"""
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corpus import load_corpus
from retriever import Retriever
from reward import answer_parts
from world import WORLD_INSTRUCTIONS, question_stream, world_questions

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


def read_array(path) -> Iterator[tuple[int, dict]]:
    """(entry number, object) of a JSON array."""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}); mend it or download it again") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, entry {number}: a JSON object is needed, not {type(row).__name__}")
        yield number, row


def gold_answers(row: dict) -> list[str] | None:
    """The aliases under "answers", "golden_answers" or "answer": text or numbers; None if there is none of that kind."""
    given = next((row[key] for key in ("answers", "golden_answers", "answer") if row.get(key) not in (None, "", [])), None)
    golds = given if isinstance(given, list) else [given]
    return [str(gold) for gold in golds] if all(isinstance(gold, (str, int, float)) for gold in golds) else None


def checked_document(row, where: str, number: int) -> dict:
    """{"id", "title", "text"} of a document; a missing id is made from its number."""
    if not isinstance(row, dict) or not isinstance(row.get("title"), str) or not isinstance(row.get("text"), str):
        raise ValueError(f"{where}: a document needs a \"title\" and a \"text\"")
    return {"id": str(row["id"] if row.get("id") is not None else number), "title": row["title"], "text": row["text"]}


def read_questions(path) -> tuple[list[dict], list[dict]]:
    """(questions, the documents that came with them) of a JSONL file or of HotpotQA's .json, told apart by content.

    JSONL: "question", "answer" or "answers" or "golden_answers", and maybe "id" and "documents". A missing id is made from the
    line number. Raises ValueError with file and line.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no question file {path}; --data takes JSONL or HotpotQA's .json")
    with open(path, encoding="utf-8-sig") as file:
        array = file.read(1024).lstrip()[:1] == "["
    questions, documents, ids = [], {}, set()
    for number, row in (read_array if array else read_json_lines)(path):
        where = f"{path}, {'entry' if array else 'line'} {number}"
        answers = gold_answers(row)
        if not isinstance(row.get("question"), str) or not row["question"].strip() or answers is None:
            raise ValueError(f"{where}: needs a \"question\" and an \"answer\" (or \"answers\", \"golden_answers\") of text")
        name = str(next((row[key] for key in ("id", "_id") if row.get(key) is not None), f"line-{number}"))
        if name in ids:
            raise ValueError(f"{where}: the id {name} stands twice; a question would be scored twice or trained on and held out at once")
        ids.add(name)
        question = {"id": name, "question": row["question"], "answers": answers}
        if row.get("documents") is not None:
            if not isinstance(row["documents"], list):
                raise ValueError(f"{where}: \"documents\" must be a list of objects with a \"title\" and a \"text\"")
            question["documents"] = [checked_document(d, where, i) for i, d in enumerate(row["documents"])]
        try:
            paragraphs = [(title, "".join(sentences)) for title, sentences in row.get("context") or []]     # HotpotQA's
        except (TypeError, ValueError):
            raise ValueError(f"{where}: \"context\" must be a list of [title, [sentence, ...]], as HotpotQA publishes it") from None
        for title, text in paragraphs:
            documents.setdefault((title, text), {"id": str(len(documents)), "title": title, "text": text})
        questions.append(question)
    if not questions:
        raise ValueError(f"{path} holds no question")
    return questions, list(documents.values())


def as_one(parts: list[dict]) -> dict:
    """Several questions as one: numbered, a list of aliases for each part of the answer in order, and all documents that the parts bring."""
    if len({bool(q.get("documents")) for q in parts}) > 1:
        raise ValueError(f"questions {parts[0]['id']} … {parts[-1]['id']}: some bring documents of their own and some do not, so they cannot be "
                         "asked as one; give all of them documents, or none and a --corpus")
    documents = {}                                             # what several parts bring is there once, and ids stay apart
    for i, q in enumerate(parts, 1):
        for d in q.get("documents") or []:
            documents.setdefault((d["title"], d["text"]), {**d, "id": f"{i}-{d['id']}"})
    text = (f"Answer these {len(parts)} questions. Give the {len(parts)} answers in this order, separated by \";\".\n"
            + "\n".join(f"{i}. {q['question']}" for i, q in enumerate(parts, 1)))
    one = {"id": "+".join(q["id"] for q in parts), "question": text, "answers": [aliases for q in parts for aliases in answer_parts(q["answers"])]}
    return one | ({"documents": list(documents.values())} if documents else {})


def objectives(questions: list[dict], n: int, seed: int) -> list[dict]:
    """The multi-objective form: the questions in an order drawn from the seed, n by n asked as one; the last len(questions) % n are left over.

    An answer that itself holds a ";" counts as so many parts. n = 1 leaves the questions as they are, in their own order.
    """
    if n == 1:
        return questions
    order = random.Random(f"{seed} objectives").sample(questions, len(questions))
    return [as_one(order[i:i + n]) for i in range(0, len(order) - n + 1, n)]


def endless(questions: list[dict], seed: int) -> Iterator[dict]:
    """The questions in a new random order each time round."""
    rng = random.Random(f"{seed} order")
    while True:
        yield from rng.sample(questions, len(questions))


def load_data(data: str | None, corpus: str | None, seed: int, eval_questions: int, eval_split: str, instructions: str) -> Data:
    """The embedded world without `data`; else a question file, of which `eval_questions` are held out, and its corpus."""
    if data is None:
        return Data(question_stream(random.Random(f"{seed} train"), "train"), world_questions(eval_questions, seed, eval_split), None, WORLD_INSTRUCTIONS)
    questions, documents = read_questions(data)
    retriever = load_corpus(corpus) if corpus is not None else Retriever(documents) if documents else None
    if retriever is None and not all(q.get("documents") for q in questions):
        raise ValueError(f"{data} brings no documents to search; give them with --corpus")
    if eval_questions >= len(questions):
        raise ValueError(f"{data} holds {len(questions)} questions, so --eval-questions {eval_questions} leaves none to train on")
    questions = random.Random(0).sample(questions, len(questions))   # the same held-out questions for every seed
    return Data(endless(questions[eval_questions:], seed), questions[:eval_questions], retriever, instructions)
