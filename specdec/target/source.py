"""Where a target comes from: a directory, a GGUF file, a Hub id or the package itself, and how it is loaded."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.embedded import embedded_target
from specdec.target.adapter import merge_adapter
from specdec.target.files import failing_in_one_line, gguf_file, is_local
from specdec.target.loading import load_config, load_model, load_parts, load_tokenizer
from specdec.target.proof import check_weights_finite

if TYPE_CHECKING:
    from specdec.target.target import Target

log = logging.getLogger(__name__)

EMBEDDED = "embedded"
AUTO = "auto"  # of devices: a GPU where there is one


class NotServable(ValueError):  # noqa: N818  a verdict
    """An engine cannot run the target or express the drafter: the message names what it lacks and its version."""


@dataclass(frozen=True)
class TargetSource:
    """A target by name.

    Args:
        source: a Hub id, a directory, a GGUF file (dequantized by transformers), or ``embedded``: the small model that
            comes with specdec.
        revision: a branch, tag or commit on the Hub.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        trust_remote_code: run code that the model's repository brings; off unless you have read it.
        device_map: ``auto`` spreads the layers over the GPUs that this process sees, by transformers and accelerate.
        adapter: a LoRA adapter of it as PEFT saves one, a directory or a Hub id; merged into the weights.
        parts: read embedding, final norm and head alone: enough to train from stored features, to export and to import,
            whatever memory the layers take; nothing is decoded then, nor proved.
    """

    source: str = EMBEDDED
    revision: str | None = None
    dtype: str = "float32"
    trust_remote_code: bool = False
    device_map: str | None = None
    adapter: str | None = None
    parts: bool = False

    def __post_init__(self) -> None:
        for name in ("adapter", "device_map"):
            if self.parts and getattr(self, name) is not None:
                raise ValueError(f"target.{name} is of the whole target: set target.parts=false")

    @classmethod
    def of(cls, target: "TargetSource | Target | str | Path") -> "TargetSource":
        """A source as it is, where a loaded target came from, or a directory or Hub id by its name."""
        if isinstance(target, TargetSource):
            return target
        if isinstance(target, str | Path):
            return cls(str(target))
        if target.origin is not None:
            return target.origin
        dtype = str(target.dtype).removeprefix("torch.")
        return cls(
            target.source, target.revision, dtype, adapter=target.adapter, parts=not target.whole
        )

    def load_tokenizer(self) -> Any:
        """The target's tokenizer alone; ``ValueError`` if there is none or it cannot be read."""
        return load_tokenizer(self.directory(), self.revision, self.trust_remote_code)

    def directory(self) -> str:
        """A directory, GGUF file or Hub id."""
        if self.source != EMBEDDED:
            return self.source
        return str(embedded_target())

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, whose quantized weights no serving engine runs as transformers does."""
        return self.source != EMBEDDED and gguf_file(self.source) is not None

    def servable(self) -> str:
        """Where an engine finds it; ``NotServable`` if it is a GGUF file, or has an adapter merged into it."""
        if self.adapter is not None:
            raise NotServable(
                f"{self.source} with {self.adapter}: an engine keeps an adapter apart, and rounds otherwise: save the "
                "merged model (docs/targets.md says how), and give that as the target"
            )
        if self.is_gguf:
            raise NotServable(
                f"{self.source}: engines run a GGUF file's quantized weights, not those that the drafter is for: save "
                "them as a directory (docs/targets.md says how), and give that as the target"
            )
        return self.directory()

    def local_config(self) -> Any | None:
        """The text model's configuration where that takes no network, else None.

        Raises:
            ValueError: it is neither a directory or GGUF file that is there nor a Hub id.
        """
        if self.source != EMBEDDED and not is_local(self.source):
            return None
        return load_config(self.directory(), self.revision, self.trust_remote_code)

    def load(self, device: str = "cpu") -> "Target":
        """Load model and tokenizer from disk, without any network, or from the Hugging Face Hub.

        Args:
            device: as torch names it, or ``auto``: a GPU where there is one, else the CPU.

        Raises:
            ValueError: whatever is wrong with source, weights, dtype or device, in one line.
        """
        from specdec.target.target import Target  # which is loaded by its own name, too

        if device == AUTO:
            import torch  # which reading a target's name does without

            device = "cuda" if torch.cuda.is_available() else "cpu"
        place = self.directory()
        trusted = self.trust_remote_code
        log.info(
            "loading %s %s in %s",
            "parts of" if self.parts else "the target",
            self.source,
            self.dtype,
        )
        if self.parts:
            model, tokenizer = load_parts(place, self.revision, self.dtype, device, trusted)
        else:
            model, tokenizer = load_model(
                place, self.revision, self.dtype, device, trusted, self.device_map
            )
        if self.adapter is not None:
            model = merge_adapter(model, self.adapter)
        with failing_in_one_line(place):
            target = Target(
                model, tokenizer, self.source, self.revision, self.adapter, not self.parts
            )
        check_weights_finite(target)
        target.origin = self
        return target
