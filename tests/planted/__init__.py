"""Faults that the proofs must find; tests/planted/proofs.py lists them all."""
