"""From a finished trajectory to its score: read the answer (C2), check the format (B3), compare (B4), score (B2).

    turns = ["<think>I recall it.</think><answer>Bergen</answer>"]      # the policy's own text of each turn
    compute_score(turns, ["Bergen", "Bjørgvin"])                        # 1.0

Only what the policy wrote is looked at: neither the prompt nor a tool's text can answer, or spoil the format. `turns` holds
for each turn its whole text as the model saw it: an opening <mem> that the loop put there is included, a closing special
token such as <|im_end|> is not (the loop takes it off by its id, before decoding).

`golds` is one answer ("Ada"), a list of aliases (["Ada", "Ada Lovelace"]), or, for several questions asked as one, either
aliases that hold the parts in order, separated by ";" (["Ada; 1815"]), or one list of aliases a part ([["Ada"], ["1815"]]).
"""
import re
import string
from collections import Counter

# ----------------------------------------------------------------------------------------------------- the answer
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)       # an <answer> never holds another
PUNCTUATION = str.maketrans("", "", string.punctuation)


def extract_solution(text: str) -> str | None:
    """C2: what stands in the last complete <answer>…</answer>, stripped; None if there is none."""
    answers = ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def normalize_answer(text: str) -> str:
    """B4: SQuAD and HotpotQA's normalisation, in their order: lower case; the 32 ASCII punctuation characters deleted
    (not replaced by a space); the articles a, an, the replaced by a space; white space joined."""
    text = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


# ------------------------------------------------------------------------------------------ one answer, one alias
def exact_match(prediction: str, gold: str) -> float:
    """B4: 1 if both are the same after normalisation, else 0; so what normalises to nothing ("A") equals only its like."""
    return float(normalize_answer(prediction) == normalize_answer(gold))


def token_f1(prediction: str, gold: str) -> float:
    """B4: F1 = 2 P R / (P + R) over the multiset of shared words, HotpotQA's rule.

    yes, no and noanswer count only as a whole: "yes, he did" against "yes" is 0. No shared word is 0, even if both are empty.
    """
    prediction, gold = normalize_answer(prediction), normalize_answer(gold)
    if prediction != gold and {prediction, gold} & {"yes", "no", "noanswer"}:
        return 0.0
    p, g = prediction.split(), gold.split()
    shared = sum((Counter(p) & Counter(g)).values())
    if shared == 0:
        return 0.0
    P, R = shared / len(p), shared / len(g)
    return 2 * P * R / (P + R)


# ------------------------------------------------------------------------------------------ all aliases, all parts
def answer_parts(golds) -> list[list[str]]:
    """`golds` in any of its forms (see the top of the file) -> one list of aliases a part; one part is the usual case.

    Aliases are split at ";" only if all have equally many parts; otherwise the ";" is taken for a part of the answer.
    """
    golds = [golds] if isinstance(golds, str) else list(golds)     # a bare string is one alias, not a list of letters
    if any(not isinstance(gold, str) for gold in golds):
        parts = [[gold] if isinstance(gold, str) else list(gold) for gold in golds]
    else:
        split = [[part.strip() for part in gold.split(";")] for gold in golds]
        parts = [list(aliases) for aliases in zip(*split)] if len(set(map(len, split))) == 1 else [golds]
    if not all(parts):
        raise ValueError(f"golds={golds!r}: a question, and each part of one, needs at least one right answer.")
    return parts


def part_scores(prediction: str | None, golds, metric) -> list[float]:
    """B4: metric(prediction, alias) for each part, best over its aliases; 0 for a part that is missing or too many.

    The prediction is split at ";" only where there are several parts. None, no answer at all, has every part missing.
    """
    parts = answer_parts(golds)
    predicted = [] if prediction is None else [prediction] if len(parts) == 1 else prediction.split(";")
    scores = [max(metric(p, gold) for gold in aliases) for p, aliases in zip(predicted, parts)]
    return scores + [0.0] * (max(len(predicted), len(parts)) - len(scores))


def em_check(prediction: str | None, golds: list[str]) -> bool:
    """B4: exact match, best over the aliases; of several parts each must be right, and none too many."""
    return all(part_scores(prediction, golds, exact_match))


def f1_score(prediction: str | None, golds: list[str]) -> float:
    """B4: word F1, best over the aliases; of several parts the mean, a missing one and one too many counting 0."""
    scores = part_scores(prediction, golds, token_f1)
    return sum(scores) / len(scores)


# ----------------------------------------------------------------------------------------------------- the format
ACTIONS = ("search", "access", "answer")
TAG = re.compile(r"<(/?)(mem|think|search|access|answer|information)>")


def read_blocks(turn: str) -> tuple[list[tuple[str, str]], str, str]:
    """One turn's tags walked in order -> (its blocks as (tag, content), the text outside them, a fault or "").

    Two states: outside, where only an opening tag may come, and inside a block, where only its own closing tag may.
    """
    blocks, outside, inside, at = [], "", None, 0
    for tag in TAG.finditer(turn):
        closing, name = tag.groups()
        text, at = turn[at:tag.start()], tag.end()
        if inside is None and not closing:
            outside, inside = outside + text, name
        elif inside == name and closing:
            blocks.append((name, text))
            inside = None
        else:
            return blocks, outside, f"{tag.group()} " + (f"stands inside <{inside}>" if inside else "closes nothing")
    return blocks, outside + ("" if inside else turn[at:]), f"<{inside}> is never closed" if inside else ""


def broken_rules(turns: list[str]):
    """B3: why a trajectory is not in valid format, rule by rule; each rule presumes that those before it hold."""
    if not turns:
        yield "rule 1: there is no turn"
    for n, turn in enumerate(turns, 1):
        if not turn.strip():
            yield f"rule 1: turn {n} is empty"

    read = [read_blocks(turn) for turn in turns]
    for n, (_, _, fault) in enumerate(read, 1):
        if fault:
            yield f"rule 2: in turn {n} {fault}"

    blocks = [turn_blocks for turn_blocks, _, _ in read]           # turn -> [(tag, content)]
    names = [[name for name, _ in turn_blocks] for turn_blocks in blocks]
    for n, turn_names in enumerate(names, 1):
        kinds = ["action" if name in ACTIONS else name for name in turn_names if name != "information"]
        if kinds not in (["think", "action"], ["mem", "think", "action"]):
            yield f"rule 3: turn {n} is {turn_names}, not an optional mem, one think, one action"

    for n, (_, outside, _) in enumerate(read, 1):
        if outside.strip():
            yield f"rule 4: turn {n} has text outside its tags: {outside.strip()[:40]!r}"

    for n, turn_names in enumerate(names, 1):
        if n < len(turns) and "answer" in turn_names:
            yield f"rule 5: turn {n} of {len(turns)} answers before the last turn"
        if n == len(turns) and turn_names[-1] != "answer":
            yield f"rule 5: the last turn, {n}, does not end with an <answer>"

    for n, turn_blocks in enumerate(blocks, 1):
        for name, content in turn_blocks:
            if name in ACTIONS and not content.strip():
                yield f"rule 6: <{name}> in turn {n} is empty"

    for n, turn_names in enumerate(names, 1):
        if "information" in turn_names:
            yield f"rule 7: the policy wrote <information> itself in turn {n}"

    for n, turn_blocks in enumerate(blocks, 1):
        memory = next((content for name, content in turn_blocks if name == "mem"), None)
        if n == 1 and memory is not None:
            yield "rule 8: turn 1 has a <mem>, but nothing to remember yet"
        if n > 1 and not (memory or "").strip():
            yield f"rule 8: turn {n} does not open with a <mem> that says something"


def validate_format(turns: list[str]) -> tuple[bool, str]:
    """B3: (True, "") or (False, the first rule broken and where). `turns`: see the top of the file; the <mem> that the loop
    forces at the start of a turn belongs to the turn's text, so the check sees prefill and completion as one.

    1 there is a turn, and none is empty          2 every tag that opens closes, once, in order, without nesting
    3 a turn is an optional memory, one <think>, one action        4 outside tags there is only white space
    5 one <answer>, in the last turn, and nothing after it         6 no action is empty, the answer included
    7 the policy wrote no <information>           8 every turn but the first opens with a non-empty <mem>; the first has none

    A <think> may be empty. Tags are the six of TAG exactly as written there; anything else in angle brackets is text.
    """
    reason = next(broken_rules(turns), "")
    return reason == "", reason


# ------------------------------------------------------------------------------------------------------ the score
def compute_score(turns: list[str], golds: list[str], format_score: float = 0.1) -> float:
    """B2: 0 in invalid format, else EM + (1 - EM) * format_score, EM the share of parts that match exactly:
    1 if all are right, format_score if none is. A missing part and one too many count as wrong."""
    valid, _ = validate_format(turns)
    if not valid:
        return 0.0
    matches = part_scores(extract_solution(turns[-1]), golds, exact_match)
    EM = sum(matches) / len(matches)
    return EM + (1 - EM) * format_score
