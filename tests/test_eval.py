"""The evaluation protocol: every question counted, special tokens out, prompts flat, tables printed."""
import json
from argparse import Namespace

import pytest

from agent_loop import Trajectory
from data import load_data
from world import world_policy, world_tokenizer
from eval import figures, main, mean, run, show
from policy import Chat, load_policy


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
