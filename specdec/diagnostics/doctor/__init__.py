"""``specdec doctor``: a set-up's faults, found before it is trained."""
