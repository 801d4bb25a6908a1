"""Sweeps: a study's arms, run once each."""
