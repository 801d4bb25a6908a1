"""Where a target comes from: a Hub id, a local directory, or the embedded default."""

from dataclasses import dataclass

from specdec.target import Target

EMBEDDED = "embedded"


@dataclass(frozen=True)
class TargetSource:
    """A target by name.

    Args:
        source: a Hub id, a directory, or ``embedded``: the small model that specdec trains on the standard library.
        revision: a branch, tag or commit on the Hub.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        trust_remote_code: run code that the model's repository brings; off unless you have read it.
    """

    source: str = EMBEDDED
    revision: str | None = None
    dtype: str = "float32"
    trust_remote_code: bool = False

    def load(self, device: str = "cpu") -> Target:
        """The target; the embedded one is built first if this machine does not have it yet."""
        source = self.source
        if source == EMBEDDED:
            from specdec.embedded.build import embedded_target

            source = str(embedded_target())
        target = Target.load(
            source,
            revision=self.revision,
            dtype=self.dtype,
            device=device,
            trust_remote_code=self.trust_remote_code,
        )
        target.source = self.source  # the name, not where this machine caches it
        return target
