"""LastKV: golden values, replay against decode, padding and packing, gradients, the compared rules, bad input, a real rollout."""
import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agent_loop import rollout
from world import world_questions, world_tokenizer
import lastkv
from lastkv import ChunkCache, Feedback, LastKV, attend, cache_bytes, sample, toy, under_rule
from helpers import tiny_model
from policy import Policy

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
SIZES = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
             max_position_embeddings=512, initializer_range=0.1)
FINE = 1e-5


def model(family=Qwen2ForCausalLM, seed=0, **sizes):
    torch.manual_seed(seed)
    config = {Qwen2ForCausalLM: Qwen2Config, LlamaForCausalLM: LlamaConfig}[family](**SIZES | sizes)
    return family(config).eval()


def ids_of(B, T, seed=0):
    return torch.randint(SIZES["vocab_size"], (B, T), generator=torch.Generator().manual_seed(seed))


def alpha_of(L=3, H=2, seed=0):
    return torch.rand(L, H, generator=torch.Generator().manual_seed(seed))


def decode(policy, rows, pieces, cache=None):
    """Feed row b the pieces pieces[b] (sizes), all rows in step -> [(row, tokens fed so far, logits [V])]."""
    cache, fed, out = cache or policy.new_cache(len(rows), max(len(r) for r in rows)), [0] * len(rows), []
    for i in range(max(map(len, pieces))):                     # rows that still run lie in front
        n = sum(len(p) > i for p in pieces)
        lengths = [pieces[b][i] for b in range(n)]
        ids = torch.zeros(n, max(lengths), dtype=torch.long)
        for b in range(n):
            ids[b, :lengths[b]] = rows[b][fed[b]:fed[b] + lengths[b]]
            fed[b] += lengths[b]
        out += [(b, fed[b], x) for b, x in enumerate(policy.step(ids, lengths, cache))]
    return out


def cuts(T, rng):
    pieces = []
    while sum(pieces) < T:
        pieces.append(min(rng.choice((1, 1, 2, 3, 5, 8, 13)), T - sum(pieces)))
    return pieces


def close(a, b, tolerance=FINE):
    assert (a - b).abs().max() <= tolerance


# ---- golden values ----

@pytest.fixture(params=[0, 1, 2])
def golden(request):
    if not (GOLDEN / f"case_{request.param}.pt").exists():
        pytest.skip(f"no golden values in {GOLDEN}")
    case = torch.load(GOLDEN / f"case_{request.param}.pt", weights_only=True)
    config = json.loads((GOLDEN / f"case_{request.param}.json").read_text())["config"]
    case["model"] = Qwen2ForCausalLM(Qwen2Config(**config, rope_theta=config["rope_parameters"]["rope_theta"]))
    case["model"].load_state_dict(case["state_dict"])
    return case


def test_golden_replay_and_gradients(golden):
    """Keeps out: a wrong three-way history, and a gradient that misses a path of the recurrence or of alpha."""
    alpha, ids = golden["alpha"].clone().requires_grad_(), golden["input_ids"][None]
    policy = LastKV(golden["model"], golden["C"], alpha)
    logits = policy.replay(ids)
    close(logits[0], golden["logits"], 2e-4)
    loss = -torch.log_softmax(logits[0, :-1], -1).gather(-1, ids[0, 1:, None]).mean()
    close(loss, golden["loss"], 2e-4)
    loss.backward()
    weights = dict(golden["model"].named_parameters()) | {"alpha": alpha}
    for name, value in golden["grads"].items():
        close(weights[name].grad, value, 2e-4)


def test_golden_decode(golden):
    """Keeps out: a chunk committed early or late when tokens come one at a time or in uneven pieces."""
    ids, policy = golden["input_ids"], LastKV(golden["model"], golden["C"], golden["alpha"])
    for pieces in ([1] * len(ids), [len(ids)], cuts(len(ids), random.Random(0)), [golden["C"] + 1, *cuts(len(ids) - golden["C"] - 1, random.Random(1))]):
        for _, t, logits in decode(policy, [ids], [pieces]):
            close(logits, golden["logits"][t - 1], 2e-4)


def test_golden_padding_and_packing(golden):
    """Keeps out: padding, or an earlier document of the row, that shifts positions or the chunk phase."""
    ids, policy = golden["input_ids"][None], LastKV(golden["model"], golden["C"], golden["alpha"])
    for left, right in ((3, 0), (0, 3), (5, 2)):
        mask = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
        logits = policy.replay(torch.nn.functional.pad(ids, (left, right), value=7), mask)
        close(logits[0, left:left + ids.shape[1]], golden["logits"], 2e-4)
    document = torch.arange(len(golden["doc_lengths"])).repeat_interleave(torch.tensor(golden["doc_lengths"]))[None]
    close(policy.replay(ids, document_ids=document)[0], golden["packed_logits"], 2e-4)


# ---- attention ----

@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)])
def test_one_query_reads_its_segments_as_if_they_were_joined(dtype, tolerance):
    """Keeps out a softmax a segment, a segment's values under another's weights, and a mask that is dropped."""
    torch.manual_seed(0)
    q, history = torch.randn(3, 4, 1, 8).to(dtype), [torch.randn(2, 3, 2, K, 8).to(dtype) for K in (800, 7, 50)]
    hides = torch.zeros(3, 1, 1, 857).masked_fill(torch.rand(3, 1, 1, 857) < 0.5, -torch.inf)
    for mask in (None, hides):
        k, v = torch.cat(history, 3).double().repeat_interleave(2, 2)
        weights = (q.double() @ k.mT * 0.3 + (0 if mask is None else mask)).softmax(-1)
        close(attend(q, history, None if mask is None else mask.to(dtype), 0.3), (weights @ v).transpose(1, 2).flatten(2), tolerance)


def test_bfloat16():
    """Keeps out gates in float32, which no bfloat16 keys can be blended by."""
    m, ids = model(initializer_range=0.05).bfloat16(), ids_of(1, 14)
    for policy in (LastKV(m, 4), LastKV(m, 4, alpha_of())):
        assert policy.gates().dtype == torch.bfloat16
        for _, t, logits in decode(policy, ids, [[5, 1, 1, 6, 1]]):
            close(logits, policy.replay(ids)[0, t - 1], 1e-2)


# ---- replay ----

@pytest.mark.parametrize("family", [Qwen2ForCausalLM, LlamaForCausalLM])
def test_one_chunk_is_the_plain_transformer(family):
    """Keeps out: any drift from the family's own layers, scaling, rotary embedding or head sharing."""
    for sizes in ({}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4, "head_dim": 16}, {"tie_word_embeddings": True}):
        m, ids = model(family, **sizes), ids_of(2, 20)
        for C in (20, 64):
            close(LastKV(m, C).replay(ids), m(input_ids=ids).logits)


def test_one_layer_is_the_plain_transformer():
    """Keeps out: a history that a single layer reads from anywhere but its own cache, which is the last layer's."""
    m, ids = model(num_hidden_layers=1), ids_of(2, 20)
    for C in (1, 3, 7):
        close(LastKV(m, C).replay(ids), m(input_ids=ids).logits)


@pytest.mark.parametrize("family", [Qwen2ForCausalLM, LlamaForCausalLM])
def test_replay_is_the_definition(family):
    """Keeps out: a chunk-parallel shortcut that leaves the definition, at chunk sizes from 1 up and lengths no multiple of them."""
    m, ids = model(family), ids_of(2, 23)
    for C in (1, 2, 5, 8):
        for alpha in (None, torch.zeros(3, 2), torch.ones(3, 2), alpha_of()):
            policy = LastKV(m, C, alpha)
            close(policy.hidden(ids), policy.definition(ids))


def test_no_token_sees_the_future():
    """Keeps out: a mask that is off by one or anchored in the wrong corner inside a later chunk."""
    policy, ids = LastKV(model(), 4), ids_of(1, 19)
    before = policy.replay(ids)
    for t in (3, 4, 9, 18):
        changed = ids.clone()
        changed[0, t:] = (changed[0, t:] + 1) % SIZES["vocab_size"]
        assert torch.equal(policy.replay(changed)[0, :t], before[0, :t])
        assert not torch.allclose(policy.replay(changed)[0, t:], before[0, t:])


def test_left_padding_keeps_the_chunks_of_a_row():
    """Keeps out: chunk borders counted on padded indices: b0 … b3 after two pads are one chunk, not two and two."""
    policy, ids = LastKV(model(), 4), ids_of(2, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    logits = policy.replay(ids, mask)
    close(logits[1, 2:], policy.replay(ids[1:, 2:])[0])
    close(logits[1, 2:], policy.model(input_ids=ids[1:, 2:]).logits[0])            # one chunk: the plain transformer
    close(logits[0], policy.replay(ids[:1])[0])


def test_padding_is_the_mask_and_not_a_token():
    """Keeps out: padding recognised by its id, and a boolean or float mask that is read as additive."""
    policy, ids = LastKV(model(), 3), ids_of(3, 11)
    mask = torch.tensor([[1] * 11, [1] * 7 + [0] * 4, [0] * 6 + [1] * 5])
    alone = [policy.replay(ids[:1])[0], policy.replay(ids[1:2, :7])[0], policy.replay(ids[2:, 6:])[0]]
    for m in (mask, mask.bool(), mask.float()):
        logits = policy.replay(ids.masked_fill(mask == 0, 5), m)
        for b in range(3):
            close(logits[b][mask[b] == 1], alone[b])


def test_documents_do_not_see_each_other():
    """Keeps out: a packed document that inherits its neighbour's history, position or phase; ids may repeat and rows be padded."""
    policy, ids = LastKV(model(), 4), ids_of(2, 17)
    document = torch.tensor([[3] * 5 + [1] * 9 + [3] * 3, [0] * 2 + [8] * 15])
    mask = torch.tensor([[1] * 17, [0] * 4 + [1] * 13])
    logits = policy.replay(ids, mask, document)
    for b, spans in enumerate((((0, 5), (5, 14), (14, 17)), ((4, 17),))):
        for start, end in spans:
            close(logits[b, start:end], policy.replay(ids[b:b + 1, start:end])[0])


def test_rows_are_independent():
    """Keeps out: rows that change with their neighbours, with their order, or with what went through the object before."""
    policy, ids = LastKV(model(), 4), ids_of(4, 18)
    lengths = [18, 3, 12, 9]
    mask = torch.arange(18) < torch.tensor(lengths)[:, None]
    alone = [policy.replay(ids[b:b + 1, :n])[0] for b, n in enumerate(lengths)]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 2, 3, 0]):
        policy.replay(ids_of(2, 31, seed=9))
        logits = policy.replay(ids[order], mask[order])
        for i, b in enumerate(order):
            close(logits[i, :lengths[b]], alone[b])


# ---- decode ----

@settings(max_examples=40, deadline=None)
@given(st.data())
def test_decode_is_replay_for_any_cutting(data):
    """Keeps out: everything that depends on how tokens are cut into fed pieces, on phases that differ, or on rows that stop."""
    C, B = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    piece = st.integers(1, 2 * C + 3)
    pieces = sorted((data.draw(st.lists(piece, min_size=1, max_size=7)) for _ in range(B)), key=len, reverse=True)
    policy = LastKV(model(), C, alpha_of())
    policy.max_tokens_a_pass = data.draw(st.sampled_from((8, 16384)))
    rows = [ids_of(1, sum(p), seed=b)[0] for b, p in enumerate(pieces)]
    p = [torch.log_softmax(policy.replay(row[None])[0], -1) for row in rows]
    for b, t, logits in decode(policy, rows, pieces):
        close(torch.log_softmax(logits, -1), p[b][t - 1], 2e-5)


def test_several_tokens_on_a_cache_keep_the_causal_mask():
    """Keeps out: no mask, or a top-left one, when three tokens are fed on top of two: row i sees key j iff j <= 2 + i."""
    policy, ids = LastKV(model(), 8), ids_of(1, 5)
    cache = policy.new_cache(1, 5)
    policy.step(ids[:, :2], [2], cache)
    cache.open(0, torch.tensor([3]), policy.gates()[:, None])
    visible = (cache.mask(torch.tensor([[2, 3, 4]]))[0, 0, :3] == 0).int()         # the first query head of the group
    assert visible.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    for pieces in ([1] * 5, [2, 2, 1], [2, 3], [3, 2], [5]):
        for _, t, logits in decode(policy, ids, [pieces]):
            close(logits, policy.replay(ids)[0, t - 1])


def test_a_partial_write_keeps_what_is_still_needed():
    """Keeps out: a block that is right only when a write fills it: writes of 3, 2 and 1 leave what single writes leave."""
    policy, ids = LastKV(model(), 2, alpha_of()), ids_of(1, 6)
    caches = []
    for pieces in ([3, 2, 1], [1] * 6, [6], [2, 4]):
        caches.append(policy.new_cache(1, 6))
        decode(policy, ids, [pieces], caches[-1])
        assert caches[-1].old.tolist() == [2] and caches[-1].W == 4                # the store holds 0, 1; near holds 2 … 5
        close(caches[-1].near[..., :4, :], caches[0].near[..., :4, :])
        close(caches[-1].store[..., :2, :], caches[0].store[..., :2, :])


def test_rows_at_one_place_that_are_fed_different_amounts():
    """Keeps out: one mask shared by rows at the same boundary of which only some go on into the next chunk."""
    policy, rows = LastKV(model(), 4), ids_of(2, 14)
    for pieces in ([[8], [8, 5, 1]], [[12], [12, 2]], [[8, 1], [11, 2]]):
        order = sorted((0, 1), key=lambda b: -len(pieces[b]))
        cut = [pieces[b] for b in order]
        for b, t, logits in decode(policy, rows[order], cut):
            close(logits, policy.replay(rows[order][b:b + 1])[0, t - 1])


def test_swap_and_copy_rows():
    """Keeps out: a row that leaves part of its cache behind when rows are exchanged or a shared prompt is copied."""
    policy, rows = LastKV(model(), 4, alpha_of()), ids_of(3, 30)
    expect = [policy.replay(row[None])[0] for row in rows]
    source = policy.new_cache(2, 20)
    policy.step(rows[:2, :13], [13, 6], source)
    cache = policy.new_cache(3, 30)
    cache.copy_rows(source, [1, 0, 0])
    policy.step(rows[:2, 13:15], [2, 2], source)               # the copy goes its own way
    assert cache.length.tolist() == [6, 13, 13]
    cache.swap(0, 2)                                           # rows: 0, 0, 1
    close(policy.step(rows[[0], 13:18], [5], cache)[0], expect[0][17])
    cache.swap(0, 2)                                           # rows: 1 at 6, 0 at 13, 0 at 18
    logits = policy.step(torch.stack((rows[1, 6:16], rows[0, 13:23], rows[0, 18:28])), [10, 7, 9], cache)
    for x, (b, t) in zip(logits, ((1, 15), (0, 19), (0, 26))):
        close(x, expect[b][t])


def test_cache_size_and_growth():
    """Keeps out: a cache that keeps all layers of all tokens, or allocates max_length at once."""
    m = model()
    policy, N, C, L = LastKV(m, 16), 256, 16, 3
    cache, token = policy.new_cache(2, 1 << 60), 2 * 2 * 2 * 8 * 4                 # bytes of one position: K and V, rows, heads, width
    assert cache.bytes() == 0
    ids = ids_of(2, N)
    for t in range(0, N, 8):
        policy.step(ids[:, t:t + 8], [8, 8], cache)
        assert cache.bytes() <= token * (2 * C * L + (t + 8 + C - 1) // C * C)         # whole chunks
    assert cache.near.shape[4] == 2 * C and cache.bytes() == 2 * cache_bytes(policy, N) == token * (2 * C * L + N - 2 * C)
    plain = Policy(m).new_cache(1, N)
    Policy(m).step(ids[:1], [N], plain)
    assert sum(t.nbytes for t in plain.keys + plain.values) == cache_bytes(Policy(m), N) == token // 2 * N * L
    assert cache_bytes(Feedback(m), N) == token // 2 * N * L + 32 * 4


# ---- gradients ----

def test_alpha_of_the_last_layer_has_no_gradient():
    """Keeps out: a last layer that blends its own keys with themselves inexactly; and an alpha that does not learn elsewhere."""
    policy = LastKV(model(), 4)
    assert torch.equal(policy.alpha, torch.full((3, 2), 0.5)) and policy.alpha_logit in set(policy.parameters())
    policy.replay(ids_of(2, 15)).square().mean().backward()
    assert torch.equal(policy.alpha_logit.grad[-1], torch.zeros(2)) and bool((policy.alpha_logit.grad[:-1] != 0).all())


def in_float64(monkeypatch):
    """transformers computes RMSNorm and the rotary tables in float32 even in a double model: lift that."""
    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def rotary(self, x, position_ids):
        angle = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()

    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, Qwen2RotaryEmbedding
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm)
    monkeypatch.setattr(Qwen2RotaryEmbedding, "forward", rotary)


def test_finite_differences(monkeypatch):
    """Keeps out: a path of the recurrence that autograd does not follow; and a detached history that claims the whole gradient."""
    in_float64(monkeypatch)
    policy, ids = LastKV(model().double(), 3, alpha_of().double().requires_grad_()), ids_of(2, 13)
    k_proj = policy.model.model.layers[0].self_attn.k_proj.weight
    v_proj = policy.model.model.layers[2].self_attn.v_proj.weight

    def loss(**options):
        return -torch.log_softmax(policy.replay(ids, **options)[:, :-1], -1).gather(-1, ids[:, 1:, None]).mean()

    for weight, entry in ((k_proj, (1, 2)), (k_proj, (9, 20)), (v_proj, (3, 4)), (policy.fixed_alpha, (0, 1)), (policy.fixed_alpha, (1, 0))):
        exact, cut = (torch.autograd.grad(loss(detach_history=d), weight)[0][entry].item() for d in (False, True))
        with torch.no_grad():
            values = []
            for step in (1e-5, -2e-5):
                weight[entry] += step
                values.append(loss().item())
            weight[entry] += 1e-5
        numeric = (values[0] - values[1]) / 2e-5
        assert abs(exact - numeric) <= 1e-8 + 1e-5 * abs(numeric)
        assert weight is policy.fixed_alpha or abs(cut - numeric) > 1e-2 * abs(numeric)


def test_truncation_keeps_values_and_cuts_gradient():
    """Keeps out: a truncation that changes logits, or that cuts elsewhere than at every j-th boundary."""
    policy, ids = LastKV(model(), 4), ids_of(1, 16)
    weight = policy.model.model.embed_tokens.weight
    full = policy.hidden(ids)

    def reach(**options):
        """[chunk of the loss][chunk of an input]: does gradient flow? Inputs are told apart by their ids."""
        tokens = torch.arange(16)[None]
        hidden = policy.hidden(tokens, **options)
        grads = [torch.autograd.grad(hidden[0, t].sum(), weight, retain_graph=True)[0][:16] for t in (3, 7, 11, 15)]
        return [[int(bool(g[4 * c:4 * c + 4].any())) for c in range(4)] for g in grads]

    assert reach() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert reach(keep_chunks=4) == reach(keep_chunks=9) == reach()
    assert reach(keep_chunks=2) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert reach(detach_history=True) == reach(keep_chunks=1) == torch.eye(4).int().tolist()
    for options in ({"detach_history": True}, {"keep_chunks": 1}, {"keep_chunks": 3}):
        assert torch.equal(policy.hidden(ids, **options), full)


# ---- checkpoint and bad input ----

def test_alpha_is_saved_and_loaded(tmp_path):
    """Keeps out: an alpha that is lost, rounded, or loaded into another chunk size without a word."""
    m = model()
    policy, again, fixed = LastKV(m, 4), LastKV(m, 4), LastKV(m, 4, alpha_of())
    policy.alpha_logit.data.normal_()
    policy.save(tmp_path)
    held = again.alpha_logit
    again.load(tmp_path)
    assert again.alpha_logit is held and torch.equal(again.alpha_logit, policy.alpha_logit)
    fixed.save(tmp_path / "fixed")
    other = LastKV(m, 4, torch.zeros(3, 2))
    other.load(tmp_path / "fixed")
    assert torch.equal(other.alpha, fixed.alpha)
    for wrong, folder in ((LastKV(m, 5), tmp_path), (fixed, tmp_path), (policy, tmp_path / "fixed"), (policy, tmp_path / "none")):
        with pytest.raises(ValueError, match="build the policy as|there is no"):
            wrong.load(folder)
    assert torch.equal(under_rule(Policy(m), "lastkv", 4, 1, tmp_path).alpha, policy.alpha)
    with pytest.raises(ValueError, match="holds fixed_alpha .* needs alpha_logit .*; build the policy as the one that was saved"):
        under_rule(Policy(m), "lastkv", 4, 1, tmp_path / "fixed")


def test_bad_input_says_what_to_change():
    """Keeps out: a wrong argument that is taken silently, or a traceback without a remedy."""
    m, ids = model(), ids_of(2, 6)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    sliding = model(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    dynamic = model(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    hole = torch.tensor([[1] * 6, [1, 1, 0, 1, 1, 1]])
    for make, words in ((lambda: LastKV(m, 0), "chunk_size"), (lambda: LastKV(m, -3), "chunk_size"), (lambda: LastKV(m, 2.5), "chunk_size"),
                        (lambda: LastKV(m, 4, torch.full((3, 2), 1.1)), "outside"), (lambda: LastKV(m, 4, -alpha_of()), "outside"),
                        (lambda: LastKV(m, 4, torch.full((3, 2), torch.nan)), "outside"),
                        (lambda: LastKV(m, 4, torch.ones(2, 3)), r"\[3, 2\]"), (lambda: LastKV(m, 4, 0.5), r"\[3, 2\]"),
                        (lambda: LastKV(gpt2), "GPT2LMHeadModel.*Qwen2ForCausalLM.*LlamaForCausalLM"),
                        (lambda: LastKV(sliding), "sliding"),
                        (lambda: LastKV(dynamic), "RoPE"),
                        (lambda: LastKV(m).replay(ids, hole), "hole"), (lambda: Feedback(m).replay(ids, hole), "hole"),
                        (lambda: toy(torch.ones(4), 0.5, -1), "rounds is -1"), (lambda: Feedback(m, -1), "rounds is -1"),
                        (lambda: under_rule(Policy(m), "fedback", 4, 1), "'fedback'; give one of full, lastkv, feedback"),
                        (lambda: LastKV(m).replay(ids, torch.zeros(2, 6)), "no real token"),
                        (lambda: LastKV(m).replay(ids, torch.ones(2, 5)), "attention_mask"),
                        (lambda: LastKV(m).replay(ids, document_ids=torch.ones(1, 6)), "document_ids"),
                        (lambda: LastKV(m).replay(ids, keep_chunks=0), "keep_chunks"),
                        (lambda: LastKV(m).step(ids, [6, 6], LastKV(m).new_cache(2, 5)), "max_length"),
                        (lambda: LastKV(m).step(ids, [6, 0], LastKV(m).new_cache(2, 6)), "at least one token")):
        with pytest.raises(ValueError, match=words) as error:
            make()
        assert len(str(error.value).splitlines()) == 1


# ---- the compared rules ----

def test_toy_table():
    """Keeps out: a Jacobi round that reads this round's neighbour, or starts from anything but x."""
    x = torch.ones(4)
    assert toy(x, 0.5).tolist() == [1, 1.5, 1.75, 1.875]
    assert toy(x, 0.5, 0).tolist() == [1, 1, 1, 1] and toy(x, 0.5, 1).tolist() == [1, 1.5, 1.5, 1.5]
    assert toy(x, 0.5, 3).tolist() == toy(x, 0.5).tolist()


def test_feedback_rules():
    """Keeps out: a feedback rollout that is not the serial hybrid, rounds that do not converge to it, or a mismatch that is not there."""
    prompt, mismatch = ids_of(2, 7), []
    for K in (0, 1, 2, 4, 12):
        policy = Feedback(model(initializer_range=0.05), K)
        ids, mu = sample(policy, prompt, 9, torch.Generator().manual_seed(0))

        def gap(h):
            return (torch.log_softmax(policy.head(h)[:, 6:-1].double(), -1) - mu).abs().max().item()

        assert gap(policy.serial(ids, 7)) <= FINE
        mismatch.append(gap(policy.hidden(ids)))
    assert mismatch == sorted(mismatch, reverse=True) and mismatch[1] > 1e-3 and mismatch[-1] <= FINE
    assert any(p is policy.W.weight for p in policy.parameters())                  # the optimizer trains W
    close(policy.hidden(ids, rounds=15), policy.serial(ids, 1))                    # T − 1 rounds are serial
    x = policy.model.get_input_embeddings()(ids)
    first = policy.model(inputs_embeds=x, output_hidden_states=True).hidden_states[-1]                     # by hand: one round
    second = policy.model(inputs_embeds=torch.cat((x[:, :1], x[:, 1:] + first[:, :-1] @ policy.W.weight.T), 1), output_hidden_states=True)
    close(policy.hidden(ids, rounds=1), second.hidden_states[-1])


def test_the_printed_comparison(monkeypatch, capsys):
    """Keeps out a table whose rows are of another rule, a count of stages or bytes that is not the rule's, and a decode that left its replay."""
    monkeypatch.setattr(lastkv, "load_policy", lambda name: (Policy(model(initializer_range=0.05)), None))
    monkeypatch.setattr("sys.argv", ["lastkv.py", "--model", "small"])
    lastkv.main()                                              # C = 8, 12 prompt and 12 sampled tokens, N = 4096
    text, *tables = capsys.readouterr().out.split("\n\n")
    assert "serial [1.0, 1.5, 1.75, 1.875], initialisation and one round [1.0, 1.5, 1.5, 1.5], T − 1 rounds [1.0, 1.5, 1.75, 1.875]" in text
    table, identity, boundaries = ({row[:31].strip(): [float(x.replace(",", "")) for x in row[31:].split()]
                                    for row in t.strip().splitlines()[2:]} for t in tables)
    token = 2 * 2 * 8 * 4                                      # bytes of one position in one layer: K and V, heads, width
    plain, ours = 3 * 4096 * token, (3 * 16 + 4096 - 16) * token
    stages = {"ordinary transformer": (1, plain), "feedback, K = 1": (2, plain + 128), "feedback, K = 4": (5, plain + 128),
              "feedback, K = 16": (17, plain + 128), "feedback, exact hybrid, K = 1": (14, plain + 128),
              "feedback, exact hybrid, K = 12": (25, plain + 128), "LastKV, C = 8": (3, ours), "LastKV, keep_chunks = 2": (3, ours),
              "LastKV, detach_history": (3, ours)}
    assert {name: tuple(row[2:4]) for name, row in table.items()} == stages and list(identity) == list(table)
    differ, approximate = ("feedback, K = 1", "feedback, K = 4"), ("LastKV, keep_chunks = 2", "LastKV, detach_history")
    for name, (kl, ratio, _, _, gradient) in table.items():
        assert ratio > 1e-2 and kl > 1e-5 if name == differ[0] else name in differ or ratio <= 1e-4 and kl <= 1e-9
        assert gradient > 1e-2 if name in (differ[0], *approximate) else name in differ or gradient <= 1e-4
        error, score, *_, leaves = identity[name]
        assert error <= 1e-4 and (score > 1e-3 if name == differ[0] else name in differ or score <= 1e-4)
        assert leaves > 1e-2 if name in approximate else name in differ or leaves <= 1e-4
    assert {name: row[:2] for name, row in boundaries.items()} == {
        f"prompt {P}, α {alpha}": [commits, 12] for P, alpha, commits in
        ((7, 0.5, 3), (8, 0.5, 3), (9, 0.5, 4), (12, 0.5, 4), (12, 0.0, 4), (12, 1.0, 4))}
    assert all(gap <= 1e-4 and other > 1e-2 for *_, gap, other in boundaries.values())


def test_feedback_cache_rows():
    """Keeps out: a fed-back state that does not move with its row, or a tool result that enters in parallel."""
    policy, rows = Feedback(model()), ids_of(2, 14)
    expect = [policy.head(policy.serial(rows[b:b + 1], P))[0] for b, P in ((0, 5), (1, 3))]
    source, cache = policy.new_cache(2, 5), policy.new_cache(3, 14)
    policy.step(rows[:, :5], [5, 3], source)
    cache.copy_rows(source, [1, 0, 0])
    cache.swap(0, 1)                                           # rows: 0, 1, 0
    logits = policy.step(torch.stack((rows[0, 5:12], rows[1, 3:10])), [6, 4], cache)
    close(logits, torch.stack((expect[0][10], expect[1][6])))
    late = policy.new_cache(2, 14)
    policy.step(rows[:1, :5], [5], late)
    with pytest.raises(ValueError, match="some rows are empty"):
        policy.step(rows[:, 5:9], [4, 3], late)
    mask = torch.tensor([[0] * 3 + [1] * 11, [1] * 14])
    close(policy.hidden(rows, mask, rounds=2)[0, 3:], policy.hidden(rows[:1, 3:], rounds=2)[0])


# ---- the whole loop ----

@pytest.mark.parametrize("make", [lambda m: LastKV(m, 16), Policy, lambda m: Feedback(m)])
def test_rollout_and_replay_agree(make):
    """Keeps out: a policy that samples one distribution and trains another; the token-level feedback policy is the one that does."""
    tokenizer = world_tokenizer()
    policy = make(model(vocab_size=len(tokenizer), initializer_range=0.05))
    questions = world_questions(2, 0, "train")
    trajectories = rollout(policy, tokenizer, questions, None, group_size=2, max_turns=3, max_turn_tokens=20, max_response_tokens=150,
                           instructions="{question}", generator=torch.Generator().manual_seed(0))
    assert max(len(t.turns) for t in trajectories) > 1         # tool results were fed, too
    gaps = []
    for t in trajectories:
        ids = torch.tensor([t.prompt_ids + t.response_ids])
        select = torch.tensor([[0] * len(t.prompt_ids) + t.response_mask])
        with torch.no_grad():
            logp = policy.logprobs(ids, select)[0, len(t.prompt_ids):]
        gaps.append((logp - torch.tensor(t.rollout_logprobs)).abs().max().item())
    assert max(gaps) > 1e-3 if isinstance(policy, Feedback) else max(gaps) <= 1e-4
    assert not isinstance(policy, LastKV) or isinstance(policy.new_cache(1, 1), ChunkCache)


def test_masks_saved_for_the_backward_pass_never_add_up_to_t_by_t():
    """Keeps out a mask a chunk, all of them kept by autograd: half of [T,T]. They are views of one [C,T]."""
    policy, T = LastKV(tiny_model(), 8), 256
    sizes = {}

    def pack(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // 4
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        policy.hidden(torch.arange(T)[None] % 40)
    assert 8 * T in sizes.values() and max(sizes.values()) < T * T // 4      # the mask, [8,248+8]


def test_a_step_that_cannot_be_made_changes_nothing():
    """Keeps out a batch of which some rows were fed, a last token fed twice, and a cache of other chunks."""
    for policy in (Policy(tiny_model()), LastKV(tiny_model(), 4)):
        policy.max_tokens_a_pass = 2
        cache = policy.new_cache(2, 10)
        policy.step(torch.zeros(2, 9, dtype=torch.long), [9, 9], cache)
        with pytest.raises(ValueError, match="holds 10 tokens a row and 11 were fed"):
            policy.step(torch.zeros(2, 2, dtype=torch.long), [1, 2], cache)
        with pytest.raises(ValueError, match="asked to feed 5 tokens a row in 2 rows"):
            policy.step(torch.zeros(2, 3, dtype=torch.long), [5, 3], cache)
        assert cache.length.tolist() == [9, 9]
    with pytest.raises(ValueError, match="made for chunks of 4 tokens and this policy has 3"):
        LastKV(policy.model, 3).step(torch.zeros(2, 1, dtype=torch.long), [1, 1], cache)
