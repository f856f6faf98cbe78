"""What is done to batches on the device is what would have been done to samples before they travelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.launching import free_port, need
from tests.split.conftest import Start, assert_same, train_here, weights_of
from tests.training.examples import assert_same_weights, config
from torch import Tensor, nn

from distributed_training.data import DecodeImages, Loader, Plan, PreprocessedDataset, as_dataset
from distributed_training.data.base import Share
from distributed_training.data.device_transform import BatchRandom, DeviceTransform
from distributed_training.runtime.errors import DataError
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.training import Trainer
from distributed_training.verify.audit import audit

CPU = torch.device("cpu")
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (44, 3, 8, 8), dtype=np.uint8))
LABELS = torch.arange(44) % 3


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def normalise(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.4) / 0.3


def trained(data: Any, held_out: Any, **options: Any) -> tuple[nn.Module, dict[str, float]]:
    net = network()
    settings = config(training__batch_size=8, training__epochs=3, training__warmup_epochs=0)
    trainer = Trainer(net, config=settings, run_dir=False, **options)
    metrics = trainer.train(data, held_out).metrics
    trainer.close()
    return net, metrics


def test_it_equals_the_same_work_done_by_the_loader() -> None:
    raw = as_dataset(torch.utils.data.TensorDataset(IMAGES, LABELS))
    prepared = PreprocessedDataset(raw, lambda sample: (normalise(sample[0]), sample[1]))
    before, metrics = trained(prepared, prepared)
    calls: list[tuple[int, bool, int]] = []

    def on_device(batch: Any, *, ids: np.ndarray, epoch: int, training: bool) -> Any:
        calls.append((epoch, training, len(ids)))
        assert not torch.is_grad_enabled()
        return [normalise(batch[0]), batch[1]]

    after, values = trained(raw, raw, device_transform=on_device)
    assert_same_weights(before, after)
    assert values["val_loss"] == metrics["val_loss"]
    assert {(epoch, training) for epoch, training, _ in calls} == {(0, True), (1, True), (2, True), (0, False)}


def test_random_numbers_belong_to_the_sample_not_to_its_batch() -> None:
    ids = np.array([5, 900, 17, 3])
    whole, part = BatchRandom(7, 2, ids, CPU), BatchRandom(7, 2, ids[2:], CPU)
    for _ in range(2):
        assert torch.equal(whole.uniform(-1, 3)[2:], part.uniform(-1, 3))
        assert torch.equal(whole.integers(0, 100)[2:], part.integers(0, 100))
    many = BatchRandom(7, 2, np.arange(20_000), CPU)
    first, second, numbers = many.uniform(), many.uniform(), many.integers(-2, 3)
    assert abs(float(first.mean()) - 0.5) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.03
    assert numbers.unique().tolist() == [-2, -1, 0, 1, 2]
    assert not torch.equal(BatchRandom(7, 3, ids, CPU).uniform(), BatchRandom(7, 2, ids, CPU).uniform())
    with pytest.raises(ValueError, match="to choose from"):
        many.integers(3, 3)


def test_ranks_make_of_their_rows_what_one_process_makes_of_all() -> None:
    def shifted(batch: Any, *, rng: BatchRandom) -> Any:
        return normalise(batch[0]) + rng.uniform()[:, None, None, None], batch[1]

    dataset, plan = as_dataset(torch.utils.data.TensorDataset(IMAGES, LABELS)), Plan(44, 8, 5)
    transform = DeviceTransform([shifted], 3, CPU)

    def rows(share: Share) -> list[Tensor]:
        loader = Loader(dataset, plan)
        loader.share = share
        batches = [batch for _, batch in loader.batches(1)]
        return [transform(b.data, b.ids, 1, training=True)[0][: b.size] for b in batches]

    parts = [rows(Share(rank, 3)) for rank in range(3)]
    for whole, *each in zip(rows(Share()), *parts):
        assert torch.equal(whole, torch.cat(each))


def test_a_function_that_forgets_to_return_is_named() -> None:
    with pytest.raises(DataError, match=r"device_transform .*forgets returned None"):
        trained((IMAGES.float(), LABELS), None, device_transform=lambda_that_forgets())


def lambda_that_forgets() -> Any:
    def forgets(batch: Any) -> None:
        del batch

    return forgets


@pytest.fixture
def images(in_tmp: Path) -> Path:
    """A folder of small pictures of two classes, in several formats and sizes."""
    try:
        from PIL import Image
    except ImportError:
        need("Pillow: pip install -e '.[files]'", False)
    numbers = np.random.default_rng(1)
    for at in range(60):
        folder, kind = in_tmp / "pictures" / f"class{at % 2}", ("png", "jpg")[at // 2 % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = numbers.integers(0, 128, (20 + at % 5, 24, 3), dtype=np.uint8) + np.uint8(100 * (at % 2))
        Image.fromarray(pixels).save(folder / f"{at:02}.{kind}")
    (in_tmp / "own.py").write_text(
        "def shift(batch, *, rng):\n    images = batch[0].float() / 255\n"
        "    return [images + rng.uniform(-0.1, 0.1)[:, None, None, None], *batch[1:]]\n"
    )
    return in_tmp / "pictures"


def test_files_travel_as_they_are_and_stay_on_the_gpu_side(start: Start, images: Path) -> None:
    """Encoded images, a transform with chance in it, an epoch cache: the weights of local, decoded data."""
    common = [
        "training.device=cpu",
        "run.progress=plain",
        "data.dataset=images",
        f"data.root={images}",
        "data.args.size=16",
    ]
    common += [
        "data.device_transform=own:shift",
        "data.augment.flip=true",
        "training.batch_size=8",
        "training.epochs=3",
    ]
    own = [*common, f"network.port={free_port()}", "data.args.encoded=true", "feed.cache=disk", "run.name=fed"]
    server, loader = start(["serve", *own], ["feed", *own])
    said = server.end()
    assert "Training completed (3 epochs, 18 steps" in said
    assert "16 of 24 steps needed no transfer" in said  # the second and third epoch, with their validation
    loader.end()

    train_here(*common, "run.name=here")
    assert_same(weights_of("runs/fed"), weights_of("runs/here"))
    assert audit(RunDirectory(Path("runs/fed"))).problem == ""


def test_an_image_that_cannot_be_decoded_is_named() -> None:
    pytest.importorskip("PIL")
    decode = DecodeImages(4)
    with pytest.raises(DataError, match="sample 7: not a readable image"):
        decode(([b"no image"], torch.zeros(1)), ids=np.array([7]))
    other = (torch.zeros(1), torch.zeros(1))
    assert decode(other, ids=np.array([7])) is other
