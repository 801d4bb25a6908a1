"""The acceptance waterfall: where acceptance is lost, bar by bar."""
