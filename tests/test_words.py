"""The vocabulary: identifiers and phrases that were replaced by standard ones do not come back."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import offences, tracked_files

# Identifier -> what it is called now; one without an underscore in front is also meant with it.
IDENTIFIERS = {
    "speak": "print_rank0",
    "say": "info",
    "tell": "emit or print_error",
    "complain": "print_error",
    "report": "print_error",
    "together": "sync_errors",
    "raise_together": "raise_on_all_ranks",
    "common": "on_all_ranks",
    "gather": "all_gather_object",
    "gather_main": "gather_to_rank0",
    "connect": "warm_up_nccl",
    "fresh_part": "create_store_prefix",
    "own_gpu": "visible_device_for_rank",
    "Peers": "RankMonitor",
    "watched": "guard",
    "_call_roll": "_poll_ranks",
    "went_on": "heartbeat",
    "stuck": "is_hung",
    "step_down": "announce_stop",
    "farewell": "mark_finished",
    "ring": "request_abort",
    "rung": "abort_requested",
    "AGAIN": "RESUME_HINT",
    "arm": "enable",
    "disarm": "disable",
    "agreed": "should_stop",
    "leave": "hard_exit",
    "heed_end_workers": "install_worker_exit_handler",
    "end_workers": "terminate_workers",
    "end_with_launcher": "exit_with_parent",
    "end_launcher": "terminate_torchrun",
    "launchers": "launch_ids",
    "introduce": "log_run_summary",
    "again": "resume_hint",
    "begin": "claim_output_dir",
    "kept": "metrics_until, or another telling name",
    "unsaved": "last_save_error",
    "_unfit": "nonfinite_reason",
    "left_out": "excluded_files",
    "without_later": "apply_exclusions",
    "with_stand_ins": "with_replacements",
    "settle_buckets": "warm_up_ddp_buckets",
    "history": "Claim",
    "share_out": "reshard",
    "shared": "replicated_state",
    "own": "rank_state",
    "write_whole": "atomic_write_text",
    "one_line": "escape_control_chars",
    "rewind": "truncate_after",
    "Gradients": "ForwardBackward",
    "CapturedGradients": "GraphedForwardBackward",
    "recording_stream": "capture_stream",
    "_undone": "_preserve_state",
    "TURNS": "NUM_PIPELINES",
    "KEPT": "CACHED",
    "BLAME_SECONDS": "BAD_FILE_SEARCH_TIMEOUT",
    "WORTH_ADVICE": "DATA_WAIT_WARNING",
    "_naming_bad_files": "_identify_bad_file",
    "_Order": "_BatchSampler",
    "take": "read",
    "_outlive_signals": "_worker_init",
    "survey": "verify_dataset",
    "inspect": "decode_files",
    "Found": "FileReport",
    "Picture": "ImageInfo",
    "Undecodable": "DecodeError",
    "_odd": "_warnings_for",
    "_misfit": "_check_cache_fits",
    "joined_by_nvlink": "all_pairs_nvlink",
    "accelerate": "swap_fused_layers",
    "_whole": "_allow_in_graph",
    "_wide": "_upcast",
    "place": "argmax, or another telling name",
    "keep_results": "enable_compile_cache",
    "judge": "diagnose",
    "Figures": "Measurements",
    "Contestant": "Case",
    "sharing": "contention",
    "sentences": "format_verdict",
}
PREFIXES = {"LEAST_": "MIN_", "FeedSettings": "LoaderSettings"}
# Pattern in prose, help and messages -> what is written now.
PHRASES = {
    r"\bCollective: call\b": "@collective",
    r"\btells? \S+ classes apart\b": "has N classes",
    r"\bcannot be had\b": "is not available",
    r"\bgood checkpoint stands\b": "the last good checkpoint is kept",
    r"\b[Uu]ndisturbed\b": "uninterrupted run",
    r"\bWhat comes out\b": "Outputs",
    r"\bin turns\b": "interleaved",
    r"\b[Aa]n URL\b": "a URL",
    r"\bbrings? a run back after\b": "restarts after a worker failure",
    r"\b(is|are) told\b": "is logged",
    r"\bWhat feeds the network\b": "Data-loading backend",
    r"\bOn an unreadable image\b": "Policy for undecodable images",
    r"\bLeast share of the area\b": "Minimum crop area fraction",
}
# Words that other libraries or other meanings need: only a function of ours must not be called so.
FUNCTIONS_ONLY = {
    "report": "a FileReport, and utils/benchmark/report.py, are reports",
    "leave": "an argument of tqdm",
    "inspect": "a module of the standard library",
    "connect": "a function of sqlite3",
}
THIS_FILE = Path(__file__).resolve()
PYTHON = [path for path in tracked_files("*.py") if path != THIS_FILE]
PROSE = [*PYTHON, *tracked_files("*.md", "*.sh", "*.yaml")]


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of all identifiers, also of programs in strings, as the tests have them."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.alias(name=name, asname=alias):
                yield from ((node.lineno, each) for each in (name, alias) if each)
            case ast.Constant(value=str(text)) if "\nimport " in text or "\nfrom " in text:
                yield from ((node.lineno, name) for _, name in identifiers(parse_program(text)))


def parse_program(text: str) -> ast.AST:
    """A program in a string; an empty one where the string is prose."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])


def old_identifiers(source: str) -> list[str]:
    """`line: old -> standard` of a Python file."""
    tree = ast.parse(source)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found = []
    for line, name in sorted(set(identifiers(tree))):
        word = name.lstrip("_")
        standards = [IDENTIFIERS.get(name) or IDENTIFIERS.get(word)]
        standards += [new for old, new in PREFIXES.items() if word.startswith(old)]
        if word not in FUNCTIONS_ONLY or name in functions:
            found += [f"{line}: {name} -> {standard}" for standard in standards if standard]
    return found


def old_phrases(text: str) -> list[str]:
    """`old -> standard` in any text; a phrase may go on in the next line."""
    flowing = re.sub(r"\s*\n\s*(#+ |> |- )?", " ", text)
    return [f"{found[0]} -> {new}" for old, new in PHRASES.items() for found in re.finditer(old, flowing)]


def test_identifiers_are_the_standard_ones() -> None:
    assert offences(PYTHON, old_identifiers) == {}


def test_phrases_are_the_standard_ones() -> None:
    assert offences(PROSE, old_phrases) == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("own = 1", 1),
        ("self._own.x", 1),
        ("def place(x): pass", 1),
        ("def f(again): pass", 1),
        ("f(shared=2)", 1),
        ("class Peers: pass", 1),
        ("import x as survey", 1),
        ("from y import one_line", 1),
        ("LEAST_SECONDS = FeedSettings()", 2),
        ("PROGRAM = '''\nimport os\nown = 1\n'''", 1),
        ("import inspect\ninspect.signature", 0),
        ("def inspect(path): pass", 1),
        ("from utils.benchmark import report\nreport.write()", 0),
        ("def report(error): pass\nreport(x)", 2),
        ("tqdm(leave=False)", 0),
        ("whole = wide = _wide", 1),
        ("owner = replaced = gathered = peers = '''own place'''", 0),
    ],
)
def test_an_old_identifier_is_found(source: str, count: int) -> None:
    assert len(old_identifiers(source)) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Collective: call it. The user is told.", 2),
        ("    # as nobody is\n    # told", 1),
        ("> The last good\n> checkpoint stands.", 1),
        ("It tells 10 classes apart; another tells them apart.", 1),
        ("He is toldest; in turnstiles.", 0),
    ],
)
def test_an_old_phrase_is_found(text: str, count: int) -> None:
    assert len(old_phrases(text)) == count
