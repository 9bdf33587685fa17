"""Questions and documents: files as people have them."""
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import read_corpus
from data import load_data, read_array, read_questions
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
    """Keeps out a string of aliases taken apart letter by letter, and the loss of those under a second name."""
    rows = '{"question":"Q","answers":["Ada L."],"answer":"Ada","golden_answers":["Ada L."]}\n'
    rows += '{"question":"Q","golden_answers":["Ada","Ada L."]}\n{"question":"Q","answers":["x"]}\n{"question":"Q","answer":"Ada"}\n'
    questions, _ = read_questions(write(tmp_path / "q.jsonl", rows))
    assert [q["answers"] for q in questions] == [["Ada", "Ada L."], ["Ada", "Ada L."], ["x"], ["Ada"]]


@pytest.mark.parametrize("line", [
    '{"question":"Q","answers":[null]}', '{"question":"Q","answers":[["Ada"],["1815"]]}', '{"question":"Q","answer":{"value":"x"}}',
    '{"question":"Q","answer":"x","context":"text"}', '{"question":"Q","answer":"x","documents":{"title":"t"}}', '{"question":"Q","answer":"x","documents":[{"title":"t"}]}',
    '{"question":"Q","answer":"x","context":{"title":["t"],"sentences":[["s"],["u"]]}}', '{"id":"line-1","question":"Q","answer":"x"}',
    '{"question":"Q","answer":"x","context":[["t","text"]]}', '{"question":"Q","answer":"x","context":[["t",[1]]]}',
    '{"question":"Q","answer":"x","context":[["t",["s"]]],"supporting_facts":[["t","0"]]}', '{"question":"Q","answer":"","answer_aliases":[]}',
    '{"question":"Q","answer":"x","answer_aliases":[{"a":1}]}', '{"question":"Q","answer":"x","paragraphs":["text"]}',
    '{"question":"Q","answer":"x","paragraphs":[{"idx":0,"title":"t"}]}',
    '{"question":"Q","answer":"x","paragraphs":[],"question_decomposition":[[1]]}', pytest.param('{"question":' + "[" * 100_000, id="deep"),
    pytest.param('{"question":"Q","answer":"x","context":"' + "[" * 100_000 + '"}', id="deep context")])
def test_malformed_fields_name_file_and_line(tmp_path, line):
    """Keeps out "None" or "['Ada']" as a right answer, documents that fail in the middle of a run, and a question that counts twice."""
    with pytest.raises(ValueError, match="q.jsonl, line 2"):
        read_questions(write(tmp_path / "q.jsonl", '{"question":"Q1","answer":"x","context":null}\n' + line + "\n"))


@pytest.mark.parametrize("text, words", [
    ('[{"question": "Q", "answer": "x"},, ]', "q.json, line 1: not valid JSON in entry 2"), ("[1]", "q.json, entry 1: a JSON object"),
    ('[{"question": "Q", "answer": "x"}\n{"question": "Q", "answer": "x"}]', "q.json, line 2: not valid JSON in entry 1"),
    pytest.param('[{"question":' + "[" * 100_000, "q.json, entry 1: not valid JSON", id="deep"),
    ('[{"question": "Q", "answer": "x"}] [1]', "q.json, line 1: not valid JSON in entry 1 .Extra data"), (" [ ] ", "holds no question")])
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


# ---- the published forms, by hand ----

HOTPOTQA = [{"_id": "5a7a06935542990198eaf050", "answer": "Arthur's Magazine",
             "question": "Which magazine was started first Arthur's Magazine or First for Women?",
             "supporting_facts": [["Arthur's Magazine", 0], ["First for Women", 0]], "type": "comparison", "level": "medium", "context": [
                 ["Radio City (Indian radio station)", ["Radio City is India's first private FM radio station.", " It was started on 3 July 2001."]],
                 ["Arthur's Magazine", ["Arthur's Magazine (1844–1846) was an American literary periodical.",
                                        " Edited by T.S. Arthur, it was merged."]],
                 ["First for Women", ["First for Women is a woman's magazine.", " It was started in 1989."]]]},
            {"_id": "5a879ab05542996e4f30887e", "answer": "no", "question": "Q2?", "supporting_facts": [["Not retrieved", 0], ["First for Women", 0]],
             "type": "comparison", "level": "hard",
             "context": [["First for Women", ["First for Women is a woman's magazine.", " It was started in 1989."]]]}]

TWOWIKI = {"_id": "13f5ad2c088c11ebbd6fac1f6bf848b6", "type": "compositional",
           "question": "Who is the mother of the director of film Polish-Russian War?",
           "context": [["Xawery Żuławski", ["Xawery Żuławski is a Polish film director.", "He is the son of Małgorzata Braunek."]],
                       ["Polish-Russian War (film)", ["Polish-Russian War is a 2009 film.", "It was directed by Xawery Żuławski."]]],
           "supporting_facts": [["Polish-Russian War (film)", 1], ["Xawery Żuławski", 1]], "answer": "Małgorzata Braunek",
           "evidences": [["Polish-Russian War", "director", "Xawery Żuławski"], ["Xawery Żuławski", "mother", "Małgorzata Braunek"]],
           "entity_ids": "Q3569599_Q3570840", "answer_id": "Q274277", "evidences_id": [["Q3569599", "director", "Q3570840"]]}

MUSIQUE = {"id": "2hop__482757_12019", "paragraphs": [
    {"idx": 0, "title": "Green", "is_supporting": True,
     "paragraph_text": "Green is an album. It was made by Steve Hillage of St. Albans, U.K. It was sold in 1978."},
    {"idx": 1, "title": "Oslo", "paragraph_text": "Oslo is a city.", "is_supporting": False},
    {"idx": 2, "title": "Miquette", "paragraph_text": "Miquette Giraudy is a musician. She married Steve\xa0Hillage.", "is_supporting": True}],
    "question": "Who is the spouse of the Green performer?", "question_decomposition": [
        {"id": 482757, "question": "Green >> performer", "answer": "Steve Hillage", "paragraph_support_idx": 0},
        {"id": 12019, "question": "#1 >> spouse", "answer": "Giraudy, Miquette", "paragraph_support_idx": 2}],
    "answer": "Miquette Giraudy", "answer_aliases": ["Giraudy", "Miquette Giraudy", "M. Giraudy"], "answerable": True}
MUSIQUE_SUPPORT = [("Green", "It was made by Steve Hillage of St. Albans, U.K. It was sold in 1978."),
                   ("Miquette", MUSIQUE["paragraphs"][2]["paragraph_text"])]


def file_of(path, rows, array):
    return write(path, json.dumps(rows) if array else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def columns(table, *names):
    return dict(zip(names, map(list, zip(*table))))


def test_hotpotqa_in_its_published_form(tmp_path):
    """Keeps out lost paragraphs, sentences glued or spaced twice, support out of order, and one that a fullwiki context does not hold."""
    questions, documents = read_questions(file_of(tmp_path / "hotpot.bin", HOTPOTQA, array=True))     # told by content, not by name
    assert questions == [
        {"id": "5a7a06935542990198eaf050", "question": HOTPOTQA[0]["question"], "answers": ["Arthur's Magazine"], "support": [
            ("Arthur's Magazine", "Arthur's Magazine (1844–1846) was an American literary periodical."),
            ("First for Women", "First for Women is a woman's magazine.")]},
        {"id": "5a879ab05542996e4f30887e", "question": "Q2?", "answers": ["no"]}]
    assert [d["id"] for d in documents] == ["0", "1", "2"] and documents[2] == {     # the paragraph that both questions bring stands once
        "id": "2", "title": "First for Women", "text": "First for Women is a woman's magazine. It was started in 1989."}


@pytest.mark.parametrize("number", [2, -1])
def test_a_supporting_fact_whose_sentence_is_not_there_is_no_support(tmp_path, number):
    """Keeps out an IndexError for the numbers beyond a paragraph that HotpotQA has, and a sentence counted from the end."""
    row = {**HOTPOTQA[0], "supporting_facts": [["Arthur's Magazine", 0], ["First for Women", number]]}
    assert "support" not in read_questions(file_of(tmp_path / "q", [row], True))[0][0]


def test_hotpotqa_as_hugging_face_exports_it(tmp_path):
    """Keeps out an export that reads otherwise than the published file."""
    rows = [{**row, "id": row["_id"], "context": columns(row["context"], "title", "sentences"),
             "supporting_facts": columns(row["supporting_facts"], "title", "sent_id")} for row in HOTPOTQA]
    assert read_questions(file_of(tmp_path / "h", rows, array=False)) == read_questions(file_of(tmp_path / "p", HOTPOTQA, array=True))


TABLES = ("context", "supporting_facts", "evidences")


@pytest.mark.parametrize("row", [
    TWOWIKI, {**TWOWIKI, **{key: json.dumps(TWOWIKI[key]) for key in TABLES}},
    {**TWOWIKI, "context": columns(TWOWIKI["context"], "title", "content"),
     "supporting_facts": columns(TWOWIKI["supporting_facts"], "title", "sent_id"),
     "evidences": columns(TWOWIKI["evidences"], "fact", "relation", "entity")},
    {"id": TWOWIKI["_id"], "question": TWOWIKI["question"], "golden_answers": [TWOWIKI["answer"]], "metadata": {
        "type": "compositional", "context": {**columns(TWOWIKI["context"], "title", "content"), "sentences": None},
        "supporting_facts": columns(TWOWIKI["supporting_facts"], "title", "sent_id"), "paragraphs": None, "question_decomposition": None}},
    {**TWOWIKI, "context": [{"title": t, "sentences": s} for t, s in TWOWIKI["context"]]}],
    ids=["published", "strings", "columns", "FlashRAG", "objects"])
@pytest.mark.parametrize("array", [True, False])
def test_2wikimultihopqa_in_all_its_forms(tmp_path, row, array):
    """Keeps out glued sentences (they bring no space of their own) and a release that reads otherwise than the published one."""
    questions, documents = read_questions(file_of(tmp_path / "q", [row], array))
    assert questions == [{"id": TWOWIKI["_id"], "question": TWOWIKI["question"], "answers": ["Małgorzata Braunek"], "support": [
        ("Polish-Russian War (film)", "It was directed by Xawery Żuławski."), ("Xawery Żuławski", "He is the son of Małgorzata Braunek.")]}]
    assert [d["text"] for d in documents] == ["Xawery Żuławski is a Polish film director. He is the son of Małgorzata Braunek.",
                                              "Polish-Russian War is a 2009 film. It was directed by Xawery Żuławski."]


@pytest.mark.parametrize("array", [True, False])
def test_musique_in_its_published_form(tmp_path, array):
    """Keeps out aliases before the gold answer or twice, a step's paragraph taken by its place, a sentence cut at "St.", and a lost answer."""
    shuffled = {**MUSIQUE, "paragraphs": MUSIQUE["paragraphs"][::-1]}
    for row in (MUSIQUE, shuffled):
        questions, documents = read_questions(file_of(tmp_path / "q", [row], array))
        assert questions == [{"id": "2hop__482757_12019", "question": MUSIQUE["question"], "answers": ["Miquette Giraudy", "Giraudy", "M. Giraudy"],
                              "support": MUSIQUE_SUPPORT}]     # the second step's answer stands in no sentence: the whole paragraph
        assert [(d["title"], d["text"]) for d in documents] == [(p["title"], p["paragraph_text"]) for p in row["paragraphs"]]


def test_musique_as_flashrag_publishes_it(tmp_path):
    """Keeps out support that is only looked for among paragraphs, which these rows do not bring, and those of the support as a corpus."""
    steps = [{**step, "support_paragraph": MUSIQUE["paragraphs"][step["paragraph_support_idx"]]} for step in MUSIQUE["question_decomposition"]]
    row = {"id": "dev_0", "question": MUSIQUE["question"], "golden_answers": ["Miquette Giraudy"],
           "metadata": {"answerable": True, "question_decomposition": steps}}
    questions, documents = read_questions(file_of(tmp_path / "q", [row], False))
    assert questions[0]["support"] == MUSIQUE_SUPPORT and documents == []


def test_unanswerable_questions_are_left_out_and_said(tmp_path, capsys):
    """Keeps out training on "right" answers to questions that have none, their silent loss, and an error for the ids that they share."""
    twin = {**MUSIQUE, "answerable": False, "paragraphs": [{**MUSIQUE["paragraphs"][1], "idx": 0, "title": "Lima"}],
            "question_decomposition": [{**step, "paragraph_support_idx": None} for step in MUSIQUE["question_decomposition"]]}
    questions, documents = read_questions(file_of(tmp_path / "full.jsonl", [MUSIQUE, twin], False))
    assert (questions, documents) == read_questions(file_of(tmp_path / "ans.jsonl", [MUSIQUE], False))
    (line,) = capsys.readouterr().err.splitlines()
    assert "full.jsonl: 1 of 2 questions are marked unanswerable and are left out" in line
    with pytest.raises(ValueError, match="no question that is answerable"):
        read_questions(file_of(tmp_path / "none.jsonl", [twin], False))


def test_search_r1_rows(tmp_path):
    """Keeps out ids that collide across sources, a target that is not read, and one id twice in one source."""
    row = lambda source, **more: {"id": "train_0", "question": "Who?", "data_source": source, "prompt": [{"role": "user", "content": "Who?"}],
                                  "ability": "fact", "extra_info": {"split": "train", "index": 0}, **more}
    rows = [row("nq", golden_answers=["Ada", "Ada L."]), row("hotpotqa", reward_model={"style": "rule", "ground_truth": {"target": ["Bo"]}}),
            row("popqa", reward_model={"style": "rule", "ground_truth": {"target": "Cy"}})]
    questions, _ = read_questions(file_of(tmp_path / "q", rows, False))
    assert [(q["id"], q["answers"]) for q in questions] == [
        ("train_0", ["Ada", "Ada L."]), ("hotpotqa/train_0", ["Bo"]), ("popqa/train_0", ["Cy"])]
    with pytest.raises(ValueError, match="line 4: the id train_0 stands twice"):
        read_questions(file_of(tmp_path / "q", rows + [row("nq", golden_answers=["Eve"])], False))


def test_an_array_with_byte_order_mark_line_ends_and_u2028(tmp_path):
    """Keeps out JSON arrays from Windows that do not load, one taken for JSONL because much white space precedes it, and a lost U+2028."""
    rows = '\ufeff\r\n[\r\n{"id":"a","question":"Q\u2028?","answer":"x"} ,\r\n\r\n{"id":"b","question":"Q2","answer":"y"}\r\n]\r\n'
    for text in (rows, " \n" * 5000 + rows[1:]):
        assert [q["question"] for q in read_questions(write(tmp_path / "q.json", text))[0]] == ["Q\u2028?", "Q2"]


# ---- broken files ----

@pytest.mark.parametrize("content, words", [
    (b"PAR1\x15\x04", "a Parquet file; make JSONL of it once: pip install pandas pyarrow && python -c \"import pandas; "
                      "pandas.read_parquet('{0}/q.bin').to_json('{0}/q.jsonl', orient='records', lines=True)\""),
    (gzip.compress(b"[]"), "compressed (gzip); unpack it first: gunzip -k {0}/q.bin"),
    (b"PK\x03\x04\x14", "a zip archive; unpack it first: unzip {0}/q.bin"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"), ('{"question":"Q"}'.encode("utf-16"), "UTF-16 text"),
    (b"<!DOCTYPE html>\n<html></html>", "a web page (HTML)"), (b"\xef\xbb\xbf\n <html>", "a web page (HTML)"), (b"", "empty"),
    (b" \r\n" * 5000, "empty")])
def test_what_is_no_question_file_ends_in_one_sentence(tmp_path, content, words):
    """Keeps out "not valid JSON" or a decoding error for a download that is something else."""
    (tmp_path / "q.bin").write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_questions(tmp_path / "q.bin")
    assert str(error.value).startswith(f"{tmp_path}/q.bin is {words.format(tmp_path)}") and "\n" not in str(error.value)


def test_a_folder_is_no_question_file(tmp_path):
    """Keeps out "there is no file" for a folder that is there."""
    with pytest.raises(ValueError, match="is a folder"):
        read_questions(tmp_path)


@pytest.mark.parametrize("template", ['{"question":"Q","answer":"x"}\n{"question":"Z","answer":"x"}\n', '[\n{"question":"Z","answer":"x"}\n]'])
def test_invalid_utf_8_names_its_line(tmp_path, template):
    """Keeps out Python's own words about a codec, without a file, and replacement characters in a question."""
    path = tmp_path / "q"
    path.write_bytes(template.encode().replace(b"Z", b"caf\xe9"))
    with pytest.raises(ValueError, match=r"q, line 2: not UTF-8 \(byte 0xe9\)"):
        read_questions(path)


@pytest.mark.parametrize("array", [True, False])
def test_a_download_cut_off_anywhere_is_never_taken_for_whole(tmp_path, array):
    """Keeps out a shorter data set that nobody notices, and an error that does not say what happened."""
    rows = [{"id": i, "question": "Q?", "answer": "\u2013", "answerable": True, "level": None, "context": [["T", ["One."]]]} for i in (1, 2)]
    raw = file_of(tmp_path / "q", rows, array).read_bytes()
    whole = set() if array else {n for i in range(len(raw)) if raw[i:i + 1] == b"\n" for n in (i, i + 1)}     # a cut between lines cannot be seen
    for cut in set(range(1, len(raw))) - whole:
        (tmp_path / "cut").write_bytes(raw[:cut])
        with pytest.raises(ValueError, match="ends in the middle of entry .: the" if array else "cut off|not UTF-8"):
            read_questions(tmp_path / "cut")


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
                           max_leaves=6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.dictionaries(st.text(), json_values), max_size=4), st.sampled_from([None, 1]), st.sampled_from(["", "\n ", "\r\n"]))
def test_an_array_read_entry_by_entry_is_what_json_reads(tmp_path_factory, rows, indent, around):
    """Keeps out entries lost or split where brackets and commas stand inside strings; the oracle is json.loads."""
    path = tmp_path_factory.mktemp("a") / "a.json"
    path.write_bytes((around + json.dumps(rows, indent=indent, ensure_ascii=True) + around).encode())
    assert list(read_array(path)) == list(enumerate(json.loads(path.read_text()), 1))


@pytest.mark.skipif(not HOTPOT.exists(), reason="needs hotpotqa_100.json, which does not come with the project")
def test_hotpotqa_as_published():
    """Keeps out a reader that loses paragraphs or duplicates shared ones."""
    questions, documents = read_questions(HOTPOT)
    assert len(questions) == 100 and len({q["id"] for q in questions}) == 100 and len(documents) == 994
    assert all(q["answers"][0] and q["support"] for q in questions)
    rows = json.loads(HOTPOT.read_text())                      # the oracle: the file itself
    for row, q in zip(rows, questions):
        context = dict(row["context"])
        assert q["support"] == [(title, context[title][n].strip()) for title, n in row["supporting_facts"]]
    spaced = {(t, "".join(s)) for row in rows for t, s in row["context"] if any(x[:1] == " " for x in s[1:])}
    assert len(spaced) > 900 and {(d["title"], d["text"]) for d in documents} >= spaced


def test_a_corpus_without_the_documents_that_answers_rest_on_is_refused(tmp_path, capsys):
    """Keeps out hours of training on questions that nobody can answer from the given corpus; where a part is lacking, it is said."""
    rows = [HOTPOTQA[0], json.loads(json.dumps({**HOTPOTQA[0], "_id": "b"}).replace("First for Women", "Second for Women"))]
    questions, women = file_of(tmp_path / "q", rows, array=True), [{"title": f"{n} for Women", "text": "t"} for n in ("First", "Second")]
    arthur, other = {"title": "Arthur's Magazine", "text": "t"}, {"title": "Elsewhere", "text": "t"}

    def load(*documents):
        load_data(str(questions), str(file_of(tmp_path / "c", documents, array=False)), 0, 0, "test", "{question}")
        return capsys.readouterr().err

    assert load(arthur, *women) == ""
    assert "c lacks documents that the answers of 1 of 2 questions" in load(arthur, women[0]) and "'Second for Women' of question b" in load(arthur, women[0])
    with pytest.raises(ValueError, match='lacks documents that the answers of 2 of 2 .*"Arthur\'s Magazine" .* give the corpus that belongs'):
        load(other, *women)
