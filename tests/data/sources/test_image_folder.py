"""Image folders: which files count, how they are cut, and damaged images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.dataset import DatasetContract

from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Dataset, Splits
from distributed_training.data.sources import load_dataset
from distributed_training.data.sources.split import mix64
from distributed_training.runtime.errors import ConfigError, DataError

Image = pytest.importorskip("PIL.Image")


def save(
    path: Path, colour: tuple[int, int, int] = (255, 0, 0), size: tuple[int, int] = (20, 12), mode: str = "RGB"
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


def load(root: Path, fraction: float = 0.0, **args: object) -> Splits:
    args = {"size": 8, **args}
    return load_dataset(DataConfig(dataset="images", root=str(root), args=args, validation_fraction=fraction))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "dog" / "b.png", (0, 0, 255))
    save(tmp_path / "dog" / "a.bmp", (0, 255, 0))
    save(tmp_path / "cat" / "z.PNG", (255, 0, 0))
    save(tmp_path / "cat" / "y.jpeg", (255, 255, 255), size=(200, 300))
    return tmp_path


class TestImages(DatasetContract):
    @pytest.fixture
    def dataset(self, root: Path) -> Dataset:
        return load(root).train

    def test_sorted_classes_and_files(self, dataset: Dataset) -> None:
        images, labels = dataset.fetch(np.arange(4))
        assert images.shape == (4, 3, 8, 8)
        assert images.dtype == torch.uint8
        assert dataset.classes == ["cat", "dog"]
        assert labels.tolist() == [0, 0, 1, 1]
        assert images[:, :, 4, 4].tolist() == [[255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 255]]

    def test_split(self, root: Path) -> None:
        splits = load(root, fraction=0.5)
        assert (len(splits.train), len(splits.validation or [])) == (2, 2)

    def test_only_images_directly_in_class_folders_count(self, dataset: Dataset, root: Path) -> None:
        save(root / "dog" / "deeper" / "c.png")
        save(root / ".hidden" / "c.png")
        save(root / "loose.png")
        (root / "dog" / "._b.png").write_bytes(b"not an image")
        (root / "dog" / "notes.txt").write_text("notes")
        assert load(root).train.fingerprint() == dataset.fingerprint()

    def test_fingerprint_tells_changes(self, dataset: Dataset, root: Path) -> None:
        before = dataset.fingerprint()
        assert load(root, size=9).train.fingerprint() != before
        (root / "dog" / "b.png").rename(root / "dog" / "c.png")
        assert load(root).train.fingerprint() != before
        (root / "dog" / "c.png").rename(root / "dog" / "b.png")
        assert load(root).train.fingerprint() == before
        save(root / "dog" / "b.png", size=(64, 64))
        assert load(root).train.fingerprint() != before

    def test_fingerprint_does_not_depend_on_the_place(self, dataset: Dataset, root: Path, tmp_path: Path) -> None:
        import shutil

        shutil.copytree(root, tmp_path / "elsewhere" / "copy", ignore=shutil.ignore_patterns("elsewhere"))
        assert load(tmp_path / "elsewhere" / "copy").train.fingerprint() == dataset.fingerprint()


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "LA"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    save(tmp_path / "a" / "x.png", (255, 255, 255), mode=mode)
    images, _ = load(tmp_path).train.fetch(np.array([0]))
    assert images.unique().tolist() == [255]


@pytest.mark.parametrize("size", [(24, 8), (8, 24), (48, 16), (5, 3), (1, 9)])
def test_the_middle_is_cut_out(tmp_path: Path, size: tuple[int, int]) -> None:
    """Black at both ends of the longer side, white in the middle third: only the middle is seen."""
    pixels = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    along = 0 if size[1] > size[0] else 1
    third = max(size) // 3
    middle = slice(third, max(size) - third)
    pixels[(middle,) if along == 0 else (slice(None), middle)] = 255
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "x.png")
    images, _ = load(tmp_path).train.fetch(np.array([0]))
    assert images.shape == (1, 3, 8, 8)
    assert images[0, :, 3:5, 3:5].min() == 255


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_own_validation_folder(tmp_path: Path, name: str) -> None:
    save(tmp_path / "train" / "cat" / "a.png")
    save(tmp_path / "train" / "dog" / "a.png")
    save(tmp_path / name / "dog" / "b.png")
    splits = load(tmp_path, fraction=0.5)
    assert len(splits.train) == 2
    assert splits.validation is not None
    assert splits.validation.fetch(np.array([0]))[1].tolist() == [1]
    assert splits.validation.num_classes == 2


def test_train_folder_without_validation_is_split(tmp_path: Path) -> None:
    save(tmp_path / "train" / "cat" / "a.png")
    save(tmp_path / "train" / "dog" / "a.png")
    assert len(load(tmp_path, fraction=0.5).validation or []) == 1


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    save(tmp_path / "train" / "a.png")
    save(tmp_path / "bus" / "a.png")
    assert load(tmp_path).train.classes == ["bus", "train"]


@pytest.mark.parametrize("keep", [0, 0.01, 0.5, 0.9])
@pytest.mark.parametrize("name", ["y.jpeg", "z.PNG"])
def test_truncated_image_is_named(root: Path, name: str, keep: float) -> None:
    path = root / "cat" / name
    noise = mix64(np.arange(64 * 64 * 3, dtype=np.uint64)).astype(np.uint8).reshape(64, 64, 3)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(DataError, match=rf"cat/{name}: not a readable image"):
        load(root).train.fetch(np.arange(4))


def test_text_that_pretends_to_be_an_image(root: Path) -> None:
    (root / "cat" / "fake.webp").write_text("hello")
    with pytest.raises(DataError, match=r"cat/fake\.webp: not a readable image"):
        load(root).train.fetch(np.arange(5))


def test_image_removed_later(root: Path) -> None:
    dataset = load(root).train
    (root / "cat" / "z.PNG").unlink()
    with pytest.raises(DataError, match=r"cat/z\.PNG: not a readable image"):
        dataset.fetch(np.arange(4))
    with pytest.raises(DataError, match=r"cat/z\.PNG: cannot be read"):
        dataset.fingerprint()


class TestBadFolders:
    def test_no_classes(self, tmp_path: Path) -> None:
        save(tmp_path / "loose.png")
        with pytest.raises(DataError, match="no class folders"):
            load(tmp_path)

    def test_class_without_images(self, root: Path) -> None:
        (root / "emu").mkdir()
        with pytest.raises(DataError, match="emu: no images in this class folder"):
            load(root)

    def test_class_of_validation_only(self, tmp_path: Path) -> None:
        save(tmp_path / "train" / "cat" / "a.png")
        save(tmp_path / "val" / "dog" / "a.png")
        with pytest.raises(DataError, match="val/dog: class 'dog' does not occur"):
            load(tmp_path)

    @pytest.mark.parametrize("size", [0, -3])
    def test_impossible_size(self, root: Path, size: int) -> None:
        with pytest.raises(ConfigError, match=r"data\.args\.size"):
            load(root, size=size)
