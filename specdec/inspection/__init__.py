"""Looking at training data before it is trained on."""
