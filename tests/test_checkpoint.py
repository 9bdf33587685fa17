"""A run that is stopped, killed or damaged goes on as if nothing had been: checkpoints, resume, steps that are not finite."""
import json
import math
import os
import random
import resource
import signal
import time
from argparse import Namespace
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
import train
from agent_loop import Trajectory, rollout
from checkpoint import KEPT, checkpoints, identity, newest, read, restore, save
from helpers import forked, greedy_tokenizer, tiny_model
from mempo import build_answer, compute_grpo_outcome_advantage
from lastkv import under_rule
from policy import Policy, master_weights
from world import world_policy

TAGS = [f"<{slash}{tag}>" for slash in ("", "/") for tag in ("mem", "think", "search", "answer")]
SMALL = ["--cold-start-steps", 4, "--steps", 4, "--questions-per-step", 2, "--group-size", 2, "--max-turns", 2, "--max-turn-tokens", 12,
         "--eval-questions", 1, "--eval-turns", 2, "--save-every", 1, "--kl-coef", 0.1, "--chunk-size", 16]


# ---- one checkpoint ----

def steps(model, optimizer, generator, n: int) -> list[float]:
    """n optimizer steps on random ids, drawn from the generator and, as a dropout would, from torch's own state."""
    losses = []
    for _ in range(n):
        ids = torch.randint(40, (2, 6), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss * (1 + torch.rand(()) + random.random())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def made(seed: int = 0):
    model = tiny_model(seed=seed, tie_word_embeddings=True)
    return model, Policy(model).parameters(), torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Generator().manual_seed(seed)


def test_what_is_restored_goes_on_bit_for_bit(tmp_path):
    """Keeps out a forgotten moment, random state or weight, and a tied weight that comes back as two."""
    model, parameters, optimizer, generator = made()
    random.seed(1)
    steps(model, optimizer, generator, 3)
    save(tmp_path, {"step": 3}, parameters, optimizer, generator)
    expected = steps(model, optimizer, generator, 3)
    other, parameters, optimizer, generator = made(seed=7)
    steps(other, optimizer, generator, 1)
    restore(newest(tmp_path), parameters, optimizer, generator)
    assert steps(other, optimizer, generator, 3) == expected and read(newest(tmp_path)) == {"step": 3}
    assert other.lm_head.weight.data_ptr() == other.model.embed_tokens.weight.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def saved(folder, n: int) -> list[Path]:
    _, parameters, optimizer, generator = made()
    return [save(folder, {"step": i}, parameters, optimizer, generator) for i in range(n)]


def test_the_newest_two_are_kept_in_order(tmp_path):
    """Keeps out a folder that fills the disk, and an order by name that puts 10 before 9."""
    paths = saved(tmp_path, 12)
    assert checkpoints(tmp_path) == paths[-KEPT:] and KEPT == 2 and sorted(os.listdir(tmp_path)) == sorted(p.name for p in paths[-2:])
    assert read(newest(tmp_path)) == {"step": 11}


@pytest.mark.parametrize("damage", [lambda b: b[:len(b) // 2], lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:], lambda b: b""], ids=["cut", "bit", "empty"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, capsys, damage):
    """Keeps out a resume from a file that is not what was saved, or a silent fresh start."""
    first, second = saved(tmp_path, 2)
    second.write_bytes(damage(second.read_bytes()))
    (tmp_path / "unfinished").write_bytes(b"a save that was cut off")
    assert newest(tmp_path) == first and f"{second.name} is damaged" in capsys.readouterr().err
    third, = saved(tmp_path, 1)
    assert checkpoints(tmp_path) == [first, third]             # the damaged one counts for nothing
    for path in (first, third):
        path.write_bytes(damage(path.read_bytes()))
    for _ in range(2):                                         # the second time, too
        with pytest.raises(ValueError, match="every checkpoint in .* is damaged"):
            newest(tmp_path)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    """Keeps out a failed save that costs the good one, or that ends in a traceback."""
    path, = saved(tmp_path, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size // 2, limit[1]))
    try:
        with pytest.raises(ValueError, match=f"cannot save a checkpoint in .*{path.name} is whole: make room, then --resume goes on from it"):
            saved(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert newest(tmp_path) == path and os.listdir(tmp_path) == [path.name]


# ---- whole runs, each in a process of its own ----

def prepare(deadly):
    """In the run's process: a cold start on three rows a step; `deadly`, (name in checkpoint, call), kills it half-way through that call."""
    rows = train.world_demonstrations
    train.world_demonstrations = lambda seed, step, keep: rows(seed, step, keep)[:3]
    if deadly:
        (name, nth), calls = deadly, []
        plain = getattr(checkpoint, name)

        def dying(*a, **k):
            calls.append(0)
            if len(calls) == nth:
                if name == "save_file":
                    Path(a[1]).write_bytes(b"half of it")
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*a, **k)
        setattr(checkpoint, name, dying)


def start(out, *more, deadly=None):
    return forked("train.py", "--out", out, *more, log=out, before=[(prepare, deadly)])


def words(out) -> str:
    return out.with_name(out.name + ".err").read_text()


def finish(out, *more, deadly=None, codes=(0,)) -> str:
    """A run to its end, which must be one of the codes -> what it wrote to stderr."""
    process = start(out, *more, deadly=deadly)
    process.join()
    assert process.exitcode in codes and "Traceback" not in words(out), words(out)[-2000:]
    return words(out)


def outcome(out) -> dict:
    """All that a run leaves behind, but for its seconds."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    tensors = {f"{p.parent.name}/{p.name}/{name}": t.tolist() for stage in ("cold_start", "model") for p in sorted((out / stage).glob("*.safetensors"))
               for name, t in load_file(p).items()}
    result = json.loads((out / "result.json").read_text())
    return {"steps": [row["step"] for row in rows], "metrics": [{k: v for k, v in row.items() if k != "seconds"} for row in rows],
            "samples": (out / "samples.jsonl").read_text(), "result": {k: v for k, v in result.items() if k != "seconds"}, **tensors}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """rule -> (the outcome, the seconds) of its uninterrupted run."""
    done = {}

    def get(rule):
        if rule not in done:
            out, began = tmp_path_factory.mktemp(rule) / "run", time.time()
            finish(out, *SMALL, "--policy", rule)
            done[rule] = outcome(out), time.time() - began
        return done[rule]
    return get


def differences(a: dict, b: dict) -> list[str]:
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]


@pytest.mark.parametrize("rule", ["full", "lastkv"])
def test_a_run_killed_at_any_instant_ends_as_if_it_had_not_been(tmp_path, whole, rule):
    """Keeps out a resume that fails, repeats or leaves out a step, or ends elsewhere: SIGKILL at 10 random instants of each rule."""
    (expected, seconds), rng, kills, round_ = whole(rule), random.Random(rule), 0, 0
    seconds = min(seconds, 3)
    while kills < 10:
        out, round_ = tmp_path / str(round_), round_ + 1
        while not (out / "result.json").exists():
            process = start(out, *SMALL, "--policy", rule, "--resume")
            process.join(rng.uniform(0.1, 0.7) * seconds if kills < 10 else None)
            if process.is_alive():
                process.kill()
                kills += 1
            else:                                              # through before it could be killed: less time for the next
                seconds *= 0.8
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL), words(out)[-2000:]
        assert outcome(out)["steps"] == [0, 1, 2, 3] and not differences(outcome(out), expected)


@pytest.mark.parametrize("name", ["save_file", "sync", "digest", "write_text"])
def test_a_kill_in_the_middle_of_a_save(tmp_path, whole, name):
    """Keeps out a save that is not atomic: the process dies in the writing, the syncing, the hashing, at several saves in turn."""
    out = tmp_path / "run"
    for nth in (1, 4, 2):
        finish(out, *SMALL, "--policy", "full", "--resume", deadly=(name, nth), codes=(0, -signal.SIGKILL))
    finish(out, *SMALL, "--policy", "full", "--resume")
    assert not differences(outcome(out), whole("full")[0])


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.parametrize("where", ["in a step", "in evaluation"])
def test_a_stop_finishes_its_step_and_says_how_to_go_on(tmp_path, whole, where, number, code):
    """Keeps out a Ctrl-C that loses the step, and an exit without a word or with another code. Resumed without its settings the run goes on with its own."""
    out = tmp_path / "run"
    sign = {"in a step": out / "metrics.jsonl", "in evaluation": out / "cold_start" / "tokenizer.json"}[where]
    process = start(out, *SMALL, "--policy", "full", "--save-every", 100, *(["--eval-questions", 50, "--eval-turns", 30] if where != "in a step" else []))
    while process.is_alive() and not (sign.exists() and sign.read_text()):         # a first step, or its weights, are written
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == code and "Traceback" not in words(out) and f"python train.py --resume --out {out} goes on" in words(out), words(out)[-2000:]
    if where == "in a step":
        finish(out, "--resume")
        assert "going on after step" in out.with_name("run.out").read_text() and not differences(outcome(out), whole("full")[0])


def test_other_settings_are_refused_by_name(tmp_path):
    """Keeps out a resume that silently mixes two runs; where to save, and how often, may differ."""
    settings = vars(train.parse_options(["--out", str(tmp_path / "old")]))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    same = train.parse_options(["--resume", "--out", str(tmp_path), "--save-every", "3"])
    assert same.save_every == 3 and {k: v for k, v in vars(same).items() if k not in ("out", "resume", "save_every")} == \
        {k: v for k, v in settings.items() if k not in ("out", "resume", "save_every")}
    said = finish(tmp_path, "--resume", "--lr", 0.1, "--group-size", 4, codes=[2])
    assert "--lr (was 0.0005)" in said and "--group-size (was 8)" in said and "--steps" not in said.split("error")[1]
    (tmp_path / "config.json").write_text("[]")
    assert f"{tmp_path / 'config.json'} is damaged" in finish(tmp_path, "--resume", codes=[2])


def test_other_files_under_the_same_names_are_refused(tmp_path, monkeypatch):
    """Keeps out a resume that goes on with a corpus, model or questions that were changed meanwhile. A new date changes nothing."""
    files = {"--data": tmp_path / "q.jsonl", "--corpus": tmp_path / "c.jsonl", "--model": tmp_path / "m"}
    world_policy(files["--model"], 0)
    files["--data"].write_text('{"question": "Find 1 Ada \'s animal .", "answer": "pet"}\n')
    files["--corpus"].write_text('{"title": "Ada", "text": "Ada has pet crow Max."}\n')
    out, options = tmp_path / "run", [*SMALL, "--cold-start-steps", 0, "--eval-questions", 0, "--steps", 1, "--resume", *(x for pair in files.items() for x in pair)]
    finish(out, *options, deadly=("save_file", 1), codes=[-signal.SIGKILL])
    for name, path in [*files.items(), *files.items()]:        # before there is a checkpoint, and with one
        path = path / "model.safetensors" if name == "--model" else path
        kept = path.read_bytes()
        path.write_bytes(kept.replace(b"a", b"o", 1) if name != "--model" else kept[:-1] + bytes([kept[-1] ^ 1]))
        assert f"{name} {files[name]} is not what {out} was begun with" in finish(out, *options, codes=[2]).splitlines()[-1]
        path.write_bytes(kept)
        if name == "--model":
            finish(out, *options)
    assert identity("Qwen2.5-1.5B") is None
    monkeypatch.setattr(checkpoint, "PIECE", 4)                # of a large file its beginning, its end and its size count
    found = set()
    for content in (b"a" + b"-" * 998 + b"b", b"b" + b"-" * 998 + b"b", b"a" + b"-" * 998 + b"a", b"a" + b"-" * 999 + b"b"):
        files["--data"].write_bytes(content)
        found.add(identity(files["--data"]))
    assert len(found) == 4


# ---- bfloat16 ----

def test_a_bfloat16_run_goes_on_from_its_float32_masters(tmp_path):
    """Keeps out a checkpoint of the rounded weights, a resume that trains on beside its masters, and masters that leave the policy behind."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for out, deadly in ((whole, None), (broken, ("save_file", 4)), (broken, ("save_file", 5)), (broken, None)):
        finish(out, *SMALL, "--dtype", "bfloat16", "--resume", deadly=deadly, codes=[-signal.SIGKILL if deadly else 0])
    assert not differences(outcome(broken), outcome(whole))
    for row in outcome(whole)["metrics"]:
        assert 0 < row["max_ratio_dev"] < math.inf and math.isfinite(row["grad_norm"]) and not row["skipped"]
    saved, model = load_file(newest(whole / "checkpoints")), load_file(whole / "model" / "model.safetensors")
    masters = [saved[f"parameter.{i}"] for i in range(sum(name.startswith("parameter.") for name in saved))]
    assert all(m.dtype == torch.float32 for m in masters) and any((m != m.bfloat16()).any() for m in masters)
    weights = {tuple(w.flatten()[:4].tolist()): w for w in model.values()}
    assert all(torch.equal(weights[tuple(m.bfloat16().flatten()[:4].tolist())], m.bfloat16()) for m in masters if m.dim() == 2)


@pytest.mark.parametrize("rule", ["full", "lastkv", "feedback"])
def test_every_rule_steps_its_masters(rule):
    """Keeps out a parameter that has no master or whose gradient is lost on the way, and an α rounded to bfloat16."""
    policy = under_rule(Policy(tiny_model().bfloat16()), rule, 2, 1)
    masters = master_weights(policy)
    before = [m.detach().clone() for m in masters]
    o = Namespace(token_budget=8, temperature=1.0, clip_low=0.2, clip_high=0.2, kl_coef=0.0, max_grad_norm=1.0)
    train.update(policy, None, torch.optim.AdamW(masters, lr=1e-4), [trajectory(0, [3, 4, 5, 6]), trajectory(0, [6, 7])], torch.ones(2, 4), o)
    assert all(m.dtype == torch.float32 and torch.equal(m.to(p.dtype), p) for p, m in zip(policy.parameters(), masters, strict=True))
    assert all(bool((m != b).any()) for m, b in zip(masters, before)) and [p is m for p, m in zip(policy.parameters(), masters)][-1] == (rule == "lastkv")


# ---- numbers that are not finite ----

def trajectory(group: int, ids: list[int]) -> Trajectory:
    return Trajectory(group, {"question": "Q", "answers": ["x"]}, [1, 2], ids, [1] * len(ids), [-1.0] * len(ids), turns=["<think></think><answer>x</answer>"])


class Poisoned(Policy):
    """NaN where the poison token stands."""

    def logprobs(self, input_ids, select, temperature=1.0, attention_mask=None):
        logp = super().logprobs(input_ids, select, temperature, attention_mask)
        return logp * torch.where(((input_ids == 39) & select).any(1, keepdim=True), math.nan, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison, value", [([39], 0.0), ([], math.inf)], ids=["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped(poison, value, dtype):
    """Keeps out weights, masters or moments that a NaN has touched, and a log that does not say where it came from."""
    policy = Poisoned(tiny_model().to(dtype))
    masters = master_weights(policy)
    optimizer = torch.optim.AdamW(masters, lr=0.1)
    o = Namespace(token_budget=8, temperature=1.0, clip_low=0.2, clip_high=0.2, kl_coef=0.0, max_grad_norm=1.0)
    good, bad = trajectory(0, [3, 4, 5]), trajectory(0, [6, 7, 8, *poison])
    assert train.update(policy, None, optimizer, [good, trajectory(0, [6, 7])], torch.ones(2, 4), o)["skipped"] == []
    before, moments, exact = deepcopy(policy.model.state_dict()), deepcopy(optimizer.state_dict()), [m.detach().clone() for m in masters]
    if value:
        policy.model.model.norm.weight.register_hook(lambda g: g * value)
    logged = train.update(policy, None, optimizer, [good, bad], torch.ones(2, 4), o)
    assert logged["skipped"] == ([1] if poison else [0, 1]) and logged["grad_norm"] is None and math.isfinite(logged["loss"])
    assert all(torch.equal(v, before[k]) for k, v in policy.model.state_dict().items()) and all(map(torch.equal, masters, exact))
    assert all(torch.equal(t, moments["state"][i][k]) for i, s in optimizer.state_dict()["state"].items() for k, t in s.items())


@pytest.fixture
def handlers():
    """A Run in this process takes Ctrl-C over; afterwards it is pytest's again."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_a_cold_start_that_is_not_finite_names_its_rows(tmp_path, monkeypatch, handlers):
    """Keeps out a message that names a file which is not there, and RL that empties it."""
    monkeypatch.setattr(train, "demonstrations", lambda data, o, first: iter(data[first:]))
    monkeypatch.setattr(train, "render", lambda chat, row: (row, [0, 1, 1]))
    good, bad, tokenizer = [1, 2, 3], [1, 2, 39], greedy_tokenizer(*TAGS)
    for folder, batches in ((tmp_path / "a", [[good, bad], [good, good]]), (tmp_path / "b", [[good, bad]] * 5)):
        policy, run = Poisoned(tiny_model()), checkpoint.Run(folder, 1)
        masters, o = policy.parameters(), Namespace(cold_start_lr=1e-3, cold_start_steps=len(batches), token_budget=3, max_grad_norm=1.0)
        with pytest.raises(ValueError, match=f"the last 5 steps were skipped.*{folder / 'skipped.jsonl'}") if folder.name == "b" else nullcontext():
            train.cold_start(policy, masters, tokenizer, batches, o, run)
            run.begin("RL", 1, masters, torch.optim.AdamW(masters), names=["skipped.jsonl"])
        rows = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
        assert [(row["step"], row["row"], row["ids"]) for row in rows] == [(step, 1, bad) for step in range(len(batches)) if bad in batches[step]]


def test_skipped_steps_in_a_row_stop_the_run(tmp_path, handlers):
    """Keeps out a run that spends the night on steps that do nothing; a good step in between starts the count again."""
    run = checkpoint.Run(tmp_path, 1)
    for skipped in (True, True, False, True, True):
        run.count_skipped(skipped, 3)
    with pytest.raises(ValueError, match="the last 3 steps were skipped"):
        run.count_skipped(True, 3)


def scored(monkeypatch, turns, rewards=None):
    """rewards_and_advantages of one group whose scorer says what a trajectory's only turn names."""
    def scorer(turns, golds, format_score):
        return {"a": 1.0, "b": 0.0, "c": 0.5, "nan": math.nan}[turns[0]] if turns[0] != "raise" else [][0]
    monkeypatch.setattr(train, "compute_score", scorer)
    monkeypatch.setattr(train, "memory_rewards", lambda policy, tokenizer, full, mem, golds, *a: rewards or [[] for _ in golds])
    rows = [trajectory(0, [3, 4]) for _ in turns]
    for t, turn in zip(rows, turns):
        t.turns = [turn]
        t.mem_spans = [(0, 1)] * bool(rewards)
    return train.rewards_and_advantages(None, None, rows, Namespace(format_score=0.1, threshold=0.5, gate="full", token_budget=64, memory_weight=1.0))


def test_a_scorer_that_fails_costs_its_trajectory_only(monkeypatch, capsys):
    """Keeps out one odd trajectory that takes its group with it."""
    advantages, _, scores, logged = scored(monkeypatch, ["a", "raise", "b", "c"])
    expected = compute_grpo_outcome_advantage([1.0, 0.0, 0.5], [0, 0, 0], torch.ones(3, 2))
    assert torch.equal(advantages[[0, 2, 3]], expected) and not advantages[1].any() and (logged["failed"], logged["broken"], logged["score"]) == (1, [], 0.5)
    assert "the scorer failed on a trajectory of question 'Q': IndexError" in capsys.readouterr().err


def test_a_snapshot_that_the_teacher_cannot_read_costs_its_trajectory_only(monkeypatch, capsys):
    """Keeps out positions that the model does not have: an IndexError, or rotary garbage as a reward. The longest context counts, with the answer."""
    tokenizer, seen, rows = greedy_tokenizer(*TAGS), [], [trajectory(0, [3, 4]) for _ in range(3)]
    answer = len(build_answer(tokenizer, "x")[0])
    for t, n in zip(rows, (10, 11, 5)):
        t.full_traj, t.mem_traj, t.mem_spans = [[1] * n], [[1] * 4], [(0, 1)]
    monkeypatch.setattr(train, "memory_rewards", lambda policy, tokenizer, full, mem, *a: seen.append((full, mem)) or [[(0.5, 0.25)] * len(f) for f in full])
    o = Namespace(format_score=0.1, threshold=0.5, gate="full", token_budget=64, memory_weight=1.0)
    advantages, rewards, scores, logged = train.rewards_and_advantages(Namespace(context_length=10 + answer), tokenizer, rows, o)
    assert seen == [([[[1] * 10], [], [[1] * 5]], [[[1] * 4], [], [[1] * 4]])]
    assert rewards == [[0.25], [], [0.25]] and scores[1] is None and not advantages[1].any() and (logged["failed"], logged["broken"]) == (1, [])
    assert f"exceed the model's {10 + answer} tokens" in capsys.readouterr().err


@pytest.mark.parametrize("turns, rewards, broken", [(["a", "nan", "b"], None, [1]), (["a", "b"], [[(math.nan, 0.5)], [(0.5, 0.5)]], [0])])
def test_a_reward_that_is_not_finite_is_named(monkeypatch, turns, rewards, broken):
    """Keeps out a step on NaN rewards: the trajectories are listed, and train skips the step as one whose loss is not finite."""
    advantages, _, _, logged = scored(monkeypatch, turns, rewards)
    assert logged["broken"] == broken and advantages.isfinite().all() and math.isfinite(logged["score"])


def test_a_scorer_that_always_fails_costs_its_trajectories_only(monkeypatch):
    """Keeps out a step that ends in a traceback: the figures are made by the same scorer, and a question may have no answer."""
    rows = [trajectory(0, [3, 4]) for _ in range(2)]
    rows[0].question = {"question": "Q", "answers": []}
    rows[1].turns = ["<think>t</think><answer>x</answer>"]
    monkeypatch.setattr(train, "memory_rewards", lambda policy, tokenizer, full, mem, golds, *a: [[] for _ in golds])
    o = Namespace(format_score=0.1, threshold=0.5, gate="full", token_budget=64, memory_weight=1.0)
    advantages, _, scores, logged = train.rewards_and_advantages(None, None, rows, o)
    assert scores[0] is None and scores[1] is not None and logged["failed"] == 1 and not advantages.any()


def test_a_folder_that_is_no_runs_is_left_as_it_is(tmp_path):
    """Keeps out --resume in a model's folder, whose config.json a run's would replace."""
    tiny_model(40).save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match="is not a run's folder: its config.json is something else's"):
        train.main(["--resume", "--out", str(tmp_path)])
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_second_process_changes_nothing(tmp_path):
    """Keeps out a config.json of the one that came too late, under which the first could never be resumed."""
    with checkpoint.lock(tmp_path / "run"), pytest.raises(ValueError, match="another process is at work"):
        train.main(["--out", str(tmp_path / "run"), "--cold-start-steps", "0", "--steps", "0"])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def test_a_checkpoint_knows_its_run_and_a_folder_has_one_process(tmp_path, handlers):
    """Keeps out a run that goes on from another's weights, and two processes that write into one folder."""
    first = checkpoint.Run(tmp_path, 1, {"lr": 1})
    with pytest.raises(ValueError, match="another process is at work"):
        checkpoint.Run(tmp_path, 1, {"lr": 1})
    _, parameters, optimizer, generator = made()
    first.begin("RL", 1, parameters, optimizer, generator)
    first.lock.close()
    checkpoint.Run(tmp_path, 1, {"lr": 1}).lock.close()
    with pytest.raises(ValueError, match="belongs to a run with other settings"):
        checkpoint.Run(tmp_path, 1, {"lr": 2})


@pytest.mark.parametrize("rule", ["full", "lastkv"])
def test_without_a_learning_rate_the_ratio_stays_one(tmp_path, rule):
    """Keeps out any drift between sampler and trainer over steps and epochs: nothing moves, so nothing may differ."""
    out = tmp_path / "run"
    finish(out, *SMALL, "--policy", rule, "--lr", 0, "--epochs", 3)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and all(len(row["ratio_by_epoch"]) == 3 and len(set(row["ratio_by_epoch"])) == 1 and row["max_ratio_dev"] < 1e-4 for row in rows)
    before, after = (load_file(out / stage / "model.safetensors") for stage in ("cold_start", "model"))
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("rule", ["full", "lastkv"])
def test_dropout_and_batch_shapes_do_not_move_the_ratio(rule):
    """Keeps out dropout in one pass and not in the other, and passes that differ by their batches: a model with dropout, learning rate 0, two epochs.

    1e-6 is what float32 can give here: the numbers about log p = -5 lie 4.8e-7 apart. A policy with sharper logits rounds in larger ones.
    """
    tokenizer, question = greedy_tokenizer(*TAGS), {"question": "Where?", "answers": ["x"], "documents": [{"id": "1", "title": "a", "text": "b"}]}
    policy = under_rule(Policy(tiny_model(len(tokenizer), attention_dropout=0.1, initializer_range=0.02).train()), rule, 16, 1)
    rows = rollout(policy, tokenizer, [question], group_size=4, max_turns=3, max_turn_tokens=20, instructions="{question}",
                   generator=torch.Generator().manual_seed(0))
    o = Namespace(token_budget=512, temperature=1.0, clip_low=0.2, clip_high=0.2, kl_coef=0.0, max_grad_norm=1.0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0)
    first, second = (train.update(policy, None, optimizer, rows, torch.ones(4, max(len(t.response_ids) for t in rows)), o) for _ in range(2))
    assert first["max_ratio_dev"] == second["max_ratio_dev"] < 1e-6 and first["trained_tokens"] > 150
