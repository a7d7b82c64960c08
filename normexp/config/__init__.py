"""What a composed config means: its leaves cast and checked, its choices turned into factories.

Plain mappings in, a frozen `Config` out; every refusal is a UserError of one line, and nothing is created.
"""

from normexp.config.combinations import norm_path
from normexp.config.load import absolute, load
from normexp.config.tree import BY_BLOCK, Config

__all__ = ["BY_BLOCK", "Config", "absolute", "load", "norm_path"]
