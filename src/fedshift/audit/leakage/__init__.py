"""Leakage, measured: attacks on what really leaves a site, scored with the samples that the site has.

`messages.py` runs the method's own federation and listens. `inversion.py`, `features.py` and `membership.py` are the
attacks, one module per family; `scores.py` says what counts as a find. `study.py` puts them to a method at several
sizes of the site. `fig5.py` is the older study that compares messages as KD3A's Fig. 5 does.
"""
