"""Checkpoints for serving engines: written, verified, and read back from whoever publishes them."""

from specdec.export.adopt import adopt
from specdec.export.checkpoint import read_checkpoint
from specdec.export.formats import FORMATS
from specdec.export.switches import NotServable, Subject
from specdec.export.write import Exported, export_drafter, subject_of

__all__ = ["FORMATS", "Exported", "NotServable", "Subject", "adopt", "export_drafter", "read_checkpoint", "subject_of"]
