"""Write src/distributed_training/data/assets/digits.npz from scikit-learn's copy of the digits. Run once, by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

ASSET = Path(__file__).parents[1] / "src" / "distributed_training" / "data" / "assets" / "digits.npz"


def main() -> None:
    """Check the values once more, then store them as small integers."""
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    if images.shape != (1797, 8, 8) or images.max() > 16 or not np.array_equal(images, digits.images):
        raise SystemExit("scikit-learn's digits are not the expected 1797 images of whole numbers 0..16")
    ASSET.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(ASSET, images=images, labels=labels)


if __name__ == "__main__":
    main()
