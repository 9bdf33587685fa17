"""A run that is stopped, killed or damaged goes on as if nothing had been: checkpoints, resume, steps that are not finite."""
import json
import math
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from argparse import Namespace
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import checkpoint
import train
from agent_loop import Trajectory
from checkpoint import KEPT, checkpoints, newest, read, restore, save
from helpers import tiny_model
from mempo import compute_grpo_outcome_advantage
from lastkv import under_rule
from policy import Policy, master_weights

ROOT = Path(__file__).parents[1]
SMALL = ["--cold-start-steps", "4", "--steps", "4", "--questions-per-step", "2", "--group-size", "2", "--max-turns", "3", "--max-turn-tokens", "12",
         "--eval-questions", "2", "--eval-turns", "2", "--save-every", "1", "--kl-coef", "0.1"]


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


# ---- whole runs, each in a process forked from one that has imported everything ----

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["train"])


def child(arguments, deadly, log):
    """train.py in this process; `deadly`, (name in checkpoint, call), kills it half-way through that call."""
    sys.stdout = sys.stderr = open(log, "a", buffering=1)
    torch.set_num_threads(1)
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
    train.run_script("train.py", train.main, arguments)


def start(out, *more, deadly=None):
    process = FORK.Process(target=child, args=(["--out", str(out), *SMALL, *more], deadly, out.with_suffix(".log")))
    process.start()
    return process


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
    """The uninterrupted run of each rule."""
    done = {}

    def get(rule):
        if rule not in done:
            out = tmp_path_factory.mktemp(rule) / "run"
            (process := start(out, "--policy", rule, "--chunk-size", "16")).join()
            assert process.exitcode == 0, out.with_suffix(".log").read_text()[-2000:]
            done[rule] = outcome(out)
        return done[rule]
    return get


def differences(a: dict, b: dict) -> list[str]:
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]


@pytest.mark.parametrize("rule", ["full", "lastkv"])
def test_a_run_killed_at_any_instant_ends_as_if_it_had_not_been(tmp_path, whole, rule):
    """Keeps out a resume that fails, repeats or leaves out a step, or ends elsewhere: SIGKILL at 12 random instants of each rule."""
    rng, kills, round_ = random.Random(rule), 0, 0
    while kills < 12:
        out, round_ = tmp_path / str(round_), round_ + 1
        while not (out / "result.json").exists():
            process = start(out, "--policy", rule, "--chunk-size", "16", "--resume")
            process.join(rng.uniform(0.2, 3) if kills < 12 else None)
            if process.is_alive():
                process.kill()
                kills += 1
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL), out.with_suffix(".log").read_text()[-2000:]
        assert outcome(out)["steps"] == [0, 1, 2, 3] and not differences(outcome(out), whole(rule))


@pytest.mark.parametrize("name", ["save_file", "sync", "digest", "write_text"])
def test_a_kill_in_the_middle_of_a_save(tmp_path, whole, name):
    """Keeps out a save that is not atomic: the process dies in the writing, the syncing, the hashing, at several saves in turn."""
    out, most = tmp_path / "run", 20
    for nth in (1, 3, 4, 2, 3):
        process = start(out, "--policy", "full", "--chunk-size", "16", "--resume", deadly=(name, nth))
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), out.with_suffix(".log").read_text()[-2000:]
    (process := start(out, "--policy", "full", "--chunk-size", "16", "--resume")).join(most)
    assert process.exitcode == 0 and not differences(outcome(out), whole("full"))


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_stop_finishes_its_step_and_says_how_to_go_on(tmp_path, whole, number, code):
    """Keeps out a Ctrl-C that loses the step, and an exit without a word. Resumed without its settings the run goes on with its own."""
    out, log = tmp_path / "run", tmp_path / "run.log"
    process = start(out, "--policy", "full", "--chunk-size", "16", "--save-every", "100")
    while process.is_alive() and len(checkpoints(out / "checkpoints")) < 2:        # the cold start is over
        time.sleep(0.01)
    while process.is_alive() and not ((out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text()):
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join()
    words = log.read_text()
    assert process.exitcode == code and "Traceback" not in words and f"python train.py --resume --out {out} goes on" in words, words[-2000:]
    process = FORK.Process(target=child, args=(["--resume", "--out", str(out)], None, log))
    process.start()
    process.join()
    assert process.exitcode == 0 and "going on after step" in log.read_text() and not differences(outcome(out), whole("full"))


def test_other_settings_are_refused_by_name(tmp_path):
    """Keeps out a resume that silently mixes two runs; where to save, and how often, may differ."""
    settings = vars(train.parse_options(["--out", str(tmp_path / "old")]))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    same = train.parse_options(["--resume", "--out", str(tmp_path), "--save-every", "3"])
    assert same.save_every == 3 and {k: v for k, v in vars(same).items() if k not in ("out", "resume", "save_every")} == \
        {k: v for k, v in settings.items() if k not in ("out", "resume", "save_every")}
    done = subprocess.run([sys.executable, "train.py", "--resume", "--out", tmp_path, "--lr", "0.1", "--group-size", "4"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "--lr (was 0.0005)" in done.stderr and "--group-size (was 8)" in done.stderr and "--steps" not in done.stderr.split("error")[1]


# ---- bfloat16 ----

def test_a_bfloat16_run_goes_on_from_its_float32_masters(tmp_path):
    """Keeps out a checkpoint of the rounded weights, a resume that trains on beside its masters, and masters that leave the policy behind."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for out, deadly in ((whole, None), (broken, ("save_file", 4)), (broken, ("save_file", 5)), (broken, None)):
        process = start(out, "--dtype", "bfloat16", "--resume", deadly=deadly)
        process.join()
        assert process.exitcode == (-signal.SIGKILL if deadly else 0), out.with_suffix(".log").read_text()[-2000:]
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


def test_skipped_steps_in_a_row_stop_the_run(tmp_path):
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


@pytest.mark.parametrize("turns, rewards, broken", [(["a", "nan", "b"], None, [1]), (["a", "b"], [[(math.nan, 0.5)], [(0.5, 0.5)]], [0])])
def test_a_reward_that_is_not_finite_is_named(monkeypatch, turns, rewards, broken):
    """Keeps out a step on NaN rewards: the trajectories are listed, and train skips the step as one whose loss is not finite."""
    advantages, _, _, logged = scored(monkeypatch, turns, rewards)
    assert logged["broken"] == broken and advantages.isfinite().all() and math.isfinite(logged["score"])


def test_a_checkpoint_knows_its_run_and_a_folder_has_one_process(tmp_path):
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
    (process := start(out, "--policy", rule, "--chunk-size", "16", "--lr", "0", "--epochs", "3")).join()
    assert process.exitcode == 0, out.with_suffix(".log").read_text()[-2000:]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and all(len(row["ratio_by_epoch"]) == 3 and max(row["ratio_by_epoch"]) < 1e-4 for row in rows)
    before, after = (load_file(out / stage / "model.safetensors") for stage in ("cold_start", "model"))
    assert all(torch.equal(after[name], before[name]) for name in before)
