"""A causal language model as a policy: cached steps for the sampler, replayed log-probabilities for the trainer.

Letters: B rows, S tokens fed at once, T positions, K cached positions, V vocabulary, D head width, H key/value heads.
Left out: tensor and pipeline parallelism, several GPUs, quantised training.

    policy, tokenizer = load_policy("Qwen2.5-1.5B")          # a hub id, its short form, a folder, or GGUF weights
"""
import inspect
import os
import signal
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub.constants import ENDPOINT
from huggingface_hub.utils import get_session
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from cache import SlotCache, additive, check_room
from chat import PLAIN_CHAT_TEMPLATE, Chat, first_line

DTYPE = "dtype" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56) else "torch_dtype"  # renamed there
HUB_OWNERS = {"Qwen": "Qwen", "SmolLM": "HuggingFaceTB"}
LOGIT_BLOCK = 2 ** 22  # logits held at once by `logprobs`, in elements: 16 MB in float32, which a CPU caches; 16 times that on a GPU


def pad_right(rows: list[list], dtype=torch.long, device=None) -> torch.Tensor:
    """Lists of different lengths -> [B,T], zeros on the right."""
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True).to(device)


class TokenLogProb(torch.autograd.Function):
    """log softmax(h·Wᵀ / temperature)[y]: h [n,E], W [V,E], y [n] -> [n], block by block of the vocabulary, both ways.

    [n,V] logits never exist whole. ∂/∂logits = g·(onehot(y) − p), with p from the block's logits computed again.
    """

    @staticmethod
    def blocks(h, W, temperature):
        """(first column v, rows of W [k,E], logits [n,k] in float32) of each block."""
        size = max(1, LOGIT_BLOCK * (16 if h.is_cuda else 1) // max(len(h), 1))
        for v in range(0, len(W), size):
            yield v, W[v:v + size], (h @ W[v:v + size].T).float().div_(temperature)

    @staticmethod
    def forward(ctx, h, W, y, temperature):
        """-> [n] in float32; the log of the normaliser is built up over the blocks, as in a streaming softmax."""
        top, own = h.new_full((2, len(h)), -torch.inf, dtype=torch.float32)                         # [n] running maximum; logit of y
        total = torch.zeros_like(top)                                                               # [n] Σ exp(logit − top)
        for v, _, logits in TokenLogProb.blocks(h, W, temperature):
            new = torch.maximum(top, logits.amax(-1))
            column = (y - v).clamp(0, logits.shape[1] - 1)
            own = torch.where(column == y - v, logits.gather(-1, column[:, None])[:, 0], own)
            total = total * (top - new).exp() + logits.sub_(new[:, None]).exp_().sum(-1)
            top = new
        ctx.save_for_backward(h, W, y, top + total.log())
        ctx.temperature = temperature
        return own - top - total.log()                         # in this order a sure token rounds to 0, not to the size of its logit

    @staticmethod
    def backward(ctx, g):
        """g [n] -> ∂h [n,E] and ∂W [V,E], whose rows are each written once."""
        h, W, y, logsum = ctx.saved_tensors
        g, dh, dW = (g / ctx.temperature)[:, None], h.new_zeros(h.shape, dtype=torch.float32), torch.empty_like(W)
        for v, rows, logits in TokenLogProb.blocks(h, W, ctx.temperature):
            gp = logits.sub_(logsum[:, None]).exp_().mul_(-g).to(h.dtype)                             # [n,k] −g·p
            dh += gp @ rows
            torch.mm(gp.T, h, out=dW[v:v + len(rows)])
        g = g.to(h.dtype)
        return dh.to(h.dtype) + g * W[y], dW.index_add_(0, y, g * h), None, None


class Policy:
    """A transformers causal LM with the three calls that the sampler and the trainer need. Dropout is off in all of them."""

    rule, setting = "full", {}                                 # how the model is executed; what a checkpoint of it depends on

    def __init__(self, model):
        self.model, self.weight = model.eval(), next(model.parameters())       # one that tells device and dtype, which transformers asks all for
        self.cache_argument = "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"
        self.max_tokens_a_pass = 16384                         # bounds the activations and the [n,1,S,K] mask of a prefill
        self.gradient_checkpointing = False                    # keep a layer's inputs only and compute it again in the backward pass

    @property
    def device(self):
        return self.weight.device

    @property
    def dtype(self):
        return self.weight.dtype

    @property
    def context_length(self) -> int | None:
        """The model's window in tokens, where its configuration names one."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def parameters(self) -> list[torch.nn.Parameter]:
        """What the optimizer updates; a tied weight appears once."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def extra(self) -> dict[str, torch.Tensor]:
        """What a rule's checkpoint holds besides the model's weights, by name; `setting` is what these tensors belong to."""
        return {}

    def save(self, folder) -> None:
        """Write the weights as a plain transformers folder, and `extra`, if any, to {rule}.safetensors in it."""
        self.model.save_pretrained(folder)
        if tensors := {name: tensor.detach().cpu().contiguous() for name, tensor in self.extra().items()}:
            save_file(tensors, Path(folder) / f"{self.rule}.safetensors", {name: str(value) for name, value in self.setting.items()})

    def load(self, folder) -> None:
        """Fill `extra` in place from what `save` wrote, so that an optimizer that holds it goes on with it."""
        path = Path(folder) / f"{self.rule}.safetensors"
        if not path.exists():
            raise ValueError(f"there is no {path}; save the policy there first, or go on without loading it")
        try:
            file = safe_open(path, "pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); bring back a copy, or remove it to drop what was learned") from None
        with file:
            found, saved = {n: file.get_tensor(n) for n in file.keys()}, {k: int(v) for k, v in (file.metadata() or {}).items()}
        for n, t in self.extra().items():
            if saved != self.setting or n not in found or found[n].shape != t.shape:
                raise ValueError(f"{path} holds {', '.join(f'{k} {list(v.shape)}' for k, v in found.items())} saved with {saved}, and this "
                                 f"policy needs {n} {list(t.shape)} with {self.setting}; build the policy as the one that was saved")
            t.data.copy_(found[n])

    def new_cache(self, batch_size: int, max_length: int) -> SlotCache:
        return SlotCache(batch_size, max_length)

    @torch.no_grad()
    def step(self, input_ids, lengths, cache) -> torch.Tensor:
        """Feed row b its first lengths[b] tokens of input_ids [B,S]; return the logits after each row's last fed token, [B,V].

        B may be smaller than the cache: rows 0 … B − 1 are fed. Positions continue where each row stands.
        """
        lengths = torch.as_tensor(lengths).cpu()
        if int(lengths.min()) < 1:
            raise ValueError("step needs at least one token for every row; drop finished rows from the end of the batch")
        if int(lengths.max()) > input_ids.shape[1] or len(lengths) > len(cache.length):
            raise ValueError(f"step was asked to feed {int(lengths.max())} tokens a row in {len(lengths)} rows, and input_ids is {list(input_ids.shape)} "
                             f"for a cache of {len(cache.length)} rows; lengths may exceed neither")
        check_room(cache, cache.length[:len(lengths)] + lengths)   # of all rows, before any is fed
        n = max(1, self.max_tokens_a_pass // int(lengths.max()))
        return torch.cat([self._step(input_ids[i:i + n], lengths[i:i + n], cache, i) for i in range(0, len(lengths), n)])

    def _step(self, input_ids, lengths, cache, start):
        hidden = self.extend(cache, start, lengths, input_ids=input_ids[:, :int(lengths.max())].to(self.device))   # [n,S,E]
        last = 0 if hidden.shape[1] == 1 else (lengths - 1).to(self.device)
        return self.head(hidden[torch.arange(len(lengths), device=self.device), last])              # [n,V]

    def extend(self, cache, start, lengths, **inputs):
        """Feed rows start … start + n − 1 their first lengths [n] of the input_ids [n,S] or inputs_embeds [n,S,E] -> hidden [n,S,E]."""
        S, device = int(lengths.max()), self.device
        cache.open(start, lengths, device)
        past = cache.length[start:start + cache.n, None]                                            # [n,1]
        position, mask = (past + torch.arange(S)).to(device), None                                  # [n,S]; empty rows: plainly causal, no mask
        if bool(past.any()):
            mask = additive(torch.arange(cache.K, device=device) <= position[:, None, :, None], self.dtype)  # [n,1,S,K] slot j: j <= position
        hidden = self.model.base_model(**inputs, attention_mask=mask, position_ids=position, use_cache=True,
                                       **{self.cache_argument: cache}).last_hidden_state
        cache.length[start:start + cache.n] += lengths
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[...,E] last hidden states -> [...,V] logits. `logprobs` reads the same layer block by block."""
        return self.model.get_output_embeddings()(hidden)

    def hidden(self, input_ids, attention_mask=None) -> torch.Tensor:
        """[B,T] -> last hidden states [B,T,E], in one causal pass; positions count real tokens only.

        Padding is what attention_mask says, never a token's id. On the right it needs no mask at all: nothing real looks there.
        """
        if attention_mask is None or bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all()):
            return self.states(input_ids=input_ids)
        position = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        return self.states(input_ids=input_ids, attention_mask=attention_mask.bool(), position_ids=position)

    def states(self, **inputs) -> torch.Tensor:
        """One pass without a cache -> last hidden states [B,T,E].

        transformers' own checkpointing wants a layer in training mode, where some models drop activations; here all stay in eval mode,
        and each layer's forward is wrapped while this pass runs, so that no cached step ever sees it.
        """
        layers = next(m for m in self.model.base_model.modules() if isinstance(m, torch.nn.ModuleList)) if self.checkpoints() else []
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        try:
            return self.model.base_model(use_cache=False, **inputs).last_hidden_state
        finally:
            for layer in layers:
                del layer.forward                              # the class's own again

    def checkpoints(self) -> bool:
        return self.gradient_checkpointing and torch.is_grad_enabled()

    def replay(self, input_ids, attention_mask=None) -> torch.Tensor:
        """[B,T] -> logits [B,T,V], with gradients; right- or left-padded."""
        return self.head(self.hidden(input_ids, attention_mask))

    def logprobs(self, input_ids, select, temperature: float = 1.0, attention_mask=None) -> torch.Tensor:
        """log p(input_ids[b,t] | input_ids[b,<t]) at the sampling temperature where select[b,t], 0 elsewhere: [B,T].

        Only the selected positions pass the output layer, and [tokens × V] logits never exist whole.
        Position 0 has no prediction and cannot be selected.
        """
        return self.selected(self.hidden(input_ids, attention_mask), input_ids, select.bool(), temperature)

    @torch.no_grad()
    def branch_logprobs(self, trunk, ids, start, position, select) -> torch.Tensor:
        """`logprobs` of sequences that share their beginnings: branches [B,Q] that leave the sequences trunk [B,T], at temperature 1.

        A row's branches lie side by side. Each of their tokens has its branch's `start`, the first `position` of the branch, and sees
        the trunk's tokens before it and its own branch up to itself. A branch's first token has no prediction and cannot be selected.
        The trunk passes once, causally, and then all branches as one chunk: no [T,T] mask. Right-padded, start and position with 0.
        A subclass that computes something else in `hidden` sets this to None.
        """
        cache, slot = DynamicCache(), torch.arange(ids.shape[1], device=ids.device)                 # [Q]
        self.model.base_model(input_ids=trunk, use_cache=True, **{self.cache_argument: cache})
        first = slot - (position - start)                                                          # [B,Q] the slot where the branch begins
        own = (first[:, :, None] == first[:, None, :]) & (slot[:, None] >= slot)                    # [B,Q,Q]
        sees = torch.cat([torch.arange(trunk.shape[1], device=ids.device) < start[:, :, None], own], 2)[:, None]    # [B,1,Q,T+Q]
        hidden = self.model.base_model(input_ids=ids, attention_mask=additive(sees, self.dtype), position_ids=position, use_cache=True,
                                       **{self.cache_argument: cache}).last_hidden_state
        return self.selected(hidden, ids, select, 1.0)

    def selected(self, hidden, input_ids, select, temperature) -> torch.Tensor:
        """`logprobs` from the hidden states [B,T,E] of the same tokens."""
        chosen, target = hidden[:, :-1][select[:, 1:]], input_ids[:, 1:][select[:, 1:]]             # [n,E], [n]
        head = self.model.get_output_embeddings()
        W = head.weight                                                                             # [V,E]
        if head.bias is not None:                              # one more column, read by a 1
            chosen, W = F.pad(chosen, (0, 1), value=1.0), torch.cat([W, head.bias[:, None]], 1)
        logp = TokenLogProb.apply(chosen, W, target, temperature)
        return hidden.new_zeros(input_ids.shape, dtype=torch.float32).masked_scatter(select, logp)


def master_weights(policy) -> list[torch.nn.Parameter]:
    """What the optimizer steps, in the order of policy.parameters(): a float32 parameter itself, and for a bfloat16 one its master.

    A step of 1e-6 would be rounded away in bfloat16, and so would one micro-batch's gradient beside the sum of many. A master is a float32
    copy; its .grad takes every gradient of its parameter in float32 as soon as the backward pass has it, and the parameter keeps none.
    """
    def master(p):
        """The float32 copy of p, which a hook hands every gradient of p."""
        copy = torch.nn.Parameter(p.detach().float())

        def take(p):
            copy.grad = p.grad.float() if copy.grad is None else copy.grad.add_(p.grad)
            p.grad = None

        p.register_post_accumulate_grad_hook(take)
        return copy

    return [master(p) if p.dtype == torch.bfloat16 else p for p in policy.parameters()]


@torch.no_grad()
def round_masters(policy, masters) -> None:
    """The policy's weights become their masters, rounded; a parameter that is its own master stays."""
    for p, master in zip(policy.parameters(), masters):
        if p is not master:
            p.copy_(master)


def resolve_name(name: str) -> str:
    """`Qwen2.5-1.5B` -> `Qwen/Qwen2.5-1.5B`; anything that exists here or already names an owner stays as it is."""
    if "/" not in name and not os.path.exists(name):
        for family, owner in HUB_OWNERS.items():
            if name.startswith(family):
                return f"{owner}/{name}"
    return name


def usable_device(device: str | None) -> str:
    """The device asked for, or cuda where there is one, else cpu."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} cannot be used here ({first_line(error)}); leave it out or give cpu") from None
    return device


def hub_answers() -> bool:
    """Asked first, since without a network each file of a model would be asked for half a minute, with a warning at each try."""
    try:
        get_session().head(ENDPOINT, timeout=10)
        return True
    except Exception:                                          # whatever its client raises: no network, refused, offline by HF_HUB_OFFLINE
        return False


@contextmanager
def loading(name: str):
    """(source, options) for transformers' from_pretrained from a hub id, its short form, a folder of safetensors, or GGUF weights (a file or
    its folder). Raises ValueError, in one sentence, if there is nothing to load, or if what stands inside finds nothing."""
    source, options = resolve_name(name), {}
    path = Path(source)
    gguf = [path] if path.suffix == ".gguf" and path.exists() else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if gguf and not (path.is_dir() and (path / "config.json").exists()):
        if len(gguf) > 1:
            raise ValueError(f"the folder {name} holds {len(gguf)} GGUF files; name one: {', '.join(file.name for file in gguf)}")
        source, options = str(gguf[0].parent), {"gguf_file": gguf[0].name}
    elif path.is_dir() and not list(path.glob("*.safetensors")):
        raise ValueError(f"the folder {name} has no *.safetensors or *.gguf weights; convert pickled weights with "
                         "save_pretrained(..., safe_serialization=True) first")
    elif (path.is_absolute() or path.suffix == ".gguf" or source.startswith(".") or source.count("/") > 1) and not path.exists():
        raise ValueError(f"there is no folder or file {name}; --model takes a hub id, a folder, or GGUF weights")
    elif not path.exists():
        options = {"local_files_only": not hub_answers()}
        if source != name:
            print(f"--model {name}: taken as {source} of the Hugging Face hub")
    try:
        yield source, options
    except Exception as error:                                 # what transformers raises over a damaged config.json is anything
        if path.exists():
            raise ValueError(f"cannot load {name}: {first_line(error)}") from error
        raise ValueError(f"cannot load {source} (from --model {name}): not found as a folder, in the local Hugging Face cache or "
                         f"on the hub; download it where there is a network (`hf download {source}`) and pass its folder "
                         f"({first_line(error)})") from error


def load_config(name: str):
    """The configuration of what load_policy would load, without a weight."""
    with loading(name) as (source, options):
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **options)


def check_architecture(policy) -> None:
    """Refuse a model whose logits are not its output layer's, or some of whose layers see less than all that came before: `head` and the
    cached step would compute another policy."""
    model, config = policy.model, policy.model.config.get_text_config()
    window = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [f"sliding windows of {window} tokens" if window else "full_attention"])
    if odd := kinds - {"full_attention"}:
        raise ValueError(f"{type(model).__name__} with {min(odd)} is not supported, only full attention in every layer; take another model")
    probe = torch.arange(8, device=policy.device)[None]        # more than one, as the embedding of padding may be 0
    with torch.no_grad():
        same = torch.allclose(model(probe).logits.float(), policy.replay(probe).float(), rtol=1e-5, atol=1e-6, equal_nan=True)
    if not same:
        raise ValueError(f"{type(model).__name__} scales or caps its logits, which is not supported; take another model")


def load_policy(name: str, dtype: str = "float32", device: str | None = None):
    """(Policy, tokenizer) by a name that `loading` takes. Pickled weights and remote code are refused."""
    device = usable_device(device)
    with loading(name) as (source, options):
        gguf = "gguf_file" in options
        declared = {} if gguf else get_tokenizer_config(source, **options)     # AutoTokenizer may overrule a Qwen2 folder's plain tokenizer.json
        plain = declared.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
        tokenizer = (PreTrainedTokenizerFast if plain else AutoTokenizer).from_pretrained(source, trust_remote_code=False, **options)
        model, report = AutoModelForCausalLM.from_pretrained(source, **{DTYPE: getattr(torch, dtype)}, use_safetensors=None if gguf else True,
                                                             trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True, **options)
        if not tokenizer.encode("text", add_special_tokens=False):
            raise ValueError("it brings no tokenizer; copy the tokenizer's files there")
        if tokenizer.vocab_size > (V := model.get_input_embeddings().weight.shape[0]):
            raise ValueError(f"its tokenizer has {tokenizer.vocab_size} tokens and its weights have {V}; they belong to different models")
        if wrong := sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]):
            raise ValueError(f"its weights lack {wrong[0]} and {len(wrong) - 1} more in the shapes that config.json names; they would be random")
    if gguf:                                                   # saved again it is an ordinary float model
        model.config.__dict__.pop("quantization_config", None)
        model.hf_quantizer = None
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    Chat(tokenizer)                                            # refuses a template that cannot be used before anything is begun
    policy = Policy(model.to(device))
    check_architecture(policy)
    return policy, tokenizer


def run_script(name: str, main, *arguments) -> None:
    """A script's last line: main(*arguments); a user's mistake ends in one sentence and code 2, Ctrl-C in one and 130."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")                   # a lone surrogate in somebody's data can be shown
    transformers.logging.disable_progress_bar()                # its bars for a save of milliseconds
    transformers.logging.set_verbosity_error()                 # its tables of weights that do not fit: they are refused in one sentence
    try:
        main(*arguments)
    except (ValueError, OSError, SafetensorError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{name}: stopped; what was written until now stays", file=sys.stderr)
        sys.exit(130)
