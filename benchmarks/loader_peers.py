"""What `loader.py` compares with, run by an interpreter that has the peers: `python loader_peers.py
NAME` serves requests.

Each has its best settings, and the same work: one shuffled pass, torch tensors of whole batches.
  all but FFCV   a DataLoader with a worker process per core that persists; workers stack uint8 batches. JPEGs are stored as bytes
                 and decoded by simplejpeg, which is faster than PIL, cv2 or torchvision's decoder.
  FFCV           OS cache, fully random order, a thread per core; raw and JPEG by SimpleRGBImageDecoder. It decodes with FASTDCT
                 of the system's libjpeg-turbo, which is less work than the others do.
  MosaicML       local MDS files of ndarrays, its own shuffle (py1e) and its own StreamingDataLoader.
  litdata        chunks of 16 MB of numpy arrays, its own shuffle, which stays within windows of 256, and StreamingDataLoader.
  webdataset     whole shards in random order and a buffer of 5,000 samples; PPM is taken as bytes, without PIL.
  ImageFolder    PPM files read whole, without PIL; JPEG files.
The recipe: random resized crop (0.4 to 1) and flip for each picture, then MixUp (0.8) and
normalisation for the batch, to float32.
  FFCV           its own ImageMixup, LabelMixup and NormalizeImage (`ffcv`), or only crop and flip, the rest by torch on the batch
                 (`ffcv+torch`, the same as the others).
  others         torchvision v2 on uint8 tensors in the workers; MixUp and normalisation by torch on the batch, on all cores.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serving import Contestant, Task, serve

MEAN, STD = (0.47, 0.45, 0.40), (0.26, 0.25, 0.28)
SCALE, ALPHA = (0.4, 1.0), 0.8
Batch = list[torch.Tensor]


def mixed(images_BCHW: torch.Tensor) -> torch.Tensor:
    """Normalised and mixed with the neighbour, one share for the batch."""
    mean = torch.tensor(MEAN).mul(255).view(1, 3, 1, 1)
    scale = torch.tensor(STD).mul(255).reciprocal().view(1, 3, 1, 1)
    normalised = images_BCHW.float().sub_(mean).mul_(scale)
    share = np.random.default_rng().beta(ALPHA, ALPHA)
    return torch.lerp(normalised.roll(1, 0), normalised, share)


class ToTensor:
    """Stored bytes or pixels -> the tensor that a worker stacks."""

    def __init__(self, task: Task):
        from torchvision.transforms import v2

        self.kind, self.size = task.kind, task.image_size
        self.augment = v2.Compose(
            [
                v2.RandomResizedCrop(task.image_size, scale=SCALE, antialias=True),
                v2.RandomHorizontalFlip(),
            ]
        )

    def __call__(self, stored: Any) -> torch.Tensor:
        if self.kind == "jpeg":
            import simplejpeg

            return torch.from_numpy(simplejpeg.decode_jpeg(bytes(stored), "RGB"))
        if isinstance(stored, bytes):
            count = 3 * self.size**2
            stored = np.frombuffer(bytearray(stored[-count:]), np.uint8).reshape(
                self.size, self.size, 3
            )
        image = torch.from_numpy(stored)
        return self.augment(image.permute(2, 0, 1)) if self.kind == "recipe" else image


class WithLoader(Contestant):
    """What the peers that use torch's DataLoader share."""

    def batches(self, loader: Any) -> Iterator[torch.Tensor]:
        task, batches = loader
        for images, _ in batches:
            if len(images) == task.batch_size:
                yield mixed(images) if task.kind == "recipe" else images


def workers(task: Task) -> dict[str, Any]:
    return {"batch_size": task.batch_size, "num_workers": task.cores, "persistent_workers": True}


class FFCV(Contestant):
    def __init__(self, *, own_mixup: bool):
        self.own_mixup = own_mixup

    def open(self, task: Task, state: Any = None) -> Any:  # noqa: ARG002
        from ffcv.fields.basics import IntDecoder
        from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import (
            ImageMixup,
            LabelMixup,
            NormalizeImage,
            RandomHorizontalFlip,
            ToTorchImage,
        )
        from ffcv.transforms import ToTensor as FromNumpy

        image: list[Any] = [SimpleRGBImageDecoder()]
        label: list[Any] = [IntDecoder()]
        if task.kind == "recipe":
            crop = RandomResizedCropRGBImageDecoder((task.image_size, task.image_size), scale=SCALE)
            image = [crop, RandomHorizontalFlip()]
            if self.own_mixup:
                normalise = NormalizeImage(np.array(MEAN) * 255, np.array(STD) * 255, np.float32)
                image += [ImageMixup(ALPHA, same_lambda=True), normalise]
                label.append(LabelMixup(ALPHA, same_lambda=True))
        image.append(FromNumpy())
        if task.kind == "recipe":
            image.append(ToTorchImage(convert_back_int16=False))
        loader = Loader(
            str(written("ffcv", task) / "data.beton"),
            batch_size=task.batch_size,
            num_workers=task.cores,
            os_cache=True,
            order=OrderOption.RANDOM,
            drop_last=True,
            pipelines={"image": image, "label": [*label, FromNumpy()]},
        )
        return task, loader

    def batches(self, loader: Any) -> Iterator[torch.Tensor]:
        task, batches = loader
        for images, _ in batches:
            yield mixed(images) if task.kind == "recipe" and not self.own_mixup else images


class Mosaic(WithLoader):
    def where(self, task: Task) -> dict[str, Any]:
        return {"local": str(written("mosaic", task))}

    def open(self, task: Task, state: Any = None) -> Any:
        from streaming import StreamingDataLoader, StreamingDataset

        prepare = ToTensor(task)

        class Dataset(StreamingDataset):  # type: ignore[misc]
            def __getitem__(self, index: int) -> Any:
                sample = super().__getitem__(index)
                return prepare(sample["image"]), sample["label"]

        dataset = Dataset(**self.where(task), shuffle=True, batch_size=task.batch_size)
        loader = StreamingDataLoader(dataset, **workers(task))
        if state is not None:
            loader.load_state_dict(state)
        return task, loader

    def state(self, loader: Any, num_consumed: int) -> Any:  # noqa: ARG002
        return loader[1].state_dict()


class Litdata(WithLoader):
    def where(self, task: Task) -> dict[str, Any]:
        return {"input_dir": str(written("litdata", task))}

    def open(self, task: Task, state: Any = None) -> Any:
        from litdata import StreamingDataLoader, StreamingDataset

        prepare = ToTensor(task)

        class Dataset(StreamingDataset):  # type: ignore[misc]
            def __getitem__(self, index: Any) -> Any:
                sample = super().__getitem__(index)
                return prepare(sample["image"]), sample["label"]

        dataset = Dataset(**self.where(task), shuffle=True, drop_last=True)
        loader = StreamingDataLoader(dataset, **workers(task))
        if state is not None:
            loader.load_state_dict(state)
        return task, loader

    def state(self, loader: Any, num_consumed: int) -> Any:  # noqa: ARG002
        return loader[1].state_dict()


class Webdataset(WithLoader):
    def shard(self, path: Path) -> str:
        return str(path)

    def open(self, task: Task, state: Any = None) -> Any:  # noqa: ARG002
        import webdataset

        prepare = ToTensor(task)
        shards, total = [], 0
        for path in sorted(Path(task.shards).glob("train-*.tar")):
            if total < task.num_samples:
                shards.append(self.shard(path))
                total += len(np.load(path.with_suffix(".npy"), mmap_mode="r"))
        samples = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(
            5000, initial=1000
        )
        pairs = samples.to_tuple("ppm;jpg", "cls").map_tuple(prepare, int)
        batches = pairs.batched(task.batch_size, collation_fn=stacked)
        return task, webdataset.WebLoader(batches, **{**workers(task), "batch_size": None})

    def batches(self, loader: Any) -> Iterator[torch.Tensor]:
        """Every worker ends with a part of a batch."""
        task, batches = loader
        for images, _ in batches:
            yield mixed(images) if task.kind == "recipe" else images


def stacked(samples: list[Any]) -> Batch:
    return [
        torch.stack([sample[0] for sample in samples]),
        torch.tensor([sample[1] for sample in samples]),
    ]


class Folder(WithLoader):
    def open(self, task: Task, state: Any = None) -> Any:  # noqa: ARG002
        from torch.utils.data import DataLoader, Subset
        from torchvision.datasets import ImageFolder

        prepare: Callable[[str], torch.Tensor] = compose(
            ToTensor(task), lambda path: Path(path).read_bytes()
        )
        dataset = ImageFolder(task.files, loader=prepare)
        numbers = {Path(path).name: number for number, (path, _) in enumerate(dataset.samples)}
        names = [
            Path(json.loads(line)).name
            for path in sorted(Path(task.shards).glob("train-*.paths"))
            for line in path.read_text().splitlines()
        ]
        chosen = Subset(dataset, [numbers[name] for name in names[: task.num_samples]])
        return task, DataLoader(chosen, shuffle=True, drop_last=True, **workers(task))


def compose(outer: Callable[[Any], Any], inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: outer(inner(value))


def written(name: str, task: Task) -> Path:
    return Path(task.peers) / f"{name}-{task.num_samples}"


def main() -> None:
    contestants: dict[str, Contestant] = {}
    name = sys.argv[1]
    if name == "ffcv":
        import ffcv.fields
        import ffcv.loader
        import ffcv.transforms  # noqa: F401

        contestants = {"ffcv": FFCV(own_mixup=True), "ffcv+torch": FFCV(own_mixup=False)}
    elif name == "mosaic":
        import streaming  # noqa: F401

        contestants = {"mosaic": Mosaic()}
    elif name == "litdata":
        import litdata  # noqa: F401

        contestants = {"litdata": Litdata()}
    elif name == "webdataset":
        import webdataset  # noqa: F401

        contestants = {"webdataset": Webdataset()}
    else:
        contestants = {"folder": Folder()}
    import simplejpeg
    import torchvision  # noqa: F401

    assert simplejpeg
    serve(contestants)


if __name__ == "__main__":
    main()
