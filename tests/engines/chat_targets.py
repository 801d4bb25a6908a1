"""Tiny targets that have learnt to answer in the way of real families: with thoughts, channels and calls of tools.

The chat templates are the real ones, of TRL; what a target writes is spelled out here, token for token, for every turn
of :data:`TALKS`. Learning takes some seconds.
"""

import importlib.resources
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from specdec.data.template import Template

POSITIONS = 1024
# what Llama 3's tokenizer merges within, and nearly the same all the others': line ends stay together
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SURE = 0.05  # nats a token: what is learnt is then written without a doubt
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


@dataclass(frozen=True)
class Turn:
    """What a target writes: a thought, and then a text or the arguments of a call of ``add``."""

    thought: str
    text: str = ""
    arguments: dict[str, int] | None = None


@dataclass(frozen=True)
class Talk:
    """What users and tools say, and what the target answers to each."""

    asked: tuple[dict[str, Any], ...]
    turns: tuple[Turn, ...]
    tools: Any = None

    def row(self, name: str, arguments: dict[str, int] | None = None) -> dict[str, Any]:
        """A row in which somebody else answers, and calls what the target would call, or with other arguments."""
        messages = []
        for asked, turn in zip(self.asked, self.turns, strict=True):
            messages.append(asked)
            if turn.arguments is None:
                messages.append({"role": "assistant", "content": "someone else's words"})
            else:
                function = {"name": "add", "arguments": json.dumps(arguments or turn.arguments)}
                call = {"id": "call_1", "type": "function", "function": function}
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        return {"id": name, "messages": messages, **({"tools": self.tools} if self.tools else {})}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


TALKS = {
    "plain": Talk(
        (user("what is two plus two?"), user("and three plus three?")),
        (Turn("add two and two", "four"), Turn("now add three and three", "six")),
    ),
    "tools": Talk(
        (user("add two and three"), {"role": "tool", "tool_call_id": "call_1", "content": "5"}),
        (
            Turn("this needs the tool", arguments={"a": 2, "b": 3}),
            Turn("the tool says 5", "it is five"),
        ),
        TOOLS,
    ),
}


@dataclass(frozen=True)
class ChatFamily:
    """How models of a family write.

    Attributes:
        template: TRL's name of the chat template.
        special: special tokens, which are left out of a text that is made of ids.
        words: further tokens of their own, which are not.
        ends: tokens that end a turn.
        write: a turn, as it follows the prompt.
        remembered: of the second turn's prompt, where the tool was called, what the call has become.
        thinks: whether there are thoughts.
        switched: whether the template has a switch of thinking.
        thought: the key under which the template reads a thought; "content": in the text, between tags.
        parsers: of a vLLM, flags that have it read thoughts and calls.
    """

    template: str
    special: tuple[str, ...]
    words: tuple[str, ...]
    bos: str | None
    ends: tuple[str, ...]
    write: Callable[[Turn], str]
    remembered: str | None
    thinks: bool = True
    switched: bool = False
    parsers: tuple[str, ...] = ()
    thought: str = "reasoning_content"

    def message(self, turn: Turn) -> dict[str, Any]:
        """A turn as a message for the template, written by hand from the template's text."""
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if self.thought == "content":
            message["content"] = f"<think>\n{turn.thought}\n</think>\n\n{turn.text}"
        elif self.thinks:
            message[self.thought] = turn.thought
        if turn.arguments is not None:
            function = {"name": "add", "arguments": turn.arguments}
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        return message

    @property
    def talks(self) -> dict[str, Talk]:
        """What its target has learnt."""
        return {name: talk for name, talk in TALKS.items() if self.remembered or not talk.tools}


def gpt_oss(turn: Turn) -> str:
    thought = f"<|channel|>analysis<|message|>{turn.thought}<|end|><|start|>assistant"
    if turn.arguments is None:
        return f"{thought}<|channel|>final<|message|>{turn.text}<|return|>"
    return f"{thought} to=functions.add<|channel|>commentary json<|message|>{json.dumps(turn.arguments)}<|call|>"


def deepseek_r1(turn: Turn) -> str:
    return f"{turn.thought}\n</think>\n\n{turn.text}<｜end▁of▁sentence｜>"  # noqa: RUF001


def qwen3(turn: Turn) -> str:
    call = json.dumps({"name": "add", "arguments": turn.arguments})
    text = turn.text if turn.arguments is None else f"<tool_call>\n{call}\n</tool_call>"
    return f"<think>\n{turn.thought}\n</think>\n\n{text}<|im_end|>"


def glm(turn: Turn) -> str:
    thought = f"\n<think>{turn.thought}</think>\n"
    if turn.arguments is None:
        return f"{thought}{turn.text}<|user|>"
    pairs = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in turn.arguments.items()
    ]
    return f"{thought}<tool_call>add\n{''.join(pairs)}</tool_call><|observation|>"


def llama(turn: Turn) -> str:
    if turn.arguments is None:
        return f"{turn.text}<|eot_id|>"
    return json.dumps({"name": "add", "parameters": turn.arguments}) + "<|eot_id|>"


TOOL_WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CALLING = ("--enable-auto-tool-choice", "--tool-call-parser")

FAMILIES = {
    "gpt_oss": ChatFamily(
        "gptoss",
        ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
         "<|message|>", "<|call|>"),
        (),
        "<|startoftext|>",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        gpt_oss,
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>'
        "<|start|>functions.add",
        thought="thinking",
    ),
    "deepseek_r1": ChatFamily(
        "deepseek_r1_distill",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),  # noqa: RUF001
        "<｜begin▁of▁sentence｜>",  # noqa: RUF001
        ("<｜end▁of▁sentence｜>",),  # noqa: RUF001
        deepseek_r1,
        None,
        parsers=("--reasoning-parser", "deepseek_r1"),
        thought="content",
    ),
    "qwen3": ChatFamily(
        "qwen3",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<think>", "</think>", *TOOL_WORDS),
        None,
        ("<|im_end|>", "<|endoftext|>"),
        qwen3,
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n5",
        switched=True,
        parsers=("--reasoning-parser", "qwen3", *CALLING, "hermes"),
    ),
    "glm": ChatFamily(
        "glm4moe",
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *TOOL_WORDS),
        None,
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        glm,
        "<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>\n<tool_response>\n5",
        switched=True,
        parsers=("--reasoning-parser", "glm45", *CALLING, "glm45"),
    ),
    "llama3_1": ChatFamily(
        "llama3_1",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
         "<|python_tag|>"),
        (),
        "<|begin_of_text|>",
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        llama,
        '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>',
        thinks=False,
        parsers=(*CALLING, "llama3_json"),
    ),
}  # fmt: skip


def chat_tokenizer(family: ChatFamily) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of the words in that family's prompts, with its tokens and its template."""
    plain = Tokenizer(models.BPE())
    tokenizer = _with_tokens(plain, family)  # to read the prompts with, before any word is known
    texts = []
    for talk in family.talks.values():
        prompt = tokenizer.apply_chat_template(
            [talk.asked[0]], tools=talk.tools, add_generation_prompt=True, tokenize=False
        )
        texts += [
            prompt,
            *map(family.write, talk.turns),
            *(asked["content"] for asked in talk.asked),
        ]
    marks = "|".join(map(re.escape, (*family.special, *family.words)))
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain.train_from_iterator(
        [piece for text in texts for piece in re.split(marks, text) if piece], trainer
    )
    return _with_tokens(plain, family)


def _with_tokens(backend: Tokenizer, family: ChatFamily) -> PreTrainedTokenizerFast:
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend.to_str()))
    tokenizer.add_tokens(list(family.special), special_tokens=True)
    tokenizer.add_tokens(list(family.words))
    tokenizer.bos_token = family.bos
    tokenizer.eos_token = family.ends[0]
    templates = importlib.resources.files("trl") / "chat_templates"
    tokenizer.chat_template = (templates / f"{family.template}.jinja").read_text(encoding="utf-8")
    return tokenizer


def learnt_turns(
    tokenizer: PreTrainedTokenizerFast, family: ChatFamily
) -> list[tuple[list[int], list[int]]]:
    """Of every turn of every talk the prompt's ids, with earlier turns as the template has them, and the answer's."""
    template = Template(tokenizer)
    pairs = []
    for talk in family.talks.values():
        messages: list[dict[str, Any]] = []
        for asked, turn in zip(talk.asked, talk.turns, strict=True):
            messages.append(asked)
            ids = tokenizer.encode(family.write(turn), add_special_tokens=False)
            pairs.append((template.prompt_ids(messages, talk.tools), ids))
            messages.append(template.answer(ids))
    return pairs


def asked_ids(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: Any = None,
    **switches: bool,
) -> list[int]:
    """The prompt of a conversation as transformers itself makes it."""
    asked = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, **switches
    )
    return list(asked["input_ids"])


def prompts_of(
    tokenizer: PreTrainedTokenizerFast, family: ChatFamily, talk: Talk
) -> list[list[int]]:
    """What the target is asked before each turn of a talk, as transformers itself makes it."""
    messages: list[dict[str, Any]] = []
    prompts = []
    for asked, turn in zip(talk.asked, talk.turns, strict=True):
        messages.append(asked)
        prompts.append(asked_ids(tokenizer, messages, talk.tools))
        messages.append(family.message(turn))
    return prompts


def make_chat_target(name: str, folder: Path, steps: int = 200) -> Path:
    """The directory of a Llama that writes as that family does."""
    family = FAMILIES[name]
    tokenizer = chat_tokenizer(family)
    tokenizer.save_pretrained(folder)
    pairs = learnt_turns(tokenizer, family)
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.zeros(len(pairs), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for number, (prompt, answer) in enumerate(pairs):
        size = len(prompt) + len(answer)
        ids[number, :size] = torch.tensor([*prompt, *answer])
        labels[number, len(prompt) : size] = torch.tensor(answer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=POSITIONS, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(list(family.ends)), pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    threads = torch.get_num_threads()
    # the layers are small, and on a busy machine more would wait for each other
    torch.set_num_threads(1)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss  # what follows a text does not change it
        if loss < SURE:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    model.save_pretrained(folder)
    return folder


def generated(folder: Path, prompts: list[list[int]], most: int) -> list[list[int]]:
    """What transformers itself generates greedily behind each of the prompts, the end token included."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=most,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers
