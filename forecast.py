"""What a run will need: its GPU memory by part, in the rollout and in the update, before any weight is loaded.

No formula: the policy is built on torch's meta device, whose tensors have shapes and no memory, and does there what it does in a run, at its
largest: a pass of the rollout with a full cache, a micro-batch's forward and backward pass, an optimizer step. What is alive is counted.
Left out: the GPU's context, its allocator's gaps, kernels' workspaces. Letters: B rows, T positions, S tokens fed at once.

    python forecast.py                                         # the README's table
    python train.py --model Qwen2.5-1.5B --data hotpot.json --dry-run
"""
import math
import sys
import weakref
from argparse import Namespace
from contextlib import nullcontext
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import AutoModelForCausalLM, Qwen2Config

from lastkv import under_rule
from options import parse_options
from policy import DTYPE, Policy, master_weights, run_script

GiB = 2 ** 30
CARDS, ROOM = (24, 48, 80), 0.9                                # in GiB; what part of a card may be planned with, the rest being left out
PROMPT_TOKENS = 256                                            # instructions and question: 173 of Qwen2.5's for a question of 20 words
PHASES = ("rollout", "update")                                 # PARTS: (the phases in which it is there, its name)
PARTS = {"weights": (PHASES, "weights"), "reference": (PHASES, "the reference's weights"), "masters": (PHASES, "float32 masters of the weights"),
         "moments": (PHASES, "AdamW's two moments"), "gradients": (("update",), "gradients, float32"),
         "kv_cache": (("rollout",), "KV cache, {} rows of {} tokens"), "pass": (("rollout",), "a pass that feeds it"),
         "activations": (("update",), "activations of a micro-batch, {2} rows of {3} tokens"), "logits": (("update",), "logits slice"),
         "backward": (("update",), "backward pass and step, beyond that")}
QWEN = {"Qwen2.5-0.5B": (896, 24, 14, 2, 4864), "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960), "Qwen2.5-3B": (2048, 36, 16, 2, 11008)}


class Live(TorchDispatchMode):
    """Bytes of the meta storages that were made while this is open and are alive: `now`, and the most at once since `peak` was set."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.held = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True                                        # transformers asks whether no row is packed from several documents
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.is_meta and id(storage := t.untyped_storage()) not in self.held:
                self.held.add(id(storage))
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, id(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def free(self, key: int, size: int) -> None:
        self.held.discard(key)
        self.now -= size


def fused(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """F.scaled_dot_product_attention by the CPU's kernel. Without a device torch would write out the scores, [T,T], as no real one has to."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def shapes(config, o: Namespace) -> tuple[int, int, int, int]:
    """At their largest: rows and tokens a row of the rollout, rows B and tokens a row T of a micro-batch."""
    longest = min(PROMPT_TOKENS + o.max_response_tokens, getattr(config, "max_position_embeddings", None) or math.inf)
    B = max(1, -(-o.token_budget // longest))
    return o.questions_per_step * o.group_size, longest, B, o.token_budget // B if B > 1 else longest


def estimate(config, o: Namespace) -> dict[str, int]:
    """Bytes of every part of PARTS, and of the phases "rollout" and "update", in which not all parts are there at once.

    reference: that of --kl-coef. moments: AdamW's. pass: what a pass of the rollout needs besides the cache. activations: what the forward
    pass keeps of one micro-batch. logits: what the output layer adds. backward: what goes beyond that later: gradients on their way, layers
    computed again, the optimizer step's temporaries. All rows are taken to be as long as they may be, and all positions as trained.
    """
    if o.policy == "feedback":
        raise ValueError("the memory of --policy feedback cannot be estimated, since its W is scaled to real weights; give full or lastkv")
    (rows, tokens, B, T), live, parts = shapes(config, o), Live(), dict.fromkeys(PARTS, 0)
    with (live, patch.object(F, "scaled_dot_product_attention", fused),
          patch.object(torch, "autocast", lambda *_, **__: nullcontext())):    # transformers 4 switches it off in places, and meta knows none
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **{DTYPE: getattr(torch, o.dtype)})
        policy = under_rule(Policy(model), o.policy, o.chunk_size, o.replay_rounds)
        policy.gradient_checkpointing = o.gradient_checkpointing
        parts["weights"] = at = live.now
        masters = master_weights(policy)
        parts["masters"], at = live.now - at, live.now
        for p in masters:
            p.grad = torch.zeros_like(p)                       # of the micro-batches before
        parts["gradients"], at = live.now - at, live.now
        optimizer, live.peak = torch.optim.AdamW(masters, foreach=False), at
        optimizer.step()
        parts["moments"], step = live.now - at, live.peak - live.now
        at = live.peak = live.now                              # the update
        ids, select = torch.zeros(B, T, dtype=torch.long), torch.arange(T).expand(B, T) > 0
        hidden = policy.hidden(ids)
        parts["activations"] = kept = live.now - at
        hidden.register_hook(lambda gradient: parts.update(logits=live.peak - at - kept))      # the output layer's backward pass is over
        policy.selected(hidden, ids.to(hidden.device), select, o.temperature).sum().backward()
        parts["backward"] = max(live.peak - at, step) - kept - parts["logits"]
        optimizer.zero_grad()                                  # the rollout
        at = live.peak = live.now
        cache, S = policy.new_cache(rows, tokens), min(tokens, max(1, policy.max_tokens_a_pass // rows))
        cache.length += tokens - S                             # as if so many had been fed
        torch.log_softmax(policy.step(torch.zeros(rows, S, dtype=torch.long), [S] * rows, cache).float() / o.temperature, -1).exp()
        parts["kv_cache"], parts["pass"] = live.now - at, live.peak - live.now
    parts["reference"] = parts["weights"] * bool(o.kl_coef)
    return parts | {phase: sum(parts[part] for part, (phases, _) in PARTS.items() if phase in phases) for phase in PHASES}


def fits(need: int, card: int) -> str:
    return "yes" if need <= ROOM * card else "tight" if need <= card else "no"


def forecast(config, o: Namespace) -> None:
    """Print the parts, the phases (of a cold start only the update), and whether the larger one fits the GPU that is there, or else CARDS."""
    parts, phases = estimate(config, o), PHASES[1:] if o.sft_only else PHASES
    print(f"estimated memory in GiB: --policy {o.policy} --dtype {o.dtype} --gradient-checkpointing {str(o.gradient_checkpointing).lower()}\n"
          f"{'':60}" + "".join(f"{phase:>10}" for phase in phases))
    for part, (there, name) in (PARTS | {"": (PHASES, "sum")}).items():
        sizes = [parts[part or phase] if phase in there else 0 for phase in phases]
        if any(sizes):
            print(f"{name.format(*shapes(config, o)):60}" + "".join(f"{f'{n / GiB:.3f}' if n else '':>10}" for n in sizes))
    cards = ({torch.cuda.get_device_name(): torch.cuda.get_device_properties(0).total_memory} if torch.cuda.is_available() else
             {f"{size} GB": size * GiB for size in CARDS})
    largest = max(phases, key=parts.get)
    print(f"\ndoes the largest, the {largest}, fit? " + ", ".join(f"{name} {fits(parts[largest], size)}" for name, size in cards.items())
          + f" (yes: {ROOM:.0%} of it or less)\n"
          "the cache grows with --questions-per-step, --group-size and --max-response-tokens, the activations with --token-budget")


def main() -> None:
    """Qwen2.5 at train.py's defaults for a real model."""
    if sys.argv[1:]:
        raise ValueError(f"unknown option {sys.argv[1]}: it has none; for another model or setting use python train.py ... --dry-run")
    columns = [*(part for part in PARTS if part != "reference"), *PHASES]
    print(f"{'GiB':22}" + "".join(f"{name:>12}" for name in columns) + "".join(f"{size:6} GB" for size in CARDS))
    for name, (E, L, heads, kv, I) in tqdm(QWEN.items(), mininterval=1):
        config = Qwen2Config(vocab_size=151936, hidden_size=E, num_hidden_layers=L, num_attention_heads=heads, num_key_value_heads=kv,
                             intermediate_size=I, max_position_embeddings=32768, tie_word_embeddings=True)
        for dtype in ("bfloat16", "float32"):
            parts = estimate(config, parse_options(["--model", name, "--data", "-", "--dtype", dtype]))
            tqdm.write(f"{name:13}{dtype:9}" + "".join(f"{parts[column] / GiB:12.2f}" for column in columns)
                       + "".join(f"{fits(max(map(parts.get, PHASES)), size * GiB):>9}" for size in CARDS))


if __name__ == "__main__":
    run_script("forecast.py", main)
