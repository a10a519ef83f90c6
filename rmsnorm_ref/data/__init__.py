"""Real inputs: what a trained transformer's norm layers are given, outlier channels included.

Random rows have channels of one size. Trained models do not: a few channels are tens of times
larger than the rest, and they dominate the mean square. `rmsnorm_ref/data/README.md` says
where the numbers come from.
"""

from importlib import resources

import numpy as np
import torch

__all__ = ["hidden_states"]


def hidden_states() -> dict[str, torch.Tensor]:
    """Load the hidden states that enter two norm layers of MiniLM, and those norms' gains.

    Returns:
        `layer_0_x` and `layer_5_x`, float16 [tokens, 384]: the residual stream before the norm
        that closes the first and the last block, one row per token. `layer_0_weight` and
        `layer_5_weight`, float32 [384]: the trained gain of the same norm. All on the CPU, and
        the caller's own to change.

    Example:
        >>> states = hidden_states()
        >>> channel_rms = states["layer_0_x"].double().square().mean(0).sqrt()
        >>> bool(channel_rms.max() > 10 * channel_rms.median())
        True
    """
    file = resources.files(__name__).joinpath("minilm_hidden_states.npz")
    with file.open("rb") as stream, np.load(stream) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
