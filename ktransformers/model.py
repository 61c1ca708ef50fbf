"""`KTransformer`, a model with its tokenizer and its experts where rules put them, and `inject` for any loaded
model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ktransformers import generation
from ktransformers.checkpoints import FloatSource, Origin, open_origin
from ktransformers.errors import CheckpointError, InjectionError, UndoError
from ktransformers.generation import Prompt
from ktransformers.injection import Plan, Report, apply_plan, build_meta_model, make_plan
from ktransformers.loading.config import KTransformersConfig
from ktransformers.loading.rules import rules_for
from ktransformers.operators.experts import KTransformersExperts
from ktransformers.reinject import injected_matches, reinject
from ktransformers.rules import RulesLike, load_rules
from ktransformers.saving import guard_saving
from ktransformers.verification import LayerCheck, verify

__all__ = ["KTransformer", "inject"]

_EXPERTS = "ktransformers.operators.experts.KTransformersExperts"


def inject(
    model: nn.Module,
    rules: RulesLike | None = None,
    *,
    keep_float: bool = True,
    threads: int | None = None,
    legacy: bool = False,
) -> Report:
    """Puts the operators of a rule file into a model that is already loaded, whatever loaded it.

    Args:
        model: a transformers model with its weights in memory.
        rules: a path, the name of a shipped file, a list of rules, or None / "auto" for the shipped file of the model's
            type.
        keep_float: keep the float originals, so that `report.undo()` restores them exactly. False frees them layer by
            layer.
        threads: of the kernel, where the rules do not say.
        legacy: rules that decide nothing are warnings instead of errors, as an older file of upstream's may need.

    Returns the report: what was replaced by what; `undo()`.
    Raises `TypeError` for what is no model, `RuleFileError`, `RuleMatchError` before anything is touched;
    `InjectionError` with the model as it was.
    """
    _raise_unless_model(model)
    plan = make_plan(rules_for(model, rules, threads), model, allow_dead=legacy)
    report = apply_plan(plan, model, keep_float=keep_float)
    guard_saving()
    return report


class KTransformer:
    """A transformers model and its tokenizer. `model` and `tokenizer` are the ordinary objects."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        keep_float: bool = False,
        threads: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Wraps a loaded model; `from_pretrained` is the usual way in. `folder`: where freed floats can be read
        again.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.folder = None if folder is None else Path(folder)
        self.keep_float = keep_float
        self.threads = threads
        self.report: Report | None = None
        """What the last injection did."""
        self._trust_remote_code = trust_remote_code
        self._origin: Origin | None = None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        rules: RulesLike | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        keep_float: bool = False,
        threads: int | None = None,
        legacy: bool = False,
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        cache: bool | str | os.PathLike[str] = False,
        weights_path: str | os.PathLike[str] | None = None,
        **model_kwargs: Any,
    ) -> KTransformer:
        """Loads a model from a folder, a GGUF file, or a model id in the local cache. Nothing is downloaded.

        Args:
            name_or_path: a folder or a file of that name wins over an id. Of a split GGUF file any part, or the folder.
            rules: what to inject: a path, a shipped name, a list of rules, or "auto" for the shipped file of the
                model's type. None injects nothing yet: see `inject_expert_backend`.
            dtype: of the float weights; "auto" as the checkpoint has them, bf16 for GGUF files that are not all fp32.
            keep_float: keep float experts after packing. False frees them layer by layer.
            threads: of the kernel; None: KT_NUM_THREADS, or what the machine gives.
            legacy: rules that decide nothing are warnings instead of errors, as an older file of upstream's may need.
            device: of everything but the experts; None: the rules' `out_device` where this host has it, else the CPU.
            cache_dir: instead of the usual Hugging Face cache of checkpoints.
            cache: keep packed experts on disk and map them at the next start: True for the usual place (KT_CACHE_DIR),
                or a folder. Not used together with `keep_float`.
            weights_path: a folder that `kt convert` wrote of this checkpoint: experts are read from there.
            model_kwargs: for transformers' `from_pretrained`, such as `attn_implementation`.

        Raises `CheckpointError` for a model that is not there or not whole, and rule errors, before weights are read.
        """
        origin = open_origin(name_or_path, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
        meta = build_meta_model(origin.model, trust_remote_code=trust_remote_code)
        ruleset = None if rules is None else rules_for(meta, rules, threads)
        if ruleset is not None:
            make_plan(ruleset, meta, allow_dead=legacy)  # rules are refused before any file is opened
        tokenizer = origin.tokenizer()
        weights = origin.open(meta, dtype)
        # What transformers alone can read it loads; the model is then injected as any other.
        streamed = weights.streamed
        if ruleset is not None and streamed:
            options = KTransformersConfig(
                ruleset,
                keep_float=keep_float,
                threads=threads,
                cache=cache,
                weights_path=weights_path,
                legacy=legacy,
            )
            options.open_source = weights.open_source
            model_kwargs["quantization_config"] = options
        elif weights_path is not None:
            raise CheckpointError(
                f"weights_path={weights_path}: nothing takes experts from there without rules, nor for a checkpoint "
                "that transformers alone can read"
            )
        model = weights.load(**model_kwargs)
        self = cls(
            model,
            tokenizer,
            folder=origin.place,
            keep_float=keep_float,
            threads=threads,
            trust_remote_code=trust_remote_code,
        )
        self._origin = origin
        if ruleset is not None:
            quantizer: Any = model.hf_quantizer if streamed else None
            plan = None if streamed else make_plan(ruleset, model, allow_dead=legacy)
            self.report = quantizer.report if plan is None else self._apply(plan)
        self._place(device)
        return self

    def inject_expert_backend(self, layer_regex: str, backend: str | None = "auto", **kwargs: Any) -> Report:
        """Runs the experts whose dotted names `layer_regex` finds on `backend`, and leaves all others as they are.

        Experts that run on another backend already change over; when their floats were freed they are read again from
        the checkpoint, a layer at a time. `kwargs`: any other argument of `KTransformersExperts`, such as
        `rotate=False`.
        """
        arguments = {"backend": backend, **({"threads": self.threads} if self.threads else {}), **kwargs}
        written = {"match": {"name": layer_regex}, "replace": {"class": _EXPERTS, "kwargs": arguments}}
        ruleset = load_rules([written])
        (rule,) = ruleset.rules
        if injected_matches(rule, self.model):
            self.report = reinject(rule, self.model, keep_float=self.keep_float, floats=self._floats)
        else:
            self.report = self._apply(make_plan(ruleset, self.model))
        guard_saving()
        return self.report

    def verify(self, *, tokens: int = 64, seed: int = 0) -> Iterator[LayerCheck]:
        """Sends random tokens through each layer of experts that the last injection replaced, and through its float
        original, which is read again, a layer at a time, where it was freed.

        Raises `InjectionError` when no experts were replaced.
        """
        if self.report is None:
            raise InjectionError("no rule replaced anything: there is nothing to verify")
        return verify(self.model, self.report, floats=self._floats, tokens=tokens, seed=seed)

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[False] = False, **kwargs: Any) -> str: ...

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **kwargs: Any) -> Iterator[str]: ...

    def generate(
        self, prompt: Prompt, *, max_new_tokens: int = 256, stream: bool = False, chat: bool = False, **kwargs: Any
    ) -> str | Iterator[str]:
        """The text that continues `prompt`, without the prompt; with `stream=True` an iterator over its pieces.

        Args:
            prompt: text, or a list of messages (dictionaries with role and content), which goes through the chat
                template.
            max_new_tokens: at most so many tokens; fewer when the model ends its text.
            chat: treat a string as one user message of a chat.
            kwargs: for transformers' `generate`: `do_sample`, `temperature`, `top_p`, `stop_strings`, …

        Raises `TypeError` or `ValueError` for a prompt that is no text and no conversation, and for arguments that make
        more or other than one text, before anything is computed.
        """
        tokenizer = self._need_tokenizer()
        inputs = generation.encode(tokenizer, prompt, chat=chat, device=self.model.device)
        generation.warn_beyond_context(self.model, inputs["input_ids"].shape[-1], max_new_tokens)
        run = generation.stream_text if stream else generation.generate_text
        return run(self.model, tokenizer, inputs, max_new_tokens=max_new_tokens, **kwargs)

    def stream(self, prompt: Prompt, *, max_new_tokens: int = 256, chat: bool = False, **kwargs: Any) -> Iterator[str]:
        """`generate(..., stream=True)`. Joined, the pieces are what `generate` gives; closing the iterator stops the
        work.
        """
        return self.generate(prompt, stream=True, max_new_tokens=max_new_tokens, chat=chat, **kwargs)

    def __repr__(self) -> str:
        experts = {m.active_backend for m in self.model.modules() if isinstance(m, KTransformersExperts)}
        return f"KTransformer({type(self.model).__name__}, experts: {', '.join(sorted(experts)) or 'transformers'})"

    def _apply(self, plan: Plan) -> Report:
        report = apply_plan(plan, self.model, keep_float=self.keep_float)
        guard_saving()
        return report

    def _place(self, device: str | torch.device | None) -> None:
        """Moves everything but the experts to where their results land."""
        if device is None:
            experts = [m for m in self.model.modules() if isinstance(m, KTransformersExperts)]
            landings = {m.out_device for m in experts if m.out_device is not None}
            device = landings.pop() if len(landings) == 1 else None
        if device is not None and torch.device(device) != self.model.device:
            self.model.to(device)  # type: ignore[arg-type]

    def _floats(self, names: Sequence[str]) -> FloatSource:
        find = cache(lambda: self._freed(names))
        return lambda name, module: find()(name, module)

    def _freed(self, names: Sequence[str]) -> FloatSource:
        if self._origin is None and self.folder is not None:
            self._origin = open_origin(self.folder, trust_remote_code=self._trust_remote_code)
        if self._origin is None:
            raise UndoError(
                f"the float weights of {names[0]} were freed and it is not known where the model came from: load it "
                "with KTransformer.from_pretrained, or with keep_float=True"
            )
        build = partial(build_meta_model, self._origin.model, trust_remote_code=self._trust_remote_code)
        return self._origin.floats(build, names)

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.folder or 'this model'} has no tokenizer, so text cannot be generated: use .model.generate "
                "with token ids, or set .tokenizer"
            )
        return self.tokenizer


def _raise_unless_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        hint = ": give its .model" if isinstance(model, KTransformer) else ""
        raise TypeError(f"inject takes a loaded model, a torch.nn.Module; this is a {type(model).__name__}{hint}")
