"""Train a memory agent with MemPO: cold start, then grouped rollouts, memory rewards, two advantages, a clipped update.

    python train.py                                                 # the embedded world and a tiny policy, on a laptop
    python train.py --model Qwen2.5-1.5B --data hotpot.json         # the same loop with a real model, on one GPU

The run's folder gets config.json, metrics.jsonl (a line a step), samples.jsonl, skipped.jsonl, init/, cold_start/ and model/ (plain
transformers folders) and result.json. Letters: N trajectories, B rows of a micro-batch, T positions. Left out of the paper: the cold
start's teacher model (demonstrations are scripted, or chats that you bring), several GPUs.
"""
import json
import math
import os
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path

if __name__ == "__main__":                                     # Ctrl-C in the seconds that the packages below take
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"\ntrain.py: stopped\n"), os._exit(130)))

import torch
from tqdm import tqdm

from agent_loop import INSTRUCTIONS, information, rollout, waste
from chat import Chat
from checkpoint import Run, identity, write_text
from data import load_data, read_object
from demonstrations import chat_demonstrations, support_demonstrations
from eval import evaluate, figures, mean, print_table, show
from forecast import forecast
from mempo import (build_answer, compute_advantage, compute_grpo_memory_advantage, compute_grpo_outcome_advantage, kl_to_reference, memory_rewards,
                   micro_batches, ppo_loss)
from lastkv import under_rule
from options import DEFAULTS, HARMLESS, parse_options
from policy import load_config, load_policy, master_weights, pad_right, round_masters, run_script, usable_device
from reward import compute_score
from world import world_config, world_demonstrations, world_policy, world_tokenizer

MOST_SKIPPED = 5                                               # steps in a row that are not finite, before the run stops


# ---- cold start ----

def render(chat: Chat, demonstration: list) -> tuple[list[int], list[int]]:
    """(ids, mask) of a demonstration, by appending the very pieces that the rollout appends."""
    ids, mask = [], []
    for role, text, trained in demonstration:
        piece = (chat.prompt(text) if role == "question" else chat.encode(text) if role == "policy" else
                 chat.to_user + chat.encode(information(text)) + chat.header)
        ids += piece
        mask += [int(trained)] * len(piece)
    return ids, mask


def demonstrations(data, o: Namespace, first: int = 0):
    """The cold start's batches from step `first` on; what cannot be demonstrated is refused here, before anything is loaded."""
    if o.sft_data:
        return islice(chat_demonstrations(o.sft_data, o.seed, o.cold_start_steps), first, None)
    if o.data:
        return islice(support_demonstrations(data, o.top_k, o.keep, o.seed, o.cold_start_steps), first, None)
    return (world_demonstrations(o.seed, step, o.keep) for step in range(first, o.cold_start_steps))


def cold_start(policy, masters, tokenizer, data, o: Namespace, run: Run) -> None:
    """Supervised steps on demonstrations; in the embedded world their memories are unreliable: the state in which RL finds its policy."""
    chat, long, window = Chat(tokenizer), 0, policy.context_length or 1 << 60
    optimizer = torch.optim.AdamW(masters, lr=o.cold_start_lr, betas=(0.9, 0.98), weight_decay=0.01, foreach=False)
    first = run.begin("cold start", o.cold_start_steps, masters, optimizer, names=["skipped.jsonl"])
    [skipped] = run.files
    round_masters(policy, masters)
    bar = tqdm(demonstrations(data, o, first), "cold start", o.cold_start_steps, initial=first, mininterval=1)
    for step, batch in enumerate(bar, first):
        optimizer.param_groups[0]["lr"] = o.cold_start_lr * min(1, (step + 1) / 30) * (1 - step / o.cold_start_steps)
        rows = [render(chat, demonstration) for demonstration in batch]
        fitting = [row for row in rows if len(row[0]) <= window]
        long += len(rows) - len(fitting)
        if not fitting:
            raise ValueError(f"step {step}'s demonstrations are all longer than the model's {window} tokens; give a smaller --top-k or shorter chats")
        optimizer.zero_grad()
        loss, bad = supervised_loss(policy, *zip(*fitting), o.token_budget)
        norm = optimizer_step(policy, optimizer, o.max_grad_norm, not bad)
        for i in (bad or range(len(fitting))) if norm is None else []:
            ids = fitting[i][0]
            skipped.write(json.dumps({"stage": "cold start", "step": step, "row": i, "ids": ids, "text": tokenizer.decode(ids)}) + "\n")
        run.count_skipped(norm is None, MOST_SKIPPED)
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        run.done(step)
    if long:
        print(f"cold start: {long} demonstrations were left out, as they are longer than the model's {window} tokens", file=sys.stderr)


def supervised_loss(policy, ids, mask, token_budget: int) -> tuple[float, list[int]]:
    """The mean -log p of all trained tokens of B rows, its gradient added up over micro-batches; and the rows of those where it is not finite."""
    total, loss, bad = sum(map(sum, mask)), 0.0, []
    for part in micro_batches([len(row) for row in ids], token_budget):
        select = pad_right([mask[i] for i in part], torch.bool, policy.device)                              # [B,T]
        share = -policy.logprobs(pad_right([ids[i] for i in part], device=policy.device), select).sum() / total
        share.backward()
        loss += share.item()
        bad += part if not share.isfinite() else []
    return loss, sorted(bad)


def optimizer_step(policy, optimizer, max_norm: float, finite) -> float | None:
    """One clipped step -> the gradient's norm; None, with weights, masters and optimizer untouched, if loss or gradient is not finite."""
    masters = optimizer.param_groups[0]["params"]
    norm = torch.nn.utils.clip_grad_norm_(masters, max_norm)
    if not (finite and norm.isfinite()):
        return None
    optimizer.step()
    round_masters(policy, masters)
    return float(norm)


# ---- one RL step, in the paper's order ----

def score(t, format_score: float, window: int | None, answer_tokens) -> float | None:
    """compute_score; None, and a warning, where it fails or the teacher cannot read a snapshot: that costs the trajectory, not its group.

    answer_tokens(gold): how many tokens follow a snapshot when the teacher reads it.
    """
    try:
        longest = max(map(len, t.full_traj + t.mem_traj), default=0)
        if longest and window and longest + answer_tokens(t.question["answers"][0]) > window:
            raise ValueError(f"a memory's context and the answer exceed the model's {window} tokens")
        return float(compute_score(t.turns, t.question["answers"], format_score))
    except Exception as error:                                 # whatever a scorer, or an odd question, may raise
        tqdm.write(f"the scorer failed on a trajectory of question {t.question.get('id', t.question['question'])!r}: {error!r}", file=sys.stderr)
        return None


def rewards_and_advantages(policy, tokenizer, trajectories, o: Namespace):
    """Scores, memory rewards and final advantages [N,T] of a batch of trajectories, and what is logged of them.

    A trajectory whose scorer failed has no part in its group, and advantage 0. "broken" lists those whose score or reward is not finite.
    """
    answer_tokens = cache(lambda gold: len(build_answer(tokenizer, gold)[0]))          # a group has one
    scores = [score(t, o.format_score, getattr(policy, "context_length", None), answer_tokens) for t in trajectories]
    full = [[] if s is None else t.full_traj for s, t in zip(scores, trajectories)]
    mem = [[] if s is None else t.mem_traj for s, t in zip(scores, trajectories)]
    golds = ["" if s is None else t.question["answers"][0] for s, t in zip(scores, trajectories)]      # the first alias
    P = memory_rewards(policy, tokenizer, full, mem, golds, o.threshold, o.gate, o.token_budget)
    rewards = [[P_mem - P_full for P_mem, P_full in turns] for turns in P]
    broken = [i for i, r in enumerate(rewards) if not all(map(math.isfinite, [scores[i] or 0.0, *r]))]
    good = [i for i, s in enumerate(scores) if s is not None and i not in broken]
    mask = pad_right([t.response_mask for t in trajectories], torch.float32)                                # [N,T]
    group_ids, advantages = [trajectories[i].group_id for i in good], torch.zeros_like(mask)
    outcome = compute_grpo_outcome_advantage([scores[i] for i in good], group_ids, mask[good])
    memory = compute_grpo_memory_advantage([rewards[i] for i in good], [trajectories[i].mem_spans for i in good], group_ids, mask[good])
    advantages[good] = compute_advantage(outcome, memory, mask[good], o.memory_weight)

    groups = [[i for i in good if trajectories[i].group_id == group] for group in set(group_ids)]
    flat = [p for i in good for p in P[i]]
    rows = [figures(t) for s, t in zip(scores, trajectories) if s is not None]
    return advantages, rewards, scores, {
        "score": mean(scores[i] for i in good), **{column: mean(row[column] for row in rows) for column in ("em", "format", "turns")},
        "memory_reward": mean(m - f for m, f in flat), "P_mem": mean(m for m, _ in flat), "P_full": mean(f for _, f in flat),
        "memory_turns": len(flat), "failed": scores.count(None), "broken": broken,
        "flat_groups": mean(len({scores[i] for i in group}) == 1 for group in groups),
        "flat_memory_groups": mean(len({r for i in group for r in rewards[i]}) < 2 for group in groups),
        "stop_reasons": dict(Counter(t.stop_reason for t in trajectories))}


def update(policy, reference, optimizer, trajectories, advantages, o: Namespace) -> dict:
    """One clipped step on prompt_ids + response_ids: gradients add up over micro-batches, weighted by their trained tokens.

    Loss or gradient that is not finite leaves weights and optimizer as they are; "skipped" then lists the trajectories it came from.
    """
    total = sum(sum(t.response_mask) for t in trajectories)
    logged, bad, seen = Counter(loss=0.0, kl=0.0, clip_fraction=0.0, max_ratio_dev=0.0), [], []
    optimizer.zero_grad()
    for batch in micro_batches([len(t.prompt_ids) + len(t.response_ids) for t in trajectories], o.token_budget):
        rows = [trajectories[i] for i in batch]
        if not any(sum(t.response_mask) for t in rows):        # stopped before anything was sampled
            continue
        before = [[0] * len(t.prompt_ids) for t in rows]
        ids = pad_right([t.prompt_ids + t.response_ids for t in rows], device=policy.device)                # [B,T]
        mask = pad_right([b + t.response_mask for b, t in zip(before, rows)], torch.bool, policy.device)
        old = pad_right([b + t.rollout_logprobs for b, t in zip(before, rows)], torch.float32, policy.device)
        adv = pad_right([b + advantages[i, :len(t.response_ids)].tolist() for b, i, t in zip(before, batch, rows)], torch.float32, policy.device)
        logp = policy.logprobs(ids, mask, o.temperature)
        loss, stats = ppo_loss(logp, old, adv, mask, o.clip_low, o.clip_high)
        if reference is not None:
            with torch.no_grad():
                ref_logp = reference.logprobs(ids, mask, o.temperature)
            kl = kl_to_reference(logp, ref_logp, mask)
            loss, stats["kl_reference"] = loss + o.kl_coef * kl, kl.item()
        seen += batch
        if not loss.isfinite():
            bad += batch
            continue
        share = stats["tokens"] / total
        (loss * share).backward()
        logged.update({"loss": loss.item() * share})
        logged.update({name: stats[name] * share for name in ("kl", "clip_fraction", "kl_reference") if name in stats})
        logged["max_ratio_dev"] = max(logged["max_ratio_dev"], stats["max_ratio_dev"])
    norm = optimizer_step(policy, optimizer, o.max_grad_norm, not bad)
    return {**logged, "grad_norm": norm, "trained_tokens": total, "skipped": (bad or seen) if norm is None else []}


def sample_record(step: int, i: int, t, **more) -> str:
    """A line about trajectory i of a step."""
    return json.dumps({"step": step, "trajectory": i, "id": t.question.get("id"), "question": t.question["question"],
                       "answers": t.question["answers"], **more}) + "\n"


def train(policy, masters, reference, tokenizer, data, o: Namespace, run: Run) -> list:
    """The RL loop -> the last step's trajectories."""
    trajectories = []
    optimizer = torch.optim.AdamW(masters, lr=o.lr, betas=(0.9, 0.98), weight_decay=0.0, foreach=False)   # no temporaries as large as all weights
    generator = torch.Generator(policy.device).manual_seed(o.seed)
    first = run.begin("RL", o.steps, masters, optimizer, generator, ["metrics.jsonl", "samples.jsonl", "skipped.jsonl"])
    metrics, samples, skipped = run.files
    round_masters(policy, masters)
    for _ in range(first * o.questions_per_step):              # drawn already
        next(data.train)
    bar = tqdm(range(first, o.steps), "RL", o.steps, initial=first, mininterval=1, disable=not o.steps)
    for step in bar:
        optimizer.param_groups[0]["lr"] = lr = o.lr * (1 - step / o.steps)
        questions = [next(data.train) for _ in range(o.questions_per_step)]
        clock, counters = [time.perf_counter()], {}
        trajectories = rollout(policy, tokenizer, questions, data.retriever, group_size=o.group_size, max_turns=o.max_turns,
                               max_response_tokens=o.max_response_tokens, max_turn_tokens=o.max_turn_tokens,
                               temperature=o.temperature, top_k=o.top_k, instructions=data.instructions,
                               generator=generator, counters=counters)
        clock.append(time.perf_counter())
        advantages, rewards, scores, logged = rewards_and_advantages(policy, tokenizer, trajectories, o)
        clock.append(time.perf_counter())
        broken = logged.pop("broken")                          # a step on rewards that are not finite is not made
        updates = [{"skipped": broken, "max_ratio_dev": 0.0}] if broken else [
            update(policy, reference, optimizer, trajectories, advantages, o) for _ in range(o.epochs)]
        optimizer.zero_grad()                                  # room for the next rollout's cache
        clock.append(time.perf_counter())
        logged |= updates[0] | {"skipped": sum(bool(u["skipped"]) for u in updates), "ratio_by_epoch": [u["max_ratio_dev"] for u in updates]}
        seconds = {part: b - a for part, a, b in zip(("rollout", "scoring", "update"), clock, clock[1:])}
        record = {"step": step, **logged, **counters, **waste(trajectories, counters), "lr": lr, "gate": o.gate, "seconds": seconds}
        metrics.write(json.dumps(record) + "\n")
        for i, (t, r, s) in islice(enumerate(zip(trajectories, rewards, scores)), 2):
            samples.write(sample_record(step, i, t, score=s, memory_rewards=[x if math.isfinite(x) else None for x in r],
                                        stop_reason=t.stop_reason, text=tokenizer.decode(t.prompt_ids + t.response_ids)))
        for i in sorted({i for u in updates for i in u["skipped"]}):
            skipped.write(sample_record(step, i, trajectories[i], prompt_ids=trajectories[i].prompt_ids, response_ids=trajectories[i].response_ids))
        bar.set_postfix(score=f"{logged['score']:.2f}", memory=f"{logged['memory_reward']:+.2f}",
                        ratio=f"{logged['max_ratio_dev']:.0e}", refresh=False)
        run.count_skipped(logged["skipped"] == len(updates), MOST_SKIPPED)
        run.done(step)
    return trajectories


def main(argv: list[str]) -> None:
    """Set up, cold start, RL, evaluation; what is printed is what a run is for."""
    o = parse_options(argv)
    if o.dry_run:
        return forecast(load_config(o.model) if o.model else world_config(), o)
    out = Path(o.out)
    if ((out / "config.json").exists() or (out / "checkpoints").exists()) and not o.resume:
        raise ValueError(f"the run folder {out} exists already; --resume goes on with it, or give another --out")
    usable_device(o.device)                                    # before anything is written
    data = load_data(o.data, o.corpus, o.seed, o.eval_questions, o.eval_split, INSTRUCTIONS)
    if o.cold_start_steps:
        demonstrations(data, o)                                # refused early, if there are none

    def weights(name):
        policy, tokenizer = load_policy(name, o.dtype, o.device)
        policy = under_rule(policy, o.policy, o.chunk_size, o.replay_rounds, name)
        policy.gradient_checkpointing = o.gradient_checkpointing
        return policy, tokenizer

    if start := o.model:
        policy, tokenizer = weights(start)
        if not o.data and tokenizer.get_vocab() != world_tokenizer().get_vocab() and DEFAULTS["lr"][0] == o.lr:
            raise ValueError(f"{o.model} is not the tiny policy, whose learning rates would destroy it; give --lr (1e-6, say), --cold-start-lr "
                             "and --max-turn-tokens")
    settings = vars(o) | {"contents": {name: identity(getattr(o, name)) for name in ("data", "corpus", "model", "sft_data") if getattr(o, name)}}
    begun = read_object(out / "config.json").get("contents", {}) if (out / "config.json").exists() else settings["contents"]
    if changed := [name for name, found in settings["contents"].items() if begun.get(name) != found]:
        raise ValueError(f"--{changed[0].replace('_', '-')} {getattr(o, changed[0])} is not what {out} was begun with; bring that back, or start "
                         "a run of its own")
    run = Run(out, o.save_every, {name: value for name, value in settings.items() if name not in HARMLESS})      # no other process from here on
    write_text(out / "config.json", json.dumps(settings, indent=1) + "\n")
    if not start:
        start = world_policy(out / "init", o.seed)
        policy, tokenizer = weights(start)
    print(f"{o.policy} policy, gate {o.gate}, memory weight {o.memory_weight}, {sum(p.numel() for p in policy.parameters()):,} parameters "
          f"on {policy.device}, seed {o.seed}" + (f"; going on after step {run.state['step']} of {run.state['stage']}" if run.path else
                                                  "; no checkpoint yet, from the start" if o.resume else ""))
    torch.manual_seed(o.seed)
    masters = master_weights(policy)
    result = run.state["result"]

    def finish(name, folder):                                  # a stage's weights, and its rows of the table
        policy.save(out / folder)
        tokenizer.save_pretrained(out / folder)
        if o.eval_questions:
            result[name] = evaluate(policy, tokenizer, data, o)

    if o.cold_start_steps:
        if run.state["stage"] != "RL":
            cold_start(policy, masters, tokenizer, data, o, run)
            finish("cold_start", "cold_start")
        start = out / "cold_start"
    reference = weights(str(start))[0] if o.kl_coef else None
    trajectories = train(policy, masters, reference, tokenizer, data, o, run)
    if not o.sft_only:
        finish("final", "model")
    result |= {"seconds": round(run.seconds(), 1), "seed": o.seed}
    write_text(out / "result.json", json.dumps(result, indent=1) + "\n")
    if trajectories:                                           # one that found something, if any did
        shown = next((t for t in trajectories if "<search>" in "".join(t.turns)), trajectories[0])
        print(f"\nOne of the last step's trajectories:\n{show(tokenizer, shown)}")
    if o.eval_questions:
        print_table(result)
    print(f"{result['seconds']} s; everything is in {out}, the weights in {out / ('cold_start' if o.sft_only else 'model')}")


if __name__ == "__main__":
    run_script("train.py", main, sys.argv[1:])
