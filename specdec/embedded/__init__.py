"""A target with no download: a small Llama trained on the Python standard library's sources."""

from specdec.embedded.build import EmbeddedConfig, embedded_target
from specdec.embedded.corpus import held_out_prompts

__all__ = ["EmbeddedConfig", "embedded_target", "held_out_prompts"]
