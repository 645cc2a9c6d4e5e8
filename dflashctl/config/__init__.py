"""hosts.yaml and recipes: their models, where they are found, how they are checked.

from dflashctl.config import load_hosts, load_recipe, resolve, fill
"""

from dflashctl.config.hosts import Host, HostsFile, load_hosts
from dflashctl.config.names import check_tag
from dflashctl.config.placeholders import PLACEHOLDERS, fill
from dflashctl.config.recipe import Recipe
from dflashctl.config.resolve import ResolvedRecipe, load_recipe, resolve

__all__ = [
    "PLACEHOLDERS",
    "Host",
    "HostsFile",
    "Recipe",
    "ResolvedRecipe",
    "check_tag",
    "fill",
    "load_hosts",
    "load_recipe",
    "resolve",
]
