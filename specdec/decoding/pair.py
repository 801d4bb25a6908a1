"""Whether a drafter and a target were made for each other."""

import logging

from specdec.drafter import Drafter
from specdec.target import Target

log = logging.getLogger(__name__)


def made_for(target: Target, drafter: Drafter) -> bool:
    """Whether the drafter was trained for this very target; warns if it was for another of the same shape."""
    trained_for = drafter.config.target
    made = trained_for.get("fingerprint") == target.identity["fingerprint"]
    if not made:
        log.warning("this drafter was trained for another target (%s) of the same shape", trained_for.get("source"))
    return made
