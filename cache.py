"""Keys and values of the sampler's rows, each token in the slot of its own position.

    cache = SlotCache(batch_size=4, max_length=512)            # policy.step feeds it
"""
import torch
import torch.nn.functional as F
from transformers import Cache


def additive(visible: torch.Tensor, dtype) -> torch.Tensor:
    """True where a query sees a key -> 0 there and the most negative number elsewhere, which every attention kernel adds to its scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


def check_room(cache, end: torch.Tensor) -> None:
    """Refuse rows that would hold end [n] tokens, more than the cache was made for."""
    if int(end.max()) > cache.max_length:
        raise ValueError(f"the cache holds {cache.max_length} tokens a row and {int(end.max())} were fed; "
                         "ask new_cache for a larger max_length")


def exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    """Two parts of a store change places: by copies, which cost far less than indexing the store by the pair."""
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


class SlotCache(Cache):
    """Keys and values of B rows; the token at position p of row b lies in slot p, so there are no holes and no padding.

    `step` works on the first n rows. A row that has stopped is swapped behind them (`swap`), so the running rows stay
    one contiguous view and nothing is copied for a row that only waits. Memory grows with use, up to `max_length`.
    """

    def __init__(self, batch_size: int, max_length: int):
        self.layers = []                                       # what transformers' Cache would keep; unused here
        self.keys, self.values = [], []                        # a layer each: [B, H, capacity, D]
        self.max_length = max_length
        self.length = torch.zeros(batch_size, dtype=torch.long)  # [B] tokens fed so far, on the CPU: no GPU sync

    def open(self, start: int, lengths: torch.Tensor, device) -> None:
        """Announce that rows start … start + n − 1 are about to receive `lengths` [n] new tokens each."""
        n, S = len(lengths), int(lengths.max())
        old = self.length[start:start + n]
        row, column = (torch.arange(S) < lengths[:, None]).nonzero(as_tuple=True)
        self.start, self.n, self.K = start, n, int((old + lengths).max())
        self.index = tuple(i.to(device) for i in (start + row, old[row] + column, row, column))

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """[n,H,S,D] new keys and values of one layer -> all keys and values of its open rows, [n,H,K,D]."""
        if layer_idx == len(self.keys):
            _, H, _, D = key_states.shape
            for store in (self.keys, self.values):
                store.append(key_states.new_zeros(len(self.length), H, min(max(self.K, 64), self.max_length), D))
        grow = self.K - self.keys[layer_idx].shape[2]
        if grow > 0:
            grow = min(max(grow, self.keys[layer_idx].shape[2] // 2), self.max_length - self.keys[layer_idx].shape[2])
            for store in (self.keys, self.values):
                store[layer_idx] = F.pad(store[layer_idx], (0, 0, 0, grow))
        row, slot, b, s = self.index                           # only real tokens are written
        self.keys[layer_idx][row, :, slot] = key_states[b, :, s]
        self.values[layer_idx][row, :, slot] = value_states[b, :, s]
        rows = slice(self.start, self.start + self.n)
        return self.keys[layer_idx][rows, :, :self.K], self.values[layer_idx][rows, :, :self.K]

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        pair, swapped = [a, b], [b, a]
        K = int(self.length[pair].max())
        self.length[pair] = self.length[swapped]
        for store in self.keys + self.values:
            exchange(store[a, :, :K], store[b, :, :K])

    def copy_rows(self, source: "SlotCache", rows: list[int]) -> None:
        """Row b becomes a copy of row rows[b] of `source`: a prompt that a group shares is prefilled once."""
        K = max(int(source.length.max()), 64)
        self.length = source.length[rows].clone()
        pad = (0, 0, 0, min(K, self.max_length) - min(source.keys[0].shape[2], K))
        self.keys = [F.pad(k[rows, :, :K], pad) for k in source.keys]
        self.values = [F.pad(v[rows, :, :K], pad) for v in source.values]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given explicitly, so transformers' own count starts at 0."""
        return 0
