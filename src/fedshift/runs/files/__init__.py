"""Trained models and checkpoints: files that must open in later versions. Each has its checksum inside."""
