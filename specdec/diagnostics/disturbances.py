"""What conditions disturb decoding with: another way to write a conversation, noise on the drafter's input, texts.

All texts and templates are written for this package; none is from a data set, a model's card or a template.

Legend: B sequences, T nodes, H hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn

from specdec.decoding.noise import coins
from specdec.drafter import Drafter, Step
from specdec.nn.view import View


class OtherTokenizer:
    """The target's tokenizer, but for how it writes a conversation.

    Args:
        bos: False leaves out the start token wherever a text begins with it.
        template: another chat template, in Jinja, behind the start token if the target's own writes one; the empty
            string for the messages' contents alone, with a blank line between them.
    """

    def __init__(self, inner: Any, bos: bool = True, template: str | None = None) -> None:
        self.inner, self.bos, self.template, self.chat_template = inner, bos, template, inner.chat_template

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ids = list(self.inner.encode(text, add_special_tokens=add_special_tokens))
        return ids[1:] if not self.bos and ids and ids[0] == self.inner.bos_token_id else ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""
        return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: list[dict[str, str]], **how: Any) -> str:
        """A conversation as text."""
        rendered = str(self.inner.apply_chat_template(messages, **how))
        if self.template is None:
            return rendered
        bos = self.inner.bos_token
        begin = str(bos) if bos and rendered.startswith(bos) else ""
        if not self.template:
            return begin + "\n\n".join(message["content"] for message in messages)
        return begin + str(self.inner.apply_chat_template(messages, **how, chat_template=self.template))


HIDDEN, EMBEDDING = 11, 12  # streams of noise of their own beside decoding's


def gaussian(seed: int, ids_BT: Tensor, place_BT: Tensor, stream: int, width: int) -> Tensor:
    """Standard normal numbers, float64 (B, T, width), that depend on seed, token and place alone.

    Neither the batch matters nor which pass comes to a place; texts that have the same token at a place share it.
    """
    seeds_N = (ids_BT + (seed << 32)).flatten()
    uniform_N1H = coins(seeds_N, place_BT.flatten()[:, None], stream, width).double() + 2**-25
    return torch.special.ndtri(uniform_N1H).view(*ids_BT.shape, width)


def blurred(x_BTH: Tensor, alpha: float, z_BTH: Tensor) -> Tensor:
    """``x + alpha rms(x) z`` with each token's own RMS, in the dtype of x (https://arxiv.org/abs/2605.09992)."""
    rms_BT1 = x_BTH.double().square().mean(-1, keepdim=True).sqrt()
    return x_BTH + (alpha * rms_BT1 * z_BTH).to(x_BTH.dtype)


class NoisyDrafter(Drafter):
    """A drafter with all parts and weights of another, whose input is noisy. Inference only.

    Args:
        stream: HIDDEN, for noise on every feature that enters a step: the fused states of committed tokens and, in
            drafting, the recurrent state, before the norm and where the residual path starts; or EMBEDDING, for noise
            on every token embedding, before its norm.
    """

    def __init__(self, drafter: Drafter, alpha: float, seed: int, stream: int) -> None:
        nn.Module.__init__(self)
        for name, part in drafter.named_children():
            self.add_module(name, part)
        self.config, self.alpha, self.seed, self.stream = drafter.config, alpha, seed, stream

    def step(self, ids_BT: Tensor, h_BTH: Tensor, view: View) -> Step:
        z_BTH = gaussian(self.seed, ids_BT, view.positions_BT, self.stream, self.config.hidden_size)
        if self.stream == HIDDEN:
            return super().step(ids_BT, blurred(h_BTH, self.alpha, z_BTH), view)
        hook = self.embed_tokens.register_forward_hook(lambda _, __, e_BTH: blurred(e_BTH, self.alpha, z_BTH))
        try:
            return super().step(ids_BT, h_BTH, view)
        finally:
            hook.remove()


# ruff: noqa: E501, RUF001
_HOUSE_RULES = (
    "Greet nobody by name unless the name stands in the message itself.",
    "Opening hours are from nine in the morning to half past five, and never on public holidays.",
    "Parcels heavier than thirty kilograms are carried by two people, and the second one signs as well.",
    "When a form is incomplete, say which field is missing before you say anything else.",
    "Amounts are written with a point before the cents and a blank before the currency.",
    "A complaint is answered on the same day; if that cannot be done, the caller is told when it will be.",
    "Do not promise a delivery date that the carrier has not confirmed in writing.",
    "If two rules contradict each other, the one that stands first applies.",
    "Telephone numbers are read out in pairs, slowly, and repeated once.",
    "Returned goods are counted in the presence of the driver and noted in the blue book.",
    "In letters, the date stands on the right, the reference on the left, and there is no postscript.",
    "Questions about taxes, contracts and illness are passed on and not answered here.",
    "A customer who has waited longer than ten minutes is offered a chair and a glass of water.",
    "Words that a child would not know are explained the first time they are used.",
    "Drawings are sent as they are, without any remark on their scale.",
    "New colleagues read all of this on their first day, and sign the last page.",
)

SYSTEM_PROMPTS = {
    "short": "Be helpful, and keep it short.",
    "stranger": (
        "You are Odile, who keeps the lighthouse on a rock that no ship has passed for eleven years. You speak of the "
        "weather first. You count in dozens, you distrust clocks, and whatever you are asked reminds you of a storm."
    ),
    "long": "These are the house rules of a small shipping office. Keep to all of them in everything that you write.\n"
    + "\n".join(f"{number}. {rule}" for number, rule in enumerate(_HOUSE_RULES, start=1)),
    "german": (
        "Du hilfst in einer Werkstatt, in der Fahrräder und Nähmaschinen repariert werden. Antworte freundlich und "
        "knapp, nenne zuerst das Werkzeug und dann den Handgriff, und frage nach, wenn eine Angabe fehlt."
    ),
    "chinese": "你在一家修理自行车和缝纫机的小店里帮忙。请回答得友好而简短，先说要用的工具，再说步骤；缺少信息时，请先提问。",
}  # fmt: skip

LANGUAGES = {
    "de": "Eine Kollegin hat die folgende Aufgabe gestellt. Lies sie in Ruhe durch und antworte auf Deutsch.",
    "es": "Una compañera ha planteado la siguiente tarea. Léela con calma y responde en español.",
    "fr": "Une collègue a posé la question suivante. Lis-la tranquillement et réponds en français.",
    "ru": "Следующее задание дала коллега. Прочитай его спокойно и ответь по-русски.",
    "zh": "下面的任务是一位同事提出的。请仔细阅读，并用中文回答。",
    "ja": "次の課題は同僚が出したものです。落ち着いて読み、日本語で答えてください。",
    "ar": "طرحت إحدى الزميلات المهمة التالية. اقرأها بهدوء وأجب باللغة العربية.",
    "hi": "यह काम एक सहकर्मी ने दिया है। इसे ध्यान से पढ़ो और हिंदी में उत्तर दो।",
}

_SYSTEM_INTO_FIRST = (
    "{% if messages[0].role == 'system' %}{% set lead = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set lead = '' %}{% set rest = messages %}{% endif %}"
)

FAMILIES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "gemma": (
        _SYSTEM_INTO_FIRST
        + "{% for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
        + "{{ lead if loop.first else '' }}{{ m.content }}<end_of_turn>\n{% endfor %}"
        + "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "alpaca": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n"
        "{% elif m.role == 'assistant' %}### Response:\n{{ m.content }}\n\n"
        "{% else %}### Instruction:\n{{ m.content }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
}
"""Jinja, as tokenizers of Hugging Face read it."""
