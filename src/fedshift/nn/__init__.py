"""Networks: architectures by name, access to their inner layers, weights in and out."""

from __future__ import annotations

from fedshift.nn.archs import ARCHS, Arch, build_network, find_arch
from fedshift.nn.network import Backbone, Network
from fedshift.nn.taps import Taps, norm_layers
from fedshift.nn.weights import LoadReport, convert_checkpoint, imagenet_weights, load_weights

__all__ = [
    "ARCHS",
    "Arch",
    "Backbone",
    "LoadReport",
    "Network",
    "Taps",
    "build_network",
    "convert_checkpoint",
    "find_arch",
    "imagenet_weights",
    "load_weights",
    "norm_layers",
]
