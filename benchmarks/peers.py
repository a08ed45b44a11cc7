"""The peers of loader.py, stores.py and prep.py. `python peers.py NAME` answers requests
(serving.py), with the interpreter of the peers' environment.

Each peer has its best settings, and the same work: a shuffled pass of complete batches of tensors.
  all but FFCV   a DataLoader with a persistent worker process per core; workers stack uint8 batches. JPEGs are stored as bytes
                 and decoded by simplejpeg, which is faster than PIL, cv2 or torchvision's decoder.
  FFCV           OS cache, fully random order, a thread per core; raw and JPEG (compressed again at the same quality) by
                 SimpleRGBImageDecoder. FFCV decodes with FASTDCT of the system's libjpeg-turbo (less work).
  MosaicML       local MDS files of ndarrays, MosaicML's shuffle (py1e) and StreamingDataLoader.
  litdata        16 MB chunks of numpy arrays, litdata's shuffle (within windows of 256) and StreamingDataLoader.
  webdataset     our shards in random order and a buffer of 5,000 samples; PPM as bytes, without PIL.
  ImageFolder    PPM files as bytes, without PIL; JPEG files.
The recipe: random resized crop (0.4 to 1) and flip for each image, then MixUp (0.8) and
normalization for the batch, to float32.
  FFCV           FFCV's ImageMixup, LabelMixup and NormalizeImage (`FFCV`), or MixUp and normalization by torch on the batch
                 (`FFCV, mixed by torch`, like the other peers).
  others         torchvision v2 on uint8 tensors in the workers; MixUp and normalization by torch on the batch, on all cores.
For remote datasets, all contestants have the same cache size. MosaicML and litdata read the server
as S3, webdataset reads URLs.
Photographs: decode at full scale with cv2 (or PIL), central square, antialiased resize, write with
labels, on all cores. Writers in the style of img2dataset make one tar per job.
"""

import importlib
import io
import multiprocessing
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image
from serving import CACHE_GB, Answer, Passes, Task, serve
from torch.utils.data import DataLoader, Subset
from torchvision.transforms import v2

MEAN, STD = (0.47, 0.45, 0.40), (0.26, 0.25, 0.28)
SCALE, ALPHA = (0.4, 1.0), 0.8
PER_TAR = 500
Item = tuple[str, int]
Read = Callable[[str], Any]


def pixels(task: Task, path: str) -> np.ndarray:
    data = Path(path).read_bytes()
    if path.endswith(".ppm"):
        shape = (task.image_size, task.image_size, 3)
        return np.frombuffer(data, np.uint8)[-np.prod(shape) :].reshape(shape)
    if task.kind == "jpeg":
        return simplejpeg.decode_jpeg(data, "RGB")
    cv2.setNumThreads(1)
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    side = min(image.shape[:2])
    top, left = ((length - side) // 2 for length in image.shape[:2])
    square, size = image[top : top + side, left : left + side], (task.image_size, task.image_size)
    return cv2.cvtColor(cv2.resize(square, size, interpolation=cv2.INTER_AREA), cv2.COLOR_BGR2RGB)


def pixels_by_pil(task: Task, path: str) -> np.ndarray:
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    size = (task.image_size, task.image_size)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC, box=box))


def as_stored(task: Task, path: str) -> Any:
    return Path(path).read_bytes() if task.kind == "jpeg" else pixels(task, path)


def to_sample(read: Read, item: Item) -> dict[str, Any]:
    return {"image": read(item[0]), "label": item[1]}


def mixed(images_BCHW: torch.Tensor) -> torch.Tensor:
    """Return the normalized batch. MixUp mixes each image with its neighbor, by one weight."""
    mean = torch.tensor(MEAN).mul(255).view(1, 3, 1, 1)
    scale = torch.tensor(STD).mul(255).reciprocal().view(1, 3, 1, 1)
    normalized = images_BCHW.float().sub_(mean).mul_(scale)
    weight = np.random.default_rng().beta(ALPHA, ALPHA)
    return torch.lerp(normalized.roll(1, 0), normalized, weight)


class ToTensor:
    """Transform of stored bytes or pixels to the tensor that a worker stacks."""

    def __init__(self, task: Task):
        self.kind, self.size = task.kind, task.image_size
        self.augment = v2.Compose(
            [
                v2.RandomResizedCrop(task.image_size, scale=SCALE, antialias=True),
                v2.RandomHorizontalFlip(),
            ]
        )

    def __call__(self, stored: Any) -> torch.Tensor:
        if self.kind == "jpeg":
            return torch.from_numpy(simplejpeg.decode_jpeg(bytes(stored), "RGB"))
        if isinstance(stored, bytes):
            count = 3 * self.size**2
            stored = np.frombuffer(bytearray(stored[-count:]), np.uint8).reshape(
                self.size, self.size, 3
            )
        image = torch.from_numpy(stored)
        return self.augment(image.permute(2, 0, 1)) if self.kind == "recipe" else image


def workers(task: Task) -> dict[str, Any]:
    return {"batch_size": task.batch_size, "num_workers": task.cores, "persistent_workers": True}


class Peer:
    """Base class: write and load samples with one library."""

    module = ""
    read = staticmethod(as_stored)
    is_mixed_by_torch = True

    def write(self, task: Task, read: Read, out: Path) -> None:
        raise NotImplementedError

    def open(self, task: Task) -> Any:
        raise NotImplementedError

    def batches(self, opened: Any) -> Iterator[torch.Tensor]:
        task, batches = opened
        for images, _ in batches:
            yield mixed(images) if task.kind == "recipe" and self.is_mixed_by_torch else images


class Indexed:
    def __init__(self, task: Task, read: Read):
        self.items, self.read = task.items(), read

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, label = self.items[index]
        return self.read(path), label


class FFCV(Peer):
    module, read = "ffcv.loader", staticmethod(pixels)

    def __init__(self, *, is_mixed_by_torch: bool = False):
        self.is_mixed_by_torch = is_mixed_by_torch

    def write(self, task: Task, read: Read, out: Path) -> None:
        from ffcv.fields import IntField, RGBImageField
        from ffcv.writer import DatasetWriter

        mode = "jpg" if task.kind == "jpeg" else "raw"
        fields = {"image": RGBImageField(write_mode=mode, jpeg_quality=90), "label": IntField()}
        writer = DatasetWriter(str(out / "data.beton"), fields, num_workers=task.cores)
        writer.from_indexed_dataset(Indexed(task, read))

    def open(self, task: Task) -> Any:
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
            if not self.is_mixed_by_torch:
                normalize = NormalizeImage(np.array(MEAN) * 255, np.array(STD) * 255, np.float32)
                image += [ImageMixup(ALPHA, same_lambda=True), normalize]
                label.append(LabelMixup(ALPHA, same_lambda=True))
        image.append(FromNumpy())
        if task.kind == "recipe":
            image.append(ToTorchImage(convert_back_int16=False))
        loader = Loader(
            str(task.written_by("FFCV") / "data.beton"),
            batch_size=task.batch_size,
            num_workers=task.cores,
            os_cache=True,
            order=OrderOption.RANDOM,
            drop_last=True,
            pipelines={"image": image, "label": [*label, FromNumpy()]},
        )
        return task, loader


class Streaming(Peer):
    """Base class for libraries with a StreamingDataset and a StreamingDataLoader."""

    def where(self, task: Task) -> dict[str, Any]:
        raise NotImplementedError

    def open(self, task: Task) -> Any:
        library, prepare = importlib.import_module(self.module), ToTensor(task)

        class Dataset(library.StreamingDataset):
            def __getitem__(self, index: Any) -> Any:
                sample = super().__getitem__(index)
                return prepare(sample["image"]), sample["label"]

        dataset = Dataset(**self.where(task), shuffle=True)
        return task, library.StreamingDataLoader(dataset, **workers(task))


def write_mds(task: Task, read: Read, job: tuple[str, list[Item]]) -> None:
    from streaming import MDSWriter

    out, items = job
    size = f"{task.image_size},{task.image_size},3"
    image = "bytes" if task.kind == "jpeg" else f"ndarray:uint8:{size}"
    with MDSWriter(out=out, columns={"image": image, "label": "int"}, hashes=["sha1"]) as writer:
        for item in items:
            writer.write(to_sample(read, item))


class Mosaic(Streaming):
    module = "streaming"

    def write(self, task: Task, read: Read, out: Path) -> None:
        """Write one directory per process and merge the directories, as MosaicML's documentation
        says."""
        from streaming.base.util import merge_index

        items = task.items()
        jobs = [(str(out / str(rank)), items[rank :: task.cores]) for rank in range(task.cores)]
        with multiprocessing.get_context("fork").Pool(task.cores) as pool:
            pool.map(partial(write_mds, task, read), jobs)
        merge_index(str(out), keep_local=True)

    def open(self, task: Task) -> Any:
        opened = super().open(task)
        for stream in opened[1].dataset.streams:
            stream._downloader.clean_up()  # otherwise forked workers share one connection
        return opened

    def where(self, task: Task) -> dict[str, Any]:
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()  # otherwise MosaicML waits for killed processes
        written = task.written_by("MosaicML streaming")
        words: dict[str, Any] = {"local": str(written), "batch_size": task.batch_size}
        if task.url:
            words |= {"remote": f"s3://bench/{written.name}", "local": f"{task.cache}/mosaic"}
            words |= {"cache_limit": f"{CACHE_GB}gb", "shuffle_block_size": 16384}
        return words


class Litdata(Streaming):
    module = "litdata"

    def write(self, task: Task, read: Read, out: Path) -> None:
        from litdata import optimize

        multiprocessing.set_start_method("fork", force=True)
        optimize(
            partial(to_sample, read),
            task.items(),
            str(out),
            chunk_bytes="16MB",
            num_workers=task.cores,
            start_method="fork",
            verbose=False,
        )

    def where(self, task: Task) -> dict[str, Any]:
        written = task.written_by("litdata")
        words: dict[str, Any] = {"input_dir": str(written), "drop_last": True}
        if task.url:
            from litdata.streaming import downloader

            # the link has no TLS, and litdata has no setting for this
            downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
            cache = Path(task.cache) / "litdata"
            cache.mkdir(exist_ok=True)
            storage = {"endpoint_url": os.environ["S3_ENDPOINT_URL"], "region_name": "us-east-1"}
            words |= {"input_dir": f"s3://bench/{written.name}", "storage_options": storage}
            words |= {"cache_dir": str(cache), "max_cache_size": f"{CACHE_GB}GB"}
        return words


class Webdataset(Peer):
    module = "webdataset"

    def open(self, task: Task) -> Any:
        import webdataset

        shards, total = [], 0
        for path in sorted(Path(task.shards).glob("train-*.tar")):
            if total < task.num_samples:
                shards.append(f"{task.url or task.shards}/{path.name}")
                total += len(np.load(path.with_suffix(".npy"), mmap_mode="r"))
        samples = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(
            5000, initial=1000
        )
        pairs = samples.to_tuple("ppm;jpg", "cls").map_tuple(ToTensor(task), int)
        batches = pairs.batched(task.batch_size, collation_fn=torch.utils.data.default_collate)
        return task, webdataset.WebLoader(batches, **{**workers(task), "batch_size": None})


class Folder(Peer):
    module = "torchvision.datasets"

    def open(self, task: Task) -> Any:
        from torchvision.datasets import ImageFolder

        prepare = ToTensor(task)
        dataset = ImageFolder(task.files, loader=lambda path: prepare(Path(path).read_bytes()))
        numbers = {path: number for number, (path, _) in enumerate(dataset.samples)}
        chosen = Subset(dataset, [numbers[path] for path, _ in task.items()])
        return task, DataLoader(chosen, shuffle=True, drop_last=True, **workers(task))


def write_tar(read: Read, job: tuple[str, list[Item]]) -> None:
    out, items = job
    with tarfile.open(out, "w") as archive:
        for number, (path, label) in enumerate(items):
            image = read(path)
            header = b"P6\n%d %d\n255\n" % image.shape[1::-1]
            for suffix, data in (("ppm", header + image.tobytes()), ("cls", b"%d" % label)):
                info = tarfile.TarInfo(f"{number:09d}.{suffix}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


class Tars(Peer):
    module = "tarfile"

    def __init__(self, read: Callable[[Task, str], np.ndarray]):
        self.read = read

    def write(self, task: Task, read: Read, out: Path) -> None:
        items = task.items()
        starts = range(0, len(items), PER_TAR)
        jobs = [(f"{out}/{start:09d}.tar", items[start : start + PER_TAR]) for start in starts]
        with multiprocessing.get_context("fork").Pool(task.cores) as pool:
            for _ in pool.imap_unordered(partial(write_tar, read), jobs):
                pass


PEERS: dict[str, Peer] = {
    "FFCV": FFCV(),
    "FFCV, mixed by torch": FFCV(is_mixed_by_torch=True),
    "MosaicML streaming": Mosaic(),
    "litdata": Litdata(),
    "webdataset": Webdataset(),
    "ImageFolder": Folder(),
    "cv2 -> tars": Tars(pixels),
    "PIL -> tars": Tars(pixels_by_pil),
}


def main() -> None:
    peer = PEERS[sys.argv[1]]
    importlib.import_module(peer.module)

    def write(task: Task, *, out: str) -> Answer:
        Path(out).mkdir(parents=True)
        began_s = time.perf_counter()
        peer.write(task, partial(peer.read, task), Path(out))
        return {"seconds": time.perf_counter() - began_s}

    serve({"run": Passes(peer).run, "write": write})


if __name__ == "__main__":
    main()
