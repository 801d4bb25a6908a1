"""Throughput and latency of a served model, as its users see them."""
