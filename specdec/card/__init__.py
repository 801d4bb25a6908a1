"""The study card: what a sweep found, with intervals."""
