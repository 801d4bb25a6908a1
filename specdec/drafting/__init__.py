"""How the drafts of a pass are made, training half and decoding half side by side."""
