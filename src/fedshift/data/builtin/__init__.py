"""Data sets that need no download: drawn from what the dependencies ship, the same bytes every time."""
