"""Folders in and out. Weights keep their type: bfloat16 stays so in the file, and becomes float32 where it is loaded
into a model of ours, whose parameters are; that changes no value."""

import inspect
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from normexp import checkpoint, commandline
from normexp.choices import factory, locate
from normexp.config import BY_BLOCK
from normexp.convert.families import FAMILIES, Family, Values
from normexp.convert.names import TIED, State, canonical, check, to_ours, to_theirs
from normexp.fields import PositiveInt, UserError, cast, cast_dataclass, show, suggest
from normexp.model import ModelConfig, Transformer
from normexp.runs import NEUTRAL, RunFolder, out_of_use

PARTS = ("model", "norm", "placement")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def import_folder(source: Path, out: Path) -> list[str]:
    """A folder of Hugging Face's -> the overrides that make its model of ours, which are returned, and its weights.

    `out`: a folder, which gets `config.yaml` and `checkpoint.pt` for `load_model`, or a new .safetensors file, with the
    tensors of our state dict. It is no run that training could go on with.
    """
    _refuse_to_overwrite(out)
    given = _json(source / "config.json")
    kind = given.get("model_type")
    if kind not in list(FAMILIES):
        raise UserError(f"model_type={show(kind)}: normexp converts {', '.join(FAMILIES)} only")
    family, vocab_size = FAMILIES[kind], cast(given.get("vocab_size"), PositiveInt, "vocab_size")
    recipe = commandline.compose([f"recipe={kind}"]).values
    fields = {path: value for path, value in family.to_ours(given).items() if value != _at(recipe, path)}
    overrides = [f"recipe={kind}", *(f"{path}={show(value)}" for path, value in fields.items())]
    composed = commandline.compose(overrides)
    values = {part: composed.values[part] for part in PARTS}
    model = build(values, vocab_size, "meta")
    tied = model.config.tied
    theirs = check(canonical(family.names, _weights(source)), to_theirs(family.names, model.state_dict(), tied), tied)
    state = to_ours(family.names, theirs, tied)
    with _whole(out) as fresh:
        if out.suffix == ".safetensors":
            save_file({name: tensor.clone() if name == TIED else tensor for name, tensor in state.items()}, fresh)
        else:
            fresh.mkdir()
            names = {group: composed.choices[group] for group in ("norm", "placement", "model", "recipe")}
            RunFolder(fresh).write_config(values | {"cell": names})
            checkpoint.save(RunFolder(fresh).checkpoint, {"model": state})
    return overrides


def export_folder(run: Path, out: Path) -> str:
    """A run, or an imported folder, -> `config.json` and `model.safetensors` for transformers' from_pretrained. Returns
    the name of the family. Dropout, of which most families have none but in attention, is left out with them."""
    _refuse_to_overwrite(out)
    values = _values(run)
    family = _family(values)
    state = _state(run)
    theirs = to_theirs(family.names, state, values["model"]["tied"])
    described = family.to_theirs(_flat(values), len(state["embed.token.weight"]))
    with _whole(out) as fresh:
        fresh.mkdir()
        (fresh / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        save_file(theirs, fresh / WEIGHTS, metadata={"format": "pt"})
    return family.model_type


def load_model(folder: Path | str) -> Transformer:
    """The model of a run or of an imported folder, on the CPU, in evaluation mode."""
    folder = Path(folder)
    values, state = _values(folder), _state(folder)
    model = build(values, len(state["embed.token.weight"]), "cpu")
    model.load_state_dict(state)
    return model.eval()


def build(values: Mapping[str, Any], vocab_size: int, device: str) -> Transformer:
    """The model of the PARTS of a config; on `meta` its names and shapes alone."""
    norm, placement = ({k: v for k, v in values[part].items() if k != "_code_"} for part in ("norm", "placement"))
    with torch.device(device):
        return Transformer(
            cast_dataclass(values["model"], ModelConfig, "model"),
            vocab_size,
            norm=factory(norm, "norm", first_positional=True),
            placement=factory(placement, "placement", provided=BY_BLOCK),
        )


def _family(values: Values) -> Family:
    """The one whose recipe the values are, but for what its config.json can say."""
    found = {kind: list(_differences(family, values)) for kind, family in FAMILIES.items()}
    nearest = min(found, key=lambda kind: len(found[kind]))
    for path, value, expected in found[nearest]:
        raise UserError(f"{path}={show(value)}: {nearest}, the nearest family, has {show(expected)} only")
    return FAMILIES[nearest]


def _differences(family: Family, values: Values) -> Iterator[tuple[str, Any, Any]]:
    recipe, given = _flat(commandline.compose([f"recipe={family.model_type}"]).values), _flat(values)
    for path in {**recipe, **given}:
        if path not in family.free and given.get(path) != recipe.get(path):
            yield path, given.get(path), recipe.get(path)


def _flat(values: Values) -> Values:
    """Fields by path, those of the model last; those out of use are all alike, as in the id of a run."""
    flat = {f"{part}.{name}": value for part in PARTS[::-1] for name, value in values[part].items()}
    return flat | {path: neutral for path, neutral in out_of_use(values).items() if path in flat}


def _at(values: Mapping[str, Any], path: str) -> Any:
    part, _, name = path.partition(".")
    return values[part][name]


def _values(folder: Path) -> Values:
    """Of a run's config.yaml; fields that are newer than the run have the value that it had without them."""
    try:
        found = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{folder}: has neither a config.json nor a config.yaml; give such a folder") from None
    if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in PARTS):
        raise UserError(f"{folder / 'config.yaml'}: is not the config of a run")
    for part in PARTS:
        target = ModelConfig if part == "model" else locate(str(found[part].get("_target_")), part)
        newer = {
            name: NEUTRAL[f"{part}.{name}"]
            for name in inspect.signature(target).parameters
            if f"{part}.{name}" in NEUTRAL
        }
        found[part] = newer | found[part]
    return {part: found[part] for part in PARTS}


def _state(folder: Path) -> State:
    found = checkpoint.load(RunFolder(folder).checkpoint)
    if found is None:
        raise UserError(f"{folder}: has no checkpoint.pt")
    state: State = found["model"]
    return state


def _json(path: Path) -> Values:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    return found if isinstance(found, dict) else {}


def _weights(folder: Path) -> dict[str, Tensor]:
    """Of one file, or of the several that an index names."""
    files = [WEIGHTS]
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        shards = _json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise UserError(
                f"{folder / INDEX}: weight_map={show(shards)}: must be an object of tensors and their files"
            )
        files = sorted({cast(file, str, f"weight_map.{name}") for name, file in shards.items()})
    try:
        return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    except (OSError, SafetensorError) as error:
        there = [path.name for path in folder.glob("*") if path.suffix in (".bin", ".safetensors")]
        raise UserError(f"{folder}: weights cannot be read ({error}){suggest(WEIGHTS, there)}") from None


def _refuse_to_overwrite(out: Path) -> None:
    """An empty folder may be there, but for the one that the command was given in, which would be replaced."""
    with suppress(OSError):  # a path that cannot be looked at, as it cannot be written: `_whole` tells why
        if out.exists() and (not out.is_dir() or out.resolve() == Path.cwd() or any(out.iterdir())):
            raise UserError(f"{out}: is there already; give another path, or delete it")


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A path beside `out` to write to, which becomes `out` in the end: whatever fails, `out` is as it was."""
    fresh = out.resolve().with_name(f".{out.name}.{os.getpid()}")
    try:
        fresh.parent.mkdir(parents=True, exist_ok=True)
        yield fresh
        fresh.replace(out.resolve())
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{out}: cannot be written ({reason}); give another path") from None
    finally:
        with suppress(OSError):
            shutil.rmtree(fresh) if fresh.is_dir() else fresh.unlink()
