"""The models of hivemind's issue 566 and their sizes, with random weights: nothing is downloaded.

Each has a small twin with the same kinds of layers for tests. Inputs are as small as the models take them, so that
forward and backward hide as little as possible of what accumulation costs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
)

__all__ = ["MODELS", "Model"]

_CLASSES = 1000
_SIDE = 32
_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """An architecture at its published size, and small."""

    label: str
    build: Callable[[], nn.Module]
    build_small: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]
    """Inputs and labels of so many samples; the model called with them has the mean loss in `.loss`."""
    samples: int
    """In a micro-batch: batch norms want two."""


def _resnet(depths: list[int], widths: list[int]) -> nn.Module:
    config = ResNetConfig(depths=depths, hidden_sizes=widths, embedding_size=widths[0] // 4, num_labels=_CLASSES)
    return ResNetForImageClassification(config)


def _convnext(depths: list[int], widths: list[int]) -> nn.Module:
    return ConvNextForImageClassification(ConvNextConfig(depths=depths, hidden_sizes=widths, num_labels=_CLASSES))


def _gpt2(**sizes: int) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes))


def _images(samples: int) -> dict[str, torch.Tensor]:
    # pixel_values[B, 3, 32, 32], labels[B]
    return {
        "pixel_values": torch.randn(samples, 3, _SIDE, _SIDE),
        "labels": torch.randint(0, _CLASSES, (samples,)),
    }


def _tokens(vocabulary: int, samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (samples, _TOKENS))  # [B, T]
    return {"input_ids": ids, "labels": ids}


def _resnet_model(label: str, depths: list[int]) -> Model:
    return Model(
        label=label,
        build=partial(_resnet, depths, [256, 512, 1024, 2048]),
        build_small=partial(_resnet, [1, 1, 2, 1], [16, 32, 64, 128]),
        batch=_images,
        samples=2,
    )


def _convnext_model(label: str, depths: list[int], widths: list[int]) -> Model:
    return Model(
        label=label,
        build=partial(_convnext, depths, widths),
        build_small=partial(_convnext, [1, 1, 2, 1], [8, 16, 32, 64]),
        batch=_images,
        samples=2,
    )


MODELS: Mapping[str, Model] = {
    "resnet50": _resnet_model("ResNet-50", [3, 4, 6, 3]),
    "convnext_t": _convnext_model("ConvNeXt-T", [3, 3, 9, 3], [96, 192, 384, 768]),
    "resnet152": _resnet_model("ResNet-152", [3, 8, 36, 3]),
    "convnext_b": _convnext_model("ConvNeXt-B", [3, 3, 27, 3], [128, 256, 512, 1024]),
    "gpt2": Model(
        label="GPT-2 small",
        build=_gpt2,
        build_small=partial(
            _gpt2, n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=256, bos_token_id=0, eos_token_id=0
        ),
        batch=partial(_tokens, 256),
        samples=1,
    ),
    "convnext_l": _convnext_model("ConvNeXt-L", [3, 3, 27, 3], [192, 384, 768, 1536]),
}
"""Smallest first."""
