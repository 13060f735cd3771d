"""Models that come with Shoal, each beside a job that trains it."""

__all__ = [
    "encoder_decoder",
    "gpt",
    "moe",
    "resnet_digits",
    "unet",
]
