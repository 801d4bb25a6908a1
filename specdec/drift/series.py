"""The quantities that are followed from draft step to draft step, by name, with titles and units."""

from typing import NamedTuple

from specdec.drafter import DrafterConfig
from specdec.drift import masses


class Kind(NamedTuple):
    """What a number is."""

    title: str
    unit: str


ATTENTION = {
    "sink_mass": Kind("Attention on the sink", "share of weight"),
    "prompt_mass": Kind("Attention on the prompt", "share of weight"),
    "recent_mass": Kind("Attention on recent committed tokens", "share of weight"),
    "own_mass": Kind("Attention on own drafts", "share of weight"),
    "rest_mass": Kind("Attention on the rest of the answer", "share of weight"),
    "self_mass": Kind("Attention on the step's own row", "share of weight"),
    "entropy": Kind("Attention entropy", "nats"),
}
assert tuple(ATTENTION) == masses.NAMES

SERIES = ATTENTION | {
    "state_rms": Kind("RMS of the recurrent state", "RMS"),
    "out_rms": Kind("RMS of the state before the output norm", "RMS"),
    "cosine": Kind("Cosine of the states of steps k and k - 1", "cosine"),
    "feature_cosine": Kind("Cosine with the target's own feature", "cosine"),
    "kl": Kind("KL(target || drafter)", "nats"),
    "kl_between_steps": Kind("KL(step k || step k - 1) of the drafter's laws", "nats"),
    "covered_mass": Kind("The target's law inside the draft vocabulary", "share of probability"),
    "joint_acceptance": Kind("Joint acceptance", "share of chains"),
    "conditional_acceptance": Kind("Conditional acceptance", "share of chains"),
}

SOURCES = {
    "aux_rms": Kind("RMS of the target's states", "RMS"),
    "normed_aux_rms": Kind("RMS of the target's states after their norm", "RMS"),
    "fused_rms": Kind("RMS of the fused feature", "RMS"),
}


def rows(config: DrafterConfig) -> list[tuple[str, int | None]]:
    """What is measured at every depth: the series, and those of attention once more for each of several layers."""
    layers = range(config.num_layers) if config.num_layers > 1 else range(0)
    return [(name, None) for name in SERIES] + [(name, layer) for layer in layers for name in ATTENTION]


def source_rows(config: DrafterConfig) -> list[tuple[str, str]]:
    """What is measured of every source: the number's name, and what it is of."""
    boundaries = [f"boundary {b}" for b in config.aux_layers]
    return [(name, b) for name in ("aux_rms", "normed_aux_rms") for b in boundaries] + [("fused_rms", "fused")]
