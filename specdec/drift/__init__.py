"""Attention drift: what a drafter attends to, and how its recurrent state grows, draft step by draft step."""
