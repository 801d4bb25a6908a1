"""Serving engines: vLLM started and measured, answers and features taken from it."""
