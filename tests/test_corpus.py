"""A corpus file and its saved index (corpus.py). Run: python -m pytest tests/test_corpus.py -q"""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import corpus
from corpus import load_corpus, read_corpus
from data import load_data
from retriever import BM25, Retriever

ROWS = [{"id": f"n{i}", "title": f"Title {i // 2}", "text": f"{'amber' if i % 3 else 'cedar'} lake {i} hill"} for i in range(40)]


@pytest.fixture
def large(monkeypatch, tmp_path):
    """Every corpus counts as a large one; the user's cache is a folder of the test's."""
    monkeypatch.setattr(corpus, "LARGE", 0)
    monkeypatch.setattr(corpus, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(corpus.os, "fsync", lambda _: None)     # no power fails here, and a sync takes long


@pytest.fixture
def builds(monkeypatch):
    """The paths for which an index was built."""
    paths, build = [], corpus.build_index
    monkeypatch.setattr(corpus, "build_index", lambda path, *rest: (paths.append(path), build(path, *rest)))
    return paths


def write(path, rows) -> Path:
    path.write_bytes(rows.encode() if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows).encode())
    return path


def answers(retriever: Retriever) -> list:
    return [retriever.index.search("cedar 7 lake", 40), retriever.search("amber 4"), retriever.access("title 3"), retriever.access("n9")]


# ---------------------------------------------------------------------------------------------------------- forms
@pytest.mark.parametrize("row, expected", [
    ({"id": "3", "contents": '"Aaron"\nAaron is a prophet.\nA line.'}, ("3", "Aaron", "Aaron is a prophet.\nA line.")),
    ({"id": 3, "contents": 'Aaron\r\nA "prophet"'}, ("3", "Aaron", 'A "prophet"')),
    ({"id": "3", "contents": '"\nx'}, ("3", '"', "x")),
    ({"id": "3", "contents": "no title"}, ("3", "", "no title")),
    ({"_id": "3", "title": "A", "contents": '"B"\nx'}, ("3", "A", "x")),
    ({"id": "3", "title": "A", "contents": "First.\nSecond."}, ("3", "A", "First.\nSecond.")),
    ({"id": "3", "title": "A", "contents": "A\nSecond."}, ("3", "A", "Second.")),
    ({"id": None, "title": "A", "text": "x", "contents": "y"}, ("1", "A", "x")),
])
def test_forms_of_a_line(tmp_path, row, expected):
    """Keeps out a Wikipedia dump whose titles keep their quotes, lose their text, or are no names for access."""
    [document] = read_corpus(write(tmp_path / "c.jsonl", [row]))
    assert (document["id"], document["title"], document["text"]) == expected


@pytest.mark.parametrize("text", ['{"Aaron": ["A prophet.", " A man."], "Bergen": "A city."}',
                                  '\ufeff\n{\n  "Aaron": ["A prophet.",\n " A man."],\r\n"Bergen": "A city."}\n'])
def test_one_object_of_titles(tmp_path, text):
    """Keeps out a HotpotQA-style dict that is taken for a bad JSONL, on one line or on many."""
    assert read_corpus(write(tmp_path / "c.json", text)) == [{"id": "1", "title": "Aaron", "text": "A prophet. A man."},
                                                             {"id": "2", "title": "Bergen", "text": "A city."}]


def test_a_title_that_stands_twice_is_kept_twice(tmp_path):
    """Keeps out the silent loss of a document: json keeps the last of two equal keys."""
    documents = read_corpus(write(tmp_path / "c.json", '{"A": "x", "A": ["y"]}'))
    assert [d["text"] for d in documents] == ["x", "y"]


@pytest.mark.parametrize("text, words", [
    pytest.param('{"id": 1, "title": "A", "text": "x"}\n{"id": ' + "[" * 100_000, "line 2: maximum recursion depth", id="deep line"),
    ('\ufeff{"id": 1, "title": "A", "text": "x"}\n\ufeff{"id": 2', "line 2: not valid JSON"), ('<html>', 'is a web page'),
    pytest.param('{"A": ' + "[" * 100_000, "c.jsonl: not valid JSON", id="deep titles"),
    ('{"id":"1","title":"A","text":"x"}\n\n{"id":"2","title":"B"}\n', 'line 3: a document needs a "title" and a "text", or "contents"'),
    ('\ufeff{"id":"1","title":"A","text":"x"}\r\n{"id":"2", \r\n', r"line 2: not valid JSON \("),
    ('{"id":"1", \n{"id":"2","title":"A","text":"x"}\n', "line 1: not valid JSON"),
    ('{"id":"1","title":"A","text":"x"}\n[1]\n', "line 2: a document needs"),
    ('{"id":"1","title":"A","text":["x"]}\n', "line 1: a document needs"),
    ('{"A": "x", "B": [1]}', "entry 2: a title with its text"),
    ('{\n"A": "x",\n"B"\n}', "line 4: not valid JSON"),
    ('[{"title": "A", "text": "x"}]', "entry 1: a title .* one object a line"),
    ("[\n{}\n]", "entry 1"), ("\n \r\n", "is empty"), ("{}", "holds no document"),
])
@pytest.mark.parametrize("limit", [0, 2 ** 22])
def test_bad_files_name_file_and_line(tmp_path, monkeypatch, text, words, limit):
    """Keeps out silent drops, a line number that leaves out blank lines, and an error in the middle of a run."""
    monkeypatch.setattr(corpus, "LARGE", limit)
    path = write(tmp_path / "c.jsonl", text)
    with pytest.raises(ValueError, match=words) as error:
        load_corpus(path)
    assert str(path) in str(error.value) and not list(tmp_path.glob("c.jsonl.index/*"))


def test_what_is_no_text_is_named(tmp_path):
    """Keeps out a Unicode error for the archive that Wikipedia dumps come in, and a traceback for a missing file."""
    (tmp_path / "c.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(ValueError, match=r"c.jsonl.gz is compressed \(gzip\); unpack it"):
        load_corpus(tmp_path / "c.jsonl.gz")
    (tmp_path / "c.jsonl").write_bytes(b'{"id":"1","title":"A","text":"x"}\n{"id":"2","title":"\xff","text":"x"}\n')
    with pytest.raises(ValueError, match="c.jsonl, line 2: 'utf-8' codec"):
        load_corpus(tmp_path / "c.jsonl")
    with pytest.raises(ValueError, match="there is no corpus file"):
        load_corpus(tmp_path / "none")


documents = st.fixed_dictionaries({"title": st.text(max_size=5), "text": st.text(max_size=12)}, optional={"id": st.none() | st.integers() | st.text(max_size=3)})
line_ends = st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\r\n"])


@given(st.lists(st.tuples(documents, line_ends, st.booleans()), min_size=1, max_size=6), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_lazily_read_equals_eagerly_read(tmp_path_factory, rows, mark, data):
    """Keeps out lines found at the wrong byte: after a byte-order mark, Windows line ends, blank lines, letters of several bytes, U+2028."""
    text = "".join(json.dumps(row, ensure_ascii=ascii) + end for row, end, ascii in rows).encode("utf-8", "surrogatepass")
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * mark + text)
    expected = [{"id": str(n if row.get("id") is None else row["id"]), "title": row["title"], "text": row["text"]} for n, (row, _, _) in enumerate(rows, 1)]
    lazy = corpus.JsonLines(path)
    assert read_corpus(path) == expected == list(lazy) == [lazy[i] for i in range(len(lazy))]
    i = data.draw(st.integers(0, len(rows) - 1))
    assert corpus.JsonLines(path, np.array(lazy.starts))[i] == expected[i]


def test_equal_ids_open_the_first(tmp_path, large):
    """Keeps out an answer that depends on the size of the corpus: search finds both documents, access the first."""
    path = write(tmp_path / "c.jsonl", [{"id": "7", "title": "A", "text": "amber"}, {"id": "7", "title": "B", "text": "amber"}])
    for retriever in (load_corpus(path), Retriever(list(read_corpus(path)))):
        assert retriever.access("7") == ["amber"] and retriever.find("7") == 0
        assert retriever.search("amber") == "[1] A: amber\n[2] B: amber"


# ---------------------------------------------------------------------------------------------------- saved index
def test_small_corpora_leave_nothing_on_the_disk(tmp_path, builds):
    """Keeps out a folder beside every handful of documents."""
    path = write(tmp_path / "c.jsonl", ROWS)
    assert answers(load_corpus(path)) == answers(Retriever(ROWS)) and not builds
    assert list(tmp_path.iterdir()) == [path] and isinstance(read_corpus(path), list)


@pytest.mark.parametrize("content", [ROWS, json.dumps({row["title"] + "ab"[i % 2]: row["text"] for i, row in enumerate(ROWS)})])
def test_saved_index_is_found_again(tmp_path, large, builds, content):
    """Keeps out a second build, and an index or documents read into memory."""
    path = write(tmp_path / "c.jsonl", content)
    first = load_corpus(path)
    again = load_corpus(path)
    assert builds == [path] and answers(first) == answers(again) == answers(Retriever(list(read_corpus(path))))
    assert all(isinstance(values, np.memmap) for values in (again.index.docs, again.index.scores, again.names))
    if content is ROWS:
        assert isinstance(again.documents.starts, np.memmap)
    [folder] = (tmp_path / "c.jsonl.index").iterdir()
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        ["docs.npy", "indptr.npy", "names.npy", "scores.npy", "starts.npy", "vocabulary.json"])


def test_changed_content_is_indexed_anew(tmp_path, large, builds):
    """Keeps out an index of other content: same size, same time of change."""
    path = write(tmp_path / "c.jsonl", ROWS)
    before, time = answers(load_corpus(path)), path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().replace(b"cedar lake 27 ", b"cedar lake 7  "))
    os.utime(path, ns=(time, time))
    assert answers(load_corpus(path)) != before and len(builds) == 2
    write(path, ROWS)
    assert answers(load_corpus(path)) == before and len(builds) == 2      # the first one is still there


def test_changed_settings_are_indexed_anew(tmp_path, large, builds, monkeypatch):
    """Keeps out scores of another k1 or b, and words of another tokenizer."""
    path = write(tmp_path / "c.jsonl", ROWS)
    scores = [load_corpus(path, k1, b).index.search("cedar", 1) for k1, b in ((1.5, 0.75), (0.9, 0.75), (0.9, 0.4), (0.9, 0.4))]
    assert scores == [BM25([f"{d['title']} {d['text']}" for d in ROWS], k1, b).search("cedar", 1) for k1, b in ((1.5, 0.75), (0.9, 0.75), (0.9, 0.4), (0.9, 0.4))]
    assert len(builds) == 3
    monkeypatch.setattr(corpus, "TOKENIZER", "another")
    load_corpus(path)
    assert len(builds) == 4


def test_pieces_of_a_file_are_hashed_in_order(tmp_path, monkeypatch):
    """Keeps out a fingerprint of the first piece only, or one that two pieces can swap under."""
    marks = {corpus.fingerprint(write(tmp_path / "c", text)) for text in ("a" * 2 ** 24 + "b", "a" * 2 ** 24 + "c", "a" * 2 ** 24, "b" + "a" * 2 ** 24)}
    assert len(marks) == 4


@pytest.mark.parametrize("name", ["docs.npy", "indptr.npy", "names.npy", "scores.npy", "starts.npy", "vocabulary.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut off", "shorter"])
def test_damaged_index_is_built_again(tmp_path, large, builds, name, damage):
    """Keeps out a search over half an index, and a run that cannot start until someone deletes a folder."""
    path = write(tmp_path / "c.jsonl", ROWS)
    good = answers(load_corpus(path))
    [file] = (tmp_path / "c.jsonl.index").glob(f"*/{name}")
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "shorter" and name.endswith("npy"):
        np.save(file, np.load(file)[:-1])
    else:
        file.write_bytes(b"" if damage == "empty" else whole[:-1])
    assert answers(load_corpus(path)) == good and len(builds) == 2
    assert file.read_bytes() == whole


def test_killed_half_way_is_built_again(tmp_path, large, builds):
    """Keeps out an index of half the corpus, and gigabytes that a killed process leaves for ever."""
    path = write(tmp_path / "c.jsonl", ROWS)
    script = """
import os, sys, corpus
corpus.LARGE, entries = 0, corpus.name_entries
corpus.name_entries = lambda document, i: entries(document, i) if i < 20 else os.kill(os.getpid(), 9)
corpus.load_corpus(sys.argv[1])"""
    killed = subprocess.run([sys.executable, "-c", script, str(path)], cwd=Path(corpus.__file__).parent, capture_output=True)
    assert killed.returncode == -9
    [left] = (tmp_path / "c.jsonl.index").iterdir()
    assert left.name.startswith("building-")
    assert answers(load_corpus(path)) == answers(Retriever(ROWS)) and len(builds) == 1
    assert left.exists()                                       # it might belong to a process at work
    os.utime(left, (0, 0))
    load_corpus(write(path, ROWS[1:]))
    assert not left.exists()


def test_two_builds_at_once(tmp_path, large, builds, monkeypatch):
    """Keeps out two processes that write into one folder, and an error in the one that ends later."""
    path = write(tmp_path / "c.jsonl", ROWS)
    write_index, others = BM25.write, []

    def meanwhile(index, folder, rows):                        # the first has its blocks on the disk, then the second does it all
        if not others:
            others.append(None)
            others.append(answers(load_corpus(path)))
        write_index(index, folder, rows)
    monkeypatch.setattr(BM25, "write", meanwhile)
    assert answers(load_corpus(path)) == others[1] == answers(Retriever(ROWS))
    assert len(builds) == 2 and len(list((tmp_path / "c.jsonl.index").iterdir())) == 1


def test_cache_where_beside_the_corpus_is_no_room(tmp_path, large, builds):
    """Keeps out a shared, read-only corpus that cannot be indexed; and names both places if there is no room at all."""
    path = write(tmp_path / "c.jsonl", ROWS)
    (tmp_path / "c.jsonl.index").write_text("a file where the folder should be")
    assert answers(load_corpus(path)) == answers(load_corpus(path)) == answers(Retriever(ROWS)) and len(builds) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1
    corpus.CACHE = path / "below a file"
    with pytest.raises(ValueError, match="neither to .*c.jsonl.index nor to .*below a file"):
        load_corpus(path)


def test_the_corpus_file_is_what_is_searched(tmp_path, large):
    """Keeps out a --corpus that is read but not searched: the questions' own paragraphs are not the corpus then."""
    question = {"_id": "q", "question": "Q", "answer": "x", "context": [["Own", ["amber."]]]}
    questions = write(tmp_path / "q.jsonl", [question, question | {"_id": "r"}])
    found = load_data(str(questions), str(write(tmp_path / "c.jsonl", ROWS)), 0, 1, "test", "{question}").retriever
    assert answers(found) == answers(Retriever(ROWS)) and found.access("Own") == []
    assert load_data(str(questions), None, 0, 1, "test", "{question}").retriever.access("Own") == ["amber."]
