"""What there is to compare: a table of the norms and one of the placements, from their docstrings and a sweep's runs.

`python -m normexp.zoo [FOLDER]` prints them as Markdown, with the runs of a report in that folder. A class says in the
first paragraph of its docstring its equation and, in brackets, its source; in a sentence that begins with "Init:" its
initial weights; and in one that begins with "Checked:" or "Not checked" what was compared with the source.
"""

import argparse
import csv
import inspect
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

import normexp
from normexp import choices, commandline
from normexp.fields import UserError
from normexp.placements import Block
from normexp.results import LEARNED

RESULTS = Path("results/zoo")
SHARED = ["train.steps=200", "seed=0,1,2", f"results={RESULTS}"]
SCALED = ("derf", "dyt")  # whose language models scale the embeddings
SOURCE = re.compile(r"\s*\(([^()]*(?:\d{4}\.\d{5}|ICML \d{4})[^()]*)\)")

Runs = Mapping[tuple[str, str], list[dict[str, str]]]  # of a norm at a placement


def names(group: str) -> list[str]:
    """The choices of a group that are no other one with fields changed."""
    return sorted(path.stem for path in (normexp.CONF / group).glob("*.yaml") if "_target_" in _node(path))


def target(group: str, name: str) -> type:
    node = _node(normexp.CONF / group / f"{name}.yaml")
    found: type = choices.locate(str(node["_target_"]), group)  # type: ignore[assignment]
    return found


def _node(path: Path) -> dict[str, object]:
    node: dict[str, object] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return node


def own_norm(placement: str) -> str:
    """The norm that a placement is shown with."""
    return "none" if getattr(target("placement", placement), "norm_free", False) else "ln"


def grids() -> list[list[str]]:
    """The sweeps that the tables tell of, as overrides: every norm in front of its sublayer, and every placement, with
    the initial weights that its paper asks for, where it asks for some."""
    plain = ",".join(name for name in names("norm") if name not in SCALED)
    found = [[f"norm={plain}", "placement=pre"]]
    found.append([f"norm={','.join(SCALED)}", "placement=pre", "model.embed_scale=learned"])
    by_setting: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in names("placement"):
        own = getattr(target("placement", name), "initial", None) is not Block.initial
        by_setting[(f"norm={own_norm(name)}", *(["model.init=placement"] if own else []))].append(name)
    found += [[f"placement={','.join(chosen)}", *setting] for setting, chosen in by_setting.items()]
    return [[*grid, *SHARED] for grid in found]


def described(cls: type) -> tuple[str, str, str, str]:
    """Equation, initial weights, source, and what was checked, as the docstring of a class tells them."""
    text = inspect.getdoc(cls) or ""
    first, *others = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    source = SOURCE.search(first)
    rest = " ".join([first, *others])
    checked = _sentence(rest, r"Checked: |(?=Not checked)")
    equation = re.split(r"\s*Checked: ", SOURCE.sub("", first))[0]
    return equation.rstrip("."), _sentence(rest, "Init: "), source[1] if source else "–", checked


def _sentence(text: str, begins: str) -> str:
    """What follows `begins`, up to a full stop; – without it."""
    found = re.search(rf"(?:{begins})(.*?)(?:\.(?=\s|$)|$)", text)
    return found[1] if found else "–"


def read(folder: Path) -> Runs:
    """The finished runs of a report, by norm and placement."""
    runs: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    path = folder / "tables" / "runs.csv"
    if path.exists():
        with path.open(encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                if row.get("status") == "finished":
                    runs[row["norm"], row["placement"]].append(row)
    return runs


def trains(runs: list[dict[str, str]]) -> str:
    """Seeds that learned, of how many, and the mean validation loss in nats; the verdicts of the others."""
    if not runs:
        return "not run"
    learned = sum(run["verdict"] in LEARNED for run in runs)
    others = sorted({run["verdict"] for run in runs} - set(LEARNED))
    losses = [float(run["val_loss"]) for run in runs if run["val_loss"]]
    mean = f", {statistics.fmean(losses):.2f}" if losses else ""
    return f"{learned} of {len(runs)}{mean}" + (f" ({', '.join(others)})" if others else "")


def tables(runs: Runs) -> str:
    norms = [["norm", "equation", "source", "checked", "trains"]]
    for name in names("norm"):
        equation, _, source, checked = described(target("norm", name))
        norms.append([f"`{name}`", equation, source, checked, trains(runs.get((name, "pre"), []))])
    placements = [["placement", "equation", "initial weights", "source", "checked", "trains"]]
    for name in names("placement"):
        cell = runs.get((own_norm(name), name), [])
        placements.append([f"`{name}`", *described(target("placement", name)), trains(cell)])
    return f"{_markdown(norms)}\n\n{_markdown(placements)}\n"


def _markdown(rows: list[list[str]]) -> str:
    head, *others = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *others])


def main(arguments: Sequence[str] | None = None) -> int:
    """0: printed; 2: the user's mistake, in one line."""
    parser = argparse.ArgumentParser(prog="python -m normexp.zoo", description="The tables of norms and placements.")
    parser.add_argument("folder", type=Path, nargs="?", help=f"the folder of a report (default: {RESULTS}, if any)")
    given = parser.parse_args(arguments)
    return commandline.exit_code(lambda: _run(given.folder))


def _run(folder: Path | None) -> int:
    runs = read(folder or RESULTS)
    if folder and not runs:
        raise UserError(f"{folder}: has no report of finished runs; give a folder that normexp.report has written into")
    print(tables(runs), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
