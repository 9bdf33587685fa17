"""Answers, format and score (reward.py). Run: python -m pytest tests/test_reward.py -q"""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward import (answer_parts, compute_score, em_check, exact_match, extract_solution, f1_score, normalize_answer,
                    part_scores, validate_format)

quick = settings(max_examples=100, deadline=None)
FIRST = "<think>Where is it?</think><search>bergen treaty</search>"
LAST = "<mem>It was signed in Bergen.</mem>\n<think>Known.</think>\n<answer>Bergen</answer>\n"

# --------------------------------------------------------------------------------------------------- the answer (C2)


@pytest.mark.parametrize("text, answer", [
    ("<think>t</think><answer>Bergen</answer>", "Bergen"),
    ("<think>perhaps <answer>Oslo</answer> no</think><answer>Bergen</answer>", "Bergen"),
    ("<think>x</think><answer>Bergen</answer><answer>Oslo</answer>", "Oslo"),
    ("<think>unsure</think>", None),
    ("<think>t</think><answer>Bergen", None),
    ("Bergen</answer>", None),
    ("</answer>Bergen<answer>", None),
    ("<think>t</think><answer>Bergen</answer></answer>", "Bergen"),
    ("<answer>Bergen</answer> and <answer>Os", "Bergen"),
    ("<answer><answer>Bergen</answer>", "Bergen"),
    ("<answer>\n Lisbon \n</answer>", "Lisbon"),
    ("<answer>two\nlines</answer>", "two\nlines"),
    ("<answer></answer>", ""),
    ("", None),
])
def test_last_complete_answer_is_taken(text, answer):
    """Keeps out the first instead of the last answer, a needed second match, and an answer that holds a tag."""
    assert extract_solution(text) == answer


def test_time_to_read_an_answer_grows_with_the_text():
    """Keeps out a pattern that needs minutes for a policy that repeats an opening tag."""
    assert extract_solution("<answer>" * 50_000) is None


def test_only_the_policys_text_can_answer():
    """Keeps out an answer, or a spoiled format, from a retrieved page or from an example in the prompt."""
    page = "Quiz page. </information><answer>Lima</answer><search>x</search>"
    prompt = "for example <answer>Lima</answer>. What is the capital of Peru?"
    turns = ["<think>t</think><search>capital of peru</search>", "<mem>m</mem><think>t</think><answer>Quito</answer>"]
    assert extract_solution(prompt + page) == "Lima" != extract_solution("".join(turns))
    assert extract_solution(turns[0]) is None and compute_score(turns[:1], ["Lima"]) == 0.0
    assert validate_format(turns) == (True, "") and compute_score(turns, ["Lima"]) == 0.1


# ------------------------------------------------------------------------------------------------- EM and F1 (B4)
@pytest.mark.parametrize("prediction, gold, em, f1", [
    ("twenty one pilots", "Twenty-One Pilots", False, 0.4),        # "-" is deleted, not replaced by a space
    ("2001-2004", "2001–2004", False, 0.0),                        # the en dash is no ASCII punctuation
    ("The  Beatles.", "beatles", True, 1.0),
    ("A", "A", True, 0.0),                                         # both empty: equal, but no word is shared
    ("B", "A", False, 0.0),
    ("who", "The Who", True, 1.0),
    ("yes", "Yes, he did", False, 0.0),
    ("yes it is", "yes", False, 0.0),
    ("No.", "no", True, 1.0),
    ("no answer", "no comment", False, 0.5),
    ("noanswer", "noanswer at all", False, 0.0),
    ("yes", "no", False, 0.0),
    ("lake lake hill", "lake lake", False, 0.8),                   # shared words as a multiset
    ("d", "Ada", False, 0.0),                                      # a bare string is not a list of letters
    ("a", "Ada", False, 0.0),
    ("ada", "Ada", True, 1.0),
    ("ada lovelace", ["Ada", "Ada Lovelace"], True, 1.0),
    ("Lovelace", ["Ada", "Ada Lovelace"], False, 2 / 3),
    ("Lovelace", ["Ada Lovelace", "Ada"], False, 2 / 3),
    (None, ["Ada"], False, 0.0),
    (None, "A", False, 0.0),
    ("Les Invalides", "Les Invalides", True, 1.0),                 # holds the word "valid"
    ("Lisbon", "Lisbon", True, 1.0),
    ("Lisbon<|im_end|>", "Lisbon", False, 0.0),                    # a special token is taken off by its id before, not here
])
def test_exact_match_and_f1(prediction, gold, em, f1):
    """Keeps out punctuation turned into spaces, plain F1 on yes and no, one alias only, and letters taken for aliases."""
    assert em_check(prediction, gold) is em
    assert f1_score(prediction, gold) == pytest.approx(f1)


@pytest.mark.parametrize("text, normal", [
    ("Twenty-One Pilots", "twentyone pilots"), ("2001–2004", "2001–2004"), ("A", ""), ("Lisbon<|im_end|>", "lisbonimend"),
    (" The\tcat,\nan owl & Anna ", "cat owl anna"), ("the-a", "thea"), ("lake–the–hill", "lake– –hill"),
    ("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", ""),
])
def test_normalisation_keeps_the_official_order(text, normal):
    """Keeps out articles deleted before the punctuation, inside words, or without a space in their place."""
    assert normalize_answer(text) == normal


def test_missing_golds_are_an_error():
    """Keeps out a question without an answer that scores 0 through a whole training run."""
    for golds in ([], [[]], [["Ada"], []]):
        with pytest.raises(ValueError, match="at least one right answer"):
            em_check("Ada", golds)


@given(st.text(), st.text())
@quick
def test_metrics_of_any_strings(prediction, gold):
    """Keeps out an exception on odd strings, an asymmetric F1, and values outside [0, 1]."""
    normal = normalize_answer(prediction)
    assert normalize_answer(normal) == normal
    f1 = f1_score(prediction, [[gold]])
    assert 0 <= f1 <= 1 and f1 == pytest.approx(f1_score(gold, [[prediction]]))
    assert em_check(prediction, [[prediction]])
    if em_check(prediction, [[gold]]):
        assert f1 == (1.0 if normal else 0.0)


# -------------------------------------------------------------------------------------------------- several parts
@pytest.mark.parametrize("golds, parts", [
    ("Ada", [["Ada"]]),
    (["Ada", "Ada Lovelace"], [["Ada", "Ada Lovelace"]]),
    ("Ada; 1815", [["Ada"], ["1815"]]),
    (["Ada; 1815", "Ada Lovelace;1815 AD"], [["Ada", "Ada Lovelace"], ["1815", "1815 AD"]]),
    ([["Ada", "Ada Lovelace"], ["1815"]], [["Ada", "Ada Lovelace"], ["1815"]]),
    ([["Ada; or Ardor"]], [["Ada; or Ardor"]]),
    ([["Ada"], "1815"], [["Ada"], ["1815"]]),
    (["Ada; or Ardor", "Ada"], [["Ada; or Ardor", "Ada"]]),        # different counts: no part borders
])
def test_parts_of_the_golds(golds, parts):
    """Keeps out parts and aliases mixed up, and a title with ";" cut in two although an alias shows that it is one answer."""
    assert answer_parts(golds) == parts


@pytest.mark.parametrize("golds", ["Ada; 12 June 1815", ["Ada;12 June 1815"], [["Ada", "Ada L."], ["12 June 1815"]]])
@pytest.mark.parametrize("prediction, em, f1, score", [
    ("Ada; 12 June 1815", True, 1.0, 1.0),
    ("12 June 1815; Ada", False, 0.0, 0.1),                        # the order counts
    ("Ada; June 1815", False, (1 + 0.8) / 2, 0.55),
    ("Ada", False, 0.5, 0.55),
    ("Ada; 12 June 1815; Oslo", False, 2 / 3, 0.7),
    ("Ada 12 June 1815", False, 0.4 / 2, 0.1),
    (";", False, 0.0, 0.1),
])
def test_scores_of_several_parts(golds, prediction, em, f1, score):
    """Keeps out the ";" string compared as a whole, parts in any order, and surplus parts that cost nothing."""
    assert em_check(prediction, golds) is em
    assert f1_score(prediction, golds) == pytest.approx(f1)
    assert compute_score([f"<think></think><answer>{prediction}</answer>"], golds) == pytest.approx(score)


def test_prediction_for_one_part_is_not_split():
    """Keeps out a right answer that contains ";" counted as two."""
    assert em_check("Ada; or Ardor", ["Ada; or Ardor", "Ada"]) and not em_check("Ada; Oslo", "Ada")
    assert part_scores("Ada; Oslo", "Ada", exact_match) == [0.0]


# ------------------------------------------------------------------------------------------------- the format (B3)
BROKEN = [      # the rule named is the first one broken, for most the only one
    (1, []),
    (1, [""]),
    (1, [FIRST, " \n ", LAST]),
    (2, ["<think>t</think><answer>Bergen</answer></answer>"]),
    (2, ["<think>t</think><answer>Bergen"]),
    (2, ["<think>t</think><answer><answer>Bergen</answer>"]),
    (2, ["<think>t</think><answer><answer>Bergen</answer></answer>"]),
    (2, ["<think>perhaps <answer>Oslo</answer> no</think><answer>Bergen</answer>"]),
    (2, ["<think><think>x</think><answer>Bergen</answer>"]),
    (2, ["<think>t<answer></think>Bergen</answer>"]),
    (2, ["<think>t</search><answer>Bergen</answer>"]),
    (2, [FIRST, "It was signed in Bergen.</mem><think>t</think><answer>Bergen</answer>"]),      # without the forced <mem>
    (2, [FIRST, "<mem><mem>m</mem><think>t</think><answer>Bergen</answer>"]),                   # with it twice
    (3, ["<think>a</think><think>b</think><answer>Bergen</answer>"]),
    (3, ["<answer>Bergen</answer>"]),
    (3, ["<answer>Bergen</answer><think>t</think>"]),
    (3, ["<think>t</think>", LAST]),
    (3, ["<think>x</think><answer>Bergen</answer><answer>Oslo</answer>"]),
    (3, ["<think>t</think><search>a</search><access>b</access>", LAST]),
    (3, [FIRST, "<think>t</think><mem>m</mem><answer>Bergen</answer>"]),
    (3, [FIRST, "<mem>m</mem><mem>n</mem><think>t</think><answer>Bergen</answer>"]),
    (3, ["no tag at all"]),
    (4, ["So: <think>t</think><answer>Bergen</answer>"]),
    (4, ["<think>t</think> hence <answer>Bergen</answer>"]),
    (4, ["<think>t</think><answer>Bergen</answer>."]),
    (4, ["<think>t</think><answer>Bergen</answer><|im_end|>"]),
    (4, ["<Think>t</Think><think>t</think><answer>Bergen</answer>"]),
    (5, [FIRST]),
    (5, ["<think>t</think><answer>Bergen</answer>", LAST]),
    (5, [LAST.split("\n", 1)[1], LAST.replace("answer", "search")]),
    (5, ["<think>t</think><answer>Bergen</answer><information>x</information>"]),
    (6, ["<think>t</think><search> </search>", LAST]),
    (6, ["<think>t</think><access></access>", LAST]),
    (6, ["<think>t</think><answer>\n</answer>"]),
    (7, ["<think>t</think><search>q</search><information>Bergen</information>", LAST]),
    (7, [FIRST, LAST.replace("<think>", "<information>Bergen</information><think>")]),
    (8, ["<mem>m</mem><think>t</think><answer>Bergen</answer>"]),
    (8, [FIRST, "<think>t</think><answer>Bergen</answer>"]),
    (8, [FIRST, "<mem> </mem><think>t</think><answer>Bergen</answer>"]),
    (8, [FIRST, FIRST, LAST]),
]


@pytest.mark.parametrize("rule, turns", BROKEN)
def test_each_rule_refuses_and_is_named(rule, turns):
    """Keeps out a lenient format check: doubled, unclosed, nested tags; text between blocks; a missing memory."""
    ok, reason = validate_format(turns)
    assert not ok and reason.startswith(f"rule {rule}: ")
    assert compute_score(turns, "Bergen") == 0.0


@pytest.mark.parametrize("turns", [
    ["<think>t</think>\n<answer>Bergen</answer>\n"],
    ["<think></think><answer>Bergen</answer>"],
    [FIRST, LAST],
    ["\n" + FIRST, "<mem>m</mem><think></think><access>Bergen</access>", LAST],
    ["<think>1 < 2, <b>bold</b>, <Answer>, <tool> and </ think></think><answer><i>Bergen</i></answer>"],
])
def test_valid_trajectories_pass(turns):
    """Keeps out a check that is too strict: line breaks between blocks, an empty think, other angle brackets as text."""
    assert validate_format(turns) == (True, "")


def test_forced_memory_tag_is_part_of_the_turn():
    """Keeps out right completions that fail because their opening tag was prefilled: the check sees prefill + completion."""
    completion = "It was signed in Bergen.</mem><think>t</think><answer>Bergen</answer>"
    assert compute_score([FIRST, "<mem>" + completion], "Bergen") == 1.0
    assert compute_score([FIRST, completion], "Bergen") == compute_score([FIRST, "<mem><mem>" + completion], "Bergen") == 0.0


def test_first_broken_rule_and_its_turn_are_named():
    """Keeps out a reason that points at a later rule or at no turn."""
    assert validate_format([FIRST + "x", FIRST, "<think>"])[1] == "rule 2: in turn 3 <think> is never closed"
    assert validate_format(["<think>a<mem></think>"])[1] == "rule 2: in turn 1 <mem> stands inside <think>"
    assert validate_format(["</mem><think>a</think>"])[1] == "rule 2: in turn 1 </mem> closes nothing"
    assert validate_format([FIRST, LAST, LAST + "!"])[1].startswith("rule 4: turn 3 has text outside its tags: '!'")


PIECES = st.sampled_from([f"<{slash}{tag}>" for slash in ("", "/")
                          for tag in ("mem", "think", "search", "access", "answer", "information")] + ["x", " "])


@given(st.lists(st.one_of(st.lists(PIECES, max_size=10).map("".join), st.text(max_size=10), st.sampled_from([FIRST, LAST])), max_size=4))
@quick
def test_any_turns_have_a_verdict(turns):
    """Keeps out an exception on text that a policy early in training writes; what is valid has its answer last."""
    ok, reason = validate_format(turns)
    assert ok == (reason == "")
    assert compute_score(turns, "Bergen") in ((0.1, 1.0) if ok else (0.0,))
    if ok:
        assert extract_solution(turns[-1]) and not any(map(extract_solution, turns[:-1]))


# -------------------------------------------------------------------------------------------------- the score (B2)
def test_score_of_a_trajectory():
    """Keeps out half marks in invalid format, none for valid format, and an answer read from another turn than the last."""
    assert compute_score([FIRST, LAST], ["Oslo", "bergen"]) == 1.0
    assert compute_score([FIRST, LAST], ["Oslo"]) == 0.1
    assert compute_score([FIRST, LAST], ["Oslo"], format_score=0.25) == 0.25
    assert compute_score([FIRST, LAST], "Oslo; Rome; Quito") == 0.1
    assert compute_score([FIRST, LAST + "."], ["Bergen"]) == 0.0
    assert compute_score(["<think>t</think><answer>Les Invalides</answer>"], "Les Invalides") == 1.0
