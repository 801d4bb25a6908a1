"""EAGLE-3.1 in one file: a drafter is trained for a language model, then the two decode together, in plain torch.

    python examples/minimal.py --target DIR_OR_HUB_ID [--text FILE ... | --chats FILE.jsonl]

Speculative decoding (https://arxiv.org/abs/2211.17192): a small drafter proposes the next few tokens, the target looks
at all of them in one pass and keeps the longest run that it would have said itself. The text is the target's own, token
for token, in fewer passes of the large model. The EAGLE family, each by what it adds to the one before:

* EAGLE (https://arxiv.org/abs/2401.15077) drafts from the target's hidden state, its *feature*, and from the token that
  was chosen after it: the pair (feature of position i, token i + 1) predicts token i + 2. From the second draft on, the
  drafter's own output stands in for the feature that the target has not computed yet.
* EAGLE-3 (https://arxiv.org/abs/2503.01840) fuses three of the target's hidden states into the feature, and trains the
  drafter on its own outputs as it will meet them when it decodes: *training-time test*.
* EAGLE-3.1 (https://arxiv.org/abs/2605.09992) normalizes each of the three states, and feeds back the *normed* output.

Read ``Drafter``, ``ttt_loss``, ``draft`` and ``speculate``, in this order. Everything is in float32 and on one device.

Legend: B batch, T tokens, H hidden, V target vocabulary, D draft vocabulary, h heads, d head width.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

Row = tuple[Tensor, Tensor]  # token ids, (T,), and which of them the target itself writes, bool (T,)


class Drafter(nn.Module):
    """One decoder layer of the target's dimensions; parameters have the names of published EAGLE-3 checkpoints.

    ``d2t``, int64 (D,), ascending, has the target's id of each draft id (checkpoints store ``d2t - arange(D)``).
    """

    def __init__(self, config, d2t: Tensor) -> None:
        super().__init__()
        width, layers, eps = config.hidden_size, config.num_hidden_layers, config.rms_norm_eps
        self.aux_layers = [2, layers // 2, layers - 3]  # a low, a middle and a high state: b is that after b layers
        self.head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
        heads, kv_heads = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.register_buffer("d2t", d2t)
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps) for _ in range(3))  # 3.1: each state has its own norm
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.input_layernorm = nn.RMSNorm(width, eps)  # on the token embedding
        self.hidden_norm = nn.RMSNorm(width, eps)  # on the feature
        self.q_proj = nn.Linear(2 * width, heads, bias=False)
        self.k_proj = nn.Linear(2 * width, kv_heads, bias=False)
        self.v_proj = nn.Linear(2 * width, kv_heads, bias=False)
        self.o_proj = nn.Linear(heads, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.gate_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)
        self.norm = nn.RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, len(d2t), bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        for module in (x for x in self.modules() if isinstance(x, nn.Linear)):
            nn.init.normal_(module.weight, std=0.02)

    def fuse(self, aux: list[Tensor]) -> Tensor:
        """The target's three hidden states, each (B, T, H), as one feature (B, T, H)."""
        return self.fc(torch.cat([norm(x) for norm, x in zip(self.fc_norm, aux, strict=True)], dim=-1))

    def forward(self, ids: Tensor, h: Tensor, positions: Tensor, visible: Tensor | None, cache: list[Tensor]) -> Tensor:
        """One step: from features ``h`` (B, T, H) and the tokens after them, ``ids`` (B, T), to the next features.

        The T nodes stand at ``positions`` (T,). Their keys and values go into ``cache``, behind those that it has;
        ``visible``, bool (T, keys), says which of them all a node attends to, or None for each to all.
        """
        # Queries, keys and values read token and feature side by side; the residual path carries the feature alone.
        x = torch.cat([self.input_layernorm(self.embed_tokens(ids)), self.hidden_norm(h)], dim=-1)  # (B, T, 2H)
        d, projections = self.head_dim, (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (proj(x).unflatten(-1, (-1, d)).transpose(1, 2) for proj in projections)  # (B, h, T, d)
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x, positions[None]))
        cache[:] = [torch.cat(pair, dim=2) for pair in zip(cache, (k, v), strict=True)] if cache else [k, v]
        seen = F.scaled_dot_product_attention(q, *cache, attn_mask=visible, enable_gqa=True)
        h = h + self.o_proj(seen.transpose(1, 2).flatten(2))
        x = self.post_attention_layernorm(h)
        h = h + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        # 3.1: what the head reads is what the next step reads. EAGLE-3 returns h as it is, and norms it for the head.
        return self.norm(h)


@torch.no_grad()
def read(target, drafter: Drafter, ids: Tensor, cache: DynamicCache | None = None) -> tuple[list[Tensor], Tensor]:
    """What the target has at new tokens: the drafter's three hidden states, each (B, T, H), and logits (B, T, V)."""
    out = target(ids, None, None, cache, use_cache=cache is not None, output_hidden_states=True)  # 5.24 renamed it
    return [out.hidden_states[b] for b in drafter.aux_layers], out.logits


def ttt_loss(
    drafter: Drafter, ids: Tensor, mask: Tensor, aux: list[Tensor], logits: Tensor, steps: int, decay: float = 0.8
) -> tuple[Tensor, Tensor, Tensor]:
    """Training-time test: the drafter drafts ``steps`` tokens from every position at once.

    The draft from slot t reads, at step k, token t + 1 + k and its own output of step k - 1, and predicts token
    t + 2 + k. It attends to the keys of the true features 0..t and to its own keys of steps 1..k, as it will in
    decoding. All slots are run together, a step at a time, and the mask over the keys of all slots and steps is

        step 0:  causal        step 1:  causal, diagonal        step 2:  causal, diagonal, diagonal

    ``mask``, bool (B, T), has the tokens that the target itself writes; others (prompts, padding) train nothing.
    Returns the mean loss, step k weighing ``decay**k``; and of each step the sum of its losses and their number.
    """
    # Cross entropy with the target's distribution p. The drafter knows D tokens only: p is renormalized on these, and
    # nothing is learnt where the target's favourite is not among them.
    known_logits = logits[..., drafter.d2t]
    p, known = known_logits.softmax(-1), known_logits.amax(-1) == logits.amax(-1)
    slots = torch.arange(ids.shape[1] - 2, device=ids.device)
    visible = slots[:, None] >= slots  # step 0: causal
    h, cache, sums, counts = drafter.fuse(aux), [], [], []
    for k in range(steps):
        n = max(0, len(slots) - k)  # slots 0..n-1 have a token t + 2 + k to predict
        if k:  # one more diagonal: of this step's keys, a slot sees its own alone
            visible = torch.cat([visible[:n], torch.eye(n, dtype=torch.bool, device=ids.device)], dim=1)
        now, after = slice(1 + k, 1 + k + n), slice(2 + k, 2 + k + n)
        h = drafter(ids[:, now], h[:, :n], slots[:n] + k, visible, cache)
        loss = -(p[:, now] * drafter.lm_head(h).log_softmax(-1)).sum(-1)
        # In decoding, the token read and the token predicted are both of the target's own writing.
        used = mask[:, now] & mask[:, after] & known[:, now]
        sums.append((loss * used).sum())
        counts.append(used.sum())
    loss, count = torch.stack(sums), torch.stack(counts)
    weight = decay ** torch.arange(steps, dtype=loss.dtype, device=ids.device)
    return (weight * loss).sum() / (weight * count).sum().clamp(min=1e-30), loss.detach(), count


def draft(drafter: Drafter, text: Tensor, aux: list[Tensor], cache: list[Tensor], depth: int) -> Tensor:
    """A chain of draft tokens, (1, depth), to follow ``text``, (1, n + 1) tokens.

    The last token of the text is the *root*, which the target has not read yet; ``aux`` has its states at the last m
    of the n positions before, those that are new to the drafter. The drafter's ``cache`` holds afterwards the n pairs
    (true feature i, token i + 1), and nothing of the drafts.
    """
    n, m = text.shape[1] - 1, aux[0].shape[1]
    order = torch.arange(n, device=text.device)
    # Catch up on what was accepted, with the target's true features in place of the guesses of the last chain.
    h = drafter(text[:, -m:], drafter.fuse(aux), order[-m:], order[-m:, None] >= order, cache)[:, -1:]
    drafts = [drafter.d2t[drafter.lm_head(h).argmax(-1)]]
    # Then on its own: each step reads the last draft and the last output, and sees all keys before it.
    for k in range(1, depth):
        h = drafter(drafts[-1], h, order[-1:] + k, None, cache)
        drafts.append(drafter.d2t[drafter.lm_head(h).argmax(-1)])
    cache[:] = [x[:, :, :n] for x in cache]
    return torch.cat(drafts, dim=1)


@torch.inference_mode()
def speculate(target, drafter: Drafter, prompt: Tensor, new_tokens: int, depth: int, end: set) -> tuple[list, list]:
    """Greedy speculative decoding with chains: the new tokens, and how many each pass of the target committed (after
    the prompt's): accepted drafts and one token of its own, the *bonus*. The mean of these is the acceptance length."""
    target_cache, drafter_cache, committed = DynamicCache(), [], []
    aux, logits = read(target, drafter, prompt, target_cache)
    text = torch.cat([prompt, logits[:, -1:].argmax(-1)], dim=1)
    while (answer := finished(text[0, prompt.shape[1] :].tolist(), new_tokens, end)) is None:
        drafts = draft(drafter, text, aux, drafter_cache, depth)
        # Verify: one pass over root and drafts says what the target itself would put after each of them.
        aux, logits = read(target, drafter, torch.cat([text[:, -1:], drafts], dim=1), target_cache)
        own = logits.argmax(-1)  # (1, depth + 1)
        # Accept the drafts up to the first that the target would not have said. Its own word there is right, too.
        accepted = int((drafts == own[:, :-1]).cumprod(dim=1).sum())
        fresh = own[:, : accepted + 1]
        text = torch.cat([text, fresh], dim=1)
        committed.append(len(finished(fresh[0].tolist(), accepted + 1, end)))  # without what is behind an end
        # Forget the refused drafts. The last token committed is the new root, which nobody has read.
        target_cache.crop(accepted - depth)
        aux = [x[:, : accepted + 1] for x in aux]
    return answer, committed


@torch.inference_mode()
def plain(target, prompt: Tensor, new_tokens: int, end: set) -> list:
    """Greedy decoding by the target alone, a token a pass: what speculation must reproduce."""
    cache, made, ids = DynamicCache(), [], prompt
    while (answer := finished(made, new_tokens, end)) is None:
        ids = target(ids, None, None, cache, use_cache=True).logits[:, -1:].argmax(-1)
        made.append(int(ids))
    return answer


def finished(made: list, new_tokens: int, end: set) -> list | None:
    """The finished answer, up to an end token or ``new_tokens`` of them; None while it goes on."""
    stop = next((i for i, token in enumerate(made, start=1) if token in end), new_tokens)
    return made[:stop] if len(made) >= stop else None


def drafter_for(target, rows: list[Row], draft_vocab: int, end: set) -> Drafter:
    """A drafter that starts from the target's embedding (which stays as it is) and head, near even guesses."""
    head = target.get_output_embeddings().weight
    counts = torch.bincount(torch.cat([ids[mask] for ids, mask in rows]), minlength=len(head))
    counts[list(end)] = counts.sum()  # however rare: a drafter must be able to say that the text is over
    d2t = counts.sort(descending=True, stable=True).indices[:draft_vocab].sort().values.to(head.device)
    drafter = Drafter(target.config, d2t).to(head.device)
    with torch.no_grad():
        drafter.embed_tokens.weight.requires_grad_(False).copy_(target.get_input_embeddings().weight)
        drafter.lm_head.weight.copy_(head[d2t])
        deviation = drafter.lm_head.weight.float().var(0, correction=0).sum().sqrt().item()  # of an even norm's logits
        drafter.norm.weight.fill_(float(f"{1 / max(1.0, deviation):.3g}"))
    return drafter


def train(target, drafter: Drafter, rows: list[Row], steps: int, batch_size: int, lr: float, ttt_steps: int) -> None:
    """AdamW over random rows; the learning rate warms up, then falls to nothing along a cosine."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.05, cycle_momentum=False)
    for step in range(steps):
        some = [rows[i] for i in torch.randint(len(rows), (batch_size,))]  # padded on the right, which nobody sees
        ids, mask = (pad_sequence(x, batch_first=True).to(target.device) for x in zip(*some, strict=True))
        loss, sums, counts = ttt_loss(drafter, ids, mask, *read(target, drafter, ids), ttt_steps)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == steps - 1:
            by_depth = [round(x, 2) for x in (sums / counts).tolist()]
            print(f"step {step:4d}: loss {loss.item():.3f}, by depth {by_depth}", flush=True)


def text_rows(tokenizer, files: list[Path], length: int) -> list[Row]:
    """Text cut into rows that begin as a text of the target begins; every token is the target's to write."""
    texts = [file.read_text(errors="ignore") for file in files]
    stream = [i for ids in tokenizer(texts, add_special_tokens=False, verbose=False).input_ids for i in ids]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = length - len(begin)
    rows = [begin + stream[at : at + size] for at in range(0, len(stream) - size + 1, size)]
    return [(torch.tensor(ids), torch.ones(length, dtype=torch.bool)) for ids in rows]


def chat_rows(tokenizer, file: Path, length: int) -> list[Row]:
    """Lines of ``{"messages": [...]}``; what the template adds for an assistant's turn is the target's to write."""
    rows = []
    for messages in (json.loads(line)["messages"] for line in file.read_bytes().splitlines()):
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for n in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
            before = tokenizer.apply_chat_template(messages[:n], add_generation_prompt=True, return_dict=False)
            mask[len(before) : len(tokenizer.apply_chat_template(messages[: n + 1], return_dict=False))] = True
        rows.append((torch.tensor(ids[:length]), mask[:length]))
    return [(ids, mask) for ids, mask in rows if mask.any()]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", required=True, help="a directory or Hub id of a Llama-like model")
    stdlib = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    add("--text", nargs="+", type=Path, default=stdlib, help="text files; by default Python's standard library")
    add("--chats", type=Path, help='in their place JSON lines of {"messages": [...]}, best with the target\'s answers')
    add("--steps", type=int, default=150, help="of the optimizer")
    add("--batch_size", type=int, default=8, help="rows of a step")
    add("--seq_len", type=int, default=256, help="tokens of a row")
    add("--lr", type=float, default=2e-3, help="at its peak; 1e-4 for a large target and a long run")
    add("--ttt_steps", type=int, default=5, help="steps of the unroll")
    add("--draft_vocab", type=int, default=32000, help="tokens that the drafter knows, at most")
    add("--depth", type=int, default=5, help="draft tokens of a chain")
    add("--prompts", type=int, default=8, help="held-out rows to decode from")
    add("--new_tokens", type=int, default=128, help="to decode after each")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).to(args.device)
    if target.config.num_hidden_layers < 7:
        parser.error(f"--target {args.target} has fewer than 7 layers, too few for three states to fuse")
    ends = target.generation_config.eos_token_id
    end = {ends} if isinstance(ends, int) else set(ends or [])
    read_rows, source = (chat_rows, args.chats) if args.chats else (text_rows, args.text)
    rows = read_rows(tokenizer, source, args.seq_len)
    if len(rows) <= args.prompts:
        parser.error(f"--prompts {args.prompts}: of {len(rows)} rows of text none is left to train on")
    rows, held_out = rows[: -args.prompts], rows[-args.prompts :]
    drafter = drafter_for(target, rows, args.draft_vocab, end)
    train(target, drafter, rows, args.steps, args.batch_size, args.lr, args.ttt_steps)

    # of a chat its prompt, of a text its first half
    prompts = [ids[None, : int(mask.int().argmax()) or len(ids) // 2].to(args.device) for ids, mask in held_out]
    times = [time.perf_counter()]
    answers = [plain(target, prompt, args.new_tokens, end) for prompt in prompts]
    times.append(time.perf_counter())
    made = [speculate(target, drafter, prompt, args.new_tokens, args.depth, end) for prompt in prompts]
    times.append(time.perf_counter())
    committed = [count for _, counts in made for count in counts]
    same = sum(ids == answer for (ids, _), answer in zip(made, answers, strict=True))
    slow, fast = (sum(map(len, answers)) / (times[i + 1] - times[i]) for i in (0, 1))
    print(f"acceptance length {sum(committed) / max(1, len(committed)):.2f}, bonus included, chains of {args.depth}")
    print(f"tokens/s: {fast:.1f}, plain {slow:.1f}; identical to plain decoding: {same} of {len(answers)} answers")


if __name__ == "__main__":
    main()
