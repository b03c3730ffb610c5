from __future__ import annotations

import io
import struct
from collections import Counter

import numpy as np
import pytest
from datafiles import picture, png, png_of_declared_size
from numpy.typing import NDArray
from PIL import Image

from fedshift.data.decoding import UnreadableError, common_size, decode_image, has_more_frames, image_size, is_dark
from fedshift.data.domain import VOID
from fedshift.data.formats.masks import MaskCode, decode_mask, decode_mask_values


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def test_rgb_comes_back_as_it_was() -> None:
    pixels = picture(1, 5, 7)
    data = encoded(Image.fromarray(pixels))
    assert image_size(data) == (5, 7)
    np.testing.assert_array_equal(decode_image(data), pixels)


def test_grey_becomes_three_equal_channels() -> None:
    grey = picture(1, 5, 7)[..., 0]
    np.testing.assert_array_equal(decode_image(encoded(Image.fromarray(grey))), np.repeat(grey[..., None], 3, axis=2))


def test_sixteen_bit_grey_keeps_its_high_byte() -> None:
    values = np.array([[0, 255, 256], [0x1234, 0xFF00, 0xFFFF]], dtype=np.uint16)
    decoded = decode_image(encoded(Image.fromarray(values)))
    np.testing.assert_array_equal(decoded[..., 0], [[0, 0, 1], [0x12, 0xFF, 0xFF]])


def sixteen_bit_colour(values: NDArray[np.uint16]) -> bytes:
    """A PNG of 16 bits in colour, `(height, width, 3)`, which Pillow reads but does not write."""
    height, width, _ = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png(struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0), rows)


def test_sixteen_bits_that_hold_twelve_are_dark() -> None:
    twelve = np.array([[0, 100, 4095]], dtype=np.uint16)
    full = np.array([[0, 100, 4096]], dtype=np.uint16)
    assert is_dark(encoded(Image.fromarray(twelve))) and not is_dark(encoded(Image.fromarray(full)))
    assert is_dark(sixteen_bit_colour(np.stack([twelve] * 3, axis=2)))
    assert not is_dark(sixteen_bit_colour(np.stack([twelve, twelve, full], axis=2)))
    assert decode_image(sixteen_bit_colour(np.stack([twelve] * 3, axis=2))).max() == 15


def test_a_black_image_of_eight_bits_is_black_on_purpose() -> None:
    black = np.zeros((4, 4), dtype=np.uint8)
    assert not is_dark(encoded(Image.fromarray(black))) and not is_dark(encoded(Image.fromarray(black), "JPEG"))


def test_palette_shows_its_colours() -> None:
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    np.testing.assert_array_equal(decode_image(encoded(image)), [[[10, 20, 30], [40, 50, 60]]])


def test_transparency_is_shown_on_white() -> None:
    rgba = np.array([[[10, 20, 30, 255], [10, 20, 30, 0]]], dtype=np.uint8)
    np.testing.assert_array_equal(decode_image(encoded(Image.fromarray(rgba))), [[[10, 20, 30], [255, 255, 255]]])


def test_photo_is_turned_the_way_the_camera_was_held() -> None:
    pixels = np.zeros((16, 32, 3), dtype=np.uint8)
    pixels[:, :16] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # To be shown turned clockwise by 90 degrees.
    data = encoded(Image.fromarray(pixels), "JPEG", quality=100, exif=exif)
    assert image_size(data) == (32, 16)
    decoded = decode_image(data)
    assert decoded.shape == (32, 16, 3)
    assert decoded[:16].min() > 250
    assert decoded[16:].max() < 5


def test_cropping_keeps_the_centre_and_stretching_keeps_everything() -> None:
    pixels = np.zeros((4, 12, 3), dtype=np.uint8)
    pixels[:, 4:8] = 255
    data = encoded(Image.fromarray(pixels))
    assert decode_image(data, (4, 4), "crop").min() == 255
    np.testing.assert_array_equal(decode_image(data, (4, 12), "stretch"), pixels)
    stretched = decode_image(data, (4, 3), "stretch")
    assert stretched[0, 1].min() > stretched[0, 0].max()


def test_large_photo_is_decoded_small_and_looks_the_same() -> None:
    ramp = np.linspace(0, 255, 1600).astype(np.uint8)
    pixels = np.repeat(np.repeat(ramp[None, :, None], 1280, axis=0), 3, axis=2)
    data = encoded(Image.fromarray(pixels), "JPEG", quality=95)
    small = decode_image(data, (32, 32), "crop").astype(int)
    expected = ramp[160:1440].reshape(32, 40).mean(axis=1)
    assert np.abs(small[16, :, 0] - expected).max() <= 4


@pytest.mark.parametrize(("form", "options"), [("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("BMP", {})])
def test_formats_without_loss_come_back_as_they_were(form: str, options: dict[str, str]) -> None:
    pixels = picture(2, 5, 7)
    data = encoded(Image.fromarray(pixels), form, **options)
    assert image_size(data) == (5, 7) and not has_more_frames(data)
    np.testing.assert_array_equal(decode_image(data), pixels)


def test_webp_is_read_and_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:, :8, 0] = 255
    for form, options in (("WEBP", {"lossless": True}), ("TIFF", {})):
        data = encoded(Image.fromarray(pixels), form, exif=exif, **options)
        assert image_size(data) == (16, 8)
        upright = decode_image(data)
        assert upright.shape == (16, 8, 3) and upright[:8, :, 0].min() == 255 and upright[8:].max() == 0


def test_of_several_frames_the_first_is_read() -> None:
    frames = [Image.fromarray(np.full((4, 4), value, dtype=np.uint8)) for value in (10, 200, 90)]
    for form in ("GIF", "TIFF"):
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
        assert has_more_frames(data) and not has_more_frames(encoded(frames[0], form))
        assert (decode_image(data) == 10).all()


def test_sixteen_bit_tiff_keeps_its_high_byte_and_may_be_dark() -> None:
    values = np.array([[0, 255, 256], [0x1234, 0xFF00, 0xFFFF]], dtype=np.uint16)
    data = encoded(Image.fromarray(values), "TIFF")
    np.testing.assert_array_equal(decode_image(data)[..., 0], [[0, 0, 1], [0x12, 0xFF, 0xFF]])
    assert not is_dark(data) and is_dark(encoded(Image.fromarray(values >> 4), "TIFF"))
    assert not is_dark(encoded(Image.fromarray(picture(1) >> 4), "TIFF"))


def test_numbers_without_a_known_white_are_refused() -> None:
    for values, words in (
        (np.full((2, 2), 0.5, dtype=np.float32), "floating-point"),
        (np.array([[0, 70_000]], dtype=np.int32), "32-bit"),
        (np.array([[-1, 5]], dtype=np.int32), "32-bit"),
    ):
        with pytest.raises(UnreadableError, match=words):
            decode_image(encoded(Image.fromarray(values), "TIFF"))
    with pytest.raises(UnreadableError, match="floating-point"):
        decode_mask_values(encoded(Image.fromarray(np.full((2, 2), 0.5, dtype=np.float32)), "TIFF"))


def test_gif_and_tiff_masks_hold_ids() -> None:
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    image.putpalette([200, 0, 0, 0, 200, 0])
    np.testing.assert_array_equal(decode_mask(encoded(image, "GIF"), CODE), [[0, 1]])
    np.testing.assert_array_equal(
        decode_mask(encoded(Image.fromarray(np.array([[1, 255]], dtype=np.uint8)), "TIFF"), CODE), [[1, VOID]]
    )


@pytest.mark.parametrize("form", ["PPM", "ICO", "TGA", "EPS", "SGI"])
def test_other_formats_are_not_parsed(form: str) -> None:
    data = encoded(Image.fromarray(picture(1, 16, 16)), form)
    with pytest.raises(UnreadableError, match="not a JPEG, PNG"):
        decode_image(data)
    with pytest.raises(UnreadableError, match="not a JPEG, PNG"):
        image_size(data)


@pytest.mark.parametrize(("width", "height"), [(9000, 9000), (50_000, 50_000), (2**31 - 1, 2**31 - 1)])
def test_giant_declared_size_is_refused_from_the_header(width: int, height: int) -> None:
    data = png_of_declared_size(width, height)
    assert len(data) < 200
    for look in (image_size, decode_image, decode_mask_values):
        with pytest.raises(UnreadableError, match=r"megapixels|limit|size"):
            look(data)


@pytest.mark.parametrize("form", ["BMP", "GIF", "TIFF"])
def test_giant_size_is_refused_in_every_format(form: str) -> None:
    small = encoded(Image.fromarray(picture(1, 16, 16)), form)
    if form == "BMP":
        data = small[:18] + struct.pack("<ii", 60_000, 60_000) + small[26:]
    elif form == "GIF":
        data = small[:6] + struct.pack("<HH", 60_000, 60_000) + small[10:]
    else:
        data = small
        for tag in (256, 257):  # width and length, as Pillow writes them
            entry = struct.pack("<HHII", tag, 4, 1, 16)
            assert data.count(entry) == 1
            data = data.replace(entry, struct.pack("<HHII", tag, 4, 1, 60_000))
    for look in (image_size, decode_image, decode_mask_values):
        with pytest.raises(UnreadableError, match=r"megapixels|limit|size"):
            look(data)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "GIF", "WEBP", "BMP"])
def test_half_a_file_is_no_image(form: str) -> None:
    data = encoded(Image.fromarray(picture(1, 64, 64)), form)
    with pytest.raises(UnreadableError):
        decode_image(data[: len(data) // 2])


@pytest.mark.parametrize("form", ["PNG", "TIFF", "GIF", "WEBP", "BMP"])
def test_every_single_damaged_byte_is_an_image_or_a_reason(form: str) -> None:
    data = encoded(Image.fromarray(picture(1, 6, 6)), form, **({"lossless": True} if form == "WEBP" else {}))
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= 0xFF
        try:
            assert decode_image(bytes(damaged)).ndim == 3
            assert has_more_frames(bytes(damaged)) in (True, False)
        except UnreadableError as problem:
            assert str(problem)


def test_size_is_kept_when_all_agree_and_are_small() -> None:
    assert common_size([Counter({(20, 30): 5}), Counter({(20, 30): 2})], None, "crop") == (20, 30)
    assert common_size([Counter({(300, 300): 5})], None, "crop") == (128, 128)


def test_mixed_sizes_take_the_largest_typical_domain_up_to_128() -> None:
    digits = [Counter({(28, 28): 10}), Counter({(16, 16): 10}), Counter({(32, 32): 9, (500, 500): 1})]
    assert common_size(digits, None, "crop") == (32, 32)
    assert common_size([Counter({(600, 800): 3}), Counter({(28, 28): 9})], None, "crop") == (128, 128)
    assert common_size(digits, 48, "crop") == (48, 48)


def test_segmentation_keeps_the_most_common_shape() -> None:
    sizes = [Counter({(720, 960): 3, (100, 100): 1})]
    assert common_size(sizes, None, "stretch") == (128, 171)
    assert common_size(sizes, 90, "stretch") == (90, 120)


CODE = MaskCode({0: 0, 1: 1, 2: VOID}, {(9, 8, 7): 1, (0, 0, 0): VOID, (255, 0, 0): 0})


def test_mask_ids_become_class_numbers() -> None:
    ids = np.array([[0, 1], [2, 255]], dtype=np.uint8)
    np.testing.assert_array_equal(decode_mask(encoded(Image.fromarray(ids)), CODE), [[0, 1], [VOID, VOID]])


def test_palette_mask_means_indices_not_colours() -> None:
    image = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    image.putpalette([200, 0, 0, 0, 200, 0])
    np.testing.assert_array_equal(decode_mask(encoded(image), CODE), [[0, 1]])


def test_colour_mask_is_read_by_its_table_and_refused_without() -> None:
    data = encoded(Image.fromarray(np.array([[[9, 8, 7], [255, 0, 0]]], dtype=np.uint8)))
    np.testing.assert_array_equal(decode_mask(data, CODE), [[1, 0]])
    with pytest.raises(UnreadableError, match="in colour"):
        decode_mask(data, MaskCode({0: 0}))
    unknown = encoded(Image.fromarray(np.array([[[9, 8, 7], [255, 0, 1]]], dtype=np.uint8)))
    with pytest.raises(UnreadableError, match=r"\(255, 0, 1\)"):
        decode_mask(unknown, CODE)


def test_grey_is_a_colour_where_masks_are_in_colour_and_an_id_where_they_are_not() -> None:
    black = encoded(Image.fromarray(np.zeros((1, 2, 3), dtype=np.uint8)))
    np.testing.assert_array_equal(decode_mask(black, CODE), [[VOID, VOID]])
    np.testing.assert_array_equal(decode_mask(black, MaskCode({0: 0})), [[0, 0]])


def test_ids_out_of_range_are_named() -> None:
    with pytest.raises(UnreadableError, match="id 9"):
        decode_mask(encoded(Image.fromarray(np.array([[0, 9]], dtype=np.uint8))), CODE)
    with pytest.raises(UnreadableError, match="id 700"):
        decode_mask(encoded(Image.fromarray(np.array([[0, 700]], dtype=np.uint16))), CODE)


def test_resized_masks_hold_no_new_ids() -> None:
    ids = np.where(np.add.outer(np.arange(50), np.arange(50)) % 7 < 3, 0, 255).astype(np.uint8)
    resized = decode_mask(encoded(Image.fromarray(ids)), CODE, (17, 23))
    assert resized.shape == (17, 23)
    assert set(np.unique(resized)) == {0, VOID}
