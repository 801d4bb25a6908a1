"""What vLLM 0.32.0 does with a drafter's directory, in plain torch, after its documented semantics.

Written apart from the drafter and without a line of it: of this package nothing but this folder is imported here, and
the checkpoint is read by its own tensors' names. So it can say that a checkpoint is not the drafter that it was made
of, whatever the two share elsewhere.
"""

from specdec.parity.reference.chain import draft
from specdec.parity.reference.checkpoint import Served, load
from specdec.parity.reference.eagle import fuse
from specdec.parity.reference.misread import Misread

__all__ = ["Misread", "Served", "draft", "fuse", "load"]
