"""Features from a real vLLM."""
