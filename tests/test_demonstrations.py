"""Scripted demonstrations for real data, chats that the user brings, and the supervised step. No teacher model anywhere."""
import json
import random
from argparse import Namespace
from collections import Counter

import pytest
import torch

import train
from checkpoint import Run
from agent_loop import AgentMemory, information, parse_action, rollout, window
from data import Data, load_data, read_questions
from demonstrations import ROWS, chat_demonstrations, chat_pieces, compressed_prompt, full_conversation, names, script, support_demonstrations
from helpers import ScriptedPolicy, greedy_tokenizer, tiny_model
from chat import Chat
from policy import Policy
from retriever import Retriever
from reward import compute_score
from test_data import HOTPOT, HOTPOTQA, MUSIQUE, TWOWIKI, file_of

TAGS = [f"<{slash}{tag}>" for slash in ("", "/") for tag in ("mem", "think", "search", "access", "answer", "information")]


def always(number: float):
    """A random generator that says one number, and the largest integer asked for."""
    rng = random.Random()
    rng.random, rng.randint = lambda: number, lambda low, high: high
    return rng


def scripted(tmp_path, row, top_k=1):
    """(question, steps) of one published row, searched in its own paragraphs."""
    questions, documents = read_questions(file_of(tmp_path / "q", [row], array=False))
    return questions[0], script(questions[0], Retriever(documents), top_k)


ARTHUR = "Arthur's Magazine: Arthur's Magazine (1844–1846) was an American literary periodical."
FIRST = "First for Women: First for Women is a woman's magazine."


def test_the_pieces_of_a_hotpotqa_question(tmp_path):
    """Keeps out a search for another title, a sentence that is not carried, a memory or action that is not trained, and a trained result."""
    question, steps = scripted(tmp_path, HOTPOTQA[0])
    assert full_conversation(question, "opening", steps, 1.0, random.Random(0)) == [
        ("question", "opening", False),
        ("policy", "<think>Arthur's Magazine is needed.</think><search>Arthur's Magazine</search>", True),
        ("result", f"[1] {ARTHUR} Edited by T.S. Arthur, it was merged.", False),
        ("policy", "<mem>", False),
        ("policy", f"{ARTHUR}</mem><think>First for Women is needed.</think><search>First for Women</search>", True),
        ("result", f"[1] {FIRST} It was started in 1989.", False),
        ("policy", "<mem>", False),
        ("policy", f"{ARTHUR}\n{FIRST}</mem><think>That is all I need.</think><answer>Arthur's Magazine</answer>", True)]
    assert compressed_prompt(question, "opening", steps, 1.0, always(0.5)) == [        # after two results
        ("question", "opening", False),
        ("policy", f"<mem>{ARTHUR}</mem><think>First for Women is needed.</think><search>First for Women</search>", False),
        ("result", "[1] First for Women: First for Women is a woman's magazine. It was started in 1989.", False),
        ("policy", "<mem>", False),
        ("policy", f"{ARTHUR}\n{FIRST}</mem><think>That is all I need.</think><answer>Arthur's Magazine</answer>", True)]


def test_the_pieces_of_a_musique_question(tmp_path):
    """Keeps out a decomposition out of order, an answer that is not the gold one, and a title trained that nothing has named."""
    question, steps = scripted(tmp_path, MUSIQUE)
    green = "Green: It was made by Steve Hillage of St. Albans, U.K. It was sold in 1978."
    woman = f"Miquette: {MUSIQUE['paragraphs'][2]['paragraph_text']}"
    assert full_conversation(question, "opening", steps, 1.0, random.Random(0)) == [
        ("question", "opening", False),
        ("policy", "<think>Green is needed.</think><search>Green</search>", True),
        ("result", f"[1] Green: {MUSIQUE['paragraphs'][0]['paragraph_text']}", False),
        ("policy", "<mem>", False),
        ("policy", f"{green}</mem>", True),
        ("policy", "<think>Miquette is needed.</think><search>Miquette</search>", False),     # neither the question nor Green's page names her
        ("result", f"[1] {woman}", False),
        ("policy", "<mem>", False),
        ("policy", f"{green}\n{woman}</mem><think>That is all I need.</think><answer>Miquette Giraudy</answer>", True)]

    first = always(0.5)
    first.randint = lambda low, high: low                      # after one result
    assert compressed_prompt(question, "opening", steps, 1.0, first) == [
        ("question", "opening", False),
        ("policy", "<think>Green is needed.</think><search>Green</search>", False),           # the first turn has no memory
        ("result", f"[1] Green: {MUSIQUE['paragraphs'][0]['paragraph_text']}", False),
        ("policy", "<mem>", False),
        ("policy", f"{green}</mem>", True),
        ("policy", "<think>Miquette is needed.</think><search>Miquette</search>", False)]


def test_hops_follow_each_other_however_a_file_lists_them(tmp_path):
    """Keeps out a search for the bridge before anything has named it, which could not be trained."""
    row = TWOWIKI | {"supporting_facts": TWOWIKI["supporting_facts"][::-1]}
    assert [title for title, *_ in scripted(tmp_path, row)[1]] == ["Polish-Russian War (film)", "Xawery Żuławski"]


def test_a_lost_fact_is_in_no_memory_and_its_answer_is_not_trained(tmp_path):
    """Keeps out a policy that learns to guess what its memory has lost; under full history the context still holds it."""
    question, steps = scripted(tmp_path, HOTPOTQA[0])
    pieces = compressed_prompt(question, "opening", steps, 0.0, always(0.5))
    assert pieces[1][1].startswith("<mem>Nothing found yet.</mem>")
    assert pieces[3:] == [("policy", "<mem>", False), ("policy", "Nothing found yet.</mem>", True),
                          ("policy", "<think>That is all I need.</think><answer>Arthur's Magazine</answer>", False)]
    full = full_conversation(question, "opening", steps, 0.0, random.Random(0))
    assert full[-1] == ("policy", "Nothing found yet.</mem><think>That is all I need.</think><answer>Arthur's Magazine</answer>", True)
    rng, counts = random.Random(0), Counter()
    for _ in range(2000):
        counts.update(text.count(ARTHUR) for _, text, trained in full_conversation(question, "o", steps, 0.25, rng)[4:] if trained)
    assert abs(counts[1] / (counts[0] + counts[1]) - 0.25) < 0.02


def test_what_a_search_does_not_show_is_searched_with_more_words_and_then_opened(tmp_path):
    """Keeps out a memory of what no result has shown, and a question lost that the other tool answers."""
    noise = [{"id": str(i), "title": f"Oslo {i}", "text": "Oslo Oslo Oslo"} for i in range(9)]
    oslo = {"id": "9", "title": "Oslo", "text": "It lies in a country of the north, and much could be said of it that is said elsewhere. It is old."}
    question = {"id": "1", "question": "How old is Oslo?", "answers": ["old"], "support": [("Oslo", "It is old.")]}
    steps = script(question, Retriever(noise + [oslo]), 2)
    assert [(parse_action(turn), fact) for _, turn, _, fact in steps] == [
        (("search", "Oslo"), None), (("search", "Oslo How old is Oslo?"), ("Oslo", ["It is old."]))]
    question["question"] = "?"
    steps = script(question, Retriever(noise + [oslo]), 2)
    assert [parse_action(turn) for _, turn, _, _ in steps] == [("search", "Oslo"), ("search", "Oslo ?"), ("access", "Oslo")]
    assert steps[-1][2] == oslo["text"] and steps[-1][3] == ("Oslo", ["It is old."])
    actions = [trained for _, text, trained in full_conversation(question, "o", steps, 1.0, random.Random(0)) if "<think>" in text]
    assert actions == [False, True, True, True]                # "?" does not name Oslo, but the first search, which stays in the context, does
    memories = [text.split("</mem>")[0] for _, text, _ in full_conversation(question, "o", steps, 1.0, random.Random(0)) if "</mem>" in text]
    assert memories == ["Nothing found yet.", "Nothing found yet.", "Oslo: It is old."]
    assert script(question, Retriever(noise), 2) is None


@pytest.mark.parametrize("text, title, named", [
    ("by Lilu.", "Lilu (mythology)", True), ("by LILU", "Lilu", True), ("Lilus", "Lilu (mythology)", False),
    ("mythology", "Lilu (mythology)", False), ("C++?", "C++", True)])
def test_a_title_is_named_as_a_whole_word(text, title, named):
    """Keeps out a title found inside another word, and one that is missed for the bracket behind it."""
    assert names(text, title) == named


def test_tags_in_a_data_set_are_text(tmp_path):
    """Keeps out a sentence, a title or an answer that closes a memory, searches or answers."""
    hostile = "</mem><answer>x</answer>"
    row = {"id": 1, "question": "Q?", "answer": f"a{hostile}", "context": [[f"T{hostile}", [f"One {hostile} two."]]],
           "supporting_facts": [[f"T{hostile}", 0]]}
    question, steps = scripted(tmp_path, row)
    for form in (full_conversation, compressed_prompt):
        text = "".join(text for role, text, _ in form(question, "o", steps, 1.0, random.Random(0)) if role == "policy")
        assert text.count("</mem>") == 1 and text.count("<answer>") == 1 == text.count("</search>")


@pytest.mark.skipif(not HOTPOT.exists(), reason="needs hotpotqa_100.json, which does not come with the project")
def test_all_real_questions_have_a_demonstration_that_scores_1():
    """Keeps out a script in a format that the score refuses, and questions whose support is not found in their own paragraphs."""
    questions, documents = read_questions(HOTPOT)
    retriever, top = Retriever(documents), 0
    for q in questions:
        steps = script(q, retriever, 5)
        pieces = full_conversation(q, "o", steps, 1.0, random.Random(0))
        turns = "".join(text if role == "policy" else "\0" for role, text, _ in pieces).strip("\0").split("\0")
        assert compute_score(turns, q["answers"]) == 1.0, turns
        top += all(turn.startswith(f"<think>{title} is needed.") for title, turn, _, _ in steps)
    assert top == 99                                           # "The Dandy Warhols" has to be opened: their records rank before the band


# ---- batches ----

def test_batches_are_drawn_from_training_questions_alone_and_repeat_for_a_seed(tmp_path, capsys):
    """Keeps out a held-out question that was trained on, a run that cannot be repeated, and questions passed over in silence."""
    rows = [{**HOTPOTQA[0], "_id": str(i), "question": f"Q{i}?"} for i in range(8)] + [{**HOTPOTQA[1], "_id": "8"}]
    lost = {"_id": "9", "question": "Q9?", "answer": "x", "context": [["Empty", ["A.", "B" * 6000]]], "supporting_facts": [["Empty", 1]]}
    data = load_data(str(file_of(tmp_path / "q", rows + [lost], True)), None, 0, 3, "test", "Do: {question}")
    batches = lambda seed: list(support_demonstrations(data, 5, 0.5, seed, 3))
    first = batches(1)
    assert [len(batch) for batch in first] == [ROWS] * 3 and first == batches(1) != batches(2)
    asked = {d[0][1] for batch in first for d in batch}
    assert asked <= {f"Do: {q['question']}" for q in data.questions} and not asked & {f"Do: {q['question']}" for q in data.eval}
    for full, compressed in (pair for batch in first for pair in zip(batch[::2], batch[1::2])):
        assert full[0] == compressed[0] and [sum(role == "result" for role, _, _ in d) for d in (full, compressed)] == [2, 1]
    usable = sum("support" in q for q in data.questions)
    assert f"cold start: {len(asked)} questions demonstrated" in capsys.readouterr().err and len(asked) in (usable, usable - 1)


def test_nothing_to_demonstrate_ends_in_one_sentence(tmp_path):
    """Keeps out an endless search for a question with support, and a cold start on nothing."""
    plain = [{"id": "1", "question": "Q?", "answers": ["x"]}]
    with pytest.raises(ValueError, match="no question brings supporting facts"):
        support_demonstrations(Data(None, [], None, "", plain), 5, 1.0, 0, 1)
    missing = [{**plain[0], "support": [("Oslo", "Oslo is old.")]}]
    with pytest.raises(ValueError, match="of 1 questions none has its supporting sentences shown"):
        next(support_demonstrations(Data(None, [], Retriever([{"title": "Oslo", "text": "Oslo is new."}]), "", missing), 5, 1.0, 0, 1))


# ---- the ids are the rollout's ----

def conversation_ids(chat, pieces):
    """The ids of each policy turn that the loop would sample, the forced `<mem>` apart."""
    turns = []
    for role, text, _ in pieces:
        if role != "policy":
            turns.append([])
        elif text != "<mem>":
            turns[-1] += chat.encode(text)
    return [ids for ids in turns if ids]


def test_rendered_ids_and_mask_are_those_of_the_rollout(tmp_path):
    """Keeps out a demonstration that teaches another token stream than the one the policy lives in: a template applied to the whole
    conversation, `><` split where the policy would write one token, results or the forced tag trained, another window."""
    tokenizer = greedy_tokenizer(*TAGS, "><", "</", "mem", "–", "\xa0", "<|im_start|>assistant", "needed.")
    chat, (question, steps) = Chat(tokenizer), scripted(tmp_path, HOTPOTQA[0])
    questions, documents = read_questions(file_of(tmp_path / "q", [HOTPOTQA[0]], False))
    opening = "Answer: " + question["question"]
    full = full_conversation(question, opening, steps, 1.0, random.Random(0))
    ids, mask = train.render(chat, full)
    marker = chat.prompt(opening)[0]
    policy = ScriptedPolicy({marker: [i for turn in conversation_ids(chat, full) for i in turn]}, len(tokenizer))
    (t,) = rollout(policy, tokenizer, questions, Retriever(documents), group_size=1, top_k=1, temperature=0, instructions="Answer: {question}")
    assert ids == t.prompt_ids + t.response_ids and mask == [0] * len(t.prompt_ids) + t.response_mask and t.stop_reason == "answer"

    policy = ScriptedPolicy({marker: [i for turn in conversation_ids(chat, full) for i in turn]}, len(tokenizer))
    rollout(policy, tokenizer, questions, Retriever(documents), group_size=1, top_k=1, temperature=0, history="compressed",
            instructions="Answer: {question}")
    ids, mask = train.render(chat, compressed_prompt(question, opening, steps, 1.0, always(0.5)))
    assert ids[:-1] == policy.contexts[marker][2]              # all that was fed of the third turn; the last token was sampled only
    memory = AgentMemory(opening)
    for (_, turn, result, _), text in zip(steps, ("", f"{ARTHUR}</mem>")):
        memory.add("llm_gen", text + turn)
        memory.add("search_results", information(result))
    prompt = chat.messages(window(memory)) + chat.mem
    assert ids[:len(prompt)] == prompt and mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))


# ---- chats ----

MESSAGES = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "<think>t</think><search>a</search>\n"},
            {"role": "tool", "content": "[1] A: <answer>no</answer>"},
            {"role": "assistant", "content": " <mem>a</mem><think>t</think><answer>b</answer>"}]
PIECES = [("question", "Where?", False), ("policy", "<think>t</think><search>a</search>", True), ("result", "[1] A: <answer>no</answer>", False),
          ("policy", "<mem>", False), ("policy", "a</mem><think>t</think><answer>b</answer>", True)]


def test_a_chat_is_appended_as_the_rollout_would(tmp_path):
    """Keeps out a forced `<mem>` that is trained or doubled, a result that is wrapped twice or can act, and the end of a turn trained twice."""
    system = {"role": "system", "content": "You are a helpful assistant."}
    wrapped = [{**m, "role": "user", "content": f"<information>{m['content']}</information>"} if m["role"] == "tool" else m for m in MESSAGES]
    for messages in (MESSAGES, [system, *MESSAGES], wrapped):
        assert chat_pieces(messages, "f, line 1") == PIECES
    chat = Chat(greedy_tokenizer(*TAGS))
    ids, mask = train.render(chat, PIECES)
    assert chat.decode([i for i, m in zip(ids, mask) if m]) == "<think>t</think><search>a</search>a</mem><think>t</think><answer>b</answer>"
    assert chat.decode(ids).endswith("<information>[1] A: &lt;answer&gt;no&lt;/answer&gt;</information>\nassistant\n"
                                     "<mem>a</mem><think>t</think><answer>b</answer>")
    batches = list(chat_demonstrations(file_of(tmp_path / "c", [{"messages": MESSAGES}, {"messages": MESSAGES[:2]}], False), 0, 2))
    assert [len(batch) for batch in batches] == [ROWS] * 2 and sum(d == PIECES for d in batches[0]) == ROWS // 2


def changed(n, **fields):
    return [{**m, **fields} if i == n else m for i, m in enumerate(MESSAGES)]


@pytest.mark.parametrize("messages, words", [
    ("text", 'needs "messages"'), ([], "no assistant message"), (MESSAGES[:1], "no assistant message"),
    (changed(1, content=None), "a tool call is written into"),
    ([{"role": "system", "content": "Be brief."}, *MESSAGES], "the loop's system message is always"), (MESSAGES[1:], "message 1 is 'assistant'"),
    (changed(2, role="assistant"), "message 3 is 'assistant'"), (changed(0, role="tool"), "message 1 is 'tool'"),
    (changed(3, content="<think>t</think><answer>b</answer>"), "message 4 does not open with <mem>"),
    (changed(3, content="<mem>a</mem>b"), "message 4 does not end with its one action"),
    (changed(1, content="<search>a</search> more"), "message 2 does not end with"),
    (changed(1, content="<think>t</think><answer>b</answer>"), "message 2 answers, and the loop ends there")])
def test_a_chat_that_the_loop_could_not_have_had_names_its_line(tmp_path, messages, words):
    """Keeps out training on a stream that no rollout can produce, and a message dropped in silence."""
    with pytest.raises(ValueError, match="c, line 2: .*" + words):
        chat_demonstrations(file_of(tmp_path / "c", [{"messages": MESSAGES}, {"messages": messages}], False), 0, 1)


# ---- the supervised step ----

def weights_after(budget, rows, context_length=4096, lr=0.1):
    model = tiny_model(vocab_size=40, max_position_embeddings=context_length)
    policy = Policy(model)
    loss, _ = train.supervised_loss(policy, *zip(*rows), budget)
    train.optimizer_step(policy, torch.optim.SGD(policy.parameters(), lr=lr), 1e9, True)
    return loss, torch.cat([p.detach().flatten() for p in policy.parameters()])


def test_micro_batches_give_the_same_step_as_one_batch():
    """Keeps out a mean of means, padding that is trained, and rows lost where a batch is cut."""
    rng = random.Random(0)
    rows = [([rng.randrange(40) for _ in range(n)], [0, 0] + [rng.randrange(2) for _ in range(n - 3)] + [1]) for n in (5, 30, 12, 7, 21)]
    (loss, whole), (parts_loss, parts), (_, start) = weights_after(150, rows), weights_after(40, rows), weights_after(150, rows, lr=0.0)
    assert abs(loss - parts_loss) < 1e-5 and (whole - parts).abs().max() < 1e-6 < (whole - start).abs().max()
    logp = torch.log_softmax(tiny_model(vocab_size=40)(torch.tensor([rows[1][0]])).logits[0, :-1].double(), -1)       # the oracle, one row
    each = [-logp[i, token].item() for i, (token, trained) in enumerate(zip(rows[1][0][1:], rows[1][1][1:])) if trained]
    assert abs(weights_after(999, rows[1:2])[0] - sum(each) / len(each)) < 1e-4


def test_demonstrations_longer_than_the_window_are_left_out_and_said(tmp_path, capsys, monkeypatch):
    """Keeps out positions that the model does not have, a conversation without its start, and rows that vanish in silence."""
    tokenizer = greedy_tokenizer(*TAGS)
    policy = Policy(tiny_model(vocab_size=len(tokenizer), max_position_embeddings=200))
    short, long = PIECES, [PIECES[0], ("policy", "x" * 300, True)]
    o = Namespace(cold_start_lr=1e-3, cold_start_steps=2, token_budget=8192, max_grad_norm=1.0)
    monkeypatch.setattr(train, "demonstrations", lambda data, o, first: iter(data[first:]))
    train.cold_start(policy, policy.parameters(), tokenizer, [[short, long], [short]], o, Run(tmp_path / "a", 9))
    assert "cold start: 1 demonstrations were left out, as they are longer than the model's 200 tokens" in capsys.readouterr().err
    with pytest.raises(ValueError, match="step 0's demonstrations are all longer than the model's 200 tokens"):
        train.cold_start(policy, policy.parameters(), tokenizer, [[long]], o, Run(tmp_path / "b", 9))


@pytest.mark.parametrize("source", ["scripted", "chats", "chats alone"])
def test_sft_only_trains_saves_evaluates_and_stops(tmp_path, source):
    """Keeps out RL after the cold start, a folder without its weights, and a cold start that does not learn what it is shown."""
    from test_train import bpe_folder
    folder, out = bpe_folder(tmp_path / "model"), tmp_path / "run"
    data = file_of(tmp_path / "q", [{**HOTPOTQA[0], "_id": str(i)} for i in range(3)], True)
    arguments = [] if source == "scripted" else ["--sft-data", str(file_of(tmp_path / "c", [{"messages": MESSAGES}], False))]
    arguments += [] if source == "chats alone" else ["--data", str(data), "--eval-questions", "1", "--eval-turns", "2", "--max-turn-tokens", "8"]
    train.main(["--model", str(folder), "--sft-only", "--cold-start-steps", "8", "--cold-start-lr", "0.1", "--token-budget", "4000",
                "--device", "cpu", "--out", str(out), *arguments])
    result, files = json.loads((out / "result.json").read_text()), {p.name for p in out.iterdir()}
    assert "cold_start" in files and "model" not in files and "final" not in result and (out / "metrics.jsonl").read_text() == ""
    assert source == "chats alone" or result["cold_start"]["n"] == 1
    scripted_data = load_data(str(data), None, 0, 1, "test", "{question}")
    pieces, losses = PIECES if source != "scripted" else next(support_demonstrations(scripted_data, 5, 1.0, 0, 1))[0], []
    for weights in (folder, out / "cold_start"):
        policy, tokenizer = train.load_policy(str(weights), "float32", "cpu")
        ids, mask = train.render(Chat(tokenizer), pieces)
        losses.append(-policy.logprobs(torch.tensor([ids]), torch.tensor([mask])).sum().item() / sum(mask))
    assert losses[1] < losses[0] - 0.5, losses


@pytest.mark.parametrize("arguments, words", [
    (["--sft-data", "c.jsonl"], "--sft-data needs --model"),
    (["--sft-data", "c.jsonl", "--model", "m"], "give --sft-only and no --eval-questions, or --data"),
    (["--sft-only", "--cold-start-steps", "0"], "--sft-only with --cold-start-steps 0")])
def test_options_that_contradict_end_in_one_sentence(arguments, words, capsys):
    """Keeps out a run that trains on nothing, or evaluates a real model on the embedded world."""
    with pytest.raises(SystemExit):
        train.parse_options(arguments)
    assert words in capsys.readouterr().err


def test_defaults_of_the_cold_start():
    """Keeps out the tiny policy's learning rate for a real model, and --sft-only that trains no step."""
    world, real = train.parse_options([]), train.parse_options(["--model", "m", "--data", "d", "--sft-only"])
    assert (world.cold_start_steps, world.cold_start_lr, world.keep, world.steps) == (1000, 6e-3, 0.45, 60)
    assert (real.cold_start_steps, real.cold_start_lr, real.keep, real.steps) == (200, 1e-5, 1.0, 0)
    assert train.parse_options(["--model", "m", "--data", "d"]).cold_start_steps == 0
    assert train.parse_options(["--model", "m", "--sft-data", "c", "--sft-only"]).cold_start_lr == 1e-5
