"""Broken variants of a chat template, which whoever checks templates must find."""

import re

TAG = r"\{%-?\s*generation\s*-?%\}"
END_TAG = r"\{%-?\s*endgeneration\s*-?%\}"
OUTPUT = r"\{\{(?:[^{}]|\{[^{}]*\})*\}\}"
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|END_OF_TURN_TOKEN|>", "<|end|>",
    "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|eot|>", "</s>",  # noqa: RUF001  DeepSeek's own bars
)  # fmt: skip
THOUGHT = ("reasoning_content", "thinking", "reasoning")


def planted_faults(template: str) -> dict[str, str]:
    """Broken variants of a template by what is wrong with them; a fault that it has no place for is left out.

    - ``user dropped``, ``tool dropped``, ``system dropped``: messages of a role are not written
    - ``thought dropped``, ``call dropped``, ``arguments lost``, ``answer cut``: a part of what is said is lost
    - ``prompt differs``: the generation prompt is not the header of the assistant's turns
    - ``end missing``: no end-of-turn token is written
    - ``tag moved forward``, ``tag moved back``: ``{% generation %}`` begins behind the first words, or with the header
    - ``end tag moved``: ``{% endgeneration %}`` stands before the end-of-turn token
    """
    variants = {
        "user dropped": _without_role("user") + template,
        "tool dropped": _without_role("tool") + template,
        "system dropped": _without_role("system") + template,
        "thought dropped": _each_message(
            ", ".join(f"{key}=''" for key in THOUGHT), "x.role == 'assistant'"
        )
        + template,
        "call dropped": _each_message("tool_calls=[]", "x.tool_calls") + template,
        "arguments lost": _WITHOUT_ARGUMENTS + template,
        "answer cut": _each_message("content=x.content[2:]", "x.role == 'assistant' and x.content")
        + template,
        "prompt differs": template + "{% if add_generation_prompt %}{{ '\\n' }}{% endif %}",
        "end missing": _without_end(template),
        "tag moved back": re.sub(rf"({OUTPUT})(\s*)({TAG})", r"\3\2\1", template),
        "tag moved forward": re.sub(rf"({TAG})(\s*)({OUTPUT})", r"\3\2\1", template),
        "end tag moved": re.sub(rf"({OUTPUT})(\s*)({END_TAG})", r"\3\2\1", template),
    }
    return {name: text for name, text in variants.items() if text != template}


def _without_role(role: str) -> str:
    return f"{{%- set messages = messages | rejectattr('role', 'equalto', '{role}') | list -%}}"


def _each_message(changes: str, condition: str) -> str:
    """Begin a template with other messages."""
    return (
        "{%- set changed = namespace(messages=[]) -%}{%- for x in messages -%}"
        f"{{%- set changed.messages = changed.messages + [dict(x, {changes}) if {condition} else x] -%}}"
        "{%- endfor -%}{%- set messages = changed.messages -%}"
    )


_WITHOUT_ARGUMENTS = (
    "{%- set changed = namespace(messages=[], calls=[]) -%}{%- for x in messages -%}{%- set changed.calls = [] -%}"
    "{%- for c in x.tool_calls or [] -%}"
    "{%- set changed.calls = changed.calls + [dict(c, function=dict(c.function, arguments={}))] -%}{%- endfor -%}"
    "{%- set changed.messages = changed.messages + [dict(x, tool_calls=changed.calls) if x.tool_calls else x] -%}"
    "{%- endfor -%}{%- set messages = changed.messages -%}"
)


def _without_end(template: str) -> str:
    """A template without the token that ends its turns."""
    end = next((token for token in ENDS if token in template), None)
    return template.replace(end, "") if end else template
