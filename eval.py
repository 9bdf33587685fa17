"""Evaluate a policy by the papers' protocol: greedy episodes under compressed or full history, one table.

    python eval.py runs/mempo                   # the final table of a training run, again, from its saved folder
    python eval.py runs/mempo runs/grpo         # several runs side by side

Compressed: the history is thrown away each turn and only AgentMemory's window is left. EM: every part of the answer right.
tokens: prompt and sampled tokens of an episode, summed over its turns; peak: the longest prompt.
"""
import json
import sys
from argparse import Namespace
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm

from agent_loop import INSTRUCTIONS, parse_action, rollout
from data import load_data
from lastkv import under_rule
from policy import load_policy, run_script
from reward import em_check, f1_score, validate_format

COLUMNS = {"em": "EM", "em_t1": "EM at T=1", "f1": "F1", "format": "format", "turns": "turns", "tokens": "tokens", "peak": "peak"}
HISTORIES = ("full", "compressed")


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def figures(t) -> dict:
    """What one trajectory adds to the table; one without an answer is wrong."""
    action, answer = parse_action(t.turns[-1]) if t.turns else (None, "")
    answer = answer if action == "answer" else None            # one that was only thought of is none
    golds = t.question["answers"]
    return {"em": float(em_check(answer, golds)), "f1": f1_score(answer, golds), "format": float(validate_format(t.turns)[0]),
            "turns": len(t.turns), "tokens": sum(t.context_lengths) + sum(t.response_mask), "peak": max(t.context_lengths, default=0)}


def run(policy, tokenizer, data, o: Namespace, history: str, temperature: float = 0.0, batch_size: int = 200) -> list:
    """One trajectory of every held-out question, in order; greedy at temperature 0."""
    generator = torch.Generator(policy.device).manual_seed(o.seed)
    trajectories = []
    for i in tqdm(range(0, len(data.eval), batch_size), f"evaluation, {history} history", mininterval=1, leave=False):
        trajectories += rollout(policy, tokenizer, data.eval[i:i + batch_size], data.retriever, group_size=1, max_turns=o.eval_turns,
                                max_response_tokens=None, max_turn_tokens=o.max_turn_tokens, temperature=temperature, top_k=o.top_k,
                                history=history, instructions=data.instructions, generator=generator)
    return trajectories


def evaluate(policy, tokenizer, data, o: Namespace) -> dict:
    """The protocol under both histories -> {"em_full", "em_compressed", …, "prompt_by_turn_full", …}: the table's figures."""
    result = {"n": len(data.eval)}
    for history in HISTORIES:
        trajectories = run(policy, tokenizer, data, o, history)
        rows = [figures(t) for t in trajectories]
        for row, t in zip(rows, run(policy, tokenizer, data, o, history, temperature=1.0)):
            row["em_t1"] = figures(t)["em"]
        result |= {f"{column}_{history}": mean(row[column] for row in rows) for column in COLUMNS}
        longest = max((len(t.context_lengths) for t in trajectories), default=0)
        result[f"prompt_by_turn_{history}"] = [round(mean(t.context_lengths[k] for t in trajectories if len(t.context_lengths) > k))
                                               for k in range(min(longest, 8))]
    return result


def print_table(result: dict) -> None:
    """Weights × history, a row each; then the prompt's length turn by turn."""
    print(f"\n{'weights':<12}{'history':<12}" + "".join(f"{title:>11}" for title in COLUMNS.values()))
    shown = [(name, result[name]) for name in ("cold_start", "final") if name in result]
    for name, row in shown:
        for history in HISTORIES:
            cells = [row[f"{column}_{history}"] for column in COLUMNS]
            print(f"{name:<12}{history:<12}" + "".join(f"{x:>11.1f}" if column in ("turns", "tokens", "peak") else f"{x:>11.3f}"
                                                     for column, x in zip(COLUMNS, cells)))
    name, row = shown[-1]
    for history in HISTORIES:
        print(f"prompt tokens by turn, {name}, {history} history: " + " ".join(map(str, row[f"prompt_by_turn_{history}"])))
    print(f"{row['n']} held-out questions, greedy unless T=1; EM: every part of the answer right; tokens: prompts and output of all turns")


def show(tokenizer, t) -> str:
    """A trajectory as text; on a terminal sampled tokens are bright, memories green, tool and template tokens dim."""
    memory = {i for start, end in t.mem_spans for i in range(start, end)}
    styles = ["dim"] * len(t.prompt_ids) + ["green" if i in memory else "bright" if sampled else "dim" for i, sampled in enumerate(t.response_mask)]
    codes = {"dim": "\033[0;2m", "green": "\033[0;32m", "bright": "\033[0;1m"} if sys.stdout.isatty() else dict.fromkeys(("dim", "green", "bright"), "")
    out, shown, end, ids = "", "", 0, t.prompt_ids + t.response_ids
    for style, stretch in groupby(styles):
        end += len(list(stretch))
        text = tokenizer.decode(ids[:end])
        out, shown = out + codes[style] + text[len(shown):], text
    return out + ("\033[0m" if codes["dim"] else "") + f"\n[{t.stop_reason}; gold: {t.question['answers'][0]}]"


def compare(folders: list[Path]) -> None:
    """One line a run, from its result.json: what was trained, and EM after the cold start, if it made one, and at the end."""
    titles = ("start: full", "compressed", "end: full", "compressed", "T=1: full", "compressed", "P_mem-P_full", "seconds")
    print(f"{'run':<14}{'weight':>7}{'gate':>6}{'seed':>6}" + "".join(f"{title:>13}" for title in titles))
    for folder in folders:
        o, result = (json.loads((folder / name).read_text()) for name in ("config.json", "result.json"))
        rewards = [json.loads(line)["memory_reward"] for line in (folder / "metrics.jsonl").read_text().splitlines()][-5:]
        cells = [f"{result[stage][column]:.3f}" if stage in result else "" for stage, column in (
            ("cold_start", "em_full"), ("cold_start", "em_compressed"), ("final", "em_full"), ("final", "em_compressed"),
            ("final", "em_t1_full"), ("final", "em_t1_compressed"))] + [f"{mean(rewards):+.3f}", f"{result['seconds']:.0f}"]
        print(f"{folder.name:<14}{o['memory_weight']:>7}{o['gate']:>6}{o['seed']:>6}" + "".join(f"{cell:>13}" for cell in cells))
    print("EM of held-out questions, greedy, and sampled at T=1; P_mem-P_full: the memory reward under the run's own gate, last five steps")


def main(argv: list[str]) -> None:
    """The final table of one run's folder, evaluated again; of several, their results side by side."""
    folders = [Path(name) for name in argv]
    if not folders or argv[0].startswith("-"):
        raise ValueError("usage: python eval.py RUN [RUN ...], folders that train.py made")
    for folder in folders:
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} is not a run's folder: it has no config.json")
    if len(folders) > 1:
        return compare(folders)
    folder, result = folders[0], {}
    o = Namespace(**json.loads((folder / "config.json").read_text()))
    data = load_data(o.data, o.corpus, o.seed, o.eval_questions, o.eval_split, INSTRUCTIONS)
    if not data.eval:
        raise ValueError(f"{folder} holds no questions out; train with --eval-questions to have a table")
    for name, weights in (("cold_start", "cold_start"), ("final", "model")):
        if (folder / weights).exists():
            policy, tokenizer = load_policy(str(folder / weights), o.dtype, o.device)
            policy = under_rule(policy, o.policy, o.chunk_size, o.replay_rounds, folder / weights)
            result[name] = evaluate(policy, tokenizer, data, o)
    if not result:
        raise ValueError(f"{folder} holds no weights yet: the run was stopped before its first stage ended")
    print_table(result)


if __name__ == "__main__":
    run_script("eval.py", main, sys.argv[1:])
