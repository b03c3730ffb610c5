"""AlexNet. Alex Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.

Layer names are torchvision's, so that its published weights load. The two hidden dense layers belong to the
backbone; the last dense layer is the head.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedshift.nn.network import Backbone


class AlexNet(Backbone):
    """Images `(B, 3, H, W)` of at least 63 x 63 pixels to features `(B, 4096)`."""

    classifier_key = "classifier.6"
    stages = ("features.0", "features.3", "features.6", "features.8", "features.10")
    taps = ("features.6", "features.8", "features.10")
    out_features = 4096

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        # ReLUs are not in place: they would overwrite what a tap on the convolution before has seen.
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, 4, 2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return features
