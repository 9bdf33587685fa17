"""What LastKV costs against the plain policy of the same model: replay, its gradient, its memory, the cache, a decoded token.

Everything is timed in this one process, in turn and again, and compared by medians; the last line is one JSON object.
Letters: T positions, C chunk size, N cached tokens, n rows, L layers, E width.

    python benchmarks/lastkv.py                                # a few minutes, on a machine that does nothing else
"""
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from lastkv import LastKV, cache_bytes  # noqa: E402
from policy import Policy  # noqa: E402
from timing import alternate, resident  # noqa: E402

T, N, C, L, E = 4096, 8192, 512, 6, 256


def policies() -> tuple[Policy, LastKV]:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=512, hidden_size=E, intermediate_size=3 * E, num_hidden_layers=L, num_attention_heads=4,
                                         num_key_value_heads=2, max_position_embeddings=N))
    return Policy(model), LastKV(model, C)


def replay_seconds(rounds: int) -> tuple[list[float], list[float]]:
    """Medians of (plain, LastKV) for the forward pass and for the backward pass at T."""
    both, ids = policies(), torch.randint(512, (1, T))
    losses = [None, None]

    def forward(i):
        losses[i] = both[i].hidden(ids).square().mean()

    def backward(i):
        both[i].model.zero_grad()
        losses[i].backward()

    seconds = alternate([lambda: forward(0), lambda: forward(1), lambda: backward(0), lambda: backward(1)], rounds)
    return [median(s) for s in seconds[:2]], [median(s) for s in seconds[2:]]


@torch.no_grad()
def peak_bytes(T: int) -> int:
    """In a fresh process: how far a replay of T positions raises resident memory at its peak."""
    policy = policies()[1]
    policy.hidden(torch.zeros(1, C, dtype=torch.long))         # what the libraries need anyway
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")              # resets the peak
    policy.hidden(torch.zeros(1, T, dtype=torch.long))
    return resident("VmHWM") - before


@torch.no_grad()
def token_seconds(n: int, steps: int) -> list[float]:
    """Medians of (plain, LastKV) for one decoded token a row, up to N tokens in each of n rows."""
    both, caches, token = policies(), [], torch.zeros(n, 1, dtype=torch.long)
    for policy in both:
        one, cache = policy.new_cache(1, N), policy.new_cache(n, N)
        for start in range(0, N - steps - 1, C):
            size = min(C, N - steps - 1 - start)
            policy.step(torch.randint(512, (1, size)), [size], one)
        cache.copy_rows(one, [0] * n)
        caches.append(cache)
    return [median(s) for s in alternate([lambda i=i: both[i].step(token, [1] * n, caches[i]) for i in (0, 1)], steps)]


def main() -> None:
    if sys.argv[1:2] == ["--peak"]:
        print(peak_bytes(int(sys.argv[2])))
        return
    result = {"threads": torch.get_num_threads()}

    def row(name, plain, ours, bound):
        result[name] = round(ours / plain, 3)
        print(f"{name:44}{plain:14.6g}{ours:14.6g}{ours / plain:9.3f}{bound:9.3f}")

    print(f"{L} layers, {E} wide, C = {C}, {torch.get_num_threads()} threads\n{'':44}{'plain':>14}{'LastKV':>14}{'ratio':>9}{'at most':>9}")
    forward, backward = replay_seconds(3)
    row(f"replay forward, T = {T}, seconds", *forward, 1.25)
    row(f"replay backward, T = {T}, seconds", *backward, 1.25)
    row(f"cache, N = {N}, bytes", *(cache_bytes(p, N) for p in policies()), 1.05 * (2 * C * L + N) / (N * L))
    for n in (1, 8):
        row(f"decoded token, N = {N}, {n} rows, seconds", *token_seconds(n, 60), 1.0)
    for size in (T // 2, T, 2 * T):
        peak = int(subprocess.run([sys.executable, __file__, "--peak", str(size)], capture_output=True, text=True, check=True).stdout)
        result[f"peak memory of replay, T = {size}, MiB"] = round(peak / 2 ** 20, 1)
        print(f"replay without gradient, T = {size:5}: peak memory {peak / 2 ** 20:7.1f} MiB; "
              f"a [T,T] mask alone would be {size ** 2 / 2 ** 18:6.0f} MiB")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
