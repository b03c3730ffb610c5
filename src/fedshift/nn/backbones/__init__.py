"""Backbones: one module per family, with the layer names of published weights."""
