"""Which JPEG decoder, in threads or in processes? `benchmarks/loader.py --decoders [--quick]`; run
by our own interpreter.

The same 224-pixel files (4:2:0, quality 90), bytes in memory, into uint8 batches of 256 on all
cores. Processes write into shared memory, so that nothing is sent but a nod. nvJPEG (torchvision's
decode_jpeg on CUDA) is measured where there is a GPU.
  simplejpeg            libjpeg-turbo into the batch's own memory, `buffer=`
  simplejpeg, new array the same into an array of its own, then copied
  as our loader         `data_prep.images.decode`: simplejpeg's RGBX -> PIL -> RGB -> numpy -> batch
  Pillow                Image.open, convert, numpy (Pillow-SIMD where it is installed: it decodes no faster, it resizes faster)
  torchvision           decode_jpeg of one file after another; its list form is for CUDA alone, and loops on the CPU
"""

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.frame import arguments, rates, report, sized
from benchmarks.loader_data import CORES, dataset
from benchmarks.loader_ours import members
from benchmarks.serving import Task
from data_prep.images import decode

SIZE, BATCH = 224, 256
Place = np.ndarray
"""(height, width, 3), where a picture goes."""


def into_place(data: bytes, place: Place) -> None:
    simplejpeg.decode_jpeg(data, "RGB", buffer=place)


def new_array(data: bytes, place: Place) -> None:
    place[...] = simplejpeg.decode_jpeg(data, "RGB")


def as_loader(data: bytes, place: Place) -> None:
    place[...] = np.array(decode(data)[0])


def pillow(data: bytes, place: Place) -> None:
    place[...] = np.asarray(Image.open(BytesIO(data)).convert("RGB"))


def torchvision_one(data: bytes, place: Place) -> None:
    stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    torch.from_numpy(place).copy_(decode_jpeg(stored, mode=ImageReadMode.RGB).permute(1, 2, 0))


DECODERS: dict[str, Callable[[bytes, Place], None]] = {
    "simplejpeg": into_place,
    "simplejpeg, new array": new_array,
    "as our loader": as_loader,
    "Pillow": pillow,
    "torchvision": torchvision_one,
}


def torchvision_list(stored: list[bytes], device: str) -> Callable[[], float]:
    """The list form, a batch at a time; on CUDA that is nvJPEG."""
    tensors = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in stored]

    def run() -> float:
        for start in range(0, len(tensors), BATCH):
            pictures = decode_jpeg(
                tensors[start : start + BATCH], mode=ImageReadMode.RGB, device=device
            )
            torch.stack(pictures)  # type: ignore[arg-type]
        if device == "cuda":
            torch.cuda.synchronize()
        return float(len(tensors))

    return run


def share(decoder: Callable[[bytes, Place], None], stored: list[bytes], batch: np.ndarray) -> None:
    for number, data in enumerate(stored):
        decoder(data, batch[number % len(batch)])


def in_threads(
    decoder: Callable[[bytes, Place], None], stored: list[bytes], number: int
) -> Callable[[], float]:
    batches = [np.empty((BATCH // number, SIZE, SIZE, 3), np.uint8) for _ in range(number)]
    pool = ThreadPoolExecutor(number)

    def run() -> float:
        parts = [stored[rank::number] for rank in range(number)]
        for done in [
            pool.submit(share, decoder, part, batch)
            for part, batch in zip(parts, batches, strict=True)
        ]:
            done.result()
        return float(len(stored))

    return run


def in_processes(
    decoder: Callable[[bytes, Place], None], stored: list[bytes]
) -> Callable[[], float]:
    context = multiprocessing.get_context("fork")
    pipes = []
    for rank in range(CORES):
        here, there = context.Pipe()
        batch = (
            torch.empty(BATCH // CORES, SIZE, SIZE, 3, dtype=torch.uint8).share_memory_().numpy()
        )
        words = (decoder, stored[rank::CORES], batch, there)
        context.Process(target=serve_share, args=words, daemon=True).start()
        pipes.append(here)

    def run() -> float:
        for pipe in pipes:
            pipe.send(None)
        for pipe in pipes:
            pipe.recv()
        return float(len(stored))

    return run


def serve_share(
    decoder: Callable[[bytes, Place], None], stored: list[bytes], batch: np.ndarray, pipe: Any
) -> None:
    torch.set_num_threads(1)
    while True:
        pipe.recv()
        share(decoder, stored, batch)
        pipe.send(None)


def main() -> None:
    options = arguments(__doc__ or "")
    shards, files = dataset("jpeg", num_samples=256 if options.dry_run else 8_192, image_size=SIZE)
    number, rounds = sized(options, full=(8192, 7), quick=(2048, 3), dry=(256, 1))
    stored = list(members(Task("jpeg", str(shards), "", str(files), number, SIZE, BATCH, CORES)))
    # processes are forked before threads or torch's own pools exist
    contestants = {
        f"{name}, processes": in_processes(decoder, stored) for name, decoder in DECODERS.items()
    }
    contestants |= {
        f"{name}, threads": in_threads(decoder, stored, CORES) for name, decoder in DECODERS.items()
    }
    contestants["simplejpeg, one thread"] = in_threads(into_place, stored, 1)
    contestants["torchvision, list"] = torchvision_list(stored, "cpu")
    if torch.cuda.is_available():
        contestants["nvJPEG (torchvision, list)"] = torchvision_list(stored, "cuda")
    found = rates(contestants, rounds=rounds)
    best = max(found, key=lambda name: float(np.median(found[name])))
    against = "simplejpeg, processes"
    title = f"JPEG decoders: {SIZE} px, 4:2:0, quality 90, {CORES} cores, {rounds} rounds"
    report(title, found, unit="images/s", against=against, headline=f"fastest: {best}")
    if "nvJPEG (torchvision, list)" not in contestants:
        print("nvJPEG: not run, no GPU here")


if __name__ == "__main__":
    main()
