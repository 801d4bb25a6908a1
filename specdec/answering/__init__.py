"""The target answers conversations: which answers are due, how it is asked, and the target in this process."""
