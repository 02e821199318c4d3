"""Recipes: strict YAML that decides a whole build."""

from pdconvert.recipe.load import load_recipe, recipe_from_data, shipped_recipes
from pdconvert.recipe.model import Decode, FunctionSpec, Gates, KvForm, Prefill, Probe, Recipe
from pdconvert.recipe.source import RandomSpec, SourceSpec, parse_source

__all__ = [
    "Decode",
    "FunctionSpec",
    "Gates",
    "KvForm",
    "Prefill",
    "Probe",
    "RandomSpec",
    "Recipe",
    "SourceSpec",
    "load_recipe",
    "parse_source",
    "recipe_from_data",
    "shipped_recipes",
]
