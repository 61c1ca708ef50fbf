"""`kt rules`: what ships, and what a rule file would do to a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformers.cli.chosen_rules import choose_rules
from ktransformers.cli.console import errors, listen_to_logs, plain_table, results, say
from ktransformers.cli.failures import WRONG_INPUT
from ktransformers.cli.options import ConfigModel, Legacy, RuleFile, Rules

if TYPE_CHECKING:
    from ktransformers.injection import Plan

__all__ = ["rules_app"]

rules_app = typer.Typer(help="Look at rule files, and try them on a model without its weights.", no_args_is_help=True)

_FIRST = 3


@rules_app.command("list")
def list_rules() -> None:
    """The rule files that ship, addressable by their bare names."""
    from ktransformers.rules import shipped_rules

    table = plain_table("name", "what it is for")
    for shipped in shipped_rules():
        table.add_row(shipped.name, shipped.summary)
    results().print(table)


@rules_app.command()
def check(
    rules: RuleFile,
    model: ConfigModel,
    first: Annotated[int, typer.Option(min=1, help="How many module names to show for each rule.")] = _FIRST,
    legacy: Legacy = False,
) -> None:
    """What each rule matches in the model. Exit code 2 when a rule matches nothing or cannot be applied."""
    listen_to_logs()
    from ktransformers.injection import build_meta_model, make_plan

    plan = make_plan(rules, build_meta_model(model), allow_dead=True)
    results().print(_table(plan, first))
    for name in plan.unmatched_experts:
        results().print(f"experts that no rule matches: {name}", markup=False)
    for warning in plan.warnings:
        word, style = ("warning: ", "bold yellow") if legacy else ("error: ", "bold red")
        errors().print(word, style=style, end="")
        errors().print(warning, markup=False)
    if plan.warnings and not legacy:
        raise typer.Exit(WRONG_INPUT)


@rules_app.command()
def show(rules: Annotated[str, typer.Argument(help="The name of a shipped rule file, or a path.")]) -> None:
    """Print a rule file. Where it lies goes to stderr, so that stdout makes a copy to start from."""
    from ktransformers.rules import rule_text

    path, text = rule_text(rules)
    say(str(path))
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


@rules_app.command()
def explain(
    model: ConfigModel,
    module: Annotated[
        str, typer.Argument(help="A dotted module name, or a regular expression that is searched in all of them.")
    ],
    rules: Rules = None,
) -> None:
    """Which rule takes a module, which others would have, and why the rest do not match."""
    listen_to_logs()
    from ktransformers.injection import build_meta_model, explain_modules

    chosen = choose_rules(model, rules)
    for explanation in explain_modules(chosen, build_meta_model(model), module):
        results().print(str(explanation), markup=False)


def _table(plan: Plan, first: int) -> object:
    table = plain_table("rule", "modules", "becomes", "names")
    for rule in plan.rules:
        decided = plan.of(rule)
        names = [decision.name for decision in decided]
        more = [f"… {len(names) - first} more"] if len(names) > first else []
        becomes = "as it is" if rule.keeps else rule.replacement.rpartition(".")[2]
        table.add_row(rule.where, str(len(names)), becomes, "\n".join([*names[:first], *more]))
    return table
