"""The command line of train.py: every option, its help and its defaults, checked together.

    o = parse_options(["--steps", "10"])                       # a Namespace: o.steps, o.lr, …
"""
import sys
from argparse import HelpFormatter, Namespace
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from data import read_object
from mempo import GATES

# option: (embedded world, otherwise); every other option has one default
DEFAULTS = {"eval_questions": (200, 0), "eval_batch_size": (200, 16), "group_size": (8, 16), "max_response_tokens": (640, 4096),
            "max_turn_tokens": (64, 1024), "top_k": (1, 5), "steps": (60, 200), "lr": (5e-4, 1e-6), "token_budget": (2048, 8192),
            "cold_start_steps": (1000, 0), "cold_start_lr": (6e-3, 1e-5), "keep": (0.45, 1.0), "save_every": (50, 20),
            "gradient_checkpointing": (False, True)}
SFT_STEPS = 200                                                # of the cold start with --sft-only or --sft-data, where --data gives none


def option(default, help: str, **metadata):
    """One command-line option and its help. A default of DEFAULTS is filled in when it is known what is trained on."""
    if isinstance(default, list):
        return field(default_factory=lambda: default, metadata={"help": f"{help} (default {' '.join(map(str, default))})", **metadata})
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
    dtype: str = option("float32", "weights: float32, whose replay equals the rollout to rounding noise, or bfloat16, which halves weights and "
                        "cache: take it on a GPU; training then keeps float32 masters, since bfloat16 rounds small updates away",
                        choices=["float32", "bfloat16"])
    policy: str = option("full", "how the model is executed: full (an ordinary transformer), lastkv (recurrent in chunks), feedback (at every token)",
                         choices=["full", "lastkv", "feedback"])
    chunk_size: int = option(512, "lastkv: tokens a chunk")
    replay_rounds: int = option(1, "feedback: parallel refinement rounds of the prefill and of the trainer's replay")
    seed: int = option(0, "of the weights made here, the questions and the sampling")


@dataclass
class DataOptions:
    """What is trained and evaluated on, and where the run is kept."""
    _argument_group_name = "data"
    data: str | None = option(None, "questions: JSONL, HotpotQA, 2WikiMultihopQA or MuSiQue; without it the embedded world")
    corpus: str | None = option(None, "documents: JSONL (id, title, text; or id, contents), or one object of titles; without it those that "
                                      "came with the questions")
    out: str = option("runs/mempo", "the run's folder")
    resume: bool = option(False, "go on with the run in --out where it was stopped, with its own settings; from the start if it has no checkpoint yet")
    save_every: int | None = option("save_every", "steps between two checkpoints")
    dry_run: bool = option(False, "print the memory that the run will need, by part, and whether it fits; nothing is loaded or written")
    eval_questions: int | None = option("eval_questions", "held-out questions for the final table")
    eval_split: str = option("test", "embedded world: dev to choose settings, test to report", choices=["dev", "test"])
    eval_turns: int = option(64, "turns of an episode at evaluation")
    eval_batch_size: int | None = option("eval_batch_size", "questions that run side by side at evaluation")


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
    top_k: int | None = option("top_k", "documents a search returns; the embedded world's demonstrations always show 1")


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
    epochs: int = option(1, "updates on each step's trajectories")
    lr: float | None = option("lr", "learning rate of RL, falling linearly to 0")
    max_grad_norm: float = option(1.0, "gradient norm clip")
    token_budget: int | None = option("token_budget", "tokens a micro-batch, in scoring and update")
    gradient_checkpointing: bool | None = option("gradient_checkpointing", "true or false: keep a layer's inputs only and compute it again in the "
                                                 "backward pass, for less memory and more time; lastkv keeps its keys and values, too")
    cold_start_steps: int | None = option("cold_start_steps", "supervised steps before RL, on scripted demonstrations: of the embedded world, or "
                                          "from the supporting facts or decompositions that --data brings; "
                                          f"{SFT_STEPS} with --sft-data, or with --sft-only on --data")
    cold_start_lr: float | None = option("cold_start_lr", "learning rate of the cold start, falling linearly")
    keep: float | None = option("keep", "cold start: probability that a demonstrated memory keeps a known fact")
    sft_only: bool = option(False, "stop after the cold start: no RL")
    sft_data: str | None = option(None, 'cold start on these chats instead: JSONL of {"messages": [{"role", "content"}, ...]}, trained on what the '
                                  "assistant says")


HARMLESS = ("out", "resume", "save_every", "dry_run", "gradient_checkpointing")   # may differ when a run goes on: the result does not depend on them
# option -> (least, most or None)
BOUNDS = dict(group_size=(2, None), questions_per_step=(1, None), steps=(0, None), epochs=(1, None), max_turns=(1, None), top_k=(1, None),
              token_budget=(1, None), max_response_tokens=(1, None), max_turn_tokens=(1, None), eval_questions=(0, None),
              eval_turns=(1, None), eval_batch_size=(1, None), cold_start_steps=(0, None), save_every=(1, None), chunk_size=(1, None),
              replay_rounds=(0, None), threshold=(0, 1), keep=(0, 1), clip_low=(0, 1), clip_high=(0, None), lr=(0, 10),
              cold_start_lr=(0, 10), kl_coef=(0, None), max_grad_norm=(0, None), memory_weight=(0, None), format_score=(0, 1),
              seed=(0, 2 ** 63 - 1))


def parse_options(argv: list[str]) -> Namespace:
    """The command line as one namespace, with the defaults of the embedded world or of a real run filled in, or, to resume, the run's own."""
    parser = HfArgumentParser((ModelOptions, DataOptions, RolloutOptions, MemPOOptions, OptimizerOptions), formatter_class=HelpFormatter,
                              usage="python train.py [option ...]", description="Train a memory agent with MemPO.")
    o = read_options(parser, argv)
    if o.resume and (config := Path(o.out) / "config.json").exists():
        saved = {name: value for name, value in read_object(config).items() if hasattr(o, name) and name not in HARMLESS}
        if "memory_weight" not in saved:
            raise ValueError(f"{o.out} is not a run's folder: its config.json is something else's; give another --out")
        parser.set_defaults(**saved)
        o = read_options(parser, argv)
        if changed := [f"--{name.replace('_', '-')} (was {value})" for name, value in saved.items() if getattr(o, name) != value]:
            parser.error(f"{o.out} was begun with other settings, which its result depends on: {', '.join(changed)}; leave them out to resume, "
                         "or start a run of its own")
    check(parser, o)
    return o


def one_namespace(parser: HfArgumentParser, argv: list[str]) -> Namespace:
    """A script's options as one namespace; what is unknown or empty ends the program."""
    parser.print_usage = lambda *_: None                       # a mistake ends in one sentence
    o, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unknown option {unknown[0]}; --help lists them all")
    if empty := [name for name, value in vars(o).items() if value == ""]:
        parser.error(f"--{empty[0].replace('_', '-')} is empty; give a name, or leave it out")
    return o


def read_options(parser: HfArgumentParser, argv: list[str]) -> Namespace:
    """The command line as one namespace, defaults filled in."""
    o = one_namespace(parser, argv)
    if o.cold_start_steps is None and (o.sft_data or o.sft_only and o.data):
        o.cold_start_steps = SFT_STEPS
    for name, defaults in DEFAULTS.items():
        if getattr(o, name) is None:
            setattr(o, name, defaults[bool(o.data or o.sft_data)])
    if o.sft_only:
        o.steps = 0
    return o


def check(parser: HfArgumentParser, o: Namespace) -> None:
    """Values out of bounds, and options that do not go together, end the program in one sentence."""
    for name, (least, most) in BOUNDS.items():
        if not least <= getattr(o, name) <= (sys.float_info.max if most is None else most):
            parser.error(f"--{name.replace('_', '-')} is {getattr(o, name)}; give "
                         + (f"a number of at least {least}" if most is None else f"a value from {least} to {most}"))
    if not 0 < o.temperature <= sys.float_info.max:
        parser.error(f"--temperature is {o.temperature}; training samples, so give a value above 0 (evaluation is greedy anyway)")
    if o.corpus and not o.data:
        parser.error("--corpus needs --data: the embedded world's questions bring their own documents")
    if (o.data or o.sft_data) and not o.model:
        parser.error(f"--{'data' if o.data else 'sft-data'} needs --model: the tiny policy knows only the embedded world's words")
    if o.sft_data and not o.data and (o.eval_questions or not o.sft_only):
        parser.error("--sft-data without --data has no questions: give --sft-only and no --eval-questions, or --data")
    if (o.sft_data or o.sft_only) and not o.cold_start_steps:
        parser.error(f"--{'sft-data' if o.sft_data else 'sft-only'} with --cold-start-steps 0 trains on nothing; give it steps")
