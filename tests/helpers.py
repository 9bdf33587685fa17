"""Small models and tokenizers, and a policy that says what a test tells it to say. Nothing here needs a network."""
import importlib
import multiprocessing
import os
import string
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[1]
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["train", "eval"])                 # its children have imported everything, which takes seconds

TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def tiny_model(vocab_size: int = 40, seed: int = 0, **config) -> Qwen2ForCausalLM:
    """A random Qwen2 of two layers whose distributions are far from flat."""
    torch.manual_seed(seed)
    config = {"tie_word_embeddings": False, "initializer_range": 0.3, "max_position_embeddings": 4096} | config
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, **config)).eval()


def with_bias(model, bias: torch.Tensor):
    """The model with a bias [V] in its output layer."""
    weight, model.lm_head = model.lm_head.weight, torch.nn.Linear(*reversed(model.lm_head.weight.shape))
    model.lm_head.weight, model.lm_head.bias.data = weight, bias
    return model


def greedy_tokenizer(*tokens: str, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Every ASCII character and the given tokens, encoded by greedy longest match; "un" + "til" decodes to what is encoded as "until"."""
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(["<unk>", *string.printable, *tokens]))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", continuing_subword_prefix="", max_input_chars_per_word=10 ** 6))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   additional_special_tokens=["<|im_start|>"], chat_template=template, clean_up_tokenization_spaces=False)


class ScriptedCache:
    """The ids that each row was fed."""

    def __init__(self, rows: int):
        self.fed = [[] for _ in range(rows)]

    def swap(self, a, b):
        self.fed[a], self.fed[b] = self.fed[b], self.fed[a]

    def copy_rows(self, source, rows):
        self.fed = [list(source.fed[row]) for row in rows]


class ScriptedPolicy:
    """Forces scripts[m], id by id over all its turns, in the row whose context holds the id m. Asked for more it raises.

    contexts[m]: what m's row was fed, a list a cache; calls: the lengths of every step.
    """
    device = torch.device("cpu")

    def __init__(self, scripts: dict[int, list[int]], vocab_size: int, context_length: int | None = None):
        self.left = {marker: list(ids) for marker, ids in scripts.items()}
        self.contexts = {marker: [] for marker in scripts}
        self.vocab_size, self.context_length, self.calls = vocab_size, context_length, []

    def new_cache(self, batch_size, max_length):
        return ScriptedCache(batch_size)

    def step(self, input_ids, lengths, cache):
        logits = torch.full((len(lengths), self.vocab_size), -1e4)
        self.calls.append([int(n) for n in lengths])
        for b, (ids, n) in enumerate(zip(input_ids.tolist(), self.calls[-1])):
            cache.fed[b] += ids[:n]
            marker = next(m for m in self.left if m in cache.fed[b])
            if not any(fed is cache.fed[b] for fed in self.contexts[marker]):
                self.contexts[marker].append(cache.fed[b])
            logits[b, self.left[marker].pop(0)] = 0
        return logits


def child(script: str, arguments: list[str], log: str, before: tuple) -> None:
    os.chdir(ROOT)
    sys.argv, sys.stdout, sys.stderr = [script, *arguments], open(f"{log}.out", "a", buffering=1), open(f"{log}.err", "a", buffering=1)
    torch.set_num_threads(1)
    for function, *more in before:
        function(*more)
    importlib.import_module("policy").run_script(script, importlib.import_module(script.removesuffix(".py")).main, arguments)


def forked(script: str, *arguments, log, before=()):
    """A running process of a script, as a user's command would be but for its imports; it writes to {log}.out and {log}.err.

    before: (function, argument, …) to be called there first.
    """
    process = FORK.Process(target=child, args=(script, list(map(str, arguments)), str(log), before))
    process.start()
    return process
