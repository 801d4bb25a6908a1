"""Chat templates in the manner of four families, written here; none begins with a start token.

Their markers are special tokens of other models: a target that does not know them reads them as text, which is what
happens when a server is given another model's template.
"""

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
