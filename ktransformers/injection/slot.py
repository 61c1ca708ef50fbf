"""One place in a model where an operator goes in: found, filled, and emptied again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from ktransformers.errors import InjectionError
from ktransformers.injection.plan import Plan, Planned
from ktransformers.injection.tree import mark_injected, unmark_injected

__all__ = ["Slot", "find_slots"]

# The hooks of a module that run around its forward; every dictionary is one attribute.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@dataclass
class Slot:
    """A module to replace, with every place it hangs at: (parent, attribute)."""

    planned: Planned  # of its first place
    original: nn.Module
    places: list[tuple[nn.Module, str]]
    names: list[str]
    operator: nn.Module | None = None
    freed: bool = False
    hooks_moved: bool = False

    @property
    def name(self) -> str:
        return self.planned.name

    @property
    def filled(self) -> bool:
        """Whether the operator is what the model has at every place."""
        return self.operator is not None and all(
            parent._modules.get(attribute) is self.operator for parent, attribute in self.places
        )

    @property
    def is_untouched(self) -> bool:
        """Whether the original is what the model has at every place."""
        return all(parent._modules.get(attribute) is self.original for parent, attribute in self.places)

    def fill(self) -> None:
        """Puts the operator in; hooks that were registered on the original go along with it."""
        assert self.operator is not None
        self.operator.train(self.original.training)
        mark_injected(self.operator)
        for parent, attribute in self.places:
            setattr(parent, attribute, self.operator)
        _exchange_hooks(self.original, self.operator)
        self.hooks_moved = True

    def restore(self, stand_in: nn.Module | None = None) -> None:
        """Puts the original (or a stand-in) back at every place, wherever `fill` was interrupted."""
        for parent, attribute in self.places:
            if parent._modules.get(attribute) is not (stand_in or self.original):
                setattr(parent, attribute, stand_in or self.original)
        if self.operator is not None:
            unmark_injected(self.operator)
        if self.operator is not None and self.hooks_moved:
            _exchange_hooks(self.original, self.operator)
            self.hooks_moved = False


def find_slots(plan: Plan, model: nn.Module) -> list[Slot]:
    """The places of a plan in a model, one slot for each module object, parents before children.

    Raises:
        InjectionError: the model is not the one that was planned for.
    """
    slots: dict[int, Slot] = {}
    for planned in plan.replacements:
        parent_name, _, attribute = planned.name.rpartition(".")
        try:
            parent = model.get_submodule(parent_name)
            original = parent.get_submodule(attribute)
        except AttributeError as error:
            raise InjectionError(f"the plan was made for another model: this one has no {planned.name}") from error
        if type(original).__name__ != planned.class_name:
            raise InjectionError(
                f"the plan was made for another model: {planned.name} is a {type(original).__name__} here, "
                f"the plan expects a {planned.class_name}"
            )
        slot = slots.setdefault(id(original), Slot(planned, original, [], []))
        slot.places.append((parent, attribute))
        slot.names.append(planned.name)
    return list(slots.values())


def _exchange_hooks(one: nn.Module, other: nn.Module) -> None:
    """Swaps the very dictionaries, so that a handle's `remove()` keeps working on the module that has the hook now."""
    for attribute in _HOOKS:
        first = one.__dict__.get(attribute, OrderedDict())
        one.__dict__[attribute] = other.__dict__.get(attribute, OrderedDict())
        other.__dict__[attribute] = first
