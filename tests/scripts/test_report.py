"""scripts/report.py and train.py --report: the page in a real browser, its parts, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from scripts import report
from tests.browser import SHIFTS, Page, open_browser
from tests.conftest import TINY, Refused, assert_same_run
from tests.contract import assert_keys
from tests.forked import launch_series
from tests.harness import launch, read_checkpoint, read_metrics
from utils.report.page import NO_BREAK
from utils.report.pictures import read_pictures

# Tick labels that the drawing cuts off, and percent signs that begin a line.
CLIPPED = """[...document.querySelectorAll('.chart > svg text')].filter(each => {
    const box = each.getBBox();
    return box.x < 0 || box.x + box.width > 420 || box.y < 0 || box.y + box.height > 240;
}).map(each => each.textContent)"""
BROKEN = """(() => {
    const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const text = texts.currentNode.textContent, range = document.createRange();
        for (const match of text.matchAll(/[0-9]\\s%/g)) {
            range.setStart(texts.currentNode, match.index);
            range.setEnd(texts.currentNode, match.index + 3);
            if (range.getClientRects().length > 1 && range.getBoundingClientRect().height > 40) found.push(text);
        }
    }
    return found;
})()"""
HOSTILE = '<script>document.title="hit"</script>"\'&<img src=x onerror=alert(1)>'


@pytest.fixture(scope="module")
def folders(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Real runs: one that was stopped and resumed, with all that a page can have, and one that diverged."""
    root = tmp_path_factory.mktemp("runs")
    flags = ("--data-dir", data, *TINY, "--batch-size", 8, "--epochs", 2, "--output-dir")
    mixed = (*flags, root / "mixed", "--report", "--mixup", 0.5, "--clip-grad", 1, "--ema-decay", 0.9)
    stopped, resumed, diverged = launch_series(
        (*mixed, "--time-limit", 0.001), mixed,
        (*flags, root / "diverged", "--lr", 1e9, "--warmup-epochs", 0, "--max-bad-steps", 3),
    )  # fmt: skip
    assert [stopped.status, resumed.status, diverged.status] == [143, 0, 1], (resumed.err, diverged.err)
    assert f"{root / 'mixed'}: report.html, report.json" in resumed.out
    return [root / "mixed", root / "diverged"]


@pytest.fixture
def page(folders: list[Path], tmp_path: Path) -> Path:
    assert report.main([*map(str, folders), "--output", str(tmp_path / "page.html")]) == 0
    return tmp_path / "page.html"


def shifts(browser: Page, path: Path, width: int, scheme: str) -> float:
    """How far what is painted moves while the page opens: a browser without time paints before it has read all."""
    browser.open(path, width, scheme)
    found: float = browser.evaluate(SHIFTS)
    return found


def test_the_page_in_a_browser(folders: list[Path], page: Path, tmp_path: Path) -> None:
    hostile = tmp_path / HOSTILE.replace("/", "_")
    shutil.copytree(folders[0], hostile)
    content = json.loads((hostile / "report.json").read_text())
    content["classes"][0]["name"] = content["worst"][0]["path"] = HOSTILE
    (hostile / "report.json").write_text(json.dumps(content))
    assert report.main([str(hostile), str(folders[1]), "--output", str(tmp_path / "hostile.html")]) == 0
    papers = set()
    with open_browser(tmp_path / "profile") as browser:
        for path in (page, tmp_path / "hostile.html"):
            for width in (400, 1600):
                for scheme in ("light", "dark"):
                    assert any(shifts(browser, path, width, scheme) < 0.001 for _ in range(5)), (path, width)
                    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
                    assert browser.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
                    papers.add((scheme, browser.evaluate("getComputedStyle(document.body).backgroundColor")))
                    assert browser.evaluate(CLIPPED) == browser.evaluate(BROKEN) == [], (path, width)
                    images = "[...document.images].every(each => each.complete && each.naturalWidth > 0)"
                    assert browser.evaluate(images), "a picture cannot be shown"
                    assert browser.evaluate("document.scripts.length") == 0
                    assert browser.problems() == []
                    assert browser.requests() == [path.as_uri()]
        assert browser.evaluate("document.title") == f"{hostile.name}, diverged: Brisk report"
        assert browser.evaluate("document.body.textContent").count(HOSTILE) >= 2
        small = "[...document.querySelectorAll('.chart > svg')].map(each => each.getBoundingClientRect().width)"
        assert all(width > 300 for width in browser.evaluate(small)), "at 1,600 px"
    assert len(papers) == len({color for _, color in papers}) == 2, "light and dark are a paper each"


def test_the_page_says_what_the_files_say(folders: list[Path], page: Path) -> None:
    text = page.read_text()
    assert_keys("metrics.jsonl", read_metrics(folders[0])[0], "train, clipped")
    summary = json.loads((folders[0] / "summary.json").read_text())
    best = read_checkpoint(folders[0], "best.pt")["best"]
    assert f"<b>{summary['best_top1']:.2f}{NO_BREAK}%</b> best top-1, epoch {best['epoch']}" in text
    assert " %" not in text.partition("</style>")[2], "which could begin a line"
    for fact in (
        "✓</span> finished", "✕</span> died", "The loss was not finite in", "stopped by", "Gradient norm",
        "<code>--mixup</code></th><td>0.5</td><td>0.0</td>", "0.37 M parameters", "2 of 2", "taken for",
        "before and after mixup", "lr in force after the warmup</th><td>0.015625</td><td>3.125e+07</td>", "trained on",
        "Percentages are probabilities", "Percentages are shares of a mixed image", "Confusion matrix",
        "if the run has the flag --report", "evaluation <b>",
    ):  # fmt: skip
        assert fact in text, fact
    assert "<code>--output-dir</code></th><td>" in text, "all flags are in the folded part"
    assert len(text) < 1_000_000
    of_run = (folders[0] / "report.html").read_text()
    assert "✓</span> finished" in of_run
    assert "diverged" not in of_run


def test_mistakes_are_those_of_the_best_weights(folders: list[Path], data: Path) -> None:
    assert_keys("report.json", json.loads((folders[0] / "report.json").read_text()) | {"training": {}})  # by class
    pictures = read_pictures(folders[0])
    assert pictures is not None
    wrong = sum(each["count"] - each["correct"] for each in pictures.classes)
    assert sum(each["count"] for each in pictures.classes) == 41
    best = json.loads((folders[0] / "summary.json").read_text())["best_top1"]
    assert 100 * (1 - wrong / 41) == pytest.approx(best)
    assert sum(each["count"] for each in pictures.confused) == wrong
    assert [sum(row) for row in pictures.confusion] == [each["count"] for each in pictures.classes]
    assert [row[at] for at, row in enumerate(pictures.confusion)] == [each["correct"] for each in pictures.classes]
    assert pictures.training == {"blue": 14, "green": 14, "red": 13}
    assert len(pictures.worst) == min(wrong, 24)
    for each in pictures.worst:
        assert (data / "val" / each["path"]).is_file()
        assert each["path"].startswith(f"{each['target']}/")
        assert each["predicted"] != each["target"]
        assert each["target_probability"] <= each["probability"]
        assert [one["class"] for one in each["heatmaps"]] == [each["predicted"], each["target"]]
    assert len(pictures.samples) == 8, "a whole batch is smaller than the grid"
    assert all(len(each["mixed"]) in (0, 2) for each in pictures.samples)
    assert any(each["after"] for each in pictures.samples)


def test_the_flag_changes_no_bit(folders: list[Path], data: Path, tmp_path: Path) -> None:
    flags = (*TINY, "--batch-size", 8, "--epochs", 2, "--mixup", 0.5, "--clip-grad", 1, "--ema-decay", 0.9)
    (done,) = launch_series(("--data-dir", data, *flags, "--output-dir", tmp_path))
    assert done.status == 0, done.err
    assert_same_run(folders[0], tmp_path)


@pytest.mark.slow  # a page of a run is quick
def test_an_evaluation_writes_them_again(folders: list[Path], tmp_path: Path) -> None:
    shutil.copytree(folders[0], tmp_path / "run")
    before = json.loads((tmp_path / "run" / "report.json").read_text())
    classes = [each | {"correct": 0} for each in before["classes"]]
    (tmp_path / "run" / "report.json").write_text(json.dumps(before | {"worst": [], "classes": classes}))
    (tmp_path / "run" / "report.html").unlink()
    (done,) = launch_series(("--evaluate", "--report", "--output-dir", tmp_path / "run"))
    assert done.status == 0, done.err
    after = json.loads((tmp_path / "run" / "report.json").read_text())
    for name in ("classes", "confused", "worst", "confusion"):
        assert after[name] == before[name]
    for name in ("samples", "training"):
        assert after[name] == before[name], "what is known of the training images is kept"
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_run_that_was_cut_off(folders: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folders[0], run)
    for name in ("summary.json", "report.json"):
        (run / name).unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "st')
    assert report.main([str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert "--evaluate --report" in (tmp_path / "page.html").read_text()
    for name in ("metrics.jsonl", "events.jsonl"):
        (run / name).unlink()
    assert report.main([str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert "There is no log interval yet" in (tmp_path / "page.html").read_text()


def test_refusals(folders: list[Path], tmp_path: Path, refused: Refused) -> None:
    def check(*flags: object, fragments: tuple[str, ...]) -> None:
        refused(*flags, main=report.main, program="report.py")(*fragments)

    broken = tmp_path / "broken"
    shutil.copytree(folders[0], broken)
    lines = (broken / "metrics.jsonl").read_text().splitlines()
    for line in ("[1]", '{"step": "one", "epoch": 1}'):
        (broken / "metrics.jsonl").write_text("\n".join([lines[0], line, *lines[1:]]))
        check(broken, fragments=(f"{broken}/metrics.jsonl: line 2 of {len(lines) + 1} is no record of train.py",))
    shutil.copy(folders[0] / "metrics.jsonl", broken)
    nameless = {"source": {}, "classes": [{"count": 1, "correct": 1}], "confused": [], "worst": [], "samples": []}
    for content in (
        "{",
        "[]",
        '{"classes": 1}',
        json.dumps(nameless),
        json.dumps({**json.loads((broken / "report.json").read_text()), "x": 1}),
        json.dumps({**json.loads((broken / "report.json").read_text()), "confusion": [[1, 2]]}),
        json.dumps({**json.loads((broken / "report.json").read_text()), "training": {"red": "many"}}),
    ):
        (broken / "report.json").write_text(content)
        check(broken, fragments=(f"{broken}/report.json: cannot be read", "--evaluate --report"))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("loader", ["dali", "stock"])
def test_several_processes_find_the_same_mistakes(data: Path, tmp_path: Path, loader: str) -> None:
    flags = ("--data-dir", data, *TINY, "--batch-size", 4, "--loader", loader, "--output-dir", tmp_path, "--report")
    found = []
    for words, processes in (((*flags, "--epochs", 1), 2), ((*flags, "--evaluate"), 1)):
        done = launch(*words, processes=processes)
        assert done.status == 0, done.err
        found.append(json.loads((tmp_path / "report.json").read_text()))
    for name in ("classes", "worst", "samples", "confusion", "training"):
        assert found[0][name] == found[1][name]
    assert sorted(map(str, found[0]["confused"])) == sorted(map(str, found[1]["confused"]))
