"""Questions and documents as people have them: JSONL, HotpotQA, 2WikiMultihopQA, MuSiQue; or the embedded world's.

A question is a dict {"question", "answers", "id"}: the gold answer, then its aliases; and maybe "documents" [{"id", "title", "text"}], which then
are all that is searched for it, and "support" [(title, sentence)]: what the answer rests on, in the published order.

    questions, documents = read_questions("hotpot_dev_distractor_v1.json")
"""
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from corpus import corpus_document, file_bar, load_corpus, text_start, utf8
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
    questions: list[dict] = field(default_factory=list)        # what `train` draws from; empty in the embedded world


# ---- files of JSON ----

def is_array(path, kind: str) -> bool:
    """Whether a file's content is one JSON array; else it is taken for JSONL. Raises ValueError for what can be neither."""
    return text_start(path, kind).startswith(b"[")


def read_json_lines(path) -> Iterator[tuple[int, object]]:
    """(line number, value) of each non-blank line; a byte-order mark and Windows line ends are fine, and U+2028 ends no line."""
    with open(path, "rb") as file, file_bar(path, "Reading") as bar:
        for number, raw in enumerate(file, 1):
            bar.update(len(raw))
            line = utf8(raw, path, number)
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:      # numbers of thousands of digits raise ValueError
                    remedy = "mend or delete the line" if raw.endswith(b"\n") else "if the download was cut off here, fetch the file again"
                    raise ValueError(f"{path}, line {number}: not valid JSON ({getattr(error, 'msg', error)}); {remedy}") from None
                yield number, row


def read_array(path) -> Iterator[tuple[int, object]]:
    """(entry number, value) of a JSON array, parsed entry by entry: half a gigabyte of HotpotQA never stands in memory as objects."""
    text = utf8(Path(path).read_bytes(), path)
    space, parse, end, at = re.compile(r"\s*"), json.JSONDecoder().raw_decode, len(text.rstrip()), text.index("[")
    if re.fullmatch(r"\s*\[\s*\]\s*", text):
        return
    with file_bar(path, "Reading") as bar:
        for number in count(1):
            start = at                                         # on the "[" or "," before the entry
            try:
                row, at = parse(text, space.match(text, at + 1).end())
                at = space.match(text, at).end()
                if text[at:at + 1] not in (",", "]"):
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
                if text[at] == "]" and at + 1 < end:
                    raise json.JSONDecodeError("Extra data", text, at + 1)
            except json.JSONDecodeError as error:
                near = end if text[end - 1] == "]" or error.msg == "Extra data" else end - 6    # where a cut \\u00e9 or null is noticed
                if error.msg.startswith("Unterminated string") or error.pos >= near:
                    raise ValueError(f"{path} ends in the middle of entry {number}: the download was cut off, so fetch it again") from None
                raise ValueError(f"{path}, line {error.lineno}: not valid JSON in entry {number} ({error.msg}); mend it or download it "
                                 "again") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, entry {number}: not valid JSON ({error}); mend it or download it again") from None
            bar.update(at - start)
            yield number, row
            if text[at] == "]":
                return


def read_rows(path, kind: str) -> Iterator[tuple[str, dict]]:
    """(where: file and line or entry, object) of JSONL or of a JSON array."""
    array = is_array(path, kind)
    for number, row in (read_array if array else read_json_lines)(path):
        where = f"{path}, {'entry' if array else 'line'} {number}"
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a JSON object is needed, not {type(row).__name__}")
        yield where, row


def read_object(path: Path) -> dict:
    """The JSON object that a run wrote."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it is no JSON object; bring back a copy, or give another --out")
    return found


# ---- one question in each published form ----

PUBLISHED = ("context", "supporting_facts", "paragraphs", "question_decomposition", "answerable")


def gold_answers(row: dict) -> list[str]:
    """All gold answers, each once; they are text or numbers. [] if there is none, or one of another kind.

    Under "answer", "answers", "golden_answers", Search-R1's "reward_model": {"ground_truth": {"target"}}, and "answer_aliases", in this order.
    """
    target = row.get("reward_model")
    for key in ("ground_truth", "target"):
        target = target.get(key) if isinstance(target, dict) else None
    given = (row.get("answer"), row.get("answers"), row.get("golden_answers"), target, row.get("answer_aliases"))
    golds = [gold for golds in given if golds is not None for gold in (golds if isinstance(golds, list) else [golds])]
    if not all(isinstance(gold, (str, int, float)) for gold in golds):
        return []
    return list(dict.fromkeys(gold for gold in (str(gold).strip() for gold in golds) if gold))


def records(value, *columns: tuple[str, ...]) -> list:
    """The rows of a published table, each with its value (or None) in every column; a column may have several names.

    A table is a list of lists, a list of objects, an object of columns (Hugging Face), or one of them as a JSON string.
    """
    value = json.loads(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        value = {name: cells for name, cells in value.items() if cells is not None}
        value = [dict(zip(value, cells)) for cells in zip(*value.values(), strict=True)]
    return [[next((row[name] for name in names if row.get(name) is not None), None) for names in columns] if isinstance(row, dict) else row
            for row in value or []]


def wiki_form(row: dict) -> tuple[list, list]:
    """HotpotQA's and 2WikiMultihopQA's ([(title, text)], support): "context" [[title, [sentence]]], "supporting_facts" [[title, number]].

    HotpotQA's sentences bring the space before them, 2WikiMultihopQA's do not. Nothing of the support is kept if a part of it is
    not in the context, as it happens in fullwiki files.
    """
    paragraphs, support = records(row.get("context"), ("title",), ("sentences", "content")), []
    for title, sentences in paragraphs:
        if not isinstance(title, str) or not isinstance(sentences, list):
            raise TypeError
    for title, number in records(row.get("supporting_facts"), ("title",), ("sent_id",)):
        found = [sentences[number] for name, sentences in paragraphs if name == title and 0 <= number < len(sentences)]
        support.append((title, found[0].strip() if found else ""))
    documents = [(title, ("" if any(s[:1].isspace() for s in sentences[1:]) else " ").join(sentences)) for title, sentences in paragraphs]
    return documents, support if all(sentence for _, sentence in support) else []


def musique_form(row: dict) -> tuple[list, list]:
    """MuSiQue's ([(title, text)], support): "paragraphs" of objects; a step of "question_decomposition" names the one that answers it.

    Its sentence is the one that holds the step's answer, else the whole paragraph. FlashRAG's rows bring only the paragraphs of the steps,
    which are no corpus.
    """
    table = records(row.get("paragraphs"), ("idx",), ("title",), ("paragraph_text",))
    if not all(isinstance(title, str) and isinstance(text, str) for _, title, text in table):
        raise TypeError
    numbered, support = {place if idx is None else idx: (title, text) for place, (idx, title, text) in enumerate(table)}, []
    for answer, idx, own in records(row.get("question_decomposition"), ("answer",), ("paragraph_support_idx",), ("support_paragraph",)):
        title, text = (own["title"], own["paragraph_text"]) if own else numbered.get(idx, ("", ""))
        if not isinstance(title, str) or not isinstance(text, str):
            raise TypeError
        sentences = re.split(r"(?<=\w{4}[.!?])\s+", text)      # four letters before the mark: "St." and "U.S." end no sentence
        support.append((title, next((s for s in sentences if str(answer).casefold() in s.casefold()), text).strip()))
    return [(title, text) for _, title, text in table], support if all(sentence for _, sentence in support) else []


def read_questions(path) -> tuple[list[dict], list[dict]]:
    """(questions, the documents that came with them) of a file, told apart by content: JSONL or a JSON array; each row in the form of
    HotpotQA, 2WikiMultihopQA, MuSiQue, Search-R1 or FlashRAG, or plain: "question", its answer, and maybe "id" and "documents".

    A missing id is made from the line number; one that two sources share, as in Search-R1's merged files, gets its "data_source" before it.
    MuSiQue's unanswerable questions are left out, with a line on stderr: they share their ids with the answerable ones, no answer is right,
    and in a common corpus the paragraph that was taken from them is back. Raises ValueError with file and line.
    """
    questions, documents, ids, sources, unanswerable = [], {}, set(), set(), 0
    for where, row in read_rows(path, "question"):
        if isinstance(row.get("metadata"), dict):              # FlashRAG keeps the published fields there
            row = {key: row["metadata"].get(key) for key in PUBLISHED} | row
        if row.get("answerable") in (False, "false"):
            unanswerable += 1
            continue
        question = {"question": row.get("question"), "answers": gold_answers(row)}
        if not isinstance(question["question"], str) or not question["question"].strip() or not question["answers"]:
            raise ValueError(f"{where}: needs a \"question\" and an \"answer\" (or \"answers\", \"golden_answers\") of text; a test split "
                             "without answers can be neither trained on nor scored")
        name = str(next((row[key] for key in ("id", "_id") if row.get(key) is not None), f"line-{where.rpartition(' ')[2]}"))
        source = str(row.get("data_source"))
        if (source, name) in ids:
            raise ValueError(f"{where}: the id {name} stands twice; a question would be scored twice or trained on and held out at once")
        ids.add((source, name))
        question["id"] = f"{source}/{name}" if any((other, name) in ids for other in sources - {source}) else name
        sources.add(source)
        if row.get("documents") is not None:
            try:
                question["documents"] = [corpus_document(d, i) for i, d in enumerate(row["documents"])]
            except (TypeError, ValueError):
                raise ValueError(f'{where}: "documents" must be a list of objects with a "title" and a "text"') from None
        musique = row.get("paragraphs") is not None or row.get("question_decomposition") is not None
        try:
            paragraphs, support = (musique_form if musique else wiki_form)(row)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
            form = ('"paragraphs" and "question_decomposition" must be lists of objects, as MuSiQue publishes them' if musique else
                    '"context" must be a list of [title, [sentence, ...]] and "supporting_facts" one of [title, number], as HotpotQA publishes them')
            raise ValueError(f"{where}: {form}") from None
        if support:
            question["support"] = support
        for title, text in paragraphs:
            documents.setdefault((title, text), {"id": str(len(documents)), "title": title, "text": text})
        questions.append(question)
    if unanswerable:
        print(f"{path}: {unanswerable} of {unanswerable + len(questions)} questions are marked unanswerable and are left out, with their paragraphs: "
              "no answer to them is right, so they can be neither trained on nor scored", file=sys.stderr)
    if not questions:
        raise ValueError(f"{path} holds no question" + (" that is answerable" if unanswerable else ""))
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


def check_support(questions: list[dict], retriever: Retriever, data: str, corpus: str) -> None:
    """Refuse a corpus that lacks every document that the answers rest on, as far as the questions name them; say so if it lacks some."""
    supported = [q for q in questions if q.get("support")]
    lacking = [q for q in supported if any(retriever.find(title) is None for title, _ in q["support"])]
    if not lacking:
        return
    title = next(title for title, _ in lacking[0]["support"] if retriever.find(title) is None)
    words = (f"{corpus} lacks documents that the answers of {len(lacking)} of {len(supported)} questions of {data} rest on "
             f"({title!r} of question {lacking[0]['id']}, for one)")
    if len(lacking) == len(supported):
        raise ValueError(f"{words}; give the corpus that belongs to these questions")
    print(f"{words}; these can hardly be answered", file=sys.stderr)


def shared_retriever(questions: list[dict], documents: list[dict], data: str, corpus: str | None, **sizes: int) -> Retriever | None:
    """Over the corpus file, else over the documents that came with the questions of the file `data`; None if each question brings its own."""
    retriever = load_corpus(corpus, **sizes) if corpus is not None else Retriever(documents, **sizes) if documents else None
    if retriever is None and not all(q.get("documents") for q in questions):
        raise ValueError(f"{data} brings no documents to search; give them with --corpus")
    if corpus is not None:
        check_support(questions, retriever, data, corpus)
        if own := sum(bool(q.get("documents")) for q in questions):
            print(f"{own} of {len(questions)} questions of {data} bring documents of their own; for these {corpus} is not searched", file=sys.stderr)
    return retriever


def load_data(data: str | None, corpus: str | None, seed: int, eval_questions: int, eval_split: str, instructions: str) -> Data:
    """The embedded world without `data`; else a question file, of which `eval_questions` are held out, and its corpus."""
    if data is None:
        return Data(question_stream(random.Random(f"{seed} train"), "train"), world_questions(eval_questions, seed, eval_split), None, WORLD_INSTRUCTIONS)
    questions, documents = read_questions(data)
    retriever = shared_retriever(questions, documents, data, corpus)
    if eval_questions >= len(questions):
        raise ValueError(f"{data} holds {len(questions)} questions, so --eval-questions {eval_questions} leaves none to train on")
    questions = random.Random(0).sample(questions, len(questions))   # the same held-out questions for every seed
    return Data(endless(questions[eval_questions:], seed), questions[:eval_questions], retriever, instructions, questions[eval_questions:])
