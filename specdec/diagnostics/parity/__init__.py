"""Whether what was trained is what is decoded, and what an engine makes of its export."""
