"""Weights of published models: Hugging Face's folders and ours, either way.

`names`: what a tensor is called; `families`: what a value of the config is called, and which ours has no place for;
`files`: folders in and out. `load_model` gives the model of a converted folder or of a run, to be probed.
"""

from normexp.convert.families import FAMILIES, Family
from normexp.convert.files import export_folder, import_folder, load_model
from normexp.convert.names import to_ours, to_theirs

__all__ = ["FAMILIES", "Family", "export_folder", "import_folder", "load_model", "to_ours", "to_theirs"]
