"""Where a target comes from: a Hub id, a local directory, or the embedded default."""

from dataclasses import dataclass
from typing import Any

from specdec.target import Target
from specdec.target.loading import load_tokenizer

EMBEDDED = "embedded"


@dataclass(frozen=True)
class TargetSource:
    """A target by name.

    Args:
        source: a Hub id, a directory, or ``embedded``: the small model that specdec trains on the standard library.
        revision: a branch, tag or commit on the Hub.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        trust_remote_code: run code that the model's repository brings; off unless you have read it.
        device_map: ``auto`` spreads the layers over the GPUs that this process sees, by transformers and accelerate.
    """

    source: str = EMBEDDED
    revision: str | None = None
    dtype: str = "float32"
    trust_remote_code: bool = False
    device_map: str | None = None

    def load_tokenizer(self) -> Any:
        """The target's tokenizer alone.

        Raises:
            ValueError: there is none, or it cannot be read.
        """
        return load_tokenizer(self.directory(), self.revision, self.trust_remote_code)

    def directory(self) -> str:
        """A directory or Hub id; the embedded one is built first if this machine does not have it yet."""
        if self.source != EMBEDDED:
            return self.source
        from specdec.embedded.build import embedded_target

        return str(embedded_target())

    def load(self, device: str = "cpu") -> Target:
        """The target."""
        target = Target.load(
            self.directory(),
            revision=self.revision,
            dtype=self.dtype,
            device=device,
            trust_remote_code=self.trust_remote_code,
            device_map=self.device_map,
        )
        target.source = self.source  # the name, not where this machine caches it
        return target
