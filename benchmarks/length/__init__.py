"""How memory and time grow with the length of rows and prompts."""
