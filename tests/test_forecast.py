"""forecast.py against numbers worked by hand, and against what torch's own allocator says of the same passes."""
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import Qwen2Config

import policy as policy_module
from forecast import GiB, estimate, fits, shapes
from helpers import ROOT, tiny_model
from lastkv import LastKV
from mempo import ppo_loss
from options import parse_options
from policy import Policy, master_weights
from train import optimizer_step

# parameters of helpers.tiny_model(40): embedding and head 2·40·32; a layer: q 32·32 + 32, k and v 2·(32·16 + 16), o 32·32, the feed-forward
# 3·32·64, two norms 2·32; the last norm 32
P = 2 * 1280 + 2 * (1056 + 2 * 528 + 1024 + 6144 + 64) + 32
BUFFERS = 4 * 4 * (2 if transformers.__version__ >= "5" else 1)   # the rotary embedding's frequencies [4], float32; transformers 5 holds them twice


def options(*more: str):
    return parse_options(["--model", "-", "--data", "-", "--questions-per-step", "3", "--group-size", "2",
                          "--max-response-tokens", "44", "--token-budget", "600", *more])


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_weights_masters_moments_gradients_and_cache_by_hand(dtype, size):
    """Keeps out a tied weight counted twice, masters of float32 weights, moments or gradients in bfloat16, and a cache by attention heads."""
    config, o = tiny_model(40).config, options("--dtype", dtype)
    assert P == 21_280 and shapes(config, o) == (6, 300, 2, 300)
    parts = estimate(config, o)
    assert parts["weights"] == P * size + BUFFERS and parts["masters"] == (4 * P if size == 2 else 0)
    assert parts["gradients"] == 4 * P and parts["moments"] == 2 * 4 * P and parts["reference"] == 0
    # rows, tokens: K and V, layers, key/value heads, width; the last pass's indices
    assert parts["kv_cache"] == 6 * 300 * (2 * 2 * 2 * 8 * size + 4 * 8)
    assert parts["rollout"] == sum(parts[p] for p in ("weights", "masters", "moments", "kv_cache", "pass"))
    assert parts["update"] == sum(parts[p] for p in ("weights", "masters", "moments", "gradients", "activations", "logits", "backward"))
    tied = tiny_model(40, tie_word_embeddings=True).config
    assert estimate(tied, o)["weights"] == (P - 1280) * size + BUFFERS
    assert estimate(tied, options("--dtype", dtype, "--kl-coef", "0.1"))["reference"] == (P - 1280) * size + BUFFERS


def test_lastkv_keeps_two_chunks_of_all_layers_and_one_layer_of_the_rest():
    """Keeps out a cache of the ordinary rule where the recurrent one runs. 300 tokens, C = 32: chunk 9 is open, so near holds 2 chunks
    of 2 layers, and the store the 8 chunks before and 2 chunks of scratch."""
    parts = estimate(tiny_model(40).config, options("--policy", "lastkv", "--chunk-size", "32"))
    assert parts["kv_cache"] == 6 * (2 * 64 + 8 * 32) * 2 * 2 * 8 * 4 and parts["weights"] == 4 * (P + 2 * 2) + BUFFERS


@pytest.mark.parametrize("budget, response, window, expected", [
    (600, 44, 4096, (6, 300, 2, 300)), (1000, 44, 4096, (6, 300, 4, 250)), (200, 44, 4096, (6, 300, 1, 300)), (600, 4096, 512, (6, 512, 2, 300))])
def test_the_largest_shapes(budget, response, window, expected):
    """Keeps out a micro-batch beyond the budget, one smaller than it may get, a long row cut to the budget, and rows beyond the window."""
    config = Qwen2Config(max_position_embeddings=window)
    assert shapes(config, options("--token-budget", str(budget), "--max-response-tokens", str(response))) == expected


def allocated_peak(run) -> int:
    """The most that torch's CPU allocator held at once during run(), above what it held before."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("rule", ["full", "lastkv"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_an_update_takes_what_is_estimated(monkeypatch, rule, dtype, checkpointing):
    """Keeps out an estimate that misses a part: activations, logits, gradients on their way. Held to torch's allocator, of the same passes."""
    monkeypatch.setattr(policy_module, "LOGIT_BLOCK", 40 * 256)
    o = options("--dtype", dtype, "--gradient-checkpointing", checkpointing, "--policy", rule, "--chunk-size", "128")
    model = tiny_model(40).to(getattr(torch, dtype))
    parts, (_, _, B, T) = estimate(model.config, o), shapes(model.config, o)
    policy = LastKV(model, 128) if rule == "lastkv" else Policy(model)
    policy.gradient_checkpointing = o.gradient_checkpointing
    masters = master_weights(policy)
    optimizer = torch.optim.AdamW(masters, foreach=False)
    for p in masters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    ids, mask = torch.randint(40, (B, T)), torch.arange(T).expand(B, T) > 0

    def micro_batch():
        loss, _ = ppo_loss(policy.logprobs(ids, mask), torch.zeros(B, T), torch.ones(B, T), mask)
        loss.backward()
        optimizer_step(policy, optimizer, 1.0, True)

    micro_batch()                                              # what the libraries keep
    measured, estimated = allocated_peak(micro_batch), sum(parts[p] for p in ("activations", "logits", "backward"))
    assert abs(estimated / measured - 1) < 0.05, (estimated, measured)


def test_a_rollout_takes_what_is_estimated():
    """Keeps out a cache or a pass that is larger than the estimate says."""
    o = options()
    model, parts = tiny_model(40), estimate(tiny_model(40).config, o)
    policy = Policy(model)
    rows, tokens, _, _ = shapes(model.config, o)

    def feed():
        policy.step(torch.zeros(rows, tokens, dtype=torch.long), [tokens] * rows, policy.new_cache(rows, tokens)).float().log_softmax(-1).exp()

    feed()
    measured = allocated_peak(feed)
    assert abs((parts["kv_cache"] + parts["pass"]) / measured - 1) < 0.05, (parts, measured)


def test_a_card_is_planned_with_a_tenth_to_spare():
    """Keeps out a run that is said to fit and has no room for the GPU's own needs."""
    assert [fits(21 * GiB, card * GiB) for card in (20, 23, 24)] == ["no", "tight", "yes"]


def test_a_dry_run_loads_and_writes_nothing(tmp_path):
    """Keeps out a dry run that needs weights or leaves a folder behind, and a traceback for a name that is not there."""
    model = tmp_path / "model"
    tiny_model(40).save_pretrained(model)
    (model / "model.safetensors").write_bytes(b"never read")

    def run(*arguments):
        return subprocess.run([sys.executable, "train.py", "--dry-run", "--out", tmp_path / "run", *arguments], cwd=ROOT, capture_output=True, text=True,
                              env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin"})
    done = run("--model", model, "--data", tmp_path / "none.jsonl", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    rows = dict((line[:60].strip(), line[60:].split()) for line in done.stdout.splitlines())
    assert rows["KV cache, 192 rows of 4096 tokens"] == ["0.094"] and len(rows["sum"]) == 2 and "24 GB yes" in done.stdout     # 192·4096·128 B
    assert not (tmp_path / "run").exists()
    sft = run("--model", model, "--data", tmp_path / "none.jsonl", "--dtype", "bfloat16", "--sft-only").stdout     # no rollout is made
    assert dict((line[:60].strip(), line[60:].split()) for line in sft.splitlines())["sum"] == rows["sum"][1:] and "the update, fit?" in sft
    done = run("--model", "./none/such", "--data", "-")
    assert done.returncode == 2 and "there is no folder or file ./none/such" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    done = run("--policy", "feedback")
    assert done.returncode == 2 and "give full or lastkv" in done.stderr
