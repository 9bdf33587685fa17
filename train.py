"""Train a memory agent with MemPO: cold start, then grouped rollouts, memory rewards, two advantages, a clipped update.

    python train.py                                                 # the embedded world and a tiny policy, on a laptop
    python train.py --model Qwen2.5-1.5B --data hotpot.json         # the same loop with a real model, on one GPU

The run's folder gets config.json, metrics.jsonl (a line a step), samples.jsonl, init/, cold_start/ and model/ (plain
transformers folders) and result.json. Letters: N trajectories, B rows of a micro-batch, T positions. Left out of the paper: the cold
start's teacher model (demonstrations are scripted), several GPUs.
"""
import json
import sys
import time
from argparse import HelpFormatter, Namespace
from collections import Counter
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import HfArgumentParser

from agent_loop import INSTRUCTIONS, information, rollout, waste
from data import load_data
from eval import evaluate, figures, mean, print_table, show
from mempo import (GATES, compute_advantage, compute_grpo_memory_advantage, compute_grpo_outcome_advantage, kl_to_reference,
                   memory_rewards, micro_batches, ppo_loss)
from lastkv import under_rule
from policy import Chat, load_policy, pad_right, run_script, usable_device
from reward import compute_score
from world import world_demonstrations, world_policy, world_tokenizer


# option: (embedded world, otherwise); every other option has one default
DEFAULTS = {"eval_questions": (200, 0), "group_size": (8, 16), "max_response_tokens": (640, 4096), "max_turn_tokens": (64, 1024),
            "top_k": (1, 5), "steps": (40, 200), "lr": (5e-4, 1e-6), "cold_start_steps": (750, 0)}


def option(default, help: str, **metadata):
    """One command-line option and its help. A default of DEFAULTS is filled in when it is known what is trained on."""
    if default in DEFAULTS:
        world, real = DEFAULTS[default]
        return field(default=None, metadata={"help": f"{help} (default {world} in the embedded world, otherwise {real})"})
    return field(default=default, metadata={"help": help + ("" if default is None else " (default %(default)s)"), **metadata})


@dataclass
class ModelOptions:
    """Which policy, in which precision, where."""
    _argument_group_name = "model"
    model: str | None = option(None, "hub id, its short form (Qwen2.5-1.5B), a folder, or GGUF weights; without it a tiny policy is made")
    device: str | None = option(None, "cuda or cpu; cuda where there is one")
    dtype: str = option("float32", "weights: float32 or bfloat16", choices=["float32", "bfloat16"])
    policy: str = option("full", "how the model is executed: full (an ordinary transformer), lastkv (recurrent in chunks), feedback (at every token)",
                         choices=["full", "lastkv", "feedback"])
    chunk_size: int = option(512, "lastkv: tokens a chunk")
    replay_rounds: int = option(1, "feedback: parallel refinement rounds of the prefill and of the trainer's replay")
    seed: int = option(0, "of the weights made here, the questions and the sampling")


@dataclass
class DataOptions:
    """What is trained and evaluated on, and where the run is kept."""
    _argument_group_name = "data"
    data: str | None = option(None, "questions: JSONL or HotpotQA's .json; without it the embedded world")
    corpus: str | None = option(None, "documents: JSONL (id, title, text); without it those that came with the questions")
    out: str = option("runs/mempo", "the run's folder")
    eval_questions: int | None = option("eval_questions", "held-out questions for the final table")
    eval_split: str = option("test", "embedded world: dev to choose settings, test to report", choices=["dev", "test"])
    eval_turns: int = option(64, "turns of an episode at evaluation")


@dataclass
class RolloutOptions:
    """How episodes are drawn."""
    _argument_group_name = "rollout"
    questions_per_step: int = option(12, "questions drawn in a step")
    group_size: int | None = option("group_size", "trajectories a question")
    max_turns: int = option(8, "turns of a training episode")
    max_response_tokens: int | None = option("max_response_tokens", "tokens after the prompt, tool results included")
    max_turn_tokens: int | None = option("max_turn_tokens", "tokens sampled in one turn")
    temperature: float = option(1.0, "of the sampling, and so of every log-probability in training")
    top_k: int | None = option("top_k", "documents a search returns")


@dataclass
class MemPOOptions:
    """Score, memory reward, advantages and clipped loss."""
    _argument_group_name = "MemPO"
    memory_weight: float = option(1.0, "w of the memory advantage; 0 is plain GRPO")
    threshold: float = option(0.5, "answer tokens below this probability are left out of P")
    gate: str = option("full", "whose probabilities decide what is left out: own (each side's), full (the full history's), none", choices=list(GATES))
    format_score: float = option(0.1, "score of a wrong answer in valid format")
    clip_low: float = option(0.2, "PPO clip below")
    clip_high: float = option(0.2, "PPO clip above")
    kl_coef: float = option(0.0, "weight of the KL to the policy before RL, which moves groups without spread, too; 0 keeps no reference")


@dataclass
class OptimizerOptions:
    """Steps and learning rates of the cold start and of RL."""
    _argument_group_name = "optimizer"
    steps: int | None = option("steps", "RL steps")
    lr: float | None = option("lr", "learning rate of RL, falling linearly to 0")
    max_grad_norm: float = option(1.0, "gradient norm clip")
    token_budget: int = option(8192, "tokens a micro-batch, in scoring and update")
    cold_start_steps: int | None = option("cold_start_steps", "supervised steps before RL, on scripted demonstrations of the embedded world")
    cold_start_lr: float = option(6e-3, "learning rate of the cold start, falling linearly")
    keep: float = option(0.5, "cold start: probability that a demonstrated memory keeps a known fact")


GROUPS = (ModelOptions, DataOptions, RolloutOptions, MemPOOptions, OptimizerOptions)


def parse_options(argv: list[str]) -> Namespace:
    """The command line as one namespace, with the defaults of the embedded world or of a real run filled in."""
    parser = HfArgumentParser(GROUPS, formatter_class=HelpFormatter, usage="python train.py [option ...]", description=__doc__.split("\n")[0])
    *groups, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        parser.error(f"unknown option {unknown[0]}; --help lists them all")
    o = Namespace(**{name: value for group in groups for name, value in asdict(group).items()})
    for name, defaults in DEFAULTS.items():
        if getattr(o, name) is None:
            setattr(o, name, defaults[bool(o.data)])
    for name, least in dict(group_size=2, questions_per_step=1, steps=0, max_turns=1, top_k=1, token_budget=1, max_response_tokens=1,
                            max_turn_tokens=1, eval_questions=0, eval_turns=1, cold_start_steps=0, chunk_size=1, replay_rounds=0).items():
        if getattr(o, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(o, name)}; give at least {least}")
    if o.temperature <= 0:
        parser.error(f"--temperature is {o.temperature}; training samples, so give a value above 0 (evaluation is greedy anyway)")
    for name, low, high in (("threshold", 0, 1), ("keep", 0, 1), ("clip_low", 0, 1), ("clip_high", 0, None), ("lr", 0, None), ("cold_start_lr", 0, None),
                            ("kl_coef", 0, None), ("max_grad_norm", 0, None), ("format_score", 0, 1)):
        if not low <= getattr(o, name) <= (high or float("inf")):
            parser.error(f"--{name.replace('_', '-')} is {getattr(o, name)}; give a value from {low}" + (f" to {high}" if high else ""))
    if o.dtype == "bfloat16" and (o.steps or o.cold_start_steps):
        parser.error("--dtype bfloat16 rounds small updates away, so training keeps float32 weights; leave it out, or give --steps 0")
    if o.corpus and not o.data:
        parser.error("--corpus needs --data: the embedded world's questions bring their own documents")
    if o.data and not o.model:
        parser.error("--data needs --model: the tiny policy knows only the embedded world's words")
    if o.data and o.cold_start_steps:
        parser.error("--cold-start-steps has scripted demonstrations for the embedded world only; leave it out with --data")
    return o


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


def cold_start(policy, tokenizer, o: Namespace) -> None:
    """Supervised steps on scripted demonstrations whose memories are unreliable: the state in which RL finds its policy."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=o.cold_start_lr, betas=(0.9, 0.98), weight_decay=0.01)
    chat = Chat(tokenizer)
    bar = tqdm(world_demonstrations(o.seed, o.keep, o.cold_start_steps), "cold start", o.cold_start_steps, mininterval=1)
    for step, demonstrations in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = o.cold_start_lr * min(1, (step + 1) / 30) * (1 - step / o.cold_start_steps)
        ids, mask = zip(*(render(chat, d) for d in demonstrations))
        mask = pad_right(mask, torch.bool, policy.device)
        loss = -policy.logprobs(pad_right(ids, device=policy.device), mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), o.max_grad_norm)
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


# ---- one RL step, in the paper's order ----

def rewards_and_advantages(policy, tokenizer, trajectories, o: Namespace):
    """Scores, memory rewards and final advantages [N,T] of a batch of trajectories, and what is logged of them."""
    mask = pad_right([t.response_mask for t in trajectories], torch.float32)                                # [N,T]
    group_ids = [t.group_id for t in trajectories]
    scores = [compute_score(t.turns, t.question["answers"], o.format_score) for t in trajectories]
    P = memory_rewards(policy, tokenizer, [t.full_traj for t in trajectories], [t.mem_traj for t in trajectories],
                       [gold_text(t.question) for t in trajectories], o.threshold, o.gate, o.token_budget)
    rewards = [[P_mem - P_full for P_mem, P_full in turns] for turns in P]
    outcome = compute_grpo_outcome_advantage(scores, group_ids, mask)
    memory = compute_grpo_memory_advantage(rewards, [t.mem_spans for t in trajectories], group_ids, mask)
    advantages = compute_advantage(outcome, memory, mask, o.memory_weight)

    groups = set(group_ids)
    flat = [p for turns in P for p in turns]
    rows = [figures(t) for t in trajectories]
    return advantages, rewards, scores, {
        "score": mean(scores), **{column: mean(row[column] for row in rows) for column in ("em", "format", "turns")},
        "memory_reward": mean([m - f for m, f in flat]), "P_mem": mean([m for m, _ in flat]), "P_full": mean([f for _, f in flat]),
        "memory_turns": len(flat),
        "flat_groups": mean([len({s for s, g in zip(scores, group_ids) if g == group}) == 1 for group in groups]),
        "flat_memory_groups": mean([len({r for rs, g in zip(rewards, group_ids) if g == group for r in rs}) < 2 for group in groups]),
        "stop_reasons": dict(Counter(t.stop_reason for t in trajectories))}


def update(policy, reference, optimizer, trajectories, advantages, o: Namespace) -> dict:
    """One clipped step on prompt_ids + response_ids: gradients add up over micro-batches, weighted by their trained tokens."""
    total = sum(sum(t.response_mask) for t in trajectories)
    logged = Counter()
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
        share = stats["tokens"] / max(total, 1)
        (loss * share).backward()
        logged.update({"loss": loss.item() * share})
        logged.update({name: stats[name] * share for name in ("kl", "clip_fraction", "kl_reference") if name in stats})
        logged["max_ratio_dev"] = max(logged["max_ratio_dev"], stats["max_ratio_dev"])
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), o.max_grad_norm)
    optimizer.step()
    return {**logged, "grad_norm": float(norm), "trained_tokens": total}


def gold_text(question: dict) -> str:
    """The gold answer that the teacher scores: the first alias."""
    return question["answers"][0]


def train(policy, tokenizer, data, o: Namespace, out: Path) -> list:
    """The RL loop -> the last step's trajectories."""
    trajectories = []
    reference = deepcopy(policy) if o.kl_coef else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=o.lr, betas=(0.9, 0.98), weight_decay=0.0)
    generator = torch.Generator(policy.device).manual_seed(o.seed)
    bar = tqdm(range(o.steps), "RL", mininterval=1)
    with open(out / "metrics.jsonl", "w") as metrics, open(out / "samples.jsonl", "w") as samples:
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = o.lr * (1 - step / o.steps)
            questions = [next(data.train) for _ in range(o.questions_per_step)]
            clock, counters = [time.perf_counter()], {}
            trajectories = rollout(policy, tokenizer, questions, data.retriever, group_size=o.group_size, max_turns=o.max_turns,
                                   max_response_tokens=o.max_response_tokens, max_turn_tokens=o.max_turn_tokens,
                                   temperature=o.temperature, top_k=o.top_k, instructions=data.instructions,
                                   generator=generator, counters=counters)
            clock.append(time.perf_counter())
            advantages, rewards, scores, logged = rewards_and_advantages(policy, tokenizer, trajectories, o)
            clock.append(time.perf_counter())
            logged |= update(policy, reference, optimizer, trajectories, advantages, o)
            clock.append(time.perf_counter())
            seconds = {part: b - a for part, a, b in zip(("rollout", "scoring", "update"), clock, clock[1:])}
            record = {"step": step, **logged, **counters, **waste(trajectories, counters), "lr": group["lr"], "gate": o.gate, "seconds": seconds}
            metrics.write(json.dumps(record) + "\n")
            metrics.flush()
            for t, r, s in list(zip(trajectories, rewards, scores))[:2]:
                samples.write(json.dumps({"step": step, "question": t.question["question"], "answers": t.question["answers"], "score": s,
                                          "memory_rewards": r, "stop_reason": t.stop_reason,
                                          "text": tokenizer.decode(t.prompt_ids + t.response_ids)}) + "\n")
            bar.set_postfix(score=f"{logged['score']:.2f}", memory=f"{logged['memory_reward']:+.2f}",
                            ratio=f"{logged['max_ratio_dev']:.0e}", refresh=False)
    return trajectories


def main(argv: list[str]) -> None:
    """Set up, cold start, RL, evaluation; what is printed is what a run is for."""
    o, start = parse_options(argv), time.time()
    out = Path(o.out)
    if (out / "config.json").exists():
        raise ValueError(f"the run folder {out} exists already; give another --out or remove it")
    usable_device(o.device)                                    # before anything is written
    data = load_data(o.data, o.corpus, o.seed, o.eval_questions, o.eval_split, INSTRUCTIONS)
    policy, tokenizer = load_policy(o.model or world_policy(out / "init", o.seed), o.dtype, o.device)
    policy = under_rule(policy, o.policy, o.chunk_size, o.replay_rounds, o.model)
    if not o.data and tokenizer.get_vocab() != world_tokenizer().get_vocab() and DEFAULTS["lr"][0] == o.lr:
        raise ValueError(f"{o.model} is not the tiny policy, whose learning rates would destroy it; give --lr (1e-6, say), --cold-start-lr "
                         "and --max-turn-tokens")
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(vars(o), indent=1) + "\n")
    print(f"{o.policy} policy, gate {o.gate}, memory weight {o.memory_weight}, {sum(p.numel() for p in policy.parameters()):,} parameters "
          f"on {policy.device}, seed {o.seed}")
    torch.manual_seed(o.seed)
    result = {}

    def finish(name, folder):                                  # a stage's weights, and its rows of the table
        policy.save(out / folder)
        tokenizer.save_pretrained(out / folder)
        if o.eval_questions:
            result[name] = evaluate(policy, tokenizer, data, o)

    if o.cold_start_steps:
        cold_start(policy, tokenizer, o)
        finish("cold_start", "cold_start")
    trajectories = train(policy, tokenizer, data, o, out)
    finish("final", "model")
    result |= {"seconds": round(time.time() - start, 1), "seed": o.seed}
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    if trajectories:
        print(f"\nOne of the last step's trajectories:\n{show(tokenizer, trajectories[0])}")
    if o.eval_questions:
        print_table(result)
    print(f"{result['seconds']} s; everything is in {out}")


if __name__ == "__main__":
    run_script("train.py", main, sys.argv[1:])
