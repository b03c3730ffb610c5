"""DICOM files made here: what is shown, what is refused, what never leaves the reader."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datafiles import write_classes
from numpy.typing import NDArray
from PIL import Image

from fedshift.data import DataSource, check_data, open_dataset
from fedshift.data import dicom as reader
from fedshift.data.decoding import UnreadableError, decode_image, has_more_frames, image_size, is_dark
from fedshift.data.formats.masks import decode_mask_values

pydicom = pytest.importorskip("pydicom", reason="needs the extra dicom")

EXPLICIT = "1.2.840.10008.1.2.1"
HOUNSFIELD = np.array([[-1000, -160], [40, 240]], dtype=np.int16)


def scan(values: NDArray[Any], kind: str = "MONOCHROME2", syntax: str = EXPLICIT, **tags: Any) -> bytes:
    """A file with a patient's name in it."""
    found = pydicom.Dataset()
    found.PatientName, found.PatientID = "Doe^Jane", "4711"
    found.Rows, found.Columns = values.shape[-3:-1] if values.shape[-1] == 3 else values.shape[-2:]
    found.SamplesPerPixel = 3 if values.shape[-1] == 3 else 1
    if found.SamplesPerPixel == 3:
        found.PlanarConfiguration = 0
    found.PhotometricInterpretation = kind
    found.BitsAllocated = found.BitsStored = 8 * values.dtype.itemsize
    found.PixelRepresentation = int(values.dtype.kind == "i")
    found.PixelData = values.tobytes() + b"\0" * (values.nbytes % 2)
    for name, value in tags.items():
        setattr(found, name, value)
    found.HighBit = found.BitsStored - 1
    found.file_meta = pydicom.dataset.FileMetaDataset()
    found.file_meta.TransferSyntaxUID = syntax
    found.file_meta.MediaStorageSOPClassUID = found.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    written = io.BytesIO()
    pydicom.dcmwrite(written, found, enforce_file_format=True)
    return written.getvalue()


def grey(data: bytes) -> list[list[int]]:
    return decode_image(data)[..., 0].tolist()


def test_without_a_window_the_range_of_the_stored_bits_is_shown() -> None:
    values = np.array([[0, 1024], [2048, 4095]], dtype=np.uint16)
    assert grey(scan(values, BitsStored=12)) == [[0, 64], [128, 255]]
    assert grey(scan(values, "MONOCHROME1", BitsStored=12)) == [[255, 191], [127, 0]]
    assert image_size(scan(np.zeros((3, 5), np.uint8))) == (3, 5)


def test_rescaling_and_the_first_window_are_applied() -> None:
    window = {"WindowCenter": [40, 50], "WindowWidth": [400, 80]}
    # (240 - 39.5) / 399 + 0.5 > 1, and (40 - 39.5) / 399 + 0.5 = 0.501
    shown = [[0, 0], [128, 255]]
    assert grey(scan(HOUNSFIELD, **window)) == shown
    stored = (HOUNSFIELD + 1024).astype(np.uint16)
    assert grey(scan(stored, RescaleSlope=1, RescaleIntercept=-1024, **window)) == shown
    assert grey(scan(HOUNSFIELD // 2, RescaleSlope=2, RescaleIntercept=0, **window)) == shown


def test_the_three_formulas_of_a_window() -> None:
    values = np.array([30.0, 50.0, 60.0])
    assert reader.windowed(values, 50, 20, "LINEAR_EXACT").tolist() == [0.0, 0.5, 1.0]
    assert reader.windowed(values, 50.5, 21, "LINEAR").tolist() == [0.0, 0.5, 1.0]
    assert reader.windowed(values, 50, 20, "SIGMOID") == pytest.approx([1 / (1 + np.exp(4)), 0.5, 1 / (1 + np.exp(-2))])


def test_a_table_of_values_of_interest_is_applied() -> None:
    table = pydicom.Dataset()
    table.LUTDescriptor, table.LUTData = [4, 0, 8], [0, 51, 102, 255]
    table["LUTDescriptor"].VR = table["LUTData"].VR = "US"
    values = np.array([[0, 1, 2, 3]], dtype=np.uint8)
    assert grey(scan(values, VOILUTSequence=[table])) == [[0, 51, 102, 255]]


def test_colour_and_the_first_of_several_frames() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    np.testing.assert_array_equal(decode_image(scan(pixels, "RGB")), pixels)
    film = np.stack([np.full((4, 4), 9, np.uint8), np.full((4, 4), 99, np.uint8)])
    data = scan(film, NumberOfFrames=2)
    assert has_more_frames(data) and not has_more_frames(scan(film[0]))
    assert (decode_image(data) == 9).all()


def test_jpeg_inside_is_read_if_its_header_agrees() -> None:
    picture = io.BytesIO()
    Image.fromarray(np.full((8, 8), 120, np.uint8)).save(picture, "JPEG")
    inside = pydicom.encaps.encapsulate([picture.getvalue()])
    data = scan(np.zeros((8, 8), np.uint8), syntax=reader.JPEG_BASELINE, PixelData=inside)
    assert np.abs(decode_image(data).astype(int) - 120).max() <= 2
    with pytest.raises(UnreadableError, match="another size"):
        decode_image(scan(np.zeros((8, 9), np.uint8), syntax=reader.JPEG_BASELINE, PixelData=inside))


def test_what_cannot_be_read_safely_is_refused() -> None:
    plain = np.zeros((4, 4), np.uint8)
    refused = {
        "compression": scan(plain, syntax="1.2.840.10008.1.2.4.90", PixelData=pydicom.encaps.encapsulate([b"ab"])),
        "deflated": scan(plain, syntax=reader.DEFLATED.decode()),
        "megapixels": scan(plain, Rows=60_000, Columns=60_000),
        "8 or 16 bits": scan(plain, BitsAllocated=32, BitsStored=32),
        "modality table": scan(plain, ModalityLUTSequence=[pydicom.Dataset()]),
        "cut off": scan(plain)[:-8],
        "without a picture": b"\0" * 128 + b"DICM" + b"\0" * 64,
    }
    for words, data in refused.items():
        with pytest.raises(UnreadableError, match=words):
            decode_image(data)
    with pytest.raises(UnreadableError):
        decode_mask_values(scan(plain))


def test_every_damaged_byte_is_a_picture_or_a_reason_without_words_of_the_file() -> None:
    data = scan(np.arange(16, dtype=np.uint8).reshape(4, 4), WindowCenter=8, WindowWidth=16)
    for i in range(0, len(data), 2):
        damaged = bytearray(data)
        damaged[i] ^= 0xFF
        try:
            assert decode_image(bytes(damaged)).ndim == 3
        except UnreadableError as problem:
            assert "Doe" not in str(problem) and "4711" not in str(problem)
        assert has_more_frames(bytes(damaged)) in (True, False)


def test_a_site_of_scans_is_read_and_nothing_personal_is_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_classes(root / "a", {"x": 6, "y": 6})
    rng = np.random.default_rng(0)
    for label in ("x", "y"):
        (root / "b" / label).mkdir(parents=True)
        for i in range(6):
            values = rng.integers(0, 4096, (12, 12)).astype(np.uint16)
            (root / "b" / label / f"{i}.dcm").write_bytes(scan(values, BitsStored=12))
    (root / "b" / "x" / "0.dcm").write_bytes(scan(np.zeros((12, 12), np.uint8))[:-40])
    with monkeypatch.context() as absent:
        absent.setattr(reader, "is_readable", lambda: False)
        absent.setattr("fedshift.data.index.files.is_readable", lambda: False)
        absent.setattr("fedshift.data.formats.images.is_readable", lambda: False)
        report = check_data(DataSource(data_dir=root))
        assert not report.ok and any("extra `dicom`" in problem.message for problem in report.problems)
    report = check_data(DataSource(data_dir=root))
    b = next(domain for domain in report.domains if domain.name == "b")
    assert sum(b.splits.values()) == 11 and [skipped.file for skipped in b.skipped] == ["b/x/0.dcm"]
    assert "Doe" not in repr(report) and "4711" not in repr(report)


@pytest.mark.parametrize(
    "mark", [b"II*\0", b"MM\0*", b"\x89PNG\r\n\x1a\n" + bytes(16) + b"\x10"], ids=["II", "MM", "PNG"]
)
def test_a_file_whose_free_first_bytes_are_those_of_another_format_is_no_end(mark: bytes, tmp_path: Path) -> None:
    """The 128 bytes before the mark may be anything. Files that are two formats at once have a header of TIFF there."""
    data = scan(np.full((16, 16), 7, np.uint8))
    for number, label in enumerate("ab" * 4):
        (tmp_path / "site" / label).mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / label / f"{number}.dcm").write_bytes(mark + data[len(mark) :])
    assert is_dark(mark + data[len(mark) :]) is False and is_dark(mark + bytes(9)) is False
    domain = open_dataset(DataSource(data_dir=tmp_path)).load("site")
    assert len(domain.skipped) == 0 and len(domain.train) + len(domain.val) + len(domain.test) == 8
