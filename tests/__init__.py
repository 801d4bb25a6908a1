import os

# before transformers is imported, as the command does
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
