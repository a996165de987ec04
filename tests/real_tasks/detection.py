"""A detector as torchvision's are called: lists of images and of target dicts in, losses out."""

import torch
from torch import nn

BATCH_SIZE = 8
CLIP_GRAD_NORM = 1.0


class Detector(nn.Module):
    """One box and one class for each cell of 4 x 4 pixels."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 24, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.classes = nn.Conv2d(24, 3, 1)
        self.boxes = nn.Conv2d(24, 4, 1)

    def forward(self, images, targets=None):
        if self.training and targets is None:
            raise ValueError("targets are needed to train")
        height = max(image.shape[1] for image in images)
        width = max(image.shape[2] for image in images)
        padded = images[0].new_zeros(len(images), 3, height, width)
        for place, image in zip(padded, images, strict=True):
            place[:, : image.shape[1], : image.shape[2]].copy_(image)
        features = self.backbone(padded)
        scores, boxes = self.classes(features), self.boxes(features)
        if not self.training:
            return [{"scores": s, "boxes": b} for s, b in zip(scores, boxes, strict=True)]
        return self.losses(scores, boxes, targets)

    def losses(self, scores, boxes, targets):
        wanted = torch.zeros_like(scores[:, 0], dtype=torch.long)
        missed = []
        for index, target in enumerate(targets):
            x, y = (target["boxes"][:, :2] / 4).long().unbind(1)
            wanted[index, y, x] = target["labels"]
            missed.append(boxes[index, :, y, x].T.float() - target["boxes"] / 16)
        return {
            "loss_classifier": nn.functional.cross_entropy(scores.float(), wanted),
            "loss_boxes": torch.cat(missed).abs().mean(),
        }


def build_model():
    return Detector()


def example():
    height, width = torch.randint(12, 17, (2,)).tolist()
    image = 0.3 * torch.randn(3, height, width)
    labels = torch.randint(1, 3, (2,))
    corners = torch.randint(8, (2, 2))
    for label, (x, y) in zip(labels, corners, strict=True):
        image[label, y : y + 4, x : x + 4] += 2
    return image, {"boxes": torch.cat([corners, corners + 4], 1).float(), "labels": labels}


def build_data(batch_size):
    for _ in range(400):
        images, targets = zip(*(example() for _ in range(batch_size)), strict=True)
        yield list(images), list(targets)


def training_step(model, batch):
    images, targets = batch
    return sum(model(images, targets).values())


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
