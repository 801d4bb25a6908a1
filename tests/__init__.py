import os

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # before transformers is imported, as the command does
