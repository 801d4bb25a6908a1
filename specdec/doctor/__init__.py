"""The doctor: is a set-up of target, data and drafter sound."""
