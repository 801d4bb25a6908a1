"""Robustness: how much of its acceptance a drafter keeps under other templates, prompts, contexts and noise."""
