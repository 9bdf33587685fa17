"""Questions and documents: files as people have them."""
import json
from pathlib import Path

import pytest

from corpus import read_corpus
from data import load_data, read_questions
from retriever import Retriever

HOTPOT = Path(__file__).parents[2] / "shared" / "data" / "hotpotqa_100.json"


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


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
