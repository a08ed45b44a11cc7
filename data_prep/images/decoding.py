"""Decode bytes into one RGB image, at full size or, if allowed, at 1/2, 1/4 or 1/8.

The orientation tag of EXIF, or of XMP if there is no EXIF, is applied; all other metadata is
dropped. Unreadable metadata leaves the image as it is stored. The first frame or page is used. The
content determines the format, not the file's name. The size is checked before decoding.

simplejpeg and imagecodecs decode JPEG (jpeg.py). imagecodecs decodes WebP, AVIF and JPEG XL
(codecs.py) and TIFF (tiff.py). Pillow decodes PNG, PPM, GIF and BMP, and reads the headers of JPEG
and TIFF. Pillow-SIMD 12.1 replaces Pillow on x86-64 and lacks the fixes of Pillow 12.2 to 13.0.
`check_tiles` therefore limits the decoders that a file can start.
"""

import io
import warnings
from dataclasses import dataclass
from importlib.metadata import version

import PIL
import simplejpeg
from PIL import Image, features
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import MAX_TEXT_CHUNK
from PIL.TiffImagePlugin import TiffImageFile

from data_prep.images.codecs import Header, decode_coded
from data_prep.images.color import rawmode_of, to_rgb
from data_prep.images.jpeg import (
    Frame,
    decode_jpeg,
    decode_rare_jpeg,
    draft_scale,
    ends_in_header,
    plain_frame,
)
from data_prep.images.rejection import Rejection, rejecting
from data_prep.images.tiff import decode_tiff

MAX_PIXELS = 178_956_970
"""Largest accepted number of pixels: Pillow's limit for decompression bombs."""
PIXEL_BUDGET = 64_000_000
"""Default of `max_pixels`. It needs up to 1 GB of memory: 4 bytes per pixel, and copies."""
EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "PPM": "ppm"}
"""File extensions of the formats that Pillow may open. Other formats of Pillow accept any bytes
(TGA) or start programs (EPS)."""
PILLOW_DECODERS = frozenset(("raw", "zip", "gif", "bmp_rle", "ppm", "ppm_plain"))
"""Decoders of Pillow that a file may start, for PNG, PPM, GIF and BMP."""

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FIRST_ON_ITS_SIDE = 5
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS = (b"iCCP", b"tEXt", b"zTXt", b"iTXt")
warnings.filterwarnings("ignore", module=r"PIL\.")  # about rejected files and dropped metadata
_PNG_TURNING = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0\0")


def decoder_version() -> str:
    """Return the versions of all libraries that affect the pixels."""
    libjpeg = features.version("libjpeg_turbo") or features.version("jpg")
    return (
        f"Pillow {PIL.__version__}, libjpeg {libjpeg}, simplejpeg {simplejpeg.__version__} (JPEG),"
        f" imagecodecs {version('imagecodecs')} (WebP AVIF JXL TIFF), opencv-python-headless"
        f" {version('opencv-python-headless')} (area)"
    )


@dataclass(frozen=True)
class Picture:
    """A decoded image before it is turned upright; `upright` turns it, or its resized copy."""

    pixels: Image.Image
    """Pixels in mode RGB, or RGBX if this avoids a copy; `upright` converts to RGB."""
    extent: tuple[float, float]
    """Exact width and height of the content. At reduced size, the last pixel may be partly
    outside."""
    orientation: int
    extension: str

    @classmethod
    def of(cls, image: Image.Image, *, extension: str = "") -> "Picture":
        """Load an image that PIL has opened; raise Rejection if its mode cannot be converted to RGB
        correctly."""
        rawmode = rawmode_of(image)
        image.load()
        return cls(to_rgb(image, rawmode=rawmode), image.size, _orientation(image), extension)

    @property
    def aspect(self) -> float:
        """Width / height of the upright image."""
        width, height = self.extent
        return height / width if self.orientation >= _FIRST_ON_ITS_SIDE else width / height

    def upright(self, image: Image.Image) -> Image.Image:
        rgb = image if image.mode == "RGB" else image.convert("RGB")
        turn = _TURNS.get(self.orientation)
        return rgb if turn is None else rgb.transpose(turn)


def read_picture(
    data: bytes, *, smallest_side: int | None = None, max_pixels: int = MAX_PIXELS
) -> Picture:
    """Decode an image. Raise Rejection if it is damaged, unsupported or too large. `smallest_side`:
    length of the shorter side after resizing, which permits decoding at reduced size. `max_pixels`:
    limit of decoded pixels."""
    frame, orientation = plain_frame(data), 1
    if frame is None:
        if (header := Header.of(data)) is not None:
            _check_size(*header.size, max_pixels=max_pixels)
            with rejecting("damaged"):
                return Picture.of(decode_coded(data, header), extension=header.extension)
        image = _open(data)
        if image.format != "JPEG":
            return _decode_opened(data, image, max_pixels=max_pixels)
        frame = Frame(image.width, image.height, image.layers)
        orientation = _orientation(image)
    width, height, _ = frame
    _check_size(width, height)
    scale = draft_scale(width, height, smallest_side)
    _check_size(-(-width // scale), -(-height // scale), max_pixels=max_pixels)
    pixels = decode_jpeg(data, frame, scale=scale)
    if pixels is None:
        _check_size(width, height, max_pixels=max_pixels)
        pixels, scale = decode_rare_jpeg(data, frame), 1
    return Picture(
        pixels if pixels.mode == "RGBX" else to_rgb(pixels),
        (width / scale, height / scale),
        orientation,
        "jpg",
    )


def size_of(data: bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return width and height from the header. Raise Rejection if the header is damaged or the
    image is too large."""
    frame = plain_frame(data)
    if frame is not None:
        width, height, _ = frame
    elif (header := Header.of(data)) is not None:
        width, height = header.size
    else:
        width, height = _open(data).size
    _check_size(width, height, max_pixels=max_pixels)
    return width, height


def _decode_opened(data: bytes, image: Image.Image, *, max_pixels: int) -> Picture:
    _check_size(*image.size, max_pixels=max_pixels)
    with rejecting("damaged"):
        if isinstance(image, TiffImageFile):
            pixels = to_rgb(decode_tiff(data, image))
            return Picture(pixels, pixels.size, _orientation(image), "tif")
        check_tiles(image)
        return Picture.of(image, extension=EXTENSIONS[image.format or ""])


def check_tiles(image: Image.Image) -> None:
    """Raise Rejection if a tile needs a decoder that `PILLOW_DECODERS` lacks, or is outside the
    image.

    Pillow checks the tiles, too, but its sums overflow before version 12.2.
    """
    side = max(image.size)
    for codec, extents, *_ in image.tile:
        if codec not in PILLOW_DECODERS:
            raise Rejection(
                "unsupported", f"{image.format} with the codec {codec}; convert it to PNG"
            )
        left, top, right, bottom = extents or (0, 0, side, side)
        if not (0 <= left <= right <= side and 0 <= top <= bottom <= side):
            raise Rejection(
                "damaged",
                f"a tile at {extents} lies outside the image of {image.width} x {image.height}",
            )


def _check_size(width: int, height: int, *, max_pixels: int = MAX_PIXELS) -> None:
    if width * height > MAX_PIXELS:
        raise Rejection(
            "too_many_pixels", f"{width} x {height} exceeds {MAX_PIXELS:,} pixels; make it smaller"
        )
    if width * height > max_pixels:
        raise Rejection(
            "too_many_pixels",
            f"{width} x {height} exceeds max_pixels={max_pixels}; shrink it, or raise max_pixels",
        )


def _without_text(data: bytes) -> bytes:
    """Return a PNG without its texts and color profile, because Pillow rejects these above 1 MiB. A
    text that may contain the orientation is kept. Nothing is decompressed."""
    kept, at = [data[:8]], 8
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4])
        name, text = data[at + 4 : at + 8], data[at + 8 : end - 4]
        is_short = len(text) <= MAX_TEXT_CHUNK and text.startswith(_PNG_TURNING)
        if name not in _PNG_TEXTS or is_short:
            kept.append(data[at:end])
        at = end
    return b"".join(kept)


def _open(data: bytes) -> Image.Image:
    if not data:
        raise Rejection("empty", "the file has no bytes")
    is_jpeg = data[:2] == b"\xff\xd8"
    if is_jpeg and ends_in_header(data):
        raise Rejection("truncated", f"the file ends in its header, after {len(data):,} bytes")
    with rejecting("not_an_image"):
        if is_jpeg:  # not an MPO, whose index of further images may be damaged
            return JpegImageFile(io.BytesIO(data))
        if data.startswith(_PNG_SIGNATURE):
            data = _without_text(data)
        try:
            return Image.open(io.BytesIO(data), formats=tuple(EXTENSIONS))
        except Image.UnidentifiedImageError:
            unknown = f"a format that begins with {data[:16]!r} is not supported"
            raise Rejection(
                "not_an_image",
                unknown
                if data[4:8] != b"ftyp"
                else "HEIC, AVIF sequences and videos are not supported",
            ) from None


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8. The image must be loaded, because a PNG may have
    metadata after the pixels."""
    if image.format == "JPEG" and "exif" not in image.info and "xmp" not in image.info:
        return 1  # fast for the common case
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 (damaged metadata raises anything)
        return 1
    return value if value in _TURNS else 1
