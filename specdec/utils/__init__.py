"""Files, locks, processes, provenance and configs: what every part of specdec uses."""
