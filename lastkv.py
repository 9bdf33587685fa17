"""LastKV: a policy that is recurrent in fixed chunks, so that its parallel replay is the function its sampler executed.

A query at position t in chunk c = t // C, layer l, head h reads a key at s ≤ t (and its value, likewise) as

    s // C == c        K^l                                     the layer's own
    s // C == c − 1    (1 − α[l,h])·K^l + α[l,h]·K^L           blended with the last layer's
    s // C <  c − 1    K^L                                     the last layer's only

Replay runs the chunks in order and each chunk in parallel. Decode feeds any number of tokens a row and keeps K^l, V^l for two
chunks only. The rules it is compared with follow: the ordinary transformer, and feedback at every token. C ≥ T is the former.
Letters: B rows, R sequences, n rows at work, T positions, S tokens at once, C chunk size, c chunk, K keys, V vocabulary, E width,
L layers, H key/value heads, G query heads a key/value head, D head width. Left out: sliding windows, length-dependent RoPE.

    python lastkv.py                                           # the comparison on a small random model: CPU, under one minute
    python lastkv.py --model Qwen2.5-0.5B                      # the same, shorter, on that model
"""
import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import DynamicCache, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from cache import SlotCache, additive, exchange
from policy import Policy, load_policy, run_script

FAMILIES = {Qwen2ForCausalLM: modeling_qwen2, LlamaForCausalLM: modeling_llama}


# ---- attention and layout ----

def attend(q, history, mask, scale: float):
    """q [n,G·H,S,D] on segments of keys and values [2,n,H,K_i,D], K in all -> [n,S,G·H·D]. mask: additive, [S,K] or [n,1,S,K]. None: causal
    if K = S, and one query sees all. Several segments are joined, a copy, for many queries; one query takes two products a segment."""
    n, heads, S, D = q.shape
    if S == 1:                                                 # G heads are G queries of one key head, so that its keys are read once
        q = q.reshape(n, history[0][0].shape[1], -1, D)
    if S == 1 and len(history) > 1:
        scores = torch.cat([k @ (q * scale).mT for k, _ in history], 2).mT            # [n,H,G,K]
        weights = (scores if mask is None else scores + mask).softmax(-1)             # of bfloat16, too, torch sums it in float32
        out = sum(w @ v for w, (_, v) in zip(weights.split([k.shape[2] for k, _ in history], -1), history))
    else:
        k, v = torch.cat(history, 3) if len(history) > 1 else history[0]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and S > 1, scale=scale, enable_gqa=S > 1)
    return out.reshape(n, heads, S, D).transpose(1, 2).flatten(2)


def unpack(input_ids, attention_mask=None, document_ids=None):
    """[B,T] -> the documents as sequences of their own, longest first: ids [R,T'], lengths [R], and where each of the N real tokens went (real
    [B,T], row [N], position [N]). Positions count a document's real tokens, so padding moves no boundary. ValueError: a mask with a hole."""
    for name, given in (("attention_mask", attention_mask), ("document_ids", document_ids)):
        if given is not None and given.shape != input_ids.shape:
            raise ValueError(f"{name} has shape {list(given.shape)}; give it the shape of input_ids, {list(input_ids.shape)}")
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    first = real & ~F.pad(real, (1, 0))[:, :-1]                # [B,T] a sequence starts here
    if bool((first.sum(1) > 1).any()) or not bool(first.any()):
        raise ValueError("attention_mask has a hole in the middle of a row or no real token at all; pad a row at one end only")
    if document_ids is not None:
        first[:, 1:] |= real[:, 1:] & (document_ids[:, 1:] != document_ids[:, :-1])
    t = torch.arange(input_ids.shape[1], device=input_ids.device)
    position = (t - torch.where(first, t, 0).cummax(1).values)[real]
    sequence = (first.flatten().cumsum(0) - 1).view_as(first)[real]
    lengths, order = sequence.bincount().sort(descending=True, stable=True)
    row = order.argsort()[sequence]
    ids = input_ids.new_zeros(len(lengths), int(lengths[0])).index_put((row, position), input_ids[real])
    return ids, lengths, real, row, position


class ChunkCache:
    """Keys and values of B rows: every layer's own of the current chunk and blend of the previous one, and the last layer's of all older ones.

    A row whose newest token lies in chunk c has old = (c − 1)·C older tokens (0 in the first two chunks). Position p < old lies in
    slot p of the store, last layer only; position p ≥ old lies in slot p − old of every layer's `near`. So what a slot holds follows
    from the row's length, never from the order of writing. Memory grows with use, up to `max_length` tokens a row.
    """

    def __init__(self, policy: "LastKV", batch_size: int, max_length: int):
        self.C, self.max_length = policy.C, max_length
        self.length = torch.zeros(batch_size, dtype=torch.long)                      # [B] tokens fed so far, on the CPU
        like = {"dtype": policy.dtype, "device": policy.device}
        self.near = torch.zeros(2, policy.L, batch_size, policy.H, 0, policy.D, **like)  # K or V, layer, row, head, slot, width
        self.store = torch.zeros(2, 1, batch_size, policy.H, 0, policy.D, **like)

    def bytes(self) -> int:
        return self.near.nbytes + self.store.nbytes

    def open(self, start: int, take: torch.Tensor, alpha: torch.Tensor) -> None:
        """Rows start … start + n − 1 are about to receive take [n] tokens each, none across a boundary: commit, make room."""
        C, rows = self.C, slice(start, start + len(take))
        begin, end = self.length[rows], self.length[rows] + take                      # [n]
        self.old = ((end - 1) // C - 1).clamp(min=0) * C                              # [n]
        M, W = int(self.old.max()), int((end - self.old).max())                       # store and near slots in use
        if W > (size := self.near.shape[4]):
            self.near = F.pad(self.near, (0, 0, 0, min(max(W, 64, 3 * size // 2), 2 * C, self.max_length) - size))
        if M > self.store.shape[4]:
            self.store = F.pad(self.store, (0, 0, 0, M - self.store.shape[4]))
        complete = torch.where((take > 0) & (begin % C == 0), begin // C, 0)          # [n] chunks, where one has just been filled
        for c in set(complete.tolist()) - {0}:                 # chunk c − 1 becomes the previous one, blended; of chunk c − 2 only K^L stays
            b = (start + (complete == c).nonzero()[:, 0]).to(self.near.device)
            if c > 1:
                self.store[:, 0, b, :, (c - 2) * C:(c - 1) * C] = self.near[:, -1, b, :, :C]
            own = self.near[:, :, b, :, C * (c > 1):C * (c > 1) + C]                  # [2,L,b,H,C,D]
            self.near[:, :, b, :, :C] = torch.lerp(own, own[:, -1:], alpha)
        self.M, self.W, self.rows = M, W, rows

    def mask(self, position: torch.Tensor) -> torch.Tensor | None:
        """What the queries at position [n,S] of the open rows see: additive [n,1,S,M+W]; one for all rows if they stand alike, and
        none if these decode one token each, which sees all that is there."""
        if bool((position == position[0]).all() & (self.old == self.old[0]).all()):
            if position.shape[1] == 1:
                return None
            position = position[:1]
        old, t = self.old[:len(position), None, None], position[:, :, None]           # [n,1,1], [n,S,1]
        slot = torch.arange(self.M + self.W)
        sees = torch.where(slot < self.M, slot < old, old + slot - self.M <= t)       # [n,S,M+W]
        return additive(sees, self.near.dtype).to(self.near.device)[:, None]

    def read(self, l: int) -> list[torch.Tensor]:
        """Keys and values that layer l sees in the open rows: [2,n,H,M,D] of the store, if there are any, and [2,n,H,W,D]."""
        near = self.near[:, l, self.rows, :, :self.W]
        return [self.store[:, 0, self.rows, :, :self.M], near] if self.M else [near]

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        pair, swapped = [a, b], [b, a]
        self.length[pair] = self.length[swapped]
        for store in (self.near, self.store):
            exchange(store[:, :, a], store[:, :, b])

    def copy_rows(self, source: "ChunkCache", rows: list[int]) -> None:
        """Row b becomes a copy of row rows[b] of `source`: a prompt that a group shares is prefilled once."""
        self.length, self.near, self.store = source.length[rows], source.near[:, :, rows], source.store[:, :, rows]


# ---- LastKV ----

class LastKV(Policy):
    """The chunk recurrence around a Qwen2 or Llama causal LM, with that model's own weights.

    alpha: [L,H] fixed values, or None: learned as a sigmoid and started at 0.5. C counts tokens fed, from 0, in every sequence.
    """

    rule = "lastkv"
    branch_logprobs = None                                     # a branch would need the chunks of its own sequence: scored row by row

    def __init__(self, model, chunk_size: int = 512, alpha=None):
        modules = [module for family, module in FAMILIES.items() if isinstance(model, family)]
        if not modules:
            raise ValueError(f"LastKV cannot wrap a {type(model).__name__}; pass a Qwen2ForCausalLM or a LlamaForCausalLM")
        if not isinstance(chunk_size, (int, float)) or not 1 <= chunk_size < float("inf") or int(chunk_size) != chunk_size:
            raise ValueError(f"chunk_size is {chunk_size}; give a whole number of tokens, at least 1")
        super().__init__(model)
        attention, config, self.C = model.model.layers[0].self_attn, model.config, int(chunk_size)
        self.setting = {"chunk_size": self.C}
        if getattr(config, "use_sliding_window", False) and config.max_window_layers < config.num_hidden_layers:
            raise ValueError("LastKV reads all history but this model has sliding windows; set use_sliding_window=False in its config")
        if model.model.rotary_emb.rope_type in ("dynamic", "longrope"):
            raise ValueError("this model's RoPE changes with the length, so decode would not equal replay; set another rope_type")
        self.L, self.D, self.rotate = config.num_hidden_layers, attention.head_dim, modules[0].apply_rotary_pos_emb
        self.H = config.num_attention_heads // attention.num_key_value_groups
        self.alpha_logit = self.fixed_alpha = None
        if alpha is None:
            self.alpha_logit = torch.nn.Parameter(torch.zeros(self.L, self.H, device=model.device))
        else:
            self.fixed_alpha = torch.as_tensor(alpha)
            if self.fixed_alpha.shape != (self.L, self.H):
                raise ValueError(f"alpha has shape {list(self.fixed_alpha.shape)}; give one for each layer and key/value head, {[self.L, self.H]}")
            if not bool(((self.fixed_alpha >= 0) & (self.fixed_alpha <= 1)).all()):
                raise ValueError("alpha has values outside [0, 1]; give each layer and key/value head a number between 0 and 1")

    @property
    def alpha(self) -> torch.Tensor:
        """[L,H] how much of the previous chunk is read through the last layer."""
        return self.fixed_alpha if self.alpha_logit is None else self.alpha_logit.sigmoid()

    def parameters(self) -> list[torch.nn.Parameter]:
        return super().parameters() + ([] if self.alpha_logit is None else [self.alpha_logit])

    def extra(self) -> dict[str, torch.Tensor]:
        """α, learned or fixed: neither is loaded as the other."""
        return {"fixed_alpha": self.fixed_alpha} if self.alpha_logit is None else {"alpha_logit": self.alpha_logit.data}

    def layers(self, x, position, mask, read):
        """x [n,S,E] at position [n or 1,S] through all layers -> [n,S,E]. read(l, k, v): layer l's new keys and values
        [n,H,S,D] -> the segments of all that it sees. In `read` alone replay and decode differ."""
        body, rest = self.model.model, self.rest_of_layer
        if self.checkpoints():                                 # the greater part: `read` keeps the history, which later chunks need anyway
            rest = partial(checkpoint, rest, use_reentrant=False, preserve_rng_state=False)
        rope = body.rotary_emb(x, position)
        for l, layer in enumerate(body.layers):
            a, y = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (f(y).unflatten(-1, (-1, self.D)).transpose(1, 2) for f in (a.q_proj, a.k_proj, a.v_proj))
            q, k = self.rotate(q, k, *rope)
            x = rest(layer, x, q, read(l, k, v), mask)
        return body.norm(x)

    def rest_of_layer(self, layer, x, q, history, mask):
        """A layer from its attention on: x [n,S,E], q and history as `attend` takes them -> [n,S,E]."""
        x = x + layer.self_attn.o_proj(attend(q, history, mask, layer.self_attn.scaling))
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def gates(self) -> torch.Tensor:
        """α as [L,H,1,1], in the model's own type and place."""
        return self.alpha.to(self.device, self.dtype)[:, :, None, None]

    def hidden(self, input_ids, attention_mask=None, document_ids=None, detach_history=False, keep_chunks=None) -> torch.Tensor:
        """[B,T] -> last hidden states [B,T,E] (0 at padding): ⌈T/C⌉ chunks in order, each in parallel, gradients through all of them.

        document_ids: a change of id starts a document of its own. Two approximations keep the values and lose gradient:
        detach_history=True: a loss sends none through the keys and values of earlier chunks. keep_chunks=j: truncated back-propagation
        in segments of j chunks: the graph is cut at every j-th boundary, and a loss reaches back to the last cut; 1 is detach_history.
        """
        if keep_chunks is not None and keep_chunks < 1:
            raise ValueError(f"keep_chunks is {keep_chunks}; give at least 1, the chunk itself, or None for the whole recurrence")
        j = 1 if detach_history else keep_chunks
        ids, lengths, real, row, position = unpack(input_ids, attention_mask, document_ids)
        embed, alpha, C = self.model.get_input_embeddings(), self.gates(), self.C
        R, T = ids.shape
        last = (T - 1) // C * C                                # every chunk's mask is a view of this one [C,last+C]: none is [T,T]
        future = F.pad(torch.full((min(C, T),) * 2, -torch.inf, dtype=self.dtype, device=self.device).triu(1), (last, 0))
        blocks, older, own = [], [], []                        # older: K^L, V^L of chunks < c − 1; own: K^l, V^l of chunk c − 1
        for c, start in enumerate(range(0, T, C)):
            x = embed(ids[:(lengths > start).sum(), start:start + C])                 # [n,S,E] sequences that reach this chunk
            (n, S, _), at = x.shape, torch.arange(start, min(start + C, T), device=x.device)
            cut = bool(j) and c % j == 0
            older, before = ([(t.detach() if cut else t)[:, :n] for t in history] for history in (older, own))
            mask = future[:S, last - start:last + S] if c else None                   # [S,start+S]
            own = []

            def read(l, k, v):
                own.append(torch.stack((k, v)))                                       # [2,n,H,S,D]
                return [*older, torch.lerp(before[l], before[-1], alpha[l]), own[l]] if c else own[l:]

            blocks.append(F.pad(self.layers(x, at[None], mask, read), (0, 0, 0, 0, 0, R - n)))    # [R,S,E]
            older += before[-1:]
        states = torch.cat(blocks, 1)                                                 # [R,T',E]
        out = states.new_zeros(*input_ids.shape, states.shape[2])
        out[real] = states[row, position]
        return out

    def replay(self, input_ids, attention_mask=None, document_ids=None, detach_history=False, keep_chunks=None) -> torch.Tensor:
        """[B,T] -> logits [B,T,V]; right- or left-padded, packed by document_ids; the options of `hidden`."""
        return self.head(self.hidden(input_ids, attention_mask, document_ids, detach_history, keep_chunks))

    def new_cache(self, batch_size: int, max_length: int) -> ChunkCache:
        return ChunkCache(self, batch_size, max_length)

    def _step(self, input_ids, lengths, cache, start):
        """`step` on rows start … start + n − 1, in pieces: each brings every row up to its next chunk boundary at most."""
        n, fed, rows = len(lengths), torch.zeros_like(lengths), slice(start, start + len(lengths))
        if cache.C != self.C:
            raise ValueError(f"the cache was made for chunks of {cache.C} tokens and this policy has {self.C}; make it with this policy's new_cache")
        input_ids, embed, alpha, last = input_ids.to(self.device), self.model.get_input_embeddings(), self.gates()[:, None], 0
        while bool((fed < lengths).any()):
            past = cache.length[rows]
            take = torch.minimum(lengths - fed, self.C - past % self.C)               # [n] tokens of this piece
            cache.open(start, take, alpha)
            column = torch.arange(int(take.max()))                                    # [S]
            position, fresh = past[:, None] + column, not bool(past.any())            # [n,S]
            mask = None if fresh else cache.mask(position)
            b, s = (column < take[:, None]).nonzero(as_tuple=True)                    # the real tokens
            row, slot, b, s, piece, at, end = (i.to(self.device) for i in (
                start + b, position[b, s] - cache.old[b], b, s, (fed[:, None] + column).clamp(max=input_ids.shape[1] - 1), position, take))

            def read(l, k, v):
                for near, new in zip(cache.near[:, l], (k, v)):
                    near[row, :, slot] = new[b, :, s]
                return [(k, v)] if fresh else cache.read(l)

            x = self.layers(embed(input_ids.gather(1, piece)), at, mask, read)        # [n,S,E]
            newest = x[torch.arange(n, device=self.device), (end - 1).clamp(min=0)]   # [n,E]
            last = torch.where(end[:, None] > 0, newest, last)
            cache.length[rows] += take
            fed += take
        return self.head(last)                                                        # [n,V]

    def definition(self, input_ids) -> torch.Tensor:
        """[B,T] -> hidden [B,T,E] read off the definition, position after position with the graph kept: slow, to hold the others to."""
        B, T = input_ids.shape
        embed, alpha, states = self.model.get_input_embeddings(), self.gates(), []
        own = [torch.zeros(2, B, self.H, 0, self.D, dtype=self.dtype, device=self.device)] * self.L     # K^l, V^l of all positions
        for t in range(T):
            at = torch.arange(t + 1, device=self.device)[:, None]                     # [t+1,1] s

            def read(l, k, v):
                own[l] = torch.cat((own[l], torch.stack((k, v))), 3)                  # [2,B,H,t+1,D]
                top = F.pad(own[-1], (0, 0, 0, t + 1 - own[-1].shape[3]))             # K^L at t is not there yet, and not read
                older = torch.where(at // self.C == t // self.C - 1, torch.lerp(own[l], top, alpha[l]), top)
                return [torch.where(at // self.C == t // self.C, own[l], older)]

            mask = torch.zeros(1, t + 1, dtype=self.dtype, device=self.device)
            states.append(self.layers(embed(input_ids[:, t:t + 1]), at[None, t], mask, read))
        return torch.cat(states, 1)


# ---- the rules it is compared with ----

def check_rounds(rounds: int) -> None:
    if rounds < 0:
        raise ValueError(f"rounds is {rounds}; give the number of parallel refinement rounds, at least 0")


def toy(x: torch.Tensor, rho: float, rounds: int | None = None) -> torch.Tensor:
    """h_t = x_t + ρ·h_{t−1} on x [T]: serially, or in `rounds` parallel Jacobi rounds h^k_t = x_t + ρ·h^{k−1}_{t−1} from h^0 = x."""
    if rounds is None:
        h = [x[0]]
        for t in range(1, len(x)):
            h.append(x[t] + rho * h[-1])
        return torch.stack(h)
    check_rounds(rounds)
    h = x
    for _ in range(rounds):
        h = x + rho * F.pad(h[:-1], (1, 0))
    return h


class FeedbackCache(SlotCache):
    """The plain cache, and the last layer's state of every row's newest token: what its next token is fed back."""

    def __init__(self, policy: "Feedback", batch_size: int, max_length: int):
        super().__init__(batch_size, max_length)
        self.state = torch.zeros(batch_size, policy.model.config.hidden_size, dtype=policy.dtype, device=policy.device)   # [B,E]

    def swap(self, a: int, b: int) -> None:
        super().swap(a, b)
        exchange(self.state[a], self.state[b])

    def copy_rows(self, source: "FeedbackCache", rows: list[int]) -> None:
        super().copy_rows(source, rows)
        self.state = source.state[rows]


class Feedback(Policy):
    """Feedback at every token: the input of token t is x_t + W·h_{t−1}, h the last layer's normed state.

    Rollout: a row's first fed chunk, the prompt, is prefilled in parallel by `rounds` Jacobi rounds; every later token is serial.
    Replay: the same rounds over the whole sequence from h = 0. They agree on the prompt; after it the replay's states carry feedback
    over `rounds` tokens only, the rollout's over all. W [E,E] is random with a fixed seed, `strength` times as loud as the embeddings.
    """

    rule = "feedback"
    branch_logprobs = None                                     # what a token is fed back depends on the whole pass: scored row by row

    def __init__(self, model, rounds: int = 1, strength: float = 0.5, seed: int = 0):
        check_rounds(rounds)
        super().__init__(model)
        self.rounds, embed, E = rounds, model.get_input_embeddings().weight, model.config.hidden_size
        self.W = torch.nn.Linear(E, E, bias=False, dtype=embed.dtype)
        scale = strength * embed.detach().float().std().item() / E ** 0.5
        self.W.weight.data.normal_(0, scale, generator=torch.Generator().manual_seed(seed))
        self.W.to(model.device)

    def parameters(self) -> list[torch.nn.Parameter]:
        return super().parameters() + [self.W.weight]

    def extra(self) -> dict[str, torch.Tensor]:
        return {"W": self.W.weight.data}

    def refined(self, x, rounds: int, fed=1, **where):
        """x [B,T,E] -> the inputs x_t + W·h_{t−1} of the last of `rounds` Jacobi rounds; the first reads h from a pass without feedback.
        fed [B,T,1]: 0 where a token has none before it."""
        inputs = x
        for _ in range(rounds):
            h = self.states(inputs_embeds=inputs, **where)                            # [B,T,E]
            inputs = x + F.pad(self.W(h[:, :-1]), (0, 0, 1, 0)) * fed
        return inputs

    def hidden(self, input_ids, attention_mask=None, rounds: int | None = None) -> torch.Tensor:
        """[B,T] -> last hidden states after `rounds` Jacobi rounds over the whole sequence, [B,T,E]."""
        position = (unpack(input_ids, attention_mask)[2].cumsum(1) - 1).clamp(min=0)
        where = dict(attention_mask=attention_mask, position_ids=position)
        x = self.refined(self.model.get_input_embeddings()(input_ids), self.rounds if rounds is None else rounds, (position > 0)[..., None], **where)
        return self.states(inputs_embeds=x, **where)

    def serial(self, input_ids, prompt: int) -> torch.Tensor:
        """The exact hybrid replay, [B,T] -> [B,T,E]: the prompt's parallel prefill, then every token after the one before it."""
        x, cache = self.model.get_input_embeddings()(input_ids), DynamicCache()
        h, step = [], self.refined(x[:, :prompt], self.rounds)
        for t in range(prompt, x.shape[1] + 1):
            h.append(self.model.base_model(inputs_embeds=step, use_cache=True, **{self.cache_argument: cache}).last_hidden_state)
            step = x[:, t:t + 1] + self.W(h[-1][:, -1:])
        return torch.cat(h, 1)

    def new_cache(self, batch_size: int, max_length: int) -> FeedbackCache:
        return FeedbackCache(self, batch_size, max_length)

    def _step(self, input_ids, lengths, cache, start):
        rows = slice(start, start + len(lengths))
        first, S = cache.length[rows] == 0, int(lengths.max())
        if (prefill := bool(first.any())) and not bool(first.all()):
            raise ValueError("some rows are empty and others are not; feed the first tokens of all rows in one step: they are prefilled together")
        x = self.model.get_input_embeddings()(input_ids[:, :S].to(self.device))       # [n,S,E]
        if prefill:
            x = self.refined(x, self.rounds)
        for s in range(1 if prefill else S):                # a prompt at once, anything else token by token
            take = lengths if prefill else (lengths > s).long()                       # [n]
            now = x if prefill else x[:, s:s + 1] + self.W(cache.state[rows])[:, None]
            h = self.extend(cache, start, take, inputs_embeds=now)    # [n,S,E]
            take = take.to(self.device)
            newest = h[torch.arange(len(take), device=self.device), (take - 1).clamp(min=0)]
            cache.state[rows] = torch.where(take[:, None] > 0, newest, cache.state[rows])
        return self.head(cache.state[rows])


def under_rule(policy: Policy, rule: str, chunk_size: int, rounds: int, folder=None) -> Policy:
    """The same model under an execution rule: full (as it is), lastkv, feedback; with the α or W that `folder` holds, if any."""
    make = {"full": lambda: policy, "lastkv": lambda: LastKV(policy.model, chunk_size), "feedback": lambda: Feedback(policy.model, rounds)}
    if rule not in make:
        raise ValueError(f"there is no rule {rule!r}; give one of {', '.join(make)}")
    held = [other for other in make if folder and (Path(folder) / f"{other}.safetensors").exists()]
    for other in {*held} - {rule}:
        raise ValueError(f"{folder} was trained with --policy {other}; give that, or remove its {other}.safetensors to drop what it learned")
    policy = make[rule]()
    if held:
        policy.load(folder)
    return policy


# ---- the comparison ----

@torch.no_grad()
def sample(policy, prompt, steps: int, generator):
    """Decode after prompt [B,P] -> ids [B,P+steps], log μ [B,steps,V] of the very distributions that were sampled."""
    (B, P), ids, mu = prompt.shape, [prompt], []
    cache = policy.new_cache(B, P + steps)
    for _ in range(steps):
        mu.append(torch.log_softmax(policy.step(ids[-1], [ids[-1].shape[1]] * B, cache).double(), -1))
        ids.append(torch.multinomial(mu[-1].exp(), 1, generator=generator))
    return torch.cat(ids, 1), torch.stack(mu, 1)


def cache_bytes(policy, N: int) -> int:
    """What the cache of one row takes after N tokens. LastKV's is made to that size; another's is K and V of all layers, and feedback's state."""
    cache, model = policy.new_cache(1, N), policy.model
    if isinstance(cache, ChunkCache):
        for end in (min(N, 2 * cache.C), N):                   # what it grows to by use
            cache.open(0, torch.tensor([end]), policy.gates())
        return cache.bytes()
    width = sum(layer.self_attn.k_proj.out_features for layer in model.model.layers)  # H·D of all layers
    return 2 * N * width * model.dtype.itemsize + (cache.state.nbytes if isinstance(cache, FeedbackCache) else 0)


def rules(model, C: int, P: int, steps: int):
    """(name, policy that samples, replay, the serial execution that its gradient is held to, sequential stages of the replay)."""
    plain, lastkv, whole, feedback = Policy(model), LastKV(model, C), LastKV(model, P + steps), [Feedback(model, K) for K in (1, 4, 16, P)]
    hybrid, chunks = {f: partial(f.serial, prompt=P) for f in feedback}, -(-(P + steps) // C)
    exact = feedback.pop()                                     # so many rounds make the prompt's prefill serial, too
    return [("ordinary transformer", plain, plain.hidden, whole.definition, 1),
            *[(f"feedback, K = {f.rounds}", f, f.hidden, hybrid[f], f.rounds + 1) for f in feedback],
            *[(f"feedback, exact hybrid, K = {f.rounds}", f, hybrid[f], serial, f.rounds + 1 + steps)
              for f, serial in ((feedback[0], hybrid[feedback[0]]), (exact, partial(exact.hidden, rounds=P + steps)))],
            (f"LastKV, C = {C}", lastkv, lastkv.hidden, lastkv.definition, chunks),
            ("LastKV, keep_chunks = 2", lastkv, partial(lastkv.hidden, keep_chunks=2), lastkv.definition, chunks),
            ("LastKV, detach_history", lastkv, partial(lastkv.hidden, detach_history=True), lastkv.definition, chunks)]


def show(title: str, *rows) -> None:
    """Print a table; its first row is the head."""
    print(f"\n{title}")
    for name, *cells in rows:
        print(f"{name:31}" + "".join(f"{x:>19.1e}" if isinstance(x, float) else f"{x:>19,}" if isinstance(x, int) else f"{x:>19}" for x in cells))


def compare(model, C: int, steps: int, N: int = 4096) -> None:
    """The table: every replay p against its own rollout μ, and its gradient against autograd through the serial execution. Then, at
    one prefix, E_μ[R·∇log p] = E_μ[R]·E_μ[∇log p] + Cov_μ(R, ∇log p), where E_μ[f·∇log p] = ∇ Σ_a μ(a)·f(a)·log p(a) over all tokens."""
    B, P, weights, V = 4, 3 * C // 2, list(model.model.layers[0].parameters()), model.config.vocab_size
    generator = torch.Generator(model.device).manual_seed(0)
    prompt = torch.randint(V, (B, P), generator=generator, device=model.device)
    R = torch.rand(V, generator=generator, device=model.device).double()              # [V] a reward for each token
    runs, truth, table, identity = {}, {}, [], []
    for name, policy, replay, serial, stages in tqdm(rules(model, C, P, steps), leave=False):
        if policy not in runs:
            runs[policy] = sample(policy, prompt, steps, generator)
        ids, mu = runs[policy]                                                        # [B,T], [B,steps,V]
        m = mu[0, -1].exp()                                                           # [V] one prefix: row 0 before its last token

        def scored(hidden):
            """log p [B,steps,V], log p of the sampled tokens, ∇ of their mean, and E_μ[f·∇log p] with f = R, 1, R − E_μ[R]."""
            logs = torch.log_softmax(policy.head(hidden)[:, P - 1:-1].double(), -1)
            chosen = logs.gather(-1, ids[:, P:, None])
            values = chosen.mean(), *((m * f * logs[0, -1]).sum() for f in (R, 1, R - m @ R))
            return logs, chosen, *(torch.cat([g.flatten() for g in torch.autograd.grad(x, weights, retain_graph=True)]) for x in values)

        if serial not in truth:
            truth[serial] = scored(serial(ids))[2:4]
        exact, own = truth[serial]                                                    # own: E_μ[R·∇log μ], the sampler's gradient
        p, chosen, grad, whole, ones, cov = scored(replay(ids))
        kl, ratio, away = (mu.exp() * (mu - p)).sum(-1).mean(), (chosen - mu.gather(-1, ids[:, P:, None])).abs().max(), (m @ R) * ones
        table.append((name, kl.item(), ratio.item(), stages, cache_bytes(policy, N), ((grad - exact).norm() / exact.norm()).item()))
        identity.append((name, *((x.norm() / own.norm()).item() for x in (whole - away - cov, ones, away, cov - own))))
    show(f"{B} rows of {P} prompt and {steps} sampled tokens; cache of one row at N = {N}; gradient: of layer 0, against the serial execution's",
         ("replay", "mean KL", "max |log ratio|", "stages", "cache bytes", "gradient error"), *table)
    show("the score identity, exact over all tokens of one prefix, norms in units of the sampler's own gradient |E_μ[R·∇log μ]|",
         ("replay", "error", "|E_μ[∇log p]|", "centering removes", "centering leaves"), *identity)


@torch.no_grad()
def boundaries(model, C: int) -> None:
    """Decode against replay, whole distributions: a prompt that ends around a boundary, commits, blending, a tool result fed at once."""
    generator, shape, table = torch.Generator(model.device).manual_seed(1), LastKV(model).alpha.shape, []
    for P, alpha in ((C - 1, 0.5), (C, 0.5), (C + 1, 0.5), (3 * C // 2, 0.5), (3 * C // 2, 0.0), (3 * C // 2, 1.0)):
        policy, pieces = LastKV(model, C, torch.full(shape, alpha)), [P, *[1] * C, 3 * C // 2, *[1] * (C // 2)]
        ids = torch.randint(model.config.vocab_size, (1, sum(pieces)), generator=generator, device=model.device)
        cache, at = policy.new_cache(1, sum(pieces)), torch.tensor(pieces).cumsum(0) - 1
        mu = torch.cat([policy.step(piece, [piece.shape[1]], cache) for piece in ids.split(pieces, 1)]).log_softmax(-1)
        p, plain = (f.replay(ids)[0, at].log_softmax(-1) for f in (policy, Policy(model)))
        table.append((f"prompt {P}, α {alpha}", (sum(pieces) - 1) // C, 3 * C // 2, *((x - p).abs().max().item() for x in (mu, plain))))
    show("decode against replay; and, for scale, LastKV against the ordinary rule",
         ("", "commits", "tool result", "max |Δ log p|", "to the ordinary"), *table)


def main() -> None:
    """The toy, the table, the identity and the boundary checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="hub id, its short form, or a folder; without it a small random Qwen2 is made")
    name = parser.parse_args().model
    torch.manual_seed(0)
    model = load_policy(name)[0].model if name else Qwen2ForCausalLM(Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=8192, initializer_range=0.05))
    serial, one, all_but_one = (toy(torch.ones(4), 0.5, rounds).tolist() for rounds in (None, 1, 3))
    print(f"toy h_t = x_t + ρ·h_(t−1), x = 1, ρ = 0.5: serial {serial}, initialisation and one round {one}, T − 1 rounds {all_but_one}")
    LastKV(model)                                              # refuses here what it cannot wrap
    C, steps = (8, 12) if name else (16, 40)
    compare(model, C, steps)
    boundaries(model, C)


if __name__ == "__main__":
    run_script("lastkv.py", main)
