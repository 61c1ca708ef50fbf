"""Rules × module tree → `Plan`; a plan carried out all or nothing; a report that can take it back."""

from ktransformers.injection.apply import apply_plan
from ktransformers.injection.explain import Explanation, explain_modules
from ktransformers.injection.freeing import FreedModule
from ktransformers.injection.meta import build_meta_model, load_config
from ktransformers.injection.placing import load_placed, place_operators
from ktransformers.injection.plan import Plan, Planned, make_plan
from ktransformers.injection.report import Replacement, Report
from ktransformers.injection.slot import Slot
from ktransformers.injection.tree import experts_modules, is_injected, walk

__all__ = [
    "Explanation",
    "FreedModule",
    "Plan",
    "Planned",
    "Replacement",
    "Report",
    "Slot",
    "apply_plan",
    "build_meta_model",
    "experts_modules",
    "explain_modules",
    "is_injected",
    "load_config",
    "load_placed",
    "make_plan",
    "place_operators",
    "walk",
]
