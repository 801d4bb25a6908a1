"""With noise on the drafter's embedding input."""

import pytest

from specdec.robustness.conditions.noise_embedding import NoiseEmbedding
from specdec.robustness.noise import NoisyEmbedding
from tests.robustness.made import Pair


def test_the_embedding_is_what_it_blurs(chat: Pair) -> None:
    noisy = NoiseEmbedding(0.5).drafter(chat.drafter, 7)
    assert isinstance(noisy, NoisyEmbedding) and (noisy.alpha, noisy.seed) == (0.5, 7)
    assert NoiseEmbedding(0.5).name == "noise_embedding:alpha=0.5"
    assert NoiseEmbedding.usual()[0].title == "embedding + 0.1 RMS"
    with pytest.raises(ValueError, match="noise_embedding: alpha"):
        NoiseEmbedding(-1)
