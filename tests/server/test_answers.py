"""What a client gets: text, counts and reasons, plain and streamed, through the official client."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from ktransformers.server.processors import CountPenalty
from tests.server.conftest import NAME, Running, Script

GREETING = [{"role": "user", "content": "Once upon a time"}]


def _joined(stream: Any) -> tuple[str, list[Any]]:
    chunks = list(stream)
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


def _expected(server: Running, prompt: str, tokens: int) -> str:
    """Greedy text by transformers' own `generate`."""
    tokenizer: Any = server.served.tokenizer
    model: Any = server.served.model
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_a_chat_answer_is_what_the_model_generates(server: Running) -> None:
    answer = server.chat(max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == _expected(server, "Once upon a time", 12)
    assert answer.model == NAME
    assert answer.object == "chat.completion"


def test_a_text_completion_is_what_the_model_generates(server: Running) -> None:
    answer = server.client.completions.create(model=NAME, prompt="The king", max_tokens=12, temperature=0)
    assert answer.choices[0].text == _expected(server, "The king", 12)
    assert answer.choices[0].finish_reason == "length"
    ids = server.served.tokenizer.encode("The king")
    again = server.client.completions.create(model=NAME, prompt=ids, max_tokens=12, temperature=0)
    assert again.choices[0].text == answer.choices[0].text


def test_a_stream_gives_the_text_and_the_counts_of_the_plain_answer(server: Running) -> None:
    plain = server.chat(max_tokens=12, temperature=0)
    options = {"include_usage": True}
    text, chunks = _joined(server.chat(max_tokens=12, temperature=0, stream=True, stream_options=options))
    assert text == plain.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == plain.choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == plain.usage
    assert len({c.id for c in chunks}) == 1


def test_usage_comes_in_a_stream_only_when_asked_for(server: Running) -> None:
    _, chunks = _joined(server.chat(stream=True))
    assert [c.usage for c in chunks] == [None] * len(chunks)
    assert all(c.choices for c in chunks)


def test_a_streamed_completion_equals_the_plain_one(server: Running) -> None:
    fields: dict[str, Any] = {"model": NAME, "prompt": "The king", "max_tokens": 16, "temperature": 0}
    plain = server.client.completions.create(**fields)
    chunks = list(server.client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text
    assert chunks[-1].usage == plain.usage


def test_every_stream_ends_with_done(server: Running) -> None:
    raw = server.post({"messages": GREETING, "max_tokens": 2, "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("data: [DONE]\n\n")


def test_usage_counts_the_tokens_of_prompt_and_answer(server: Running, script: Script) -> None:
    prompt, words = server.served.tokenizer.encode("Once upon a time"), server.served.tokenizer.encode("the end")
    with script("the end"):
        usage = server.chat(max_tokens=50).usage
    # The end token was generated too.
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(words) + 1)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_token_is_a_stop_and_the_limit_a_length(server: Running, script: Script, stream: bool) -> None:
    words = len(server.served.tokenizer.encode("the end"))
    for limit, reason in ((50, "stop"), (words + 1, "stop"), (words, "length")):
        with script("the end"):
            answer = server.chat(max_tokens=limit, stream=stream)
            choice = list(answer)[-1].choices[0] if stream else answer.choices[0]
        assert choice.finish_reason == reason


def test_request_parameters_are_obeyed_and_temperature_0_is_greedy(server: Running) -> None:
    fields: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "top_p": 0.1, "seed": 1}
    first, second = server.chat(**fields), server.chat(**fields)
    assert first.usage.completion_tokens == 5
    assert first.choices[0].finish_reason == "length"
    assert (
        first.choices[0].message.content
        == second.choices[0].message.content
        == server.chat(**fields | {"temperature": 1e-300}).choices[0].message.content
        == _expected(server, "Once upon a time", 5)
    )
    newer = server.chat(max_tokens=None, max_completion_tokens=3)
    assert newer.usage.completion_tokens == 3


def test_a_seed_makes_sampling_repeatable_and_leaves_the_program_s_own_draws_alone(server: Running) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    texts = [server.chat(max_tokens=12, temperature=1.5, seed=seed).choices[0].message.content for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_sampling_without_a_seed_differs_each_time(server: Running) -> None:
    server.chat(max_tokens=12, temperature=2, seed=1)
    first = server.chat(max_tokens=12, temperature=2).choices[0].message.content
    server.chat(max_tokens=12, temperature=2, seed=1)
    assert server.chat(max_tokens=12, temperature=2).choices[0].message.content != first


def test_top_k_of_1_is_greedy_at_any_temperature(server: Running) -> None:
    answer = server.chat(max_tokens=12, temperature=2, extra_body={"top_k": 1})
    assert answer.choices[0].message.content == _expected(server, "Once upon a time", 12)


def test_logit_bias_forbids_and_forces_tokens(server: Running) -> None:
    greedy = server.served.tokenizer.encode(_expected(server, "Once upon a time", 1))[0]
    without = server.chat(max_tokens=1, temperature=0, logit_bias={str(greedy): -100})
    assert without.choices[0].message.content != server.served.tokenizer.decode([greedy])
    forced = server.served.tokenizer.encode(" house")[0]
    answer = server.chat(max_tokens=3, temperature=0, logit_bias={str(forced): 100})
    assert answer.choices[0].message.content == server.served.tokenizer.decode([forced] * 3)


def test_a_frequency_penalty_keeps_the_model_from_repeating_itself(server: Running) -> None:
    forced = {str(server.served.tokenizer.encode(" house")[0]): 20.0}
    plain = server.chat(max_tokens=16, temperature=0, logit_bias=forced).choices[0].message.content
    less = server.chat(max_tokens=16, temperature=0, logit_bias=forced, frequency_penalty=2).choices[0].message.content
    assert plain.count(" house") == 16
    assert 0 < less.count(" house") < 16


def test_penalties_are_subtracted_as_the_api_describes_them() -> None:
    written = torch.tensor([[9, 9, 1, 2, 1, 1]])  # two tokens of prompt
    penalty = CountPenalty(2, frequency=0.5, presence=0.25)
    scores = penalty(written, torch.zeros(1, 10))
    assert scores[0].tolist() == [0, -1.75, -0.75, *[0] * 7]


def test_without_a_limit_the_answer_goes_on_to_the_end_of_the_context(small: Running, script: Script) -> None:
    with script(" and", end=False):
        answer = small.client.chat.completions.create(model=NAME, messages=GREETING)
    assert answer.usage.total_tokens == small.served.context == 64
    assert answer.choices[0].finish_reason == "length"


def test_an_answer_that_would_pass_the_context_ends_there(small: Running, script: Script) -> None:
    with script(" and", end=False):
        answer = small.client.completions.create(model=NAME, prompt=[5] * 60, max_tokens=50)
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].finish_reason == "length"


def test_the_model_is_listed_under_the_name_that_answers_carry(server: Running) -> None:
    (listed,) = server.client.models.list().data
    assert listed.id == NAME
    assert server.client.models.retrieve(NAME).id == NAME
    assert server.post({"messages": GREETING, "max_tokens": 1}).json()["model"] == NAME


def test_health_tells_what_runs_and_waits(server: Running) -> None:
    deadline = time.monotonic() + 60  # another test's client may have hung up a moment ago: its answer ends then
    while (health := server.get("/health").json())["running"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert health == {"status": "ok", "model": NAME, "running": 0, "waiting": 0}


def test_a_text_in_parts_is_one_text(server: Running) -> None:
    parts = [{"type": "text", "text": "Once upon"}, {"type": "text", "text": "a time"}]
    answer = server.chat(messages=[{"role": "user", "content": parts}], temperature=0)
    assert answer.choices[0].message.content == _expected(server, "Once upon\na time", 8)


def test_messages_reach_the_template_as_they_are(server: Running) -> None:
    messages = [{"role": role, "content": f"I am {role}."} for role in ("system", "user", "user", "assistant", "tool")]
    prompt = str(server.served.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    answer = server.chat(messages=messages, temperature=0)
    assert answer.choices[0].message.content == _expected(server, prompt, 8)
    assert answer.usage.prompt_tokens == len(server.served.tokenizer.encode(prompt))


def test_fields_about_the_client_change_nothing(server: Running) -> None:
    answer = server.chat(temperature=0, user="me", metadata={"a": "b"}, store=False, n=1, logprobs=False)
    assert answer.choices[0].message.content == _expected(server, "Once upon a time", 8)


def test_transformers_chat_can_talk_to_it(server: Running) -> None:
    """The requests that `transformers chat demo/model URL` makes: a warm-up, then a whole generation config."""
    from transformers import GenerationConfig

    warm = server.post({"model": NAME}, "/load_model")
    assert json.loads(warm.text.removeprefix("data: "))["status"] == "ready"
    config = GenerationConfig(do_sample=True, max_new_tokens=7, top_k=1)
    body = {"messages": GREETING, "model": NAME, "stream": True, "generation_config": config.to_json_string()}
    events = server.post(body).text.split("\n\n")
    pieces = [json.loads(e.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for e in events[:-2]]
    assert "".join(pieces) == _expected(server, "Once upon a time", 7)
