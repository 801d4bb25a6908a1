"""A serving engine as a child process, and what a drafter is worth in it."""
