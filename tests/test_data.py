"""Questions, documents and demonstrations: the embedded world's promises, and files as people have them."""
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from agent_loop import information
from data import (RELATION, load_data, read_corpus, read_questions, world_demonstration, world_demonstrations, world_questions,
                  world_tokenizer)
from policy import Chat
from retriever import Retriever
from train import render

HOTPOT = Path(__file__).parents[2] / "shared" / "data" / "hotpotqa_100.json"


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


# ---- the embedded world ----

def test_world_is_the_same_for_a_seed_and_other_for_another():
    """Keeps out questions that cannot be generated again."""
    assert world_questions(5, 3, "test") == world_questions(5, 3, "test")
    assert world_questions(5, 3, "test") != world_questions(5, 4, "test")


def test_splits_share_no_combination_of_entities():
    """Keeps out test questions that were trained on."""
    combinations = {split: {tuple(sorted(s[1] for s in q["steps"])) for q in world_questions(300, 0, split)} for split in ("train", "dev", "test")}
    assert not combinations["train"] & combinations["test"] and not combinations["train"] & combinations["dev"]
    assert not combinations["dev"] & combinations["test"]


def test_every_step_is_answered_by_its_search_and_by_nothing_in_the_question():
    """Keeps out questions that cannot be answered, or can be without searching."""
    for q in world_questions(200, 1, "test"):
        retriever = Retriever(q["documents"])
        for _, entity, relation, value in q["steps"]:
            first = retriever.search(entity, 5).split("\n")[0]
            assert first.startswith(f"[1] {entity}:") and f"{relation} {value}" in first
            assert value not in q["question"]
        for part, answer in enumerate(q["answers"][0].split("; ")):
            assert answer == [f"{r} {v}" for p, _, r, v in q["steps"] if p == part][-1]


def test_retrieval_has_something_to_rank():
    """Keeps out a world in which every search has one hit only."""
    hits = [len(Retriever(q["documents"]).index.search(s[1], 5)) for q in world_questions(100, 2, "test") for s in q["steps"]]
    assert sum(h > 1 for h in hits) / len(hits) > 0.4


def test_question_shapes_cover_two_to_four_facts_and_chains():
    """Keeps out a world without multi-objective or two-hop questions."""
    parts = Counter(len(q["answers"][0].split("; ")) for q in world_questions(300, 0, "train"))
    assert set(parts) == {1, 2, 3, 4}
    chains = [q for q in world_questions(300, 0, "train") if len(q["steps"]) > len(q["answers"][0].split("; "))]
    q = chains[0]
    (_, first, r1, value), (_, second, r2, _) = next((a, b) for a, b in zip(q["steps"], q["steps"][1:]) if a[0] == b[0])
    assert value.split()[0] == second and f"{first}'s {r1}'s {r2}" in q["question"] and RELATION[r1][1] == RELATION[r2][0]


def test_tiny_tokenizer_knows_every_word_of_the_world():
    """Keeps out <unk> in questions, results, notices and demonstrations."""
    chat = Chat(world_tokenizer())
    unknown = chat.tokenizer.unk_token_id
    for demonstrations in world_demonstrations(0, 0.5, 6):
        for d in demonstrations:
            assert unknown not in render(chat, d)[0]
    for q in world_questions(50, 0, "test"):
        assert unknown not in chat.encode(information(Retriever(q["documents"]).search(q["steps"][0][1], 5)))


def test_a_sentence_is_one_token_a_word_and_reads_back():
    """Keeps out a tokenizer that glues tags or marks to words."""
    tokenizer = world_tokenizer()
    assert tokenizer.tokenize("<mem>birthplace Velden Bay.</mem><think>Mira's") == \
        ["<mem>", "birthplace", "Velden", "Bay", ".", "</mem>", "<think>", "Mira", "'s"]
    assert tokenizer.decode(tokenizer.encode("<mem>river Wye Run.</mem>")) == "<mem> river Wye Run . </mem>"


# ---- demonstrations ----

def test_demonstrated_memories_keep_about_half():
    """Keeps out a cold start that already teaches to remember: memories that are whole are shown, and never trained."""
    rng, kept, known = random.Random(0), 0, 0
    for _ in range(300):
        d = world_demonstration(rng, "full", 0.5)
        facts = 0
        for role, text, trained in d:
            facts += role == "result"
            if role == "policy" and text.endswith("</mem>") and trained:
                kept += text.count(".") - ("Nothing yet." in text)
                known += facts
    assert 0.40 < kept / known < 0.52                          # a later hop replaces the earlier, so a little below one half


def test_unknown_values_are_shown_but_not_trained():
    """Keeps out demonstrations that teach to guess what the memory has lost."""
    rng = random.Random(1)
    for _ in range(200):
        d = world_demonstration(rng, "compressed", 0.5)
        seen = " ".join(text for role, text, trained in d if role == "result" or (text.endswith("</mem>") and not trained))
        if any("<answer>" in text for _, text, _ in d):
            start = next(i for i, (_, text, _) in enumerate(d) if text.endswith("<answer>"))
            for _, text, trained in d[start + 1:-1]:
                if text != ";":
                    assert trained == (text in seen), (text, seen)


def test_forced_memory_tag_and_results_are_never_trained():
    """Keeps out a mask that trains what the loop or the tool writes."""
    chat = Chat(world_tokenizer())
    for d in next(world_demonstrations(5, 0.5, 3)):
        ids, mask = render(chat, d)
        trained = chat.decode([i for i, m in zip(ids, mask) if m])
        assert len(ids) == len(mask) and "<mem>" not in trained and "<information>" not in trained and "</answer>" in trained


# ---- files ----

def test_byte_order_mark_blank_lines_and_line_ends(tmp_path):
    """Keeps out a first line that fails on Windows files, and a split at U+2028."""
    rows = '\ufeff{"id":"a","question":"Q1","answer":"x"}\r\n\r\n{"id":"b","question":"Q2\u2028?","answer":"y"}\r\n'
    questions, documents = read_questions(write(tmp_path / "q.jsonl", rows))
    assert [q["id"] for q in questions] == ["a", "b"] and questions[1]["question"] == "Q2\u2028?" and documents == []


def test_ids_missing_and_falsy(tmp_path):
    """Keeps out the shared id "None", and 0 taken for a missing id."""
    rows = '{"question":"Q1","answer":"x"}\n{"question":"Q2","answer":"y"}\n{"id":0,"question":"Q5","answer":0}\n'
    questions, _ = read_questions(write(tmp_path / "q.jsonl", rows))
    assert [q["id"] for q in questions] == ["line-1", "line-2", "0"] and questions[2]["answers"] == ["0"]


@pytest.mark.parametrize("line, words", [('{"question":"Q3"}', "line 2: needs"), ('{"question": "Q4", ', "line 2: not valid JSON"), ("[1]", "line 2: a JSON object")])
def test_bad_lines_name_file_and_line(tmp_path, line, words):
    """Keeps out silent drops and a bare KeyError far away."""
    path = write(tmp_path / "q.jsonl", '{"question":"Q1","answer":"x"}\n' + line + "\n")
    with pytest.raises(ValueError, match=words) as error:
        read_questions(path)
    assert str(path) in str(error.value)


def test_answers_under_any_of_the_three_names(tmp_path):
    """Keeps out a string of aliases taken apart letter by letter."""
    rows = '{"question":"Q","golden_answers":["Ada","Ada L."]}\n{"question":"Q","answers":["x"]}\n{"question":"Q","answer":"Ada"}\n'
    questions, _ = read_questions(write(tmp_path / "q.jsonl", rows))
    assert [q["answers"] for q in questions] == [["Ada", "Ada L."], ["x"], ["Ada"]]


@pytest.mark.parametrize("line", [
    '{"question":"Q","answers":[null]}', '{"question":"Q","answers":[["Ada"],["1815"]]}', '{"question":"Q","answer":{"value":"x"}}',
    '{"question":"Q","answer":"x","context":"text"}', '{"question":"Q","answer":"x","documents":{"title":"t"}}', '{"question":"Q","answer":"x","documents":[{"title":"t"}]}',
    '{"question":"Q","answer":"x","context":{"title":["t"],"sentences":[["s"]]}}', '{"id":"line-1","question":"Q","answer":"x"}'])
def test_malformed_fields_name_file_and_line(tmp_path, line):
    """Keeps out "None" or "['Ada']" as a right answer, documents that fail in the middle of a run, and a question that counts twice."""
    with pytest.raises(ValueError, match="q.jsonl, line 2"):
        read_questions(write(tmp_path / "q.jsonl", '{"question":"Q1","answer":"x","context":null}\n' + line + "\n"))


@pytest.mark.parametrize("text, words", [('[{"question": "Q"},, ]', "q.json, line 1: not valid"), ("[1]", "q.json, entry 1: a JSON object")])
def test_a_broken_array_names_its_file(tmp_path, text, words):
    """Keeps out a JSON error without a file, and a traceback for an entry that is no object."""
    with pytest.raises(ValueError, match=words):
        read_questions(write(tmp_path / "q.json", text))


def test_a_null_id_is_a_missing_one(tmp_path):
    """Keeps out the shared id "None" in a corpus, under which access("None") opens a document."""
    path = write(tmp_path / "c.jsonl", '{"id":null,"title":"A","text":"x"}\n{"id":null,"title":"B","text":"y"}\n')
    assert [d["id"] for d in read_corpus(path)] == ["1", "2"]
    assert Retriever([{"id": None, "title": "A", "text": "x"}]).access("None") == []


def test_corpus_lines(tmp_path):
    """Keeps out a corpus line without a text that fails at search time."""
    good = write(tmp_path / "c.jsonl", '{"id":"7","title":"Bergen","text":"A city."}\n')
    assert read_corpus(good) == [{"id": "7", "title": "Bergen", "text": "A city."}]
    with pytest.raises(ValueError, match="line 1: a document needs"):
        read_corpus(write(tmp_path / "d.jsonl", '{"id":"7","title":"Bergen"}\n'))


def test_held_out_questions_are_not_trained_on(tmp_path):
    """Keeps out an evaluation on training questions, and a file too small to hold any out."""
    path = write(tmp_path / "q.jsonl", "".join(json.dumps({"question": f"Q{i}", "answer": "x", "documents": [{"title": "t", "text": "x"}]}) + "\n" for i in range(10)))
    data = load_data(str(path), None, 0, 3, "test", "{question}")
    trained = [next(data.train)["id"] for _ in range(14)]
    assert len(data.eval) == 3 and not {q["id"] for q in data.eval} & set(trained)
    assert len(set(trained[:7])) == 7 == len(set(trained[7:]))  # each question once a round
    with pytest.raises(ValueError, match="leaves none to train on"):
        load_data(str(path), None, 0, 10, "test", "{question}")


@pytest.mark.skipif(not HOTPOT.exists(), reason="needs hotpotqa_100.json, which does not come with the project")
def test_hotpotqa_as_published():
    """Keeps out a reader that loses paragraphs or duplicates shared ones."""
    questions, documents = read_questions(HOTPOT)
    assert len(questions) == 100 and len({q["id"] for q in questions}) == 100 and len(documents) == 994
    assert all(q["answers"][0] for q in questions)
