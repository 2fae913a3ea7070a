"""Speeds and sizes, as ratios to what the same run measures beside them: `make bench`."""
