"""KD3A: the method (`kd3a`), its keys, what the target does with its teachers, and how much each source counts."""
