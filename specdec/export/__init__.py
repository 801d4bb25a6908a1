"""Checkpoints for serving engines: written, verified, and read back from whoever publishes them."""

from specdec.export.checkpoint import read_checkpoint
from specdec.export.known_formats import FORMATS
from specdec.export.read import import_checkpoint, import_drafter
from specdec.export.subject import Subject
from specdec.export.write import Exported, export_drafter, subject_of
from specdec.target import NotServable

__all__ = [
    "FORMATS",
    "Exported",
    "NotServable",
    "Subject",
    "export_drafter",
    "import_checkpoint",
    "import_drafter",
    "read_checkpoint",
    "subject_of",
]
