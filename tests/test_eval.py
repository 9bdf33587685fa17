"""The evaluation protocol: every question counted, special tokens out, prompts flat, tables printed, an interrupted one gone on with."""
import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import eval as evaluation
from agent_loop import INSTRUCTIONS, TAGS, Trajectory, information
from data import load_data, objectives
from eval import evaluate, figures, interval, main, mean, run, show
from helpers import ROOT, ScriptedPolicy, greedy_tokenizer
from chat import SYSTEM, Chat
from checkpoint import lock
from policy import load_policy, run_script
from reward import em_check, f1_score
from world import world_policy, world_questions, world_tokenizer



def answered(turns, answers=("Bergen",)):
    return Trajectory(0, {"question": "Q", "answers": list(answers)}, [1], response_mask=[1, 1, 0], turns=turns, context_lengths=[5, 9], stop_reason="answer")


def test_every_question_counts_and_an_unanswered_one_is_wrong():
    """Keeps out a denominator that drops failed or last questions: 8 right of 10 is 0.8."""
    right, silent, never = answered(["<think>t</think><answer>Bergen</answer>"]), answered(["<think>t</think>"]), answered([])
    rows = [figures(t) for t in [right] * 8 + [silent, never]]
    assert mean(r["em"] for r in rows) == 0.8 and mean(r["format"] for r in rows) == 0.8


def test_figures_of_one_trajectory():
    """Keeps out tokens counted once where a prompt is read every turn, and a peak that is a sum."""
    row = figures(answered(["<think>t</think><answer>in Bergen</answer>"]))
    assert row == {"em": 0.0, "f1": pytest.approx(2 / 3), "format": 1.0, "turns": 1, "tokens": 5 + 9 + 2, "peak": 9}


@pytest.mark.parametrize("turn", ["<think>perhaps <answer>Bergen</answer></think><search>x</search>", "<think>perhaps <answer>Bergen</answer>"])
def test_an_answer_that_was_only_thought_of_is_none(turn):
    """Keeps out a table that counts episodes right which never answered."""
    assert figures(answered([turn]))["em"] == figures(answered([turn]))["f1"] == 0.0


def test_last_incomplete_batch_is_evaluated_in_order(tmp_path):
    """Keeps out an evaluation that shuffles or drops the last batch."""
    policy, tokenizer = load_policy(world_policy(tmp_path, 0))
    data = load_data(None, None, 0, 10, "test", "")
    o = Namespace(seed=0, eval_turns=2, max_turn_tokens=4, top_k=1)
    for history in ("full", "compressed"):
        trajectories = run(policy, tokenizer, data, o, history, batch_size=4)
        assert [t.question["id"] for t in trajectories] == [q["id"] for q in data.eval] and len(trajectories) == 10


def test_special_tokens_are_taken_off_by_id_before_scoring():
    """Keeps out "Lisbon<|im_end|>" scored as lisbonimend."""
    chat = Chat(world_tokenizer())
    ids = chat.encode("<answer>Bergen</answer>") + [chat.tokenizer.eos_token_id]
    assert "im_end" not in chat.decode(ids) and "im_end" in chat.tokenizer.decode(ids)


def test_a_shown_trajectory_is_its_whole_text(capsys):
    """Keeps out a printed trajectory that loses or repeats tokens where the style changes."""
    tokenizer = world_tokenizer()
    ids = tokenizer.encode("<think>1 Mira.</think><search>Mira</search>")
    t = Trajectory(0, {"answers": ["x"]}, tokenizer.encode("Find Mira's pet."), ids, [1] * 4 + [0] * (len(ids) - 4), mem_spans=[(1, 3)], stop_reason="answer")
    assert show(tokenizer, t) == tokenizer.decode(t.prompt_ids + t.response_ids) + "\n[answer; gold: x]"


def test_runs_side_by_side(tmp_path, capsys):
    """Keeps out a comparison that mixes up runs."""
    for name, em in (("a", 0.25), ("b", 0.75)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"memory_weight": 1.0, "gate": "full", "seed": 3}))
        final = {"em_full": 1.0, "em_compressed": em, "em_t1_full": 0.875, "em_t1_compressed": 0.5}
        result = {"cold_start": {"em_full": 0.9, "em_compressed": 0.2}} if name == "a" else {}
        (tmp_path / name / "result.json").write_text(json.dumps(result | {"final": final, "seconds": 7}))
        (tmp_path / name / "metrics.jsonl").write_text('{"memory_reward": -0.5}\n')
    main([str(tmp_path / "a"), str(tmp_path / "b")])
    head, a, b, _ = capsys.readouterr().out.splitlines()
    assert a.split() == ["a", "1.0", "full", "3", "0.900", "0.200", "1.000", "0.250", "0.875", "0.500", "-0.500", "7"]
    assert b.split() == ["b", "1.0", "full", "3", "1.000", "0.750", "0.875", "0.500", "-0.500", "7"]      # it began at another's cold start


def test_the_batch_size_is_the_runs_own(tmp_path, monkeypatch):
    """Keeps out an evaluation inside training that runs 200 episodes of a real model at once whatever was asked for."""
    sizes = []
    monkeypatch.setattr(evaluation, "rollout", lambda policy, tokenizer, questions, *_, **__: sizes.append(len(questions)) or [
        Trajectory(0, q, [1]) for q in questions])
    data = load_data(None, None, 0, 5, "test", "")
    o = Namespace(seed=0, eval_turns=2, max_turn_tokens=4, top_k=1)
    policy = Namespace(device=torch.device("cpu"))
    evaluate(policy, None, data, Namespace(**vars(o), eval_batch_size=2))
    assert sizes == [2, 2, 1] * 4                              # two histories, greedy and at T=1
    sizes.clear()
    evaluate(policy, None, data, o)                            # a run from before there was the option
    assert sizes == [5] * 4


# ------------------------------------------------------------------------------------------ figures of a whole evaluation
TOKENIZER = greedy_tokenizer(*[f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")], *[f"Q{i}" for i in range(6)], SYSTEM, "…", "zz")
CHAT = Chat(TOKENIZER)
FIRST = ["<think>", "</think>", "<search>", "x", "</search>"]
LATER = ["m", "</mem>", "<think>", "</think>", "<search>", "y", "</search>"]


def answering(*words):
    return ["m", "</mem>", "<think>", "</think>", "<answer>", *words, "</answer>"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scripted(tmp_path, monkeypatch, scripts, golds, *options):
    """main() on the questions Q0, Q1, … with a policy that says scripts[i] over all its turns about Qi -> (rows of the table, lines)."""
    data, corpus = tmp_path / "q.jsonl", tmp_path / "c.jsonl"
    data.write_text("".join(json.dumps({"question": f"Q{i}", "answers": gold, "id": f"id{i}"}) + "\n" for i, gold in enumerate(golds)))
    corpus.write_text('{"title": "x", "text": "R"}\n')
    ids = TOKENIZER.convert_tokens_to_ids
    policy = ScriptedPolicy({ids(f"Q{i}"): ids(script) for i, script in enumerate(scripts)}, len(TOKENIZER))
    monkeypatch.setattr(evaluation, "load_policy", lambda *_: (policy, TOKENIZER))
    main(["--model", "scripted", "--data", str(data), "--corpus", str(corpus), "--out", str(tmp_path / "out"), *options])
    assert not any(policy.left.values())
    return json.loads((tmp_path / "out" / "result.json").read_text())["rows"], lines(tmp_path / "out" / "results.jsonl")


def test_hand_worked_figures_under_full_and_compressed_history(tmp_path, monkeypatch, capsys):
    """Keeps out a mean over answered questions only, a peak or a token count of something else, and a reduction the wrong way round."""
    three = [FIRST + LATER + last for last in (answering("z"), answering("zz", " ", "q"), LATER)]           # right; half right; no answer
    rows, each = scripted(tmp_path, monkeypatch, [script * 2 for script in three], [["z"], ["no", "zz"], ["y"]],
                          "--history", "compressed", "full", "--max-turns", "3", "--batch-size", "2")
    P = len(CHAT.prompt(INSTRUCTIONS.replace("{question}", "Q0")))
    found, nothing = (len(CHAT.to_user + CHAT.encode(information(text)) + CHAT.header) for text in ("[1] x: R", 'No results for "y".'))
    full = [P, P + 5 + found + 1, P + 5 + found + 1 + 7 + nothing + 1]                 # a forced <mem> from the second turn on
    compressed = [P, P + 5 + found + 1, P + 1 + 7 + nothing + 1]                       # the third sees the last turn and the last result
    sampled = 5 + 7 + 7, 5 + 7 + 9, 5 + 7 + 7
    assert [(row["history"], row["objectives"], row["n"], row["unanswered"]) for row in rows] == [("full", 1, 3, 1), ("compressed", 1, 3, 1)]
    for row, contexts in zip(rows, (full, compressed)):
        assert row["em"] == row["em_part"] == pytest.approx(1 / 3) and row["f1"] == pytest.approx((1 + 2 / 3) / 3)
        assert row["format"] == pytest.approx(2 / 3) and row["turns"] == 3 and row["peak"] == max(contexts)
        assert row["tokens"] == pytest.approx(sum(contexts) + sum(sampled) / 3)
        assert row["stop_reasons"] == {"answer": 2, "max_turns": 1}
    assert rows[0]["tokens_cut"] is rows[0]["peak_cut"] is None
    assert rows[1]["peak_cut"] == pytest.approx(1 - max(compressed) / max(full)) and 0 < rows[1]["tokens_cut"] < 1
    assert rows[1]["tokens_cut"] == pytest.approx(1 - rows[1]["tokens"] / rows[0]["tokens"])
    assert [(e["history"], e["id"], e["prediction"], e["em"], e["stop_reason"], e["broken_rule"][:6]) for e in each[3:]] == [
        ("compressed", "id0", "z", 1.0, "answer", ""), ("compressed", "id1", "zz q", 0.0, "answer", ""),
        ("compressed", "id2", None, 0.0, "max_turns", "rule 5")]
    assert each[1]["golds"] == ["no", "zz"] and each[1]["f1"] == pytest.approx(2 / 3) and each[1]["tokens"] == sum(full) + 21 and each[1]["peak"] == full[2]
    table = capsys.readouterr().out.splitlines()
    assert "0.333 [" in table[2] and f"{rows[1]['peak_cut']:.1%}" in table[3] and "%" not in table[2]


def test_without_history_greedy_episodes_have_two_turns(tmp_path, monkeypatch):
    """Keeps out sixty-two greedy repetitions of one turn, and a closed-book row that has seen a result."""
    rows, _ = scripted(tmp_path, monkeypatch, [FIRST + answering("z"), FIRST + LATER], [["z"], ["z"]], "--history", "none")
    P = len(CHAT.prompt(INSTRUCTIONS.replace("{question}", "Q0")))
    assert rows[0]["em"] == 0.5 and rows[0]["peak"] == P + 1 and rows[0]["tokens"] == 2 * P + 1 + 12 and rows[0]["tokens_cut"] is None


def test_two_questions_asked_as_one(tmp_path, monkeypatch, capsys):
    """Keeps out parts whose aliases are lost or in another order than the questions, and a left-over question that nobody hears of."""
    [probe] = objectives([{"id": str(i), "question": "", "answers": [""]} for i in range(3)], 2, seed=7)
    a, b = map(int, probe["id"].split("+"))                    # this seed draws these two, and one is left over
    golds, scripts = [["m"]] * 3, [[]] * 3
    golds[a], golds[b] = ["z", "zz"], ["x", "y"]
    scripts[min(a, b)] = ["<think>", "</think>", "<answer>", "zz", ";", " ", "x", "</answer>"]      # a row goes by its lowest marker
    rows, [line] = scripted(tmp_path, monkeypatch, scripts, golds, "--objectives", "2", "--seed", "7")
    assert line["golds"] == [["z", "zz"], ["x", "y"]] and line["em"] == line["f1"] == line["em_part"] == 1.0 and line["objectives"] == 2
    assert line["id"] == f"id{a}+id{b}" and line["question"].endswith(f"\n1. Q{a}\n2. Q{b}") and '";"' in line["question"]
    assert rows[0]["n"] == rows[0]["left_over"] == 1 and "2 questions as one: 1 left over and not asked" in capsys.readouterr().out


def test_objectives_take_every_question_once_and_the_same_way_each_time():
    """Keeps out a question asked twice or lost, a grouping that changes from run to run, and parts that answer for each other."""
    questions = [{"id": str(i), "question": f"q{i}", "answers": [f"a{i}", f"b{i}"]} for i in range(11)]
    groups = objectives(questions, 4, 0)
    asked = "+".join(q["id"] for q in groups).split("+")
    assert len(groups) == 2 and len(set(asked)) == 8 and groups == objectives(questions, 4, 0) != objectives(questions, 4, 1)
    assert objectives(questions, 1, 0) == questions and len(objectives(questions, 11, 0)) == 1
    one = groups[0]
    i, j, k, m = one["id"].split("+")
    assert em_check(f"a{i}; b{j} ;a{k};b{m}", one["answers"]) and not em_check(f"a{j}; a{i}; a{k}; a{m}", one["answers"])
    assert f1_score(f"a{i}; b{j}", one["answers"]) == 0.5 and "documents" not in one


def test_documents_of_questions_asked_as_one_are_merged():
    """Keeps out a part whose own documents cannot be found, and one document twice in the results."""
    def question(i, *texts):
        return {"id": i, "question": i, "answers": [i], "documents": [{"id": str(k), "title": t, "text": t} for k, t in enumerate(texts)]}
    [one] = objectives([question("p", "both", "one"), question("q", "two", "both")], 2, 0)
    assert sorted(d["title"] for d in one["documents"]) == ["both", "one", "two"] and len({d["id"] for d in one["documents"]}) == 3
    with pytest.raises(ValueError, match="some bring documents of their own and some do not"):
        objectives([question("p", "one"), {"id": "q", "question": "q", "answers": ["q"]}], 2, 0)


def test_the_interval_is_the_percentile_bootstrap():
    """Keeps out a normal approximation, resamples without replacement or of another size, and an interval that changes from run to run.

    Oracle: the mean of N draws from 30 ones and 70 zeros is Binomial(100, 0.3) / 100, whose quantiles are sums of its probabilities.
    """
    cumulative, quantiles = 0.0, []
    for k in range(101):
        cumulative += math.comb(100, k) * 0.3 ** k * 0.7 ** (100 - k)
        quantiles += [k / 100] * (len(quantiles) < 1 and cumulative >= 0.025) + [k / 100] * (len(quantiles) == 1 and cumulative >= 0.975)
    assert quantiles == [0.21, 0.39]
    low, high = interval([1.0] * 30 + [0.0] * 70)
    assert abs(low - 0.21) <= 0.01 and abs(high - 0.39) <= 0.01
    values = [math.sqrt(k) for k in range(50)]                 # no two means alike
    assert interval(values) == interval(values)
    assert interval([0.25] * 7) == [0.25, 0.25] and interval([1.0]) == [1.0, 1.0]
    low, high = interval([0.0, 1.0])                           # means 0, 1/2, 1: each end has a quarter of the resamples
    assert (low, high) == (0.0, 1.0)


# ------------------------------------------------------------------------------------------------------ stopped and gone on with
@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny random policy and five questions with their own documents, as files."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in world_questions(5, 0, "test")))
    return ["--model", str(world_policy(folder / "model", 0)), "--data", str(folder / "q.jsonl"), "--history", "full", "compressed", "--max-turns", "3",
            "--max-turn-tokens", "12", "--batch-size", "2", "--out"]


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("stop, kept, left", [(0, 0, [2, 2, 1, 2, 2, 1]), (1, 2, [2, 1, 2, 2, 1]), (2, 4, [2, 2, 1]), (4, 7, [2, 1])])
def test_a_stopped_evaluation_goes_on_and_ends_as_one_that_was_not(world, tmp_path, monkeypatch, temperature, stop, kept, left):
    """Keeps out questions that are asked twice or lost, sampling that depends on where it stopped, and a torn line that is read or kept."""
    options = ["--temperature", temperature]
    main([*world, str(tmp_path / "whole"), *options])
    rollout, calls, out = evaluation.rollout, [], tmp_path / "stopped"

    def breaks(*arguments, **settings):
        calls.append(len(arguments[2]))
        if len(calls) > stop:
            raise KeyboardInterrupt
        return rollout(*arguments, **settings)

    monkeypatch.setattr(evaluation, "rollout", breaks)
    with pytest.raises(KeyboardInterrupt):
        main([*world, str(out), *options])
    whole = (tmp_path / "whole" / "results.jsonl").read_bytes().splitlines(True)
    assert (out / "results.jsonl").read_bytes() == b"".join(whole[:kept])      # of the batches of 2, 2, 1 under each history
    (out / "results.jsonl").write_bytes(b"".join(whole[:kept + 1]) + whole[kept + 1][:30])     # one line more, and a torn one
    calls.clear()
    stop = 9
    main([*world, str(out), *options])
    assert calls == left                                       # the third batch is the one line; any other is begun again
    assert (out / "results.jsonl").read_bytes() == b"".join(whole)
    rows = [json.loads((folder / "result.json").read_text())["rows"] for folder in (tmp_path / "whole", out)]
    assert rows[0] == rows[1] and rows[0][0]["n"] == 5


def test_a_finished_evaluation_prints_its_table_again(world, tmp_path, monkeypatch, capsys):
    """Keeps out a second evaluation where everything is there, and one that adds its lines to the first's."""
    out = tmp_path / "out"
    main([*world, str(out)])
    printed, written = capsys.readouterr().out.splitlines()[:-1], (out / "results.jsonl").read_bytes()
    monkeypatch.setattr(evaluation, "load_policy", None)
    main([*world, str(out)])
    assert capsys.readouterr().out.splitlines()[:-1] == printed and (out / "results.jsonl").read_bytes() == written


def test_an_id_that_stands_twice_counts_once(tmp_path):
    """Keeps out 0.667 for one right of two: a third line repeats the first, and is cut off; within a batch it is refused."""
    rows = [{"objectives": 1, "history": "full", "id": name, "prediction": "x", "stop_reason": "answer", "em": em,
             **dict.fromkeys(("em_part", "f1", "format", "turns", "tokens", "peak"), 1)} for name, em in (("q1", 1), ("q2", 0), ("q1", 1))]
    path, plan = tmp_path / "results.jsonl", [(1, "full", 0, [{"id": "q1"}, {"id": "q2"}])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, batches = evaluation.finished(path, plan)
    [row] = evaluation.table(found, Namespace(objectives=[1], history=["full"]), {1: 0})
    assert (row["em"], row["n"], batches) == (0.5, 2, 1) and len(path.read_text().splitlines()) == 2
    path.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], rows[2], rows[1])))
    with pytest.raises(ValueError, match="lines 1 to 2: not the results of the questions asked"):
        evaluation.finished(path, plan)


def test_sampling_is_drawn_from_the_seed_and_from_the_batch(world, tmp_path, monkeypatch):
    """Keeps out a seed that nothing depends on, under which the tests of going on would pass whatever is drawn, and batches that all draw the same."""
    texts, seeds, rollout = [], [], evaluation.rollout
    monkeypatch.setattr(evaluation, "rollout", lambda *a, generator, **k: seeds.append(generator.initial_seed()) or rollout(*a, generator=generator, **k))
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        main([*world, str(tmp_path / name), "--temperature", "1", "--seed", seed])
        texts.append((tmp_path / name / "results.jsonl").read_text())
    assert texts[0] == texts[1] != texts[2] and seeds[:6] == seeds[6:12] and len(set(seeds)) == 12


def test_other_settings_weights_or_lines_are_not_gone_on_with(world, tmp_path):
    """Keeps out a table made of two evaluations."""
    out, model = tmp_path / "out", Path(world[1])
    main([*world, str(out)])
    with pytest.raises(ValueError, match=r"another batch-size \(2 there, 3 here\), top-k \(5 there, 1 here\); give another --out"):
        main([*world, str(out), "--batch-size", "3", "--top-k", "1"])
    before = (model / "model.safetensors").stat()
    os.utime(model / "model.safetensors", (1, 1))
    with pytest.raises(ValueError, match="another model file"):
        main([*world, str(out)])
    os.utime(model / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    first, second, *rest = (out / "results.jsonl").read_text().splitlines(True)
    for text in (second + first + "".join(rest), "{}\n" + second + "".join(rest), first + "{\n" + "".join(rest)):
        (out / "results.jsonl").write_text(text)
        with pytest.raises(ValueError, match="lines 1 to 2: not the results of the questions asked"):
            main([*world, str(out)])
    (out / "config.json").unlink()
    with pytest.raises(ValueError, match="results without their config.json"):
        main([*world, str(out)])


def test_one_process_evaluates_in_a_folder(world, tmp_path):
    """Keeps out the same command started twice, whose rows would be mixed."""
    with lock(tmp_path / "out"), pytest.raises(ValueError, match="another process is at work in"):
        main([*world, str(tmp_path / "out")])


@pytest.mark.parametrize("arguments, words", [
    ([], "usage: python eval.py RUN"),
    (["--data", "q.jsonl"], "required: --model"),
    (["--model", "x", "--data", "q.jsonl", "--no-such-option"], "unknown option --no-such-option"),
    (["--model", "x", "--data", "q.jsonl", "--out", ""], "--out is empty; give a name, or leave it out"),
    (["--model", "x", "--data", "q.jsonl", "--history", "half"], "invalid choice: 'half'"),
    (["--model", "x", "--data", "q.jsonl", "--objectives", "2", "0"], "--objectives is 0; give at least 1"),
    (["--model", "x", "--data", "q.jsonl", "--objectives", "3"], "--objectives 3 needs as many questions, and 2 are asked"),
    (["--model", "x", "--data", "missing.jsonl"], "no question file missing.jsonl"),
    (["--model", "x", "--data", "q.jsonl"], "brings no documents to search"),
    (["--model", "./x", "--data", "q.jsonl", "--corpus", "c.jsonl"], "there is no folder or file ./x"),
    (["--model", "x", "--data", "q.jsonl", "--out", "run"], "run holds a training run"),
    (["eval"], "eval is the folder of an evaluation"),
    (["run2"], "run2 is not a run's folder")])
def test_a_mistake_ends_in_one_sentence(tmp_path, monkeypatch, capsys, arguments, words):
    """Keeps out tracebacks for a user's mistake, and a folder that is left behind so that the mended command is refused."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"question": "Q", "answer": "a"}\n'
                                         '{"question": "R", "answer": "a"}\n')
    (tmp_path / "c.jsonl").write_text('{"title": "x", "text": "R"}\n')
    for name, held in (("run", {"seed": 0}), ("eval", {"objectives": [1]})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(held))
    with pytest.raises(SystemExit) as stopped:
        run_script("eval.py", main, arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and words in said and not (tmp_path / "runs").exists()
    assert said.count("\n") == 1 or said.startswith("usage: ") and "error: " in said


@pytest.mark.parametrize("arguments, words", [(["--model", "x", "--data", "no.jsonl"], "no question file no.jsonl"), (["--model", "x"], "required: --data")])
def test_the_script_itself_exits_with_2(tmp_path, arguments, words):
    """Keeps out a script whose last line does not catch what main raises."""
    done = subprocess.run([sys.executable, ROOT / "eval.py", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_help_names_every_option():
    """Keeps out an option without help or outside its group."""
    text = subprocess.run([sys.executable, ROOT / "eval.py", "--help"], capture_output=True, text=True, cwd=ROOT).stdout
    for name in ("model data corpus limit out history objectives max-turns max-turn-tokens max-response-tokens temperature seed batch-size dtype device "
                 "policy chunk-size replay-rounds top-k max-doc-chars page-chars max-pages").split():
        assert f"--{name} " in text, name
    assert all(f"\n{group}:\n" in text for group in ("model", "data", "protocol"))
