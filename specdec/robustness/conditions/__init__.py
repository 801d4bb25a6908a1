"""The conditions that acceptance is measured under, one class in one file each."""

from specdec.robustness.conditions.bare import Bare
from specdec.robustness.conditions.condition import Condition
from specdec.robustness.conditions.context import Context
from specdec.robustness.conditions.language import Language
from specdec.robustness.conditions.no_bos import NoBos
from specdec.robustness.conditions.no_system import NoSystem
from specdec.robustness.conditions.no_template import NoTemplate
from specdec.robustness.conditions.noise_embedding import NoiseEmbedding
from specdec.robustness.conditions.noise_hidden import NoiseHidden
from specdec.robustness.conditions.other_template import OtherTemplate
from specdec.robustness.conditions.system_prompt import SystemPrompt
from specdec.robustness.conditions.temperature import Temperature
from specdec.robustness.conditions.thinking import Thinking

ALL: tuple[type[Condition], ...] = (
    NoBos, NoTemplate, Bare, OtherTemplate, NoSystem, SystemPrompt, Language, Thinking, Context, Temperature,
    NoiseHidden, NoiseEmbedding,
)  # fmt: skip
"""In the order of tables and figures."""

KINDS = {condition.kind: condition for condition in ALL}
"""By their names on the command line."""

__all__ = ["ALL", "KINDS", "Condition"]
