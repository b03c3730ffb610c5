"""The page, read back with an HTML parser, for runs written by hand."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from runfiles import write_ledger, write_run

from fedshift.errors import InputError
from fedshift.report import write_report

FIFTY, NINETY = "50.043.2–56.8", "90.082.6–94.5"
"""A score of 204 test samples and one of 101 for validation, each with the small 95 % interval below it."""
HOSTILE = "</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """All tags with their attributes, the text, and every table as rows of (class, text) cells."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.tables: list[tuple[str, list[list[tuple[str, str]]]]] = []
        self._in_cell = False
        self.feed(html)
        self.text = re.sub(r"\s+", " ", "".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {key: value or "" for key, value in attrs}
        self.tags.append((tag, attributes))
        if tag == "table":
            self.tables.append((attributes.get("class", ""), []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in ("td", "th"):
            self._in_cell = True
            self.tables[-1][1][-1].append((attributes.get("class", ""), ""))

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._in_cell:
            style, text = self.tables[-1][1][-1][-1]
            self.tables[-1][1][-1][-1] = (style, text + data.strip())

    def scores(self, table: int = 0) -> dict[str, list[tuple[str, str]]]:
        """Method (with its tags) -> the numbers of its row in a headline table."""
        rows = [rows for style, rows in self.tables if style.startswith("scores")][table]
        return {row[0][1]: [c for c in row[1:] if "lead" not in c[0]] for row in rows[2:]}

    def rows(self, name: str) -> list[list[str]]:
        return [[text for _, text in row] for style, rows in self.tables if style == name for row in rows]

    def count(self, tag: str, **attributes: str) -> int:
        return sum(t == tag and all(a.get(k) == v for k, v in attributes.items()) for t, a in self.tags)


def report(tmp_path: Path, *runs: Path) -> Page:
    write_report(runs, tmp_path / "report.html")
    return Page((tmp_path / "report.html").read_text())


def test_scores_are_in_the_table_and_the_best_last_round_is_bold(tmp_path: Path) -> None:
    page = report(
        tmp_path,
        write_run(tmp_path / "a", "fedavg", curve=(0.3, 0.55, 0.5)),
        write_run(tmp_path / "b", "source-only", curve=(0.2, 0.3, 0.4126)),
        write_run(tmp_path / "c", "oracle", curve=(0.5, 0.8, 0.95)),
    )
    scores = page.scores()
    assert [text for _, text in scores["fedavg"]] == [FIFTY, FIFTY, "55.0", "90.0"]
    assert [text for _, text in scores["source-only"]] == ["41.334.7–48.1", "41.334.7–48.1", "41.3", "90.0"]
    best = [(method, text) for method, cells in scores.items() for style, text in cells if "best" in style.split()]
    assert best == [("fedavg", FIFTY)]
    assert "fedavg has the highest last-round accuracy on photo: 50.0 %, 8.7 points above source-only" in page.text
    assert "45.0 points below the bound oracle" in page.text
    # The confusion matrix is [[8, 2], [1, 9]]: both classes are as frequent.
    assert "Always giving the most frequent class would score: photo 50.0." in page.text


def test_warnings_are_shown_as_text_with_their_advice(tmp_path: Path) -> None:
    warned = {"code": "chance", "site": "photo", "text": f"photo {HOSTILE}", "advice": "Try another lr."}
    page = report(tmp_path, write_run(tmp_path / "a", results={"warnings": [warned]}))
    assert f"chance photo {HOSTILE} Try another lr." in page.text and page.count("img", src="x") == 0


def test_bounds_are_marked_and_stand_below(tmp_path: Path) -> None:
    page = report(tmp_path, write_run(tmp_path / "a", "deepall"), write_run(tmp_path / "b", "fedavg"))
    assert list(page.scores()) == ["fedavg", "deepallbound, not deployable"]
    assert page.count("tr", **{"class": "bound"}) == 1
    assert "bound, not deployable: all labelled data in one place" in page.text


def test_methods_that_move_data_and_are_no_bounds_are_marked_and_ranked(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, name, curve=(0.1, 0.6)) for name in ("fed-mcd", "dualadapt")]
    page = report(tmp_path, *runs)
    assert list(page.scores()) == ["fed-mcdmoves data", "dualadapt"]
    assert page.text.count("moves data: a copy of the home's labelled training data at every client") == 1
    assert page.count("tr", **{"class": "bound"}) == 0


def test_several_targets_and_seeds_are_averaged(tmp_path: Path) -> None:
    scores = {("photo", 0): 0.4, ("photo", 1): 0.6, ("paint", 0): 0.7, ("paint", 1): 0.9}
    runs = [
        write_run(tmp_path / f"{target}{seed}", target=target, seed=seed, curve=(0.1, score), sources=("chalk", other))
        for (target, seed), score in scores.items()
        for other in [("paint" if target == "photo" else "photo")]
    ]
    [cells] = report(tmp_path, *runs).scores().values()
    # The mean over targets is 55 % with seed 0 and 75 % with seed 1; standard deviations are by n - 1.
    spread = 100 * math.sqrt(2 * 0.1**2)
    assert [text for _, text in cells][::3] == [
        f"65.0±{spread:.1f}",
        f"50.0±{spread:.1f}",
        f"80.0±{spread:.1f}",
        "90.0",
    ]


def test_a_mean_over_targets_needs_all_of_them(tmp_path: Path) -> None:
    everywhere = ("chalk", "paint", "photo")
    runs = [
        write_run(tmp_path / f"{method}-{t}", method, t, sources=tuple(d for d in everywhere if d != t))
        for method, t in (("fedavg", "photo"), ("fedavg", "paint"), ("source-only", "photo"))
    ]
    scores = report(tmp_path, *runs).scores()
    assert scores["fedavg"][0][1] == "50.0" and scores["source-only"][0][1] == "–"


def test_runs_that_differ_in_a_setting_are_different_rows(tmp_path: Path) -> None:
    page = report(
        tmp_path,
        write_run(tmp_path / "a", config={"lr": 0.1, "fedavg": {"mu": 1}}),
        write_run(tmp_path / "b", config={"lr": 0.5, "fedavg": {"mu": 2}}),
    )
    assert list(page.scores()) == ["fedavgmu 1, lr 0.1", "fedavgmu 2, lr 0.5"]


def test_a_row_says_what_is_special_about_it_and_nothing_else(tmp_path: Path) -> None:
    common = {"attack": [], "fedavg": {"drop": []}}
    page = report(
        tmp_path,
        write_run(tmp_path / "a", sources=("chalk", "paint"), config=common),
        write_run(tmp_path / "b", sources=("chalk", "paint"), config=common | {"attack": ["poison:chalk:0.3"]}),
        write_run(tmp_path / "c", sources=("chalk", "paint"), config=common | {"fedavg": {"drop": ["chalk"]}}),
        write_run(tmp_path / "d", sources=("paint",), config=common),
    )
    assert list(page.scores()) == ["fedavg", "fedavgattack poison:chalk:0.3", "fedavgdrop chalk", "fedavgwithout chalk"]


def test_data_sets_are_not_mixed(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a")
    two = write_run(
        tmp_path / "b", config={"dataset": "streets"}, results={"dataset": "streets", "task": "segmentation"}
    )
    page = report(tmp_path, one, two)
    assert len([style for style, _ in page.tables if style.startswith("scores")]) == 2
    assert ": mIoU on photo" in page.text and ": accuracy on photo" in page.text


def test_one_line_per_run_and_one_per_site(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / m, m, notes={"some_metric": 0.7}) for m in ("fedavg", "source-only")]
    page = report(tmp_path, *runs)
    # Overview: 2 charts of 2 runs. Each run: 3 domains, 2 sites' losses, 2 sites' metric, bytes up and down, seconds.
    assert page.count("polyline") == 2 * 2 + 2 * (3 + 2 + 2 + 2 + 1)
    assert "Some metric" in page.text and "Training loss" in page.text
    assert page.count("path", **{"class": "ring"}) == 2 * 2 + 2 * 1
    # Test scores 0.30, 0.55, 0.50 on an axis from 0.30 to 0.55, 190 pixels high.
    assert 'points="0,190 500,0 1000,38"' in page.html


def test_what_a_run_shows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", results={"counters": {"refused.non-finite": 3, "clipped.updates": 12}})
    write_ledger(run, "street", [("averaging.train", "samples", "count", 1, 8)])
    page = report(tmp_path, run)
    domains = next(rows for style, rows in page.tables if rows and rows[0][0][1] == "Domain")
    assert [text for _, text in domains[1]] == ["chalk", "source, labelled", "812", "101", "204", NINETY, "", "", ""]
    assert [text for _, text in domains[3]][1:] == [
        *("target, held out for testing", "812", "101", "204", "", FIFTY, FIFTY, "55.0"),
    ]
    assert page.rows("ledger")[1:] == [
        ["chalk", "3.0 kB750 values, 3×", "nothing"],
        ["street", "nothing", "8 B1 value, 1×"],
    ]
    assert "model parameters and normalisation statistics" in page.text
    assert page.rows("counters") == [
        [
            "clipped.updates",
            "12",
            "An update was larger than the site's policy allows and was clipped before it left the site.",
        ],
        [
            "refused.non-finite",
            "3",
            "A reply was refused at the coordinator's gate and not used: it held NaN or infinite numbers.",
        ],
    ]
    assert "None" not in page.text and "FLOP" not in page.text, "operations are not counted in training"
    for text in (
        "1.5 MB",
        "3.0 MB",
        "500 kB",
        "41 s",
        "ab" * 32,
        "lr: 0.1",
        '"python": "3.11"',
        "cat taken for dog: 2 (20.0 %)",
    ):
        assert text in page.text
    assert "source-validated" in page.text and "best round, chosen with the target's own test labels" in page.text


def test_cells_of_the_confusion_matrix_are_coloured_by_their_row(tmp_path: Path) -> None:
    page = report(tmp_path, write_run(tmp_path / "a", confusion=[[8, 2], [1, 9]]))
    cells = [(a["class"], a["style"]) for tag, a in page.tags if tag == "td" and a.get("style", "").startswith("--v")]
    assert cells == [("right deep", "--v:0.8"), ("wrong", "--v:0.2"), ("wrong", "--v:0.1"), ("right deep", "--v:0.9")]
    assert page.rows("confusion") == [["", "cat", "dog"], ["cat", "8", "2"], ["dog", "1", "9"]]


def test_an_unfinished_run_shows_how_far_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", curve=(0.2, 0.6, 0.5), finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "phase": "tr')
    with (run / "sites" / "chalk" / "ledger.jsonl").open("a") as file:
        file.write('{"round": 4')
    page = report(tmp_path, run, write_run(tmp_path / "b", "source-only"))
    assert "running or stopped, not finished" in page.text and "round 3 of 20" in page.text
    assert "2 lines of its files were unreadable" in page.text
    cells = page.scores()["fedavgnot finished: round 3 of 20"]
    assert [text for _, text in cells[:3]] == ["50.0", "50.0", "60.0"]
    assert not any("best" in style for rows in page.scores().values() for style, _ in rows)
    assert 'points="0,190 500,0 1000,47.5"' in page.html


def test_a_run_that_failed_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", curve=(0.2, 0.6, 0.5), finished=False)
    (run / "failed").write_text("disk\n")
    page = report(tmp_path, run, write_run(tmp_path / "b", "source-only"))
    assert "failed, not finished" in page.text and "running or stopped" not in page.text
    assert "the disk is full or not writable (disk)." in page.text
    assert "fedavgfailed: round 3 of 20" in page.scores()


def test_a_target_that_was_skipped_in_every_round_says_so(tmp_path: Path) -> None:
    for times, told in ((2, False), (3, True)):
        run = write_run(tmp_path / f"{times}", results={"counters": {"skipped.photo.site-policy": times}})
        assert ("target, skipped in every round" in report(tmp_path, run).text) == told


def test_a_run_that_has_only_begun_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", curve=(0.5,), finished=False)
    (run / "metrics.jsonl").unlink()
    page = report(tmp_path, run)
    assert "No round has been scored yet." in page.text and "round 0 of 20" in page.text


def test_a_finished_run_counts_before_an_unfinished_one_of_the_same_row(tmp_path: Path) -> None:
    done = write_run(tmp_path / "a")
    begun = write_run(tmp_path / "b", curve=(0.1,), val=0.2, finished=False, config={"rounds": 3})
    page = report(tmp_path, done, begun)
    assert [text for _, text in page.scores()["fedavg1 of 2 runs not finished"]] == [FIFTY, FIFTY, "55.0", "90.0"]


def test_a_method_that_is_not_installed_is_still_reported(tmp_path: Path) -> None:
    assert list(report(tmp_path, write_run(tmp_path / "a", "from-tomorrow")).scores()) == ["from-tomorrow"]


def test_a_run_without_a_target_shows_its_validation(tmp_path: Path) -> None:
    nothing = {"target": None, "per_target": {}, "accuracy": {}, "confusion": {}}
    page = report(tmp_path, write_run(tmp_path / "a", config={"target": None}, results=nothing))
    assert [text for _, text in page.scores()["fedavg"]] == ["90.0"]
    assert ": accuracy on the sources" in page.text


def test_a_target_without_labels_is_no_source(tmp_path: Path) -> None:
    nothing = {"per_target": {}, "accuracy": {}, "confusion": {}, "setting": "adapt"}
    page = report(tmp_path, write_run(tmp_path / "a", results=nothing, config={"setting": "adapt"}))
    assert "target, no labels used" in page.text
    assert "on the sources' validation data, because no target has labels" in page.text


def test_a_score_that_is_not_a_number_is_a_dash(tmp_path: Path) -> None:
    nan = {"last": math.nan, "source_val": math.nan, "oracle": math.nan}
    page = report(
        tmp_path,
        write_run(tmp_path / "a", results={"per_target": {"photo": nan}}),
        write_run(tmp_path / "b", "source-only"),
    )
    assert [text for _, text in page.scores()["fedavg"]][:3] == ["–", "–", "–"]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "<img src=x onerror=alert(2)>",
        "fedavg",
        HOSTILE,
        sources=(HOSTILE.replace("/", ""), "street"),
        classes=(HOSTILE, '"><svg onload=alert(3)>'),
        notes={HOSTILE: 0.5},
        results={"counters": {HOSTILE: 1}, "dataset": HOSTILE, "model_sha256": HOSTILE},
    )
    page = report(tmp_path, run)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "iframe", "object", "embed", "base", "form"})
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
    assert HOSTILE not in page.html
    assert page.text.count(HOSTILE) > 10 and '"><svg onload=alert(3)>' in page.text


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    page = report(tmp_path, write_run(tmp_path / "a"))
    links = [
        attributes[key] for _, attributes in page.tags for key in ("src", "href", "srcset", "data") if key in attributes
    ]
    assert links and all(link.startswith("#") for link in links)
    assert "http://" not in page.html and "https://" not in page.html
    assert "@import" not in page.html and "url(" not in page.html
    [policy] = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "script" not in policy
    assert "prefers-color-scheme: dark" in page.html and "@media print" in page.html


def test_every_link_has_its_place(tmp_path: Path) -> None:
    page = report(tmp_path, write_run(tmp_path / "a"), write_run(tmp_path / "b", "source-only"))
    places = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    assert {attributes["href"][1:] for tag, attributes in page.tags if tag == "a"} <= places
    assert {"run-1", "run-2"} <= places


def test_few_runs_are_unfolded_many_are_not(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(4)]
    opened = [
        ["open" in a for tag, a in report(tmp_path, *some).tags if a.get("class") == "run card"]
        for some in (runs[:3], runs)
    ]
    assert opened == [[True] * 3, [False] * 4]


def test_a_run_named_twice_is_shown_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    assert report(tmp_path, run, tmp_path / "." / "a").count("details", **{"class": "run card"}) == 1


def test_what_is_not_a_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere") as error:
        report(tmp_path, tmp_path / "nowhere")
    assert error.value.code == "run-missing"
    with pytest.raises(InputError) as error:
        write_report([], tmp_path / "report.html")
    assert error.value.code == "run-missing"
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("results.json", '{"method": '),
        ("results.json", '{"method": 3}'),
        ("config.yaml", "a: [1"),
        ("config.yaml", "3"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: str) -> None:
    run = write_run(tmp_path / "a")
    (run / file).write_text(content)
    with pytest.raises(InputError, match=re.escape(file)) as error:
        report(tmp_path, run)
    assert error.value.code == "run-corrupt"


def test_matrices_of_many_targets_are_folded(tmp_path: Path) -> None:
    matrices = {name: [[3, 1], [0, 4]] for name in ("a", "b", "c")}
    page = report(tmp_path, write_run(tmp_path / "a", results={"confusion": matrices}))
    assert page.count("details", **{"class": "fold matrices"}) == 3
    assert report(tmp_path, write_run(tmp_path / "b")).count("details", **{"class": "fold matrices"}) == 0
