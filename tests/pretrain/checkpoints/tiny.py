"""The card and settings of tiny checkpoints."""

from pretrain.checkpoints.card import ModelCard
from pretrain.models.spec import AnySpec


def card_of(spec: AnySpec, *, image_size: int = 16, num_classes: int = 3) -> ModelCard:
    return ModelCard(
        model=spec,
        image_size=image_size,
        classes=tuple(f"n{number}" for number in range(num_classes)),
        channel_mean=(0.4, 0.5, 0.6),
        channel_std=(0.1, 0.2, 0.3),
        dataset="shapes",
        content_hash="0" * 64,
        step=20,
        run_key="key",
    )
