"""What forecast.py estimates next to what a run takes: the peak resident memory of an update and of a rollout on this CPU.

Every figure is a process of its own that does what train.py does, on a random model of 20 M parameters: VmHWM above the level after the
imports and a run of a much smaller model, which loads the libraries' kernels. Freed memory goes back to the system at once. The last line is
one JSON object. Letters: B rows, T positions.

    python benchmarks/memory.py                                # minutes; Linux
    python benchmarks/memory.py update full                    # those cases only
"""
import ctypes
import json
import sys
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(Path(__file__).parent.parent))
from agent_loop import Trajectory, sample  # noqa: E402
from forecast import estimate, shapes  # noqa: E402
from lastkv import under_rule  # noqa: E402
from options import parse_options  # noqa: E402
from policy import DTYPE, Policy, master_weights  # noqa: E402
from timing import resident  # noqa: E402
from train import update  # noqa: E402

CASES = [(phase, rule, dtype, checkpointing) for dtype in ("float32", "bfloat16") for rule in ("full", "lastkv")
         for phase, checkpointing in (("update", "false"), ("update", "true"), ("rollout", "true"))]


def options(rule: str, dtype: str, checkpointing: str, questions: int = 6):
    return parse_options(["--model", "-", "--data", "-", "--policy", rule, "--dtype", dtype, "--gradient-checkpointing", checkpointing,
                          "--group-size", "4", "--questions-per-step", str(questions), "--max-response-tokens", "512", "--token-budget", "2304",
                          "--chunk-size", "256"])


def config(size: int = 384, layers: int = 8) -> Qwen2Config:
    return Qwen2Config(vocab_size=8192, hidden_size=size, intermediate_size=4 * size, num_hidden_layers=layers, num_attention_heads=6,
                       num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True)


def run(config, o, phase: str) -> None:
    """The phase, as large as its options allow, after a first optimizer step."""
    torch.manual_seed(0)
    policy = under_rule(Policy(AutoModelForCausalLM.from_config(config, **{DTYPE: getattr(torch, o.dtype)})), o.policy, o.chunk_size, 1)
    policy.gradient_checkpointing = o.gradient_checkpointing
    masters, (rows, tokens, B, T) = master_weights(policy), shapes(config, o)
    optimizer = torch.optim.AdamW(masters, lr=1e-6, foreach=False)
    for p in masters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    if phase == "update":                                      # a short micro-batch, whose gradients are there already, and one of B rows
        rows = torch.randint(config.vocab_size, (B, T)).tolist() + [[1, 2]] * B
        rows = [Trajectory(0, {}, row[:1], row[1:], [1] * (len(row) - 1), [-9.0] * (len(row) - 1)) for row in rows]
        update(policy, None, optimizer, rows, torch.ones(len(rows), T - 1), o)
    else:
        cache, fed, most = policy.new_cache(rows, tokens), 0, policy.max_tokens_a_pass // rows
        while fed < tokens:
            size = min(most, tokens - fed)
            sample(policy.step(torch.randint(config.vocab_size, (rows, size)), [size] * rows, cache), 1.0)
            fed += size


def measure(phase: str, rule: str, dtype: str, checkpointing: str) -> int:
    run(config(24, 1), options(rule, dtype, checkpointing, 1), phase)
    before = resident("VmRSS")
    run(config(), options(rule, dtype, checkpointing), phase)
    return resident("VmHWM") - before


def main() -> None:
    ctypes.CDLL(None).mallopt(-3, 1 << 16)                     # M_MMAP_THRESHOLD: 64 KiB and more go back to the system when freed
    result, processes = {}, get_context("fork").Pool(1, maxtasksperchild=1)
    print(f"{'':44}{'measured MiB':>14}{'estimated':>12}{'ratio':>8}")
    for case in tqdm([case for case in CASES if set(sys.argv[1:]) <= set(case)], mininterval=1):
        phase, rule, dtype, checkpointing = case
        measured, estimated = processes.apply(measure, case), estimate(config(), options(rule, dtype, checkpointing))[phase]
        name = f"{phase}, {rule}, {dtype}" + ", checkpointing" * (phase == "update" and checkpointing == "true")
        result[name] = round(estimated / measured, 3)
        tqdm.write(f"{name:44}{measured / 2 ** 20:14.1f}{estimated / 2 ** 20:12.1f}{result[name]:8.3f}")
    print(json.dumps(result | {"max |ratio - 1|": round(max(abs(ratio - 1) for ratio in result.values()), 3)}))


if __name__ == "__main__":
    main()
