"""The plain policy with its decode step at fixed shapes, which a GPU captures once and replays: one launch in place of hundreds.

A CUDA graph replays the same kernels on the same memory. So a step is computed for N ≥ n rows and the first K slots, both rounded up; what
differs from step to step, token and position, is written into the same two tensors. On a CPU the same step runs without a graph.
Letters: n rows at work, N rows computed, K slots, V vocabulary. Left out: prefills, whose shapes are never the same.

    policy = Captured(policy.model)                            # then as any policy; `python benchmarks/run.py --device cuda` measures it
"""
import torch

from cache import SlotCache, additive
from policy import Policy


def capture(run):
    """A function without arguments as one CUDA graph -> a function that replays it and returns the same tensor, newly filled."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay():
        graph.replay()
        return out
    return replay


class FixedCache(SlotCache):
    """A SlotCache and the steps that were captured on its stores."""

    def __init__(self, batch_size: int, max_length: int):
        super().__init__(batch_size, max_length)
        self.steps = {}

    def place(self) -> tuple:
        """Where the stores are and how large: a captured step belongs to these, and the stores move as they grow."""
        return tuple((store.data_ptr(), store.shape) for store in self.keys + self.values)


class Captured(Policy):
    """Policy, with the same results. N is the next power of two and K the next multiple of `slots`, so that few shapes occur."""

    slots = 256

    def __init__(self, model):
        super().__init__(model)
        self.graphs = self.device.type == "cuda"

    def new_cache(self, batch_size: int, max_length: int) -> FixedCache:
        return FixedCache(batch_size, max_length)

    def _step(self, input_ids, lengths, cache, start):
        """A piece of `step`, which copies the logits; for one token a row at fixed shapes. Rows n … N − 1 are computed and forgotten: what
        they write lies behind their last token, in the slot where their next token will be written."""
        n = len(lengths)
        if start or int(lengths.max()) > 1:
            return super()._step(input_ids, lengths, cache, start)
        N = min(1 << (n - 1).bit_length(), len(cache.length))
        K = min(-(-(int(cache.length[:N].max()) + 1) // self.slots) * self.slots, cache.max_length)
        token, position, step = cache.steps.get((N, K, cache.place())) or (*torch.zeros(2, N, dtype=torch.long, device=self.device), None)
        token[:n] = input_ids[:, 0]
        position.copy_(cache.length[:N].clamp(max=K - 1))      # a row that is full is never fed again
        if step is None:
            run = lambda: self.fixed(cache, token, position, K)
            logits = run()                                     # lets the stores grow and the libraries set up
            if self.graphs:
                cache.steps[N, K, cache.place()] = token, position, capture(run)
        else:
            logits = step()
        cache.length[:n] += 1
        return logits[:n]

    def fixed(self, cache, token, position, K: int) -> torch.Tensor:
        """token [N] at position [N] of rows 0 … N − 1, which see slots < K -> logits [N,V]. Nothing here depends on a value."""
        row = torch.arange(len(token), device=token.device)
        cache.start, cache.n, cache.K, cache.index = 0, len(token), K, (row, position, row, torch.zeros_like(row))
        mask = additive(torch.arange(K, device=token.device) <= position[:, None, None, None], self.dtype)        # [N,1,1,K]
        hidden = self.model.base_model(input_ids=token[:, None], attention_mask=mask, position_ids=position[:, None], use_cache=True,
                                       **{self.cache_argument: cache}).last_hidden_state                                # [N,1,E]
        return self.head(hidden[:, 0])
