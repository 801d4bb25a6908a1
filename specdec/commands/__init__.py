"""Commands that no package below has, and what reads a command line: its parser, and answers to misspelt options."""
