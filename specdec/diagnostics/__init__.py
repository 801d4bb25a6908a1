"""Why a drafter is accepted or not: before training, after it, and in an engine."""
