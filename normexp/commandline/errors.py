"""Every mistake in one line that names the field, the value, and what would be right; and the exit code."""

import os
import re
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

import normexp
from normexp.fields import UserError, suggest

CLASSES = ("norm", "placement", "data")  # groups whose choices have fields of their own


def exit_code(run: Callable[[], int]) -> int:
    """What `run` returns; 2 after one line for a user's mistake, 1 after the traceback of a fault, 130 for Ctrl-C."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # of a reader that has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception:
        traceback.print_exc()
        return 1


def explain(error: BaseException) -> str:
    """One line that names the field, the value, and what would be right."""
    line = _explain(error).replace("\n", "\\n")
    return re.sub(r"\S{200,}", lambda word: f"{word[0][:200]}...", line)


def _explain(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, UserError):
        return " ".join(lines)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group}={name}: there is no such choice{suggest(name, error.options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: is not field=value; quote a value with special signs, as in field='\"a=b, c.txt\"'"
    if ambiguous := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'", lines[0]):
        return f"{ambiguous[1]}: is more than one value; add -m to run a cell for each, or write a list as [a,b]"
    if unknown := re.match(r"Could not override '(.*?)'", lines[0]):
        given = re.search(r"use \+(.*)", "\n".join(lines))
        return f"{given[1] if given else unknown[1]}: {_near(unknown[1])}"
    if present := re.match(
        r"(?:Multiple values for|Could not append to config. An item is already at) '?([\w./]+)", lines[0]
    ):
        return f"+{present[1].rstrip('.')}: is there already; leave out the +"
    cause = str(error.__cause__).splitlines()[:1] if error.__cause__ else []
    return "; ".join([lines[0].rstrip("."), *cause]) if not isinstance(error, yaml.YAMLError) else " ".join(lines)


def _near(name: str) -> str:
    """What a mistyped field may mean: one of the same last part elsewhere, else its nearest neighbours."""
    fields = _fields()
    if name in fields and "." not in name:
        return f"is not chosen by default; give +{name}=<name>"
    if name in fields:
        return f"the chosen {name.partition('.')[0]} has no such field; it belongs to {', '.join(fields[name])}"
    namesakes = [field for field in fields if field.rpartition(".")[2] == name.rpartition(".")[2]]
    if namesakes:
        return f"there is no such field; did you mean {' or '.join(namesakes)}?"
    group = name.rpartition(".")[0]
    neighbours = {field: owners for field, owners in fields.items() if field.rpartition(".")[0] == group}
    if group not in CLASSES:
        return f"there is no such field{suggest(name, neighbours or fields)}"
    likely = [f"{field} of {' and '.join(neighbours[field])}" for field in get_close_matches(name, neighbours, 1, 0.7)]
    return f"the chosen {group} has no such field{f' (did you mean {likely[0]}?)' if likely else ''}"


def _fields() -> dict[str, list[str]]:
    """Groups, top-level fields and the fields of all choices, read from the files; and the choices that have each."""
    top = yaml.safe_load((normexp.CONF / "config.yaml").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {name: [] for name in top if name not in ("defaults", "hydra")}
    for file in sorted(normexp.CONF.glob("*/*.yaml")):
        text, group = file.read_text(encoding="utf-8"), file.parent.name
        own = yaml.safe_load(text) if "@package" not in text else {}
        for name in [group, *(f"{group}.{field}" for field in own if not field.startswith("_"))]:
            found.setdefault(name, []).append(f"{group}={file.stem}")
    return found
