"""The audit: what it measures is what separate runs of the stock model and of reuse give."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("skimage")

import offline  # noqa: E402
from vlcache_hf import RecomputeSchedule, VLCache, attach  # noqa: E402
from vlcache_hf.audit import (  # noqa: E402
    AuditReport,
    AuditSample,
    AuditSettings,
    CaseResult,
    Measure,
    PartialMismatch,
    Rate,
    SampleError,
    audit,
    calibrated_threshold,
    read_samples,
)
from vlcache_hf.audit import measure as measuring  # noqa: E402
from vlcache_hf.audit.report import prompts_needed  # noqa: E402
from vlcache_hf.audit.samples import NEUTRAL, earlier_prompts  # noqa: E402

TOKENS = 5
BEFORE, QUESTION = "A picture follows.", "What is it?"


@pytest.fixture(scope="module")
def processor() -> Any:
    return offline.build_processor("qwen3_vl", max_pixels=65536)


@pytest.fixture(scope="module")
def pictures() -> list[Any]:
    found = list(offline.photographs().values())[:3]
    for picture in found:
        picture.thumbnail((160, 160))
    return found


@pytest.fixture
def ours(tmp_path: Path) -> Any:
    return attach(offline.build_model("qwen3_vl"), {"cache_dir": tmp_path / "users"})


def turn(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {
        "role": role,
        "content": [
            {"type": "image", "image": part}
            if not isinstance(part, str) or part.endswith(".png")
            else {"type": "text", "text": part}
            for part in parts
        ],
    }


def quick(**settings: Any) -> AuditSettings:
    return AuditSettings(**{"schedules": (0.0, 0.5), "max_new_tokens": TOKENS, **settings})


# --- what is measured


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "qwen3_vl"])
def test_it_measures_what_separate_runs_give(architecture: Any, pictures: list[Any], tmp_path: Path) -> None:
    processor = offline.build_processor(architecture, max_pixels=65536)
    ours = attach(offline.build_model(architecture), {"cache_dir": tmp_path / "users"})
    # a checkpoint's repetition penalty changes answers, and must not change what is compared
    ours.generation_config.repetition_penalty = 1.5
    samples = [
        AuditSample([turn(BEFORE, picture, QUESTION)], [turn(picture, "Something else?")]) for picture in pictures[:2]
    ]
    report = audit(ours, processor, samples, quick())
    assert (report.prompts, report.same_context, report.failed, report.answer_tokens) == (2, 0, [], TOKENS)
    assert [case.label for case in report.cases] == ["0", "0.5"]

    stock, by_hand = offline.build_model(architecture), attach(offline.build_model(architecture), {"cache_dir": "no"})
    first, whole, flips, ratios = [], [], [], []
    for index, sample in enumerate(samples):
        settings: Any = {"cache_dir": tmp_path / str(index), "schedule": 0.5}
        inputs, earlier = (offline_inputs(processor, chat) for chat in (sample.messages, sample.context))
        answer = stock.generate(**inputs, max_new_tokens=TOKENS)[0]
        by_hand.generate(**earlier, max_new_tokens=1, cache=VLCache(**settings))
        reused = by_hand.generate(**inputs, max_new_tokens=TOKENS, cache=VLCache(**settings, read_only=True))[0]
        (record,) = by_hand.vlcache.last_request.images
        assert record.kv == "reused"
        ratios.append(record.ratio)
        flips.append(not torch.equal(answer, reused))
        length = inputs["input_ids"].shape[1]
        long = {**inputs, "input_ids": answer[None, :-1]}
        long["attention_mask"] = torch.ones_like(long["input_ids"])
        long["mm_token_type_ids"] = (long["input_ids"] == offline.IMAGE_PAD).int()
        with torch.no_grad():
            true = stock(**long).logits[0, length - 1 :].double().log_softmax(-1)
            seen = by_hand(**long, logits_to_keep=TOKENS, cache=VLCache(**settings, read_only=True)).logits[0]
        assert by_hand.vlcache.last_request.images[0].kv == "reused"
        kl = (true.exp() * (true - seen.double().log_softmax(-1))).sum(-1)
        first.append(float(kl[0]))
        whole.append(float(kl.mean()))
    half = report.cases[1]
    assert half.first_kl == pytest.approx(sum(first) / 2, rel=1e-3) and min(first) > 1e-4
    assert half.answer_kl == pytest.approx(sum(whole) / 2, rel=1e-3)
    assert half.flips == Rate(sum(flips), 2), "along the full answer the same is seen as by generating"
    assert half.recomputed == pytest.approx(sum(ratios) / 2) and 0.4 < half.recomputed <= 0.5
    assert report.exact.first_kl < 1e-5 and report.exact.flips == Rate(0, 2) and report.exact.recomputed == 0.0
    assert report.cases[0].recomputed == 0.0 and report.cases[0].first_kl > half.first_kl > 0
    assert all(0.01 < deviation < 2 for deviation in report.deviations)


def offline_inputs(processor: Any, chat: Any) -> Any:
    return processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def test_the_users_store_is_not_touched(
    ours: Any, processor: Any, pictures: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLCACHE_REMOTE", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    report = audit(ours, processor, [AuditSample([turn(pictures[0], QUESTION)])], quick(schedules=(0.0,)))
    assert report.prompts == 1 and report.cases[0].prompts == 1
    assert list(tmp_path.iterdir()) == [], "neither the user's folder nor one that was left behind"
    assert ours.vlcache.stats().faults == 0
    assert ours.vlcache.config.cache_dir == str(tmp_path / "users")


def test_in_operation_counts_the_order_of_the_prompts(ours: Any, processor: Any, pictures: list[Any]) -> None:
    a, b, _ = pictures
    chats = [
        [turn(a, QUESTION)],  # miss
        [turn(a, "And now?")],  # exact
        [turn(BEFORE, a, QUESTION)],  # reused
        [turn(b, QUESTION)],  # miss
        [turn(a, b, QUESTION)],  # a exact, b computed in full: there are two
        [turn(BEFORE, a, "Again?")],  # met before with a loss: computed in full once
        [turn(BEFORE, a, "And again?")],  # exact
    ]
    report = audit(ours, processor, [AuditSample(chat) for chat in chats], quick(schedules=(0.5,)))
    assert report.in_operation == {"exact": 2, "reused": 1, "miss": 4}
    assert (report.prompts, report.same_context, report.failed) == (7, 0, [])
    assert 'reuse="exact" computes 1 of 3 hits in full, 33.3 % of them' in report.recommendation[1]


def test_a_context_that_is_the_same_is_said_to_be_exact(ours: Any, processor: Any, pictures: list[Any]) -> None:
    a, b, _ = pictures
    samples = [
        AuditSample([turn(a, QUESTION)], [turn(a, "Another question behind it?")]),
        AuditSample([turn(b, QUESTION)], [turn(BEFORE, b)]),
    ]
    report = audit(ours, processor, samples, quick())
    assert (report.prompts, report.same_context) == (2, 1)
    assert report.exact.prompts == 2 and [case.prompts for case in report.cases] == [1, 1]
    assert len(report.deviations) == 1


def test_the_guard(ours: Any, processor: Any, pictures: list[Any]) -> None:
    samples = [AuditSample([turn(BEFORE, picture, QUESTION)]) for picture in pictures[:2]]
    report = audit(ours, processor, samples, quick(guard="escalate", guard_threshold=0.001))
    assert [case.escalated for case in report.cases] == [2, 2]
    assert all(case.first_kl < 1e-5 and case.flips.count == 0 and case.recomputed == 1.0 for case in report.cases)
    assert report.guard_acts == Rate(2, 2)
    quiet = audit(ours, processor, samples, quick(guard="escalate", guard_threshold=100.0))
    assert [case.escalated for case in quiet.cases] == [0, 0] and quiet.cases[0].first_kl > 1e-4
    assert quiet.guard_acts == Rate(0, 2) and quiet.deviations == pytest.approx(report.deviations)
    # the sample that it looks at is recomputed, whatever the schedule
    assert quiet.cases[0].recomputed > 0.0


def test_policies(ours: Any, processor: Any, pictures: list[Any]) -> None:
    samples = [AuditSample([turn(BEFORE, pictures[0], QUESTION)])]
    schedule = RecomputeSchedule([0.5, 0.5, 0.25, 0.0])
    report = audit(ours, processor, samples, quick(schedules=(schedule,), policies=("prefix", "suffix", "full")))
    assert [case.label for case in report.cases] == ["mean 0.312", "mean 0.312 suffix", "mean 0.312 full"]
    assert [case.policy for case in report.cases] == ["prefix", "suffix", "full"]
    prefix, suffix, full = report.cases
    assert prefix.recomputed == suffix.recomputed == pytest.approx(0.3125, abs=0.02) and full.recomputed == 1.0
    assert full.first_kl < 1e-5 < 1e-4 < min(prefix.first_kl, suffix.first_kl)
    assert prefix.first_kl != suffix.first_kl


def test_requests_that_are_no_hits_are_no_measures(ours: Any, processor: Any, pictures: list[Any]) -> None:
    sample = AuditSample([turn(pictures[0], QUESTION)], name="line 7")
    ours.model.language_model.layers[1].register_forward_hook(lambda *_: None)
    report = audit(ours, processor, [sample], quick())
    assert report.failed == [{"prompt": "line 7", "problem": "computed in full: what forward hooks do is unknown"}]
    assert report.prompts == 0 and math.isnan(report.exact.first_kl)
    assert report.to_dict()["exact"]["first_kl"] is None and json.loads(json.dumps(report.to_dict()))
    assert report.recommendation[0].startswith("No prompt was reused")


def test_a_full_disk_is_a_failure(
    ours: Any, processor: Any, pictures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLCACHE_MIN_FREE_BYTES", str(2**60))
    ours.vlcache.config.min_free_bytes = 2**60
    report = audit(ours, processor, [AuditSample([turn(pictures[0], QUESTION)])], quick())
    assert "no exact hit after it was stored" in report.failed[0]["problem"]


def test_an_answer_ends_where_it_shows_a_picture(ours: Any, processor: Any, pictures: list[Any]) -> None:
    bench = measuring.Bench(ours, processor, "unused", TOKENS)
    inputs = bench.inputs([turn(pictures[0], QUESTION)])
    with bench.stock():
        whole = bench.answer(inputs)
        ours.config.video_token_id = int(whole[2])
        assert bench.answer(inputs).tolist() == whole[:3].tolist()
    assert len(set(whole[:3].tolist())) == 3


# --- going on


def test_a_stopped_audit_goes_on(ours: Any, processor: Any, pictures: list[Any], tmp_path: Path) -> None:
    samples = [AuditSample([turn(BEFORE, picture, QUESTION)], name=str(i)) for i, picture in enumerate(pictures)]
    file, steps = tmp_path / "partial", []

    class Stop(Exception):
        pass

    def stop_at_the_fifth() -> None:
        steps.append(1)
        if len(steps) == 5:
            raise Stop

    with pytest.raises(Stop):
        audit(ours, processor, samples, quick(), file, stop_at_the_fifth)
    assert len(file.read_text().splitlines()) == 1 + 3 + 2
    with file.open("a") as cut:
        cut.write('{"kind": "measure", "sam')
    before = ours.vlcache.stats().requests
    resumed = audit(ours, processor, samples, quick(), file)
    one = ours.vlcache.stats().requests - before
    # the third sample alone: stored, exact, the earlier prompt, the guard's look, two schedules
    assert one == 6
    again = audit(ours, processor, samples, quick(max_flips=0.5), file)
    assert ours.vlcache.stats().requests == before + one
    assert resumed.to_dict() == audit(ours, processor, samples, quick()).to_dict()
    assert again.max_flips == 0.5
    # beside the limit only the thresholds that follow from it may be others
    plain = [[dataclasses.replace(case, guard_threshold=None) for case in one.cases] for one in (again, resumed)]
    assert plain[0] == plain[1]
    with pytest.raises(PartialMismatch, match=r"other settings"):
        audit(ours, processor, samples, quick(schedules=(0.1,)), file)
    with pytest.raises(PartialMismatch, match=r"other prompts"):
        audit(ours, processor, samples[:2], quick(), file)
    with pytest.raises(PartialMismatch, match=r"other model"):
        audit(attach(offline.build_model("qwen3_vl", seed=1)), processor, samples, quick(), file)
    for foreign in ("notes\nof mine", '{"a": 1}\n{"b": 2}'):
        file.write_text(foreign)
        with pytest.raises(PartialMismatch, match="holds no partial results"):
            audit(ours, processor, samples, quick(), file)
        assert file.read_text() == foreign


def test_what_failed_is_tried_again(ours: Any, processor: Any, pictures: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_text("no image")
    samples = [AuditSample([turn(str(path), QUESTION)], name="line 1"), AuditSample([turn(pictures[1], QUESTION)])]
    report = audit(ours, processor, samples, quick(), tmp_path / "partial")
    assert [row["prompt"] for row in report.failed] == ["line 1"] and "UnidentifiedImage" in report.failed[0][
        "problem"
    ]
    assert report.prompts == 1 and report.in_operation == {"exact": 0, "reused": 0, "miss": 1}
    pictures[0].save(path)
    report = audit(ours, processor, samples, quick(), tmp_path / "partial")
    assert (report.failed, report.prompts) == ([], 2)


# --- settings and samples


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedules": (1.5,)}, "must lie in"),
        ({"schedules": (1.0,)}, "recomputes everything"),
        ({"schedules": ()}, "at least one schedule"),
        ({"policies": ("best",)}, "'best'"),
        ({"policies": ("encoder_only",)}, "reuses no KV"),
        ({"guard": "maybe"}, "'maybe'"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_flips": 0.0}, "max_flips"),
    ],
)
def test_settings_out_of_range(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AuditSettings(**settings)


def test_a_schedule_for_another_model(ours: Any, processor: Any, pictures: list[Any]) -> None:
    with pytest.raises(ValueError, match="2 ratios but the model has 4"):
        audit(ours, processor, [AuditSample([turn(pictures[0])])], quick(schedules=(RecomputeSchedule([0.5, 0.1]),)))


@pytest.fixture
def folder(tmp_path: Path, pictures: list[Any]) -> Path:
    for name in ("a.png", "b.png"):
        pictures[0].save(tmp_path / name)
    return tmp_path


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_reading_prompts(folder: Path) -> None:
    a, b = str((folder / "a.png").resolve()), str((folder / "b.png").resolve())
    samples = read_samples(
        write(
            folder,
            {"image": "a.png", "question": "What?\u2028Really?", "id": 3},
            "",
            {"images": ["a.png", a], "question": "Same?", "system": "Be brief.", "context": "Before."},
            {
                "image": "a.png",
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image"}]},
                    {"role": "assistant", "content": "I see."},
                    {"role": "user", "content": [{"type": "image", "image": "b.png"}]},
                ],
                "context": [{"role": "user", "content": [{"type": "image", "image": "b.png"}]}],
            },
        )
    )
    assert [sample.name for sample in samples] == ["line 1", "line 3", "line 4"]
    assert samples[0].messages == [turn(a, "What?\u2028Really?")] and samples[0].context is None
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert samples[1].messages == [system, turn(a, a, "Same?")]
    assert samples[1].context == [system, turn("Before.", a, a)]
    assert samples[2].messages == [system, turn("See", a), turn("I see.", role="assistant"), turn(b)]
    assert samples[2].context == [turn(b)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"image": "a.png"', "line 2: no JSON"),
        ("[1]", "line 2: a JSON object"),
        ({"image": "none.png", "question": "?"}, "line 2: there is no image .*none.png"),
        ({"image": ["a.png"], "question": "?"}, r"line 2: `images` must be a list of paths"),
        ({"image": "a.png"}, "line 2: one of `question` and `messages`"),
        ({"image": "a.png", "question": "?", "messages": []}, "line 2: one of `question` and `messages`"),
        ({"image": "a.png", "question": 3}, "line 2: `question` must be a string, got 3"),
        ({"image": "a.png", "question": "?", "system": 3}, "line 2: `system` must be a string, got 3"),
        ({"question": "?"}, "line 2: it shows no image"),
        ({"messages": "hello"}, "line 2: a chat must be a list"),
        ({"messages": ["hello"]}, "line 2: a message must have"),
        ({"messages": [{"role": "user", "content": 3}]}, "line 2: `content` must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "line 2: `messages` show more images"),
        (
            {"image": "a.png", "messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
            "line 2: the last turn is the assistant's",
        ),
    ],
)
def test_bad_lines_are_named(folder: Path, line: Any, message: str) -> None:
    file = write(folder, {"image": "a.png", "question": "?"}, line)
    with pytest.raises(SampleError, match=message):
        read_samples(file)


def test_many_bad_lines_and_none(folder: Path) -> None:
    with pytest.raises(SampleError, match="line 5: .*\n  and 3 more"):
        read_samples(write(folder, *8 * ["{}"]))
    with pytest.raises(SampleError, match="holds no prompts"):
        read_samples(write(folder, "", ""))
    with pytest.raises(SampleError, match="cannot be read"):
        read_samples(folder / "none.jsonl")


def test_in_which_prompts_the_images_are_met_before() -> None:
    def chats(*samples: AuditSample) -> list[Any]:
        return earlier_prompts(samples)

    first, same = AuditSample([turn("a.png", "One?")]), AuditSample([turn("a.png", "Two?")])
    later = AuditSample([turn("See:", "a.png", "Three?")])
    neutral = [turn(NEUTRAL[0], "a.png")]
    assert chats(first, same) == [[neutral], [neutral]], "the same context is no other one"
    assert chats(first, same, later) == [[later.messages], [later.messages], [first.messages]]
    given = AuditSample([turn("a.png", "One?")], [turn("a.png", "as before")])
    assert chats(given, later)[0] == [given.context], "what the user says is what is done"
    # a prompt that is like the neutral one
    assert chats(AuditSample([turn(NEUTRAL[0], "a.png")])) == [[[turn(NEUTRAL[1], "a.png")]]]
    # several images: each in a prompt of its own where none has it; a prompt that has both stands once
    pair = AuditSample([turn("a.png", "b.png")])
    assert chats(pair) == [[neutral, [turn(NEUTRAL[0], "b.png")]]]
    assert chats(pair, AuditSample([turn("b.png", "a.png")]))[0] == [[turn("b.png", "a.png")]]
    half = AuditSample(pair.messages, [turn("See:", "a.png")])
    assert chats(half) == [[half.context, [turn(NEUTRAL[0], "b.png")]]]
    picture = offline.Image.new("RGB", (64, 64))
    assert chats(AuditSample([turn(picture, "One?")]), AuditSample([turn("See:", picture)]))[0] == [
        [turn("See:", picture)]
    ]


# --- rates and advice


def test_rates() -> None:
    # the reference values are statsmodels' proportion_confint(method="wilson")
    assert Rate(0, 10).interval == (0.0, pytest.approx(0.277533, abs=1e-5))
    assert Rate(5, 10).interval == (pytest.approx(0.236593, abs=1e-5), pytest.approx(0.763407, abs=1e-5))
    assert Rate(10, 10).interval == (pytest.approx(0.722467, abs=1e-5), 1.0)
    assert Rate(0, 0).interval == (0.0, 1.0) and Rate(0, 0).to_dict()["value"] is None
    assert prompts_needed(0.01) == 381
    assert Rate(0, 381).interval[1] <= 0.01 < Rate(0, 380).interval[1]


def test_percentiles() -> None:
    measures = [Measure(float(i), 2.0 * i, i == 99, i >= 98, 0.1) for i in range(100)]
    result = CaseResult.of("0.1", "0.1", "prefix", measures)
    assert (result.first_kl, result.answer_kl) == (49.5, 99.0) and result.first_kl_p95 == pytest.approx(94.05)
    assert (result.first_flips, result.flips) == (Rate(1, 100), Rate(2, 100))


def report(cases: list[tuple[str, float, int, int]], **fields: Any) -> AuditReport:
    def case(label: str, recomputed: float, flips: int, total: int) -> CaseResult:
        measures = [Measure(0.1, 0.1, False, index < flips, recomputed) for index in range(total)]
        return CaseResult.of(label, label, "prefix", measures)

    values: Any = {
        "model": "m@0",
        "prompts": cases[0][3],
        "answer_tokens": 8.0,
        "in_operation": {"exact": 60, "reused": 20, "miss": 20},
        "same_context": 0,
        "several_images": 0,
        "exact": case("exact hit", 0.0, 0, cases[0][3]),
        "cases": [case(*values) for values in cases],
        "deviations": [],
        "guard_threshold": 0.3,
        "max_flips": 0.01,
        **fields,
    }
    return AuditReport(**values)


def test_the_cheapest_that_is_shown_to_hold_is_recommended() -> None:
    advice = report([("0", 0.0, 30, 1000), ("0.1", 0.1, 4, 1000), ("0.3", 0.3, 0, 1000)]).recommendation
    assert advice[0] == (
        "Recommended: schedule=0.3, where 0 of 1000 answers differ (0 %, 95 % CI 0.0-0.4 %) and 30 % of image tokens "
        "are recomputed. That is within the 1 % of answers that may differ."
    )
    assert advice[1].startswith('reuse="exact" computes 20 of 80 hits in full, 25 % of them')
    loose = report([("0", 0.0, 30, 1000), ("0.1", 0.1, 4, 1000)], max_flips=0.02).recommendation
    assert loose[0].startswith("Recommended: schedule=0.1, where 4 of 1000 answers differ (0.4 %, 95 % CI 0.2-1.0 %)")


def test_few_prompts_recommend_nothing() -> None:
    advice = report([("0", 0.0, 1, 20), ("auto", 0.1, 0, 20)]).recommendation
    assert advice[0].startswith('Likely: schedule="auto", where 0 of 20 answers differ (0 %, 95 % CI 0.0-16.1 %)')
    assert 'takes 381 without a flip, and more with some. Until then reuse="exact" is the safe choice.' in advice[0]


def test_where_every_schedule_flips_too_much() -> None:
    advice = report([("0", 0.0, 9, 20), ("0.3", 0.3, 5, 20)], in_operation={"exact": 9, "reused": 0, "miss": 1})
    assert advice.recommendation[0].startswith('Recommended: reuse="exact". With every schedule more than 1 %')
    assert "the best is schedule=0.3, where 5 of 20 answers differ" in advice.recommendation[0]
    assert advice.recommendation[1] == 'All hits are exact in this order of prompts: reuse="exact" costs none of them.'


def test_noise_is_named() -> None:
    noisy = report([("0.1", 0.1, 3, 1000)], in_operation={"exact": 0, "reused": 0, "miss": 9})
    flips = dataclasses.replace(noisy.exact, flips=Rate(2, 1000))
    advice = dataclasses.replace(noisy, exact=flips).recommendation
    assert advice[1] == "No image comes twice in these prompts: in this order nothing is a hit."
    assert advice[2].startswith("Exact hits too differ in 2 of 1000 answers")


@pytest.mark.parametrize(
    ("harmed", "limit", "expected"),
    [
        ("", 0.01, 0.4),  # nothing is known of what lies above
        ("4", 0.01, 0.3),
        ("4", 0.25, 0.4),
        ("24", 0.25, 0.3),
        ("1", 0.01, 0.0),
    ],
)
def test_the_calibrated_threshold_is_the_highest_that_lets_little_harm_pass(
    harmed: str, limit: float, expected: float
) -> None:
    deviations = [0.4, 0.1, 0.3, 0.2]
    assert calibrated_threshold(deviations, [str(round(10 * d)) in harmed for d in deviations], limit) == expected


def test_of_equal_deviations_all_pass_or_none() -> None:
    assert calibrated_threshold([0.1, 0.2, 0.2], [False, False, True], 0.0) == 0.1


@given(st.lists(st.tuples(st.floats(0, 2), st.booleans())), st.floats(0, 1))
def test_what_passes_the_calibrated_threshold_is_within_the_limit(
    prompts: list[tuple[float, bool]], limit: float
) -> None:
    deviations, harmed = [d for d, _ in prompts], [h for _, h in prompts]
    found = calibrated_threshold(deviations, harmed, limit)
    passed = [h for d, h in prompts if d <= found and (found or limit)]
    assert found == 0.0 or sum(passed) <= limit * len(prompts) + 1e-6
    higher = sorted({d for d in deviations if d > found})
    if higher:  # one step more would be too much
        assert sum(h for d, h in prompts if d <= higher[0]) > limit * len(prompts)


def test_the_report_says_the_threshold_of_every_case(ours: Any, processor: Any, pictures: list[Any]) -> None:
    samples = [AuditSample([turn(BEFORE, picture, QUESTION)]) for picture in pictures]
    report = audit(ours, processor, samples, quick(schedules=(0.0, 0.5)))
    for case in report.cases:
        assert case.guard_threshold in [math.floor(1e4 * d) / 1e4 for d in (0.0, *report.deviations)]
        assert case.to_dict()["guard_threshold"] == case.guard_threshold
    guarded = audit(ours, processor, samples, quick(guard="escalate", guard_threshold=100.0))
    assert [case.guard_threshold for case in guarded.cases] == [None] * len(guarded.cases)
    assert report.exact.guard_threshold is None


def test_prompts_with_several_images_are_left_out_unless_asked_for(
    ours: Any, processor: Any, pictures: list[Any]
) -> None:
    a, b, _ = pictures
    samples = [AuditSample([turn(BEFORE, a, QUESTION)]), AuditSample([turn(a, b, QUESTION)])]
    report = audit(ours, processor, samples, quick())
    assert (report.prompts, report.several_images, report.same_context, report.failed) == (2, 1, 0, [])
    assert report.exact.prompts == 2 and {case.prompts for case in report.cases} == {1}
    every = audit(ours, processor, samples, quick(lossy_multi_image=True))
    assert every.several_images == 0 and {case.prompts for case in every.cases} == {2}


def test_the_threshold_is_that_of_the_models_schedule(ours: Any, processor: Any, pictures: list[Any]) -> None:
    samples = [AuditSample([turn(BEFORE, pictures[0], QUESTION)])]
    assert audit(ours, processor, samples, quick()).guard_threshold == 0.7
    layers = ours.config.text_config.num_hidden_layers
    low = RecomputeSchedule((0.0,) * layers, guard_threshold=0.0001)
    report = audit(ours, processor, samples, quick(schedules=(low,), guard="escalate"))
    assert [case.escalated for case in report.cases] == [1]
    assert audit(ours, processor, samples, quick(guard_threshold=0.3)).guard_threshold == 0.3
