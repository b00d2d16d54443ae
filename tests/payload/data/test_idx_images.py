"""MNIST's files as images: borders, scaling, channels, labels, and the cache made of them."""

from pathlib import Path

import pytest
import torch

from jobkit.errors import UsageError
from jobkit.payload.data.cache import ensure_cache, open_cache
from jobkit.payload.data.sources import find_source
from jobkit.spec import idx
from support.idx_files import idx_bytes, write_idx


def test_grey_images_get_a_border_and_three_equal_channels(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "mnist", packed=True)
    source = find_source(f"idx:{folder}", tmp_path / "data", None, None)
    data = open_cache(ensure_cache(source, tmp_path / "data", lambda _: None))
    assert data.train.images.shape == (30, 32, 32, 3) and len(data.test.labels) == 10
    assert data.classes == [str(i) for i in range(10)]
    image = data.train.images[1]
    expected = torch.arange(784, 2 * 784).remainder(10).reshape(28, 28).to(torch.uint8)
    assert torch.equal(image[2:30, 2:30, 0], expected)
    assert not image[:2].any() and not image[:, 30:].any()
    assert torch.equal(image[..., 0], image[..., 2])
    assert data.train.labels[:12].tolist() == [*range(10), 0, 1]


def test_other_sizes_are_scaled(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "mnist", side=8)
    train, _, _ = find_source(f"idx:{folder}", tmp_path, None, None).read(lambda _: None)
    assert train.images.shape == (30, 32, 32, 3)
    assert 0 <= int(train.images.min()) < int(train.images.max()) <= 9


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("train_labels", idx_bytes(29), "30 images, and 29 labels"),
        ("test_images", idx_bytes(10, 300, 1), "10 images of 300 x 1, more than"),
        ("train_images", idx_bytes(2_000_001, 1, 1, content=bytes(2_000_001)), "and 30 labels"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    tmp_path: Path, part: str, content: bytes, message: str
) -> None:
    folder = write_idx(tmp_path / "mnist")
    (folder / idx.FILES[part]).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        find_source(f"idx:{folder}", tmp_path, None, None).read(lambda _: None)
