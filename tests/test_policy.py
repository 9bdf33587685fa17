"""Cached steps, replayed log-probabilities, chat template pieces and loading (policy.py). Run: python -m pytest tests/test_policy.py -q"""
import json
import random
from argparse import Namespace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (GenerationConfig, GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM, MistralConfig, MistralForCausalLM,
                          OPTConfig, OPTForCausalLM)

import policy as policy_file
from agent_loop import rollout, sample
from world import world_policy, world_tokenizer
from helpers import TEMPLATE, greedy_tokenizer, tiny_model, with_bias
from lastkv import Feedback, LastKV
from chat import PLAIN_CHAT_TEMPLATE, SYSTEM, Chat
from policy import Policy, load_config, load_policy, master_weights, resolve_name, round_masters

quick = settings(max_examples=25, deadline=None)
V = 40
MODEL = tiny_model(V)


def plain(ids: list[int], model=MODEL) -> torch.Tensor:
    """Logits [T,V] of one unpadded row by transformers alone."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def text(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(V) for _ in range(n)]


def pad(rows: list[list[int]], filler: int = 0) -> torch.Tensor:
    T = max(map(len, rows))
    return torch.tensor([row + [filler] * (T - len(row)) for row in rows])


def close(a, b):
    torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-5)     # logits of up to 10 in float32, by other kernels


# ------------------------------------------------------------------------------------------------------------- step
@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_a_row_fed_in_pieces_has_the_logits_of_one_forward(cut):
    """Keeps out a causal mask that is skipped, or anchored at the top left, when several tokens meet a cache."""
    ids = text(random.Random(1), 7)
    cache, expected = Policy(MODEL).new_cache(1, 7), plain(ids)
    for start in range(0, 7, cut):
        piece = ids[start:start + cut]
        close(Policy(MODEL).step(torch.tensor([piece]), [len(piece)], cache)[0], expected[start + len(piece) - 1])


@quick
@given(st.integers(0, 10 ** 6), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 4), st.sampled_from([1, 6, 16384]))
def test_a_row_in_a_batch_is_the_row_alone(seed, lengths, pieces, tokens_a_pass):
    """Keeps out rows that see each other's tokens or padding, whatever their lengths, cuts, fillers and passes."""
    rng, policy = random.Random(seed), Policy(MODEL)
    policy.max_tokens_a_pass = tokens_a_pass
    rows = [text(rng, n + pieces) for n in lengths]
    cuts = [[0, *sorted(rng.sample(range(1, len(row)), pieces - 1)), len(row)] for row in rows]
    cache = policy.new_cache(len(rows), max(map(len, rows)))
    for k in range(pieces):
        fed = [row[cut[k]:cut[k + 1]] for row, cut in zip(rows, cuts)]
        logits = policy.step(pad(fed, rng.randrange(V)), torch.tensor([len(f) for f in fed]), cache)
        for row, cut, got in zip(rows, cuts, logits):
            close(got, plain(row[:cut[k + 1]])[-1])
    assert cache.length.tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("seed", range(4))
def test_swapped_stopped_and_growing_rows(seed):
    """Keeps out a swap that leaves a key, value or length behind, a stopped row that is written to, and a store that loses tokens as it grows."""
    rng, policy = random.Random(seed), Policy(MODEL)
    cache, rows = policy.new_cache(4, 400), [[] for _ in range(4)]
    for move in range(14):
        n = rng.randint(1, 4)
        fed = [text(rng, rng.choice([1, 2, 40])) for _ in range(n)]
        logits = policy.step(pad(fed), [len(f) for f in fed], cache)
        for b in range(n):
            rows[b] += fed[b]
            close(logits[b], plain(rows[b])[-1])
        a, b = rng.randrange(4), rng.randrange(4)
        if a != b and cache.length.max() > 0:
            cache.swap(a, b)
            rows[a], rows[b] = rows[b], rows[a]
    assert cache.length.tolist() == [len(row) for row in rows] and cache.length.max() > 64


@pytest.mark.parametrize("prompts", [(3, 5), (70, 90)])
@pytest.mark.parametrize("room", [6, 300])
def test_copied_rows_go_their_own_ways(prompts, room):
    """Keeps out a group that shares one store, so that a trajectory's tokens overwrite another's, and a copy that cannot grow."""
    rng, policy = random.Random(0), Policy(MODEL)
    shared = [text(rng, n) for n in prompts]
    source, copy = policy.new_cache(2, max(prompts)), policy.new_cache(5, max(prompts) + room)
    policy.step(pad(shared), list(prompts), source)
    index = [1, 0, 0, 1, 0]
    copy.copy_rows(source, index)
    rows = [list(shared[i]) for i in index]
    for n in (1, 4, 1):
        fed = [text(rng, n) for _ in rows]
        logits = policy.step(torch.tensor(fed), [n] * 5, copy)
        for row, f, got in zip(rows, fed, logits):
            row += f
            close(got, plain(row)[-1])
    assert source.length.tolist() == list(prompts)
    close(policy.step(torch.tensor([[9], [9]]), [1, 1], copy_of(source, policy))[0], plain(shared[0] + [9])[-1])


def copy_of(source, policy):
    cache = policy.new_cache(2, source.max_length + 1)
    cache.copy_rows(source, [0, 1])
    return cache


def test_memory_grows_with_use_only():
    """Keeps out a store of max_length slots for every row from the first token on."""
    policy = Policy(MODEL)
    cache = policy.new_cache(2, 10 ** 9)
    policy.step(torch.ones(2, 65, dtype=torch.long), [65, 1], cache)
    policy.step(torch.ones(2, 1, dtype=torch.long), [1, 1], cache)
    assert 66 <= cache.keys[0].shape[2] <= 130


def test_a_full_cache_says_so():
    """Keeps out tokens that are dropped, or written over others, when the cache is full."""
    cache = Policy(MODEL).new_cache(2, 5)
    Policy(MODEL).step(torch.ones(2, 5, dtype=torch.long), [5, 4], cache)
    with pytest.raises(ValueError, match="the cache holds 5 tokens a row and 6 were fed"):
        Policy(MODEL).step(torch.ones(2, 1, dtype=torch.long), [1, 1], cache)
    assert cache.length.tolist() == [5, 4]
    with pytest.raises(ValueError, match="at least one token"):
        Policy(MODEL).step(torch.ones(2, 1, dtype=torch.long), [1, 0], cache)


# ----------------------------------------------------------------------------------------------------------- replay
ROWS = [text(random.Random(b), n) for b, n in enumerate((9, 4, 6, 1))]


@pytest.mark.parametrize("filler", [0, 7, 39])
@pytest.mark.parametrize("side", ["right", "right, no mask", "left"])
def test_padding_on_either_side_changes_nothing(filler, side):
    """Keeps out positions that count padding, real tokens that see it, and a result that depends on the padding's id."""
    T = 9
    padded, mask = [], []
    for row in ROWS:
        gap = [filler] * (T - len(row))
        padded.append(gap + row if side == "left" else row + gap)
        mask.append([0] * len(gap) + [1] * len(row) if side == "left" else [1] * len(row) + [0] * len(gap))
    logits = Policy(MODEL).replay(torch.tensor(padded), None if side == "right, no mask" else torch.tensor(mask))
    for row, got, m in zip(ROWS, logits, torch.tensor(mask).bool()):
        close(got[m].detach(), plain(row))


@pytest.mark.parametrize("pad", [0, 2, 49])                    # 2: the end of a turn
def test_a_tokenizer_without_a_pad_token_needs_none(pad):
    """Keeps out a batch that raises, an id beyond the embedding, and a result that depends on which id fills the gap."""
    model, batch, mask = tiny_model(50), torch.tensor([[5, 6, 7], [pad, pad, 8]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
    logits = Policy(model).replay(batch, mask).detach()
    close(logits[0], plain([5, 6, 7], model))
    close(logits[1, 2], plain([8], model)[0])
    tokenizer = greedy_tokenizer()
    tokenizer.pad_token = None
    model = tiny_model(len(tokenizer))
    rows = rollout(Policy(model), tokenizer, [{"question": q, "answers": ["x"], "documents": [{"id": "1", "title": "a", "text": "b"}]} for q in ("a", "abcd")],
                   group_size=2, max_turns=2, max_turn_tokens=4, instructions="{question}", generator=torch.Generator().manual_seed(0))
    assert tokenizer.pad_token is None and len(rows) == 4 and model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert all(max(t.prompt_ids + t.response_ids) < len(tokenizer) and t.turns for t in rows)


def test_padding_is_never_recognised_by_its_id():
    """Keeps out an end-of-turn token inside the text that is masked because padding has the same id."""
    ids = [0, 5, 0, 0, 8, 0]
    cache = Policy(MODEL).new_cache(1, 6)
    close(Policy(MODEL).step(torch.tensor([ids]), [6], cache)[0], plain(ids)[-1])
    close(Policy(MODEL).replay(torch.tensor([ids]))[0].detach(), plain(ids))
    left = Policy(MODEL).replay(torch.tensor([[0, 0] + ids]), torch.tensor([[0, 0] + [1] * 6]))
    close(left[0, 2:].detach(), plain(ids))


def test_gradients_under_left_padding_are_finite():
    """Keeps out NaN from a padding position that may look at nothing, which reaches the weights through the backward pass."""
    model = tiny_model(V)
    logp = Policy(model).logprobs(torch.tensor([[0, 0, 0, 4, 5], [1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 0, 0, 1], [0, 1, 1, 1, 1]]),
                                  attention_mask=torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]))
    close(logp[0, 4].detach(), torch.log_softmax(plain([4, 5]), -1)[0, 5])
    logp.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# --------------------------------------------------------------------------------------------------------- logprobs
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_are_of_the_next_token_at_the_temperature(temperature):
    """Keeps out a shift by one, a temperature that only the sampler uses, and values where nothing is selected."""
    ids, select = torch.tensor(ROWS[:1]), torch.tensor([[0, 1, 0, 1, 1, 0, 0, 0, 1]])
    got = Policy(MODEL).logprobs(ids, select, temperature)[0]
    expected = torch.log_softmax(plain(ROWS[0]) / temperature, -1)
    for t in range(9):
        close(got[t].detach(), expected[t - 1, ROWS[0][t]] if select[0, t] else torch.tensor(0.0))


@pytest.mark.parametrize("make", [lambda: tiny_model(V), lambda: tiny_model(V, tie_word_embeddings=True), lambda: with_bias(tiny_model(V), torch.arange(V) / V)])
@pytest.mark.parametrize("block", [1, 100, 1200, 2 ** 22])
def test_blocks_of_the_vocabulary_change_nothing(monkeypatch, make, block):
    """Keeps out a block that is lost or counted twice, a target looked up in the wrong one, and a gradient other than of log softmax."""
    monkeypatch.setattr(policy_file, "LOGIT_BLOCK", block)
    ids, select = pad(ROWS), torch.rand(4, 9, generator=torch.Generator().manual_seed(0)) < 0.7
    select[:, 0] = False
    weight, results = torch.arange(36).view(4, 9) / 36, []
    for way in ("logprobs", "softmax"):
        torch.manual_seed(1)
        policy = Policy(make())
        if way == "logprobs":
            logp = policy.logprobs(ids, select, 0.7)
        else:
            logp = torch.log_softmax(policy.replay(ids) / 0.7, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
            logp = torch.where(select, torch.cat([torch.zeros(4, 1), logp], 1), 0)
        (logp * weight).sum().backward()
        results.append([logp.detach()] + [p.grad for p in policy.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_sure_token_loses_nothing():
    """Keeps out log p above 0, or off by the rounding of a large logit, where the model is sure."""
    model = with_bias(tiny_model(3), torch.tensor([91.25, 83.0, -40.0]))
    model.lm_head.weight.data.zero_()
    logp = Policy(model).logprobs(torch.tensor([[1, 0, 1, 2]]), torch.tensor([[0, 1, 1, 1]])).detach()
    torch.testing.assert_close(logp, torch.tensor([[0, -2.612240e-4, -8.250261, -131.250261]]), atol=2e-7, rtol=1e-7)


def test_the_temperature_is_in_the_sampler_and_in_the_replay():
    """Keeps out ratios of 0.897 and 6.63 before any update: sampled at T = 0.5 and scored at 1."""
    expected = torch.tensor([-0.018150, -4.018150])
    token, logp = sample(torch.tensor([[2.0, 0.0]] * 400), 0.5, torch.Generator().manual_seed(0))
    assert set(token.tolist()) == {0, 1} and 0 < int(token.sum()) < 25
    close(logp, expected[token])
    model = with_bias(tiny_model(2), torch.tensor([2.0, 0.0]))
    model.lm_head.weight.data.zero_()
    replayed = Policy(model).logprobs(torch.tensor([[1, 0, 1]]), torch.tensor([[0, 1, 1]]), 0.5)
    close(replayed[0, 1:], expected)


def test_a_checkpoints_sampling_defaults_have_no_say(tmp_path):
    """Keeps out a repetition penalty, top-p or top-k of generation_config.json in the distribution that is sampled."""
    world_policy(tmp_path, 0)
    loaded, tokenizer = load_policy(str(tmp_path), device="cpu")
    loaded.model.generation_config = GenerationConfig(repetition_penalty=1.1, top_p=0.8, top_k=20, temperature=0.7, do_sample=True)
    loaded.model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["repetition_penalty"] == 1.1
    penalised, tokenizer = load_policy(str(tmp_path), device="cpu")
    [t] = rollout(penalised, tokenizer, [{"question": "Find Ada 's river .", "answers": ["x"]}], group_size=1, max_turns=1,
                  max_turn_tokens=30, instructions="{question}", generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(plain(t.prompt_ids + t.response_ids, penalised.model), -1)[len(t.prompt_ids) - 1:]
    close(torch.tensor(t.rollout_logprobs), torch.stack([expected[k, i] for k, i in enumerate(t.response_ids)]))
    token, logp = sample(torch.tensor([[1.0, 0.0]] * 50), 1.0, torch.Generator().manual_seed(0))
    close(logp, torch.tensor([-0.313262, -1.313262])[token])


def test_dropout_is_off_in_every_pass():
    """Keeps out a first update whose ratios are not 1 because one of the passes drops activations."""
    model = tiny_model(V, attention_dropout=0.5)
    model.train()
    policy, ids, select = Policy(model), torch.tensor(ROWS[:1]), torch.ones(1, 9)
    select[:, 0] = 0
    rollout_logits = policy.step(ids, [9], policy.new_cache(1, 9))
    first, second = policy.logprobs(ids, select), policy.logprobs(ids, select)
    assert torch.equal(first, second)
    close(rollout_logits, policy.replay(ids)[:, -1].detach())


# ----------------------------------------------------------------------------------------- float32 masters, checkpointing
def test_a_model_that_changes_its_precision_later_is_followed():
    """Keeps out a device or precision that was read once: model.double() after the policy was made, and float32 masks."""
    policy = Policy(tiny_model(V))
    policy.model.double()
    cache = policy.new_cache(1, 8)
    logits = torch.stack([policy.step(torch.tensor([[i]]), [1], cache)[0] for i in (5, 6, 7)])
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, policy.replay(torch.tensor([[5, 6, 7]]))[0].detach(), atol=1e-5, rtol=1e-5)


def test_masters_keep_what_bfloat16_rounds_away():
    """Keeps out steps and gradients that are lost in bfloat16. Below 1 its numbers lie 2^-8 apart: three steps of 2^-10 are nearer to the next
    one, one or two (a tie, to even) are not; and 1 + 2^-9 lies half-way, so a sum there would stay 1."""
    policy = Namespace(parameters=lambda: [p, q])
    p, q = (torch.nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    masters = master_weights(policy)
    assert masters[0].dtype == torch.float32 and masters[1] is q
    optimizer, seen = torch.optim.SGD(masters, lr=2 ** -10), []
    for gradient in (1, 2 ** -9):                              # two micro-batches
        (p * gradient).sum().backward()
    assert masters[0].grad.item() == 1 + 2 ** -9 and p.grad is None
    for _ in range(3):
        optimizer.zero_grad()
        (p + q).sum().backward()
        optimizer.step()
        round_masters(policy, masters)
        seen.append((p.item(), masters[0].item(), q.item()))
    assert seen == [(1, 1 - 2 ** -10, 1 - 2 ** -10), (1, 1 - 2 ** -9, 1 - 2 ** -9), (1 - 2 ** -8, 1 - 3 * 2 ** -10, 1 - 3 * 2 ** -10)]


def test_a_float32_policy_is_its_own_master():
    """Keeps out a second copy of the weights where none is needed."""
    policy = Policy(tiny_model(V, tie_word_embeddings=True))
    assert all(a is b for a, b in zip(master_weights(policy), policy.parameters(), strict=True))
    assert all(p._post_accumulate_grad_hooks is None for p in policy.parameters())


def saved_bytes(call):
    """call() -> (its result, bytes that autograd keeps for its backward pass, weights aside)."""
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in call.__self__.parameters()}

    def pack(t):
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return call(torch.tensor([[5, 6, 7] * 7] * 2)), sum(t.untyped_storage().nbytes() for t in kept.values())


SMALL = dict(vocab_size=V, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64)
BUILDS = [(lambda: Policy(tiny_model(V, attention_dropout=0.5)), 0.3), (lambda: LastKV(tiny_model(V), 8), 0.6), (lambda: Feedback(tiny_model(V), 2), 0.3),
          (lambda: Policy(OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, dropout=0.5))), 0.3),
          pytest.param(lambda: Policy(GPT2LMHeadModel(GPT2Config(**SMALL, resid_pdrop=0.5))), 0.3, marks=pytest.mark.skipif(
              transformers.__version__ < "5", reason="GPT-2 of transformers 4 takes no cache but its own"))]


@pytest.mark.parametrize("build, share", BUILDS, ids=["qwen2", "lastkv", "feedback", "opt", "gpt2"])
def test_gradient_checkpointing_keeps_less_and_changes_nothing(build, share):
    """Keeps out other gradients, dropout that comes on with a training mode (OPT has it in the layer itself), and a cached step that sees it."""
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        policy = build()
        policy.gradient_checkpointing = on
        hidden, kept = saved_bytes(policy.hidden)
        hidden.square().sum().backward()
        assert not any(m.training or "forward" in vars(m) for m in policy.model.modules())
        logits = policy.step(torch.tensor([[5, 6, 7, 8]]), [4], policy.new_cache(1, 4))
        results.append(([hidden, logits, *(p.grad for p in policy.parameters() if p.grad is not None)], kept))
    (plain_, most), (checkpointed, least) = results
    assert len(plain_) > 4 and len(plain_) == len(checkpointed) and all(map(torch.equal, plain_, checkpointed))
    assert least < share * most, least / most


def test_a_cache_is_written_once_under_gradient_checkpointing():
    """Keeps out a cached pass with gradients that is computed again and so writes its keys twice: Feedback's exact serial replay."""
    results, ids = [], torch.tensor([[5, 6, 7, 8, 9, 10]])
    for on in (False, True):
        policy = Feedback(tiny_model(V), 1)
        policy.gradient_checkpointing = on
        states = policy.serial(ids, 3)
        results.append([states, *torch.autograd.grad(states.square().sum(), policy.parameters(), allow_unused=True)[:-2]])
    assert all(torch.equal(a, b) for a, b in zip(*results) if a is not None)


# ------------------------------------------------------------------------------------------------------------- Chat
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "<think>t</think><search>s</search>"}, {"role": "user", "content": "R"}]
STREAM = ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
          "<|im_start|>assistant\n<think>t</think><search>s</search><|im_end|>\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n")
DEFAULT_SYSTEM = ("{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a model from a vendor.<|im_end|>\n{% endif %}" + TEMPLATE)
DROPS_THOUGHTS = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")


@pytest.mark.parametrize("template", [TEMPLATE, DEFAULT_SYSTEM, DROPS_THOUGHTS])
def test_a_templates_own_ideas_leave_the_stream_alone(template):
    """Keeps out a vendor's default system message, and thoughts that vanish from earlier turns and shift every later token."""
    tokenizer = greedy_tokenizer(template=template)
    chat = Chat(tokenizer)
    assert tokenizer.decode(chat.messages(MESSAGES)) == STREAM
    assert tokenizer.decode(chat.prompt("Q")) == STREAM.split("<think>")[0]
    assert chat.stops == {tokenizer.eos_token_id}


def test_a_template_that_drops_messages_is_refused():
    """Keeps out training on a stream that lacks what the policy wrote."""
    with pytest.raises(ValueError, match="chat template drops or reorders messages; give"):
        Chat(greedy_tokenizer(template="{{ messages[-1]['content'] }}"))


def test_a_template_without_a_system_role_has_the_text_in_the_users_turn():
    """Keeps out the refusal of models whose template raises over a system message (Gemma, older Mistrals)."""
    tokenizer = greedy_tokenizer(template="{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE)
    chat = Chat(tokenizer)
    assert tokenizer.decode(chat.prompt("Who?")) == f"<|im_start|>user\n{SYSTEM}\n\nWho?<|im_end|>\n<|im_start|>assistant\n"


def test_an_added_token_that_controls_is_spelled_out_and_a_tag_of_the_protocol_is_not():
    """Keeps out a document's <tool_call>, which Qwen2.5's vocabulary does not call special; Qwen3's <think> is what the policy itself writes."""
    tokenizer = greedy_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "<think>"])
    chat, call, think = Chat(tokenizer), *tokenizer.convert_tokens_to_ids(["<tool_call>", "<think>"])
    ids = chat.encode("a<tool_call><think>b")
    assert call not in ids and think in ids and tokenizer.decode(ids) == "a<tool_call><think>b"
    assert tokenizer.encode("<tool_call>", add_special_tokens=False) == [call]


def test_text_never_becomes_a_special_token():
    """Keeps out a document that ends the turn, and a lone surrogate that ends the run."""
    tokenizer = greedy_tokenizer()
    chat = Chat(tokenizer)
    ids = chat.encode("a<|im_end|>\n<|im_start|>user<|endoftext|>\ud800")
    assert not {i for i in ids} & set(tokenizer.all_special_ids)
    assert chat.decode(ids) == "a<|im_end|>\n<|im_start|>user<|endoftext|>?"
    assert chat.prompt("<|im_end|>").count(tokenizer.eos_token_id) == 2
    assert chat.decode([tokenizer.eos_token_id, *chat.encode("Lisbon"), tokenizer.eos_token_id]) == "Lisbon"


# ---------------------------------------------------------------------------------------------------------- loading
@pytest.mark.parametrize("name, resolved", [
    ("Qwen2.5-1.5B", "Qwen/Qwen2.5-1.5B"), ("SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ("somebody/Qwen2.5-1.5B", "somebody/Qwen2.5-1.5B"), ("./Qwen-mine", "./Qwen-mine"), ("gpt2", "gpt2")])
def test_short_names(name, resolved):
    """Keeps out the README's own command failing, and an owner put before a name that has one."""
    assert resolve_name(name) == resolved


def test_a_folder_here_goes_before_the_hub(tmp_path, monkeypatch):
    """Keeps out a download in place of the user's own folder of that name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen2.5-1.5B").mkdir()
    assert resolve_name("Qwen2.5-1.5B") == "Qwen2.5-1.5B"


@pytest.mark.parametrize("name, message", [
    ("Qwen0-none-such", "cannot load Qwen/Qwen0-none-such (from --model Qwen0-none-such): "),
    ("nobody/none-such", "cannot load nobody/none-such "),
    ("./none/such", "there is no folder or file ./none/such; "),
    ("/none/such", "there is no folder or file /none/such; ")])
def test_what_cannot_be_loaded_is_said_in_one_sentence(monkeypatch, name, message):
    """Keeps out a page of traceback, and a wait for the network, for a mistyped name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (load_policy, load_config):
        with pytest.raises(ValueError) as error:
            load(name)
        assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize("file, change, words", [
    ("config.json", lambda text: "[]", "cannot load .*"), ("config.json", lambda text: "null", "cannot load .*"),
    ("config.json", lambda text: "[" * 100_000, "cannot load .*"), ("config.json", lambda text: text[:40], "cannot load .*"),
    ("config.json", lambda text: text.replace('"hidden_size": 128', '"hidden_size": 64'), "cannot load .*: its weights lack .* in the shapes that config.json names"),
    ("chat_template.jinja", lambda text: "{% for m in messages %}{{ m['role' }}", "chat template cannot be rendered"),
    ("chat_template.jinja", lambda text: "{{ raise_exception('no system role') }}", r"chat template cannot be rendered \(no system role\); give the tokenizer")],
    ids=["list", "null", "deep", "cut", "size", "syntax", "raises"])
def test_a_damaged_folder_ends_in_one_sentence(tmp_path, file, change, words):
    """Keeps out a traceback from inside transformers or its template engine, and random weights where those on the disk do not fit."""
    world_policy(tmp_path, 0)
    if not (tmp_path / file).exists():
        pytest.skip(f"this transformers writes no {file}")
    (tmp_path / file).write_text(change((tmp_path / file).read_text()))
    with pytest.raises(ValueError, match=words) as error:
        load_policy(str(tmp_path))
    assert "\n" not in str(error.value)


SIZES = dict(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("model, words", [
    (lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)), "GraniteForCausalLM scales or caps its logits"),
    (lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)), "MistralForCausalLM with sliding windows of 4 tokens is not supported"),
    (lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)), None),
    (lambda: tiny_model(use_sliding_window=True, sliding_window=4, max_window_layers=1), "Qwen2ForCausalLM with sliding"),
    (lambda: tiny_model(use_sliding_window=False, sliding_window=4), None)])
def test_an_architecture_that_computes_something_else_is_refused(model, words):
    """Keeps out wrong log-probabilities that no ratio shows: logits scaled behind the output layer, layers that see a window only."""
    policy = Policy(model())
    if words:
        with pytest.raises(ValueError, match=words):
            policy_file.check_architecture(policy)
    else:
        policy_file.check_architecture(policy)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    """Keeps out an IndexError in the middle of a run, and a folder without a tokenizer."""
    tiny_model(40).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot load .*tokenizer"):
        load_policy(str(tmp_path))
    world_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its tokenizer has .* tokens and its weights have 40; they belong to different models"):
        load_policy(str(tmp_path))


def test_of_several_gguf_files_one_is_to_be_named(tmp_path):
    """Keeps out the first by name, taken silently."""
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="holds 2 GGUF files; name one: a.gguf, b.gguf"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("file", [None, "pytorch_model.bin"])
def test_a_folder_without_safe_weights_is_refused(tmp_path, file):
    """Keeps out pickled weights, which can run code as they are read, and fresh random weights in their place."""
    world_policy(tmp_path, 0)
    (tmp_path / "model.safetensors").unlink()
    if file:
        torch.save({}, tmp_path / file)
    with pytest.raises(ValueError, match=r"has no \*.safetensors or \*.gguf weights; convert"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("tokenizer", [world_tokenizer(), greedy_tokenizer("until", "<mem>")], ids=["words", "greedy"])
def test_a_folders_tokenizer_is_the_one_that_was_saved(tmp_path, tokenizer):
    """Keeps out the model type's usual tokenizer class in place of the folder's own: its words fall to pieces or vanish."""
    text = "<mem> until Alder's river, Mira's hero.\n"
    tiny_model(len(tokenizer)).save_pretrained(tmp_path)
    loaded = tokenizer
    for _ in range(2):
        loaded.save_pretrained(tmp_path)
        _, loaded = load_policy(str(tmp_path), device="cpu")
        assert loaded.encode(text) == tokenizer.encode(text) and loaded.decode(loaded.encode(text)) == tokenizer.decode(tokenizer.encode(text))
        assert Chat(loaded).messages(MESSAGES) == Chat(tokenizer).messages(MESSAGES) and Chat(loaded).stops == Chat(tokenizer).stops


def test_a_tokenizer_without_a_template_gets_the_plain_one(tmp_path):
    """Keeps out base models, which bring no chat template, failing at the first prompt."""
    tokenizer = greedy_tokenizer(template=None)
    tiny_model(len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    _, loaded = load_policy(str(tmp_path), device="cpu")
    assert loaded.chat_template == PLAIN_CHAT_TEMPLATE
    assert loaded.decode(Chat(loaded).messages(MESSAGES)) == (
        "system: You are a helpful assistant.\n\nuser: Q\n\nassistant: <think>t</think><search>s</search>\n\nuser: R\n\nassistant: ")


def test_tied_weights_stay_tied(tmp_path):
    """Keeps out an embedding and an output layer that part after a save, and a weight that the optimizer steps twice."""
    policy, tokenizer = load_policy(world_policy(tmp_path / "a", 0), device="cpu")
    ids = torch.tensor([[5, 6, 7]])
    for folder in ("b", "c"):
        policy.model.save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
        loaded, _ = load_policy(str(tmp_path / folder), device="cpu")
        embedding, output = loaded.model.get_input_embeddings().weight, loaded.model.get_output_embeddings().weight
        assert embedding.data_ptr() == output.data_ptr() and sum(p is embedding for p in loaded.parameters()) == 1
        assert len(loaded.parameters()) == len({p.data_ptr() for p in loaded.parameters()})
        assert torch.equal(loaded.replay(ids), policy.replay(ids))
        loaded.logprobs(ids, torch.tensor([[0, 1, 1]])).sum().backward()
        torch.optim.SGD(loaded.parameters(), lr=0.1).step()
        assert embedding.data_ptr() == output.data_ptr() and not torch.equal(loaded.replay(ids), policy.replay(ids))
        policy = loaded


def test_a_think_that_the_template_opens_is_left_to_the_policy():
    """Keeps out a model whose template prefills <think>: no turn of it could be in valid format, and <mem> would stand inside it."""
    tokenizer = greedy_tokenizer(template=TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    assert tokenizer.decode(Chat(tokenizer).prompt("Q")).endswith("assistant\n")
    assert tokenizer.decode(Chat(tokenizer).messages(MESSAGES)) == STREAM


def test_a_base_model_stops_at_the_templates_end_of_turn_too():
    """Keeps out a base model, whose eos is another token, that runs on into the user's turn."""
    tokenizer = greedy_tokenizer()
    end, tokenizer.eos_token = tokenizer.eos_token_id, "<|endoftext|>"
    chat = Chat(tokenizer)
    assert chat.stops == {end, tokenizer.eos_token_id} and len(chat.stops) == 2
    assert chat.decode([*chat.encode("Lisbon"), end, tokenizer.eos_token_id]) == "Lisbon"


def test_a_device_that_is_not_there_is_one_sentence():
    """Keeps out a traceback for --device cuda on a machine without it."""
    with pytest.raises(ValueError, match="--device gpu cannot be used here"):
        load_policy("anything", device="gpu")
