"""Evaluate a policy by the papers' protocol: episodes of up to 64 turns, greedy, under compressed, full or no history.

    python eval.py --model Qwen2.5-1.5B --data hotpot_dev_distractor_v1.json --history compressed full none --objectives 1 2 4
    python eval.py runs/mempo                   # the final table of a training run, again, from its saved folder
    python eval.py runs/mempo runs/grpo         # several runs side by side

History, what a turn sees besides the question. Compressed: AgentMemory's window, the last turn and the last result. Full: everything.
None: nothing, so no memory and no result ever reaches the policy; this is the closed-book floor, what it answers by itself. Greedy, its
third turn could only repeat the second, so two turns are run and counted; sampled, it has as many as the others.
EM: every part of the answer right; EM/part: the share of parts. tokens: prompt and sampled tokens of an episode, summed over its turns;
peak: the longest prompt; cut: 1 - tokens (or peak) / those under full history. [ ]: 95 % bootstrap interval over questions.

The folder --out gets config.json, results.jsonl (a line a question, written batch by batch: the same command again goes on after the
last whole batch) and result.json (the table). Left out: answers judged by a language model, several GPUs.
"""
import json
import os
import sys
import time
import zlib
from argparse import HelpFormatter, Namespace
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import HfArgumentParser

from agent_loop import HISTORIES, INSTRUCTIONS, parse_action, rollout
from checkpoint import lock
from data import load_data, objectives, read_object, read_questions, shared_retriever
from lastkv import under_rule
from options import one_namespace, option
from policy import load_policy, run_script, usable_device
from reward import em_check, exact_match, f1_score, part_scores, validate_format

COLUMNS = {"em": "EM", "em_t1": "EM at T=1", "f1": "F1", "format": "format", "turns": "turns", "tokens": "tokens", "peak": "peak"}
TRAINING_HISTORIES = ("full", "compressed")                    # rows of a training run's table


# ---- one trajectory ----

def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def prediction(t) -> str | None:
    """What the last turn answers; an answer that was only thought of is none."""
    action, answer = parse_action(t.turns[-1]) if t.turns else (None, "")
    return answer if action == "answer" else None


def figures(t) -> dict:
    """What one trajectory adds to the table; one without an answer is wrong."""
    answer, golds = prediction(t), t.question["answers"]
    return {"em": float(em_check(answer, golds)), "f1": f1_score(answer, golds), "format": float(validate_format(t.turns)[0]),
            "turns": len(t.turns), "tokens": sum(t.context_lengths) + sum(t.response_mask), "peak": max(t.context_lengths, default=0)}


def show(tokenizer, t) -> str:
    """A trajectory as text; on a terminal sampled tokens are bright, memories green, tool and template tokens dim."""
    memory = {i for start, end in t.mem_spans for i in range(start, end)}
    styles = ["dim"] * len(t.prompt_ids) + ["green" if i in memory else "bright" if sampled else "dim" for i, sampled in enumerate(t.response_mask)]
    codes, terminal = {"dim": "\033[0;2m", "green": "\033[0;32m", "bright": "\033[0;1m"}, sys.stdout.isatty()
    out, shown, end, ids = "", "", 0, t.prompt_ids + t.response_ids
    for style, stretch in groupby(styles):
        end += len(list(stretch))
        text = tokenizer.decode(ids[:end])
        out, shown = out + codes[style] * terminal + text[len(shown):], text
    return out + "\033[0m" * terminal + f"\n[{t.stop_reason}; gold: {t.question['answers'][0]}]"


# ---- a training run's table ----

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
    result, batch_size = {"n": len(data.eval)}, getattr(o, "eval_batch_size", 200)      # runs from before it was an option: 200
    for history in TRAINING_HISTORIES:
        trajectories = run(policy, tokenizer, data, o, history, 0.0, batch_size)
        rows = [figures(t) for t in trajectories]
        for row, t in zip(rows, run(policy, tokenizer, data, o, history, 1.0, batch_size)):
            row["em_t1"] = figures(t)["em"]
        result |= {f"{column}_{history}": mean(row[column] for row in rows) for column in COLUMNS}
        by_turn = [[t.context_lengths[k] for t in trajectories if len(t.context_lengths) > k] for k in range(8)]
        result[f"prompt_by_turn_{history}"] = [round(mean(lengths)) for lengths in by_turn if lengths]
    return result


def print_table(result: dict) -> None:
    """Weights × history, a row each; then the prompt's length turn by turn."""
    print(f"\n{'weights':<12}{'history':<12}" + "".join(f"{title:>11}" for title in COLUMNS.values()))
    shown = [(name, result[name]) for name in ("cold_start", "final") if name in result]
    for name, row in shown:
        for history in TRAINING_HISTORIES:
            cells = (f"{row[f'{column}_{history}']:.{1 if column in ('turns', 'tokens', 'peak') else 3}f}" for column in COLUMNS)
            print(f"{name:<12}{history:<12}" + "".join(f"{cell:>11}" for cell in cells))
    name, row = shown[-1]
    for history in TRAINING_HISTORIES:
        print(f"prompt tokens by turn, {name}, {history} history: " + " ".join(map(str, row[f"prompt_by_turn_{history}"])))
    print(f"{row['n']} held-out questions, greedy unless T=1; EM: every part of the answer right; tokens: prompts and output of all turns")


def compare(folders: list[Path]) -> None:
    """One line a run, from its result.json: what was trained, and EM after the cold start, if it made one, and at the end."""
    titles = ("start: full", "compressed", "end: full", "compressed", "T=1: full", "compressed", "P_mem-P_full", "seconds")
    print(f"{'run':<14}{'weight':>7}{'gate':>6}{'seed':>6}" + "".join(f"{title:>13}" for title in titles))
    for folder in folders:
        o, result = (read_object(folder / name) for name in ("config.json", "result.json"))
        if "seconds" not in result:
            raise ValueError(f"{folder / 'result.json'} is damaged; python train.py --resume --out {folder} makes it again")
        rewards = [json.loads(line)["memory_reward"] for line in (folder / "metrics.jsonl").read_text().splitlines()][-5:]
        cells = [f"{result[stage][column]:.3f}" if stage in result else "" for stage, column in (
            ("cold_start", "em_full"), ("cold_start", "em_compressed"), ("final", "em_full"), ("final", "em_compressed"),
            ("final", "em_t1_full"), ("final", "em_t1_compressed"))] + [f"{mean(rewards):+.3f}", f"{result['seconds']:.0f}"]
        print(f"{folder.name:<14}{o['memory_weight']:>7}{o['gate']:>6}{o['seed']:>6}" + "".join(f"{cell:>13}" for cell in cells))
    print("EM of held-out questions, greedy, and sampled at T=1; P_mem-P_full: the memory reward under the run's own gate, last five steps")


# ---- the protocol on any model and data ----

@dataclass
class ModelOptions:
    """Which policy, in which precision, where."""
    _argument_group_name = "model"
    model: str = field(metadata={"help": "hub id, its short form (Qwen2.5-1.5B), a folder, or GGUF weights"})
    device: str | None = option(None, "cuda or cpu; cuda where there is one")
    dtype: str = option("float32", "weights: float32 or bfloat16", choices=["float32", "bfloat16"])
    policy: str = option("full", "how the model is executed: full (an ordinary transformer), lastkv (recurrent in chunks), feedback (at every token)",
                         choices=["full", "lastkv", "feedback"])
    chunk_size: int = option(512, "lastkv: tokens a chunk")
    replay_rounds: int = option(1, "feedback: parallel refinement rounds of the prefill")
    batch_size: int = option(16, "questions that run side by side")


@dataclass
class DataOptions:
    """What is asked, what is searched, and where the results are kept."""
    _argument_group_name = "data"
    data: str = field(metadata={"help": "questions, in one of the forms that train.py takes"})
    corpus: str | None = option(None, "documents; without it those that came with the questions")
    limit: int | None = option(None, "only the first so many questions of the file")
    out: str = option("runs/eval", "the evaluation's folder")
    top_k: int = option(5, "documents a search returns")
    max_doc_chars: int = option(5000, "characters of each document in a search result")
    page_chars: int = option(25000, "characters of a page that access returns")
    max_pages: int = option(10, "pages of a document, at most")


@dataclass
class ProtocolOptions:
    """How episodes are run."""
    _argument_group_name = "protocol"
    history: list[str] = option(["compressed"], "what a turn sees of those before, one or several: compressed, full, none", choices=list(HISTORIES))
    objectives: list[int] = option([1], "so many questions asked as one, one or several numbers")
    max_turns: int = option(64, "turns of an episode")
    max_turn_tokens: int = option(1024, "tokens sampled in one turn")
    max_response_tokens: int | None = option(None, "tokens after the prompt, tool results included; without it the model's window is the bound")
    temperature: float = option(0.0, "0 is greedy")
    seed: int = option(0, "of the sampling, and of which questions are asked as one")


def parse_options(argv: list[str]) -> Namespace:
    """The command line as one namespace."""
    parser = HfArgumentParser((ModelOptions, DataOptions, ProtocolOptions), formatter_class=HelpFormatter, description=__doc__.split("\n")[0],
                              usage="python eval.py RUN [RUN ...], or python eval.py --model NAME --data FILE [option ...]")
    o = one_namespace(parser, argv)
    o.history, o.objectives = [h for h in HISTORIES if h in o.history], sorted(set(o.objectives))     # the table's order, full history first
    for name, least in dict(chunk_size=1, batch_size=1, limit=1, top_k=1, max_doc_chars=1, page_chars=1, max_pages=1, max_turns=1, max_turn_tokens=1,
                            max_response_tokens=1, objectives=1, temperature=0, replay_rounds=0).items():
        given = o.objectives[0] if name == "objectives" else getattr(o, name)
        if given is not None and not least <= given < float("inf"):
            parser.error(f"--{name.replace('_', '-')} is {given}; give at least {least}")
    return o


def interval(values, resamples: int = 2000) -> list[float]:
    """[N] -> the 95 % bootstrap interval of their mean: percentiles 2.5 and 97.5 of the means of N values drawn with replacement."""
    values, rng = np.asarray(values, float), np.random.default_rng(0)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(resamples)]     # [resamples]
    return np.percentile(means, [2.5, 97.5]).tolist()


def record(t, n: int, history: str) -> dict:
    """The line of results.jsonl of one trajectory."""
    answer, golds = prediction(t), t.question["answers"]
    return {"objectives": n, "history": history, "id": t.question["id"], "question": t.question["question"], "golds": golds, "prediction": answer,
            "em_part": mean(part_scores(answer, golds, exact_match)), **figures(t), "broken_rule": validate_format(t.turns)[1],
            "stop_reason": t.stop_reason}


def table(rows: list[dict], o: Namespace, left_over: dict) -> list[dict]:
    """The lines of results.jsonl -> a row a setting; an unanswered question counts like any other. cut: 1 - figure / that under full history."""
    out, full = [], {}
    for n, history in ((n, history) for n in o.objectives for history in o.history):      # full history comes first
        of = [row for row in rows if (row["objectives"], row["history"]) == (n, history)]
        means = {name: mean(row[name] for row in of) for name in ("em", "em_part", "f1", "format", "turns", "tokens", "peak")}
        cuts = {f"{name}_cut": 1 - means[name] / full[n][name] if n in full and full[n][name] else None for name in ("tokens", "peak")}
        if history == "full":
            full[n] = means
        out.append({"objectives": n, "history": history, "n": len(of), "left_over": left_over[n], **means,
                    **{f"{name}_interval": interval([row[name] for row in of]) for name in ("em", "f1")}, **cuts,
                    "unanswered": sum(row["prediction"] is None for row in of), "stop_reasons": dict(Counter(row["stop_reason"] for row in of))})
    return out


def print_protocol(rows: list[dict]) -> None:
    """The table, a row a setting."""
    titles = {"objectives": 10, "history": 12, "asked": 7, "EM": 22, "EM/part": 9, "F1": 22, "format": 8, "turns": 7, "tokens": 10, "peak": 9,
              "tokens cut": 12, "peak cut": 10, "unanswered": 12}
    print("\n" + "".join(f"{title:>{width}}" for title, width in titles.items()))
    for row in rows:
        em, f1 = ("{:.3f} [{:.3f}, {:.3f}]".format(row[name], *row[f"{name}_interval"]) for name in ("em", "f1"))
        cuts = ("" if row[name] is None else f"{row[name]:.1%}" for name in ("tokens_cut", "peak_cut"))
        cells = (row["objectives"], row["history"], row["n"], em, f"{row['em_part']:.3f}", f1, f"{row['format']:.3f}", f"{row['turns']:.1f}",
                 f"{row['tokens']:.1f}", f"{row['peak']:.1f}", *cuts, row["unanswered"])
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, titles.values())))
    for n, left in {row["objectives"]: row["left_over"] for row in rows if row["left_over"]}.items():
        print(f"{n} questions as one: {left} left over and not asked")


def changed(path: str) -> str | None:
    """Size and time of the last change of a local file, or of the weights in a folder; None where nothing is local."""
    files = [Path(path)] if Path(path).is_file() else [f for f in Path(path).glob("*") if f.suffix in (".safetensors", ".gguf")]
    return f"{sum(f.stat().st_size for f in files)} bytes of {max(f.stat().st_mtime for f in files)}" if files else None


def check_settings(out: Path, settings: dict) -> None:
    """Refuse a folder that holds something else than an evaluation with these settings."""
    held = read_object(out / "config.json") if (out / "config.json").exists() else {}
    if not held and not (out / "results.jsonl").exists():
        return
    if "objectives" not in held:
        raise ValueError(f"{out} holds a training run, or results without their config.json; give another --out")
    if differ := [f"{name.replace('_', '-')} ({held.get(name)} there, {value} here)" for name, value in settings.items() if held.get(name) != value]:
        raise ValueError(f"{out} holds an evaluation with another {', '.join(differ)}; give another --out, or the settings that it was begun with")


def finished(path: Path, plan: list) -> tuple[list[dict], int]:
    """(rows, number) of the batches that stand in results.jsonl; what is there of a broken one, a torn last line say, is cut off the file."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []       # what follows the last newline is torn
    rows, batches = [], 0
    for n, history, _, questions in plan:
        start, end = len(rows), len(rows) + len(questions)
        if end > len(lines):
            break
        try:
            rows += [json.loads(line) for line in lines[start:end]]
            same = [(row["objectives"], row["history"], row["id"]) for row in rows[start:]] == [(n, history, q["id"]) for q in questions]
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise ValueError(f"{path}, lines {start + 1} to {end}: not the results of the questions asked; remove {path.parent} and evaluate again")
        batches += 1
    if path.exists():
        os.truncate(path, sum(len(line) + 1 for line in lines[:len(rows)]))
    return rows, batches


def sizes(o: Namespace) -> dict[str, int]:
    """The options of how much of a document is shown, as a Retriever takes them."""
    return {name: getattr(o, name) for name in ("max_doc_chars", "page_chars", "max_pages")}


def tools(o: Namespace, questions: list[dict], documents: list[dict]) -> tuple:
    """(policy, tokenizer, retriever) that the options name."""
    usable_device(o.device)                                    # before anything slow
    retriever = shared_retriever(questions, documents, o.data, o.corpus, **sizes(o))
    policy, tokenizer = load_policy(o.model, o.dtype, o.device)
    return under_rule(policy, o.policy, o.chunk_size, o.replay_rounds, o.model), tokenizer, retriever


def ask(policy, tokenizer, retriever, o: Namespace, settings: dict, plan: list, rows: list[dict]) -> None:
    """Run the batches of the plan and append their rows, also to results.jsonl as soon as each batch is through."""
    out = Path(o.out)
    if not rows:                                               # else it is there, and equal
        (out / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    with open(out / "results.jsonl", "a") as file, tqdm(total=len(rows) + sum(len(b) for *_, b in plan), initial=len(rows), unit="question") as bar:
        for n, history, i, batch in plan:
            bar.set_description(f"{history} history" + (f", {n} as one" if n > 1 else ""))
            generator = torch.Generator(policy.device).manual_seed(zlib.crc32(f"{o.seed} {n} {history} {i}".encode()))    # each batch its own
            turns = min(o.max_turns, 2) if history == "none" and o.temperature == 0 else o.max_turns      # see the top of the file
            trajectories = rollout(policy, tokenizer, batch, retriever, group_size=1, max_turns=turns, max_response_tokens=o.max_response_tokens,
                                   max_turn_tokens=o.max_turn_tokens, temperature=o.temperature, top_k=o.top_k, history=history,
                                   generator=generator, retriever_options=sizes(o))
            new = [record(t, n, history) for t in trajectories]
            file.write("".join(json.dumps(row) + "\n" for row in new))
            file.flush()
            rows += new
            bar.update(len(new))


def protocol(o: Namespace) -> None:
    """Plan the batches, ask those that are not answered yet, and print the table."""
    out, start = Path(o.out), time.time()
    settings = {name: value for name, value in vars(o).items() if name != "out"} | {
        f"{name} file": changed(getattr(o, name)) for name in ("model", "data", "corpus") if getattr(o, name)}
    check_settings(out, settings)
    questions, documents = read_questions(o.data)
    questions = questions[:o.limit]
    if o.objectives[-1] > len(questions):
        raise ValueError(f"--objectives {o.objectives[-1]} needs as many questions, and {len(questions)} are asked; lower it, or raise --limit")
    asked = {n: objectives(questions, n, o.seed) for n in o.objectives}
    plan = [(n, history, i, asked[n][i:i + o.batch_size])
            for n in o.objectives for history in o.history for i in range(0, len(asked[n]), o.batch_size)]
    lines = (out / "results.jsonl").read_bytes().count(b"\n") if (out / "results.jsonl").exists() else 0
    loaded = tools(o, questions, documents) if lines < sum(len(batch) for *_, batch in plan) else ()      # may fail: before a folder is made
    with lock(out):
        rows, batches = finished(out / "results.jsonl", plan)
        if loaded:
            ask(*loaded, o, settings, plan[batches:], rows)
        result = table(rows, o, {n: len(questions) % n for n in o.objectives})
        (out / "result.json").write_text(json.dumps({"settings": settings, "rows": result}, indent=1) + "\n")
    print_protocol(result)
    print(f"{time.time() - start:.0f} s; everything is in {out}")


def main(argv: list[str]) -> None:
    """Options: the protocol on a model and data. Else the final table of one run's folder, evaluated again; of several, side by side."""
    if argv and argv[0].startswith("-"):
        return protocol(parse_options(argv))
    folders = [Path(name) for name in argv]
    if not folders:
        raise ValueError("usage: python eval.py RUN [RUN ...], folders that train.py made, or python eval.py --model NAME --data FILE (see --help)")
    for folder in folders:
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} is not a run's folder: it has no config.json")
        config = read_object(folder / "config.json")
        if "memory_weight" not in config and "objectives" not in config:
            raise ValueError(f"{folder} is not a run's folder: its config.json is something else's; a model's folder goes to --model, with --data")
        if "objectives" in config:
            raise ValueError(f"{folder} is the folder of an evaluation; give the command that made it once more to see its table")
    if len(folders) > 1:
        return compare(folders)
    folder, result = folders[0], {}
    o = Namespace(**config)
    data = load_data(o.data, o.corpus, o.seed, o.eval_questions, o.eval_split, INSTRUCTIONS)
    if not data.eval:
        raise ValueError(f"{folder} holds no questions out; train with --eval-questions to have a table, or give its weights to --model, with --data")
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
