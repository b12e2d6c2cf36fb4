"""The report of a run: it matches the run, fetches nothing, and holds a config that repeats the
run.
"""

from __future__ import annotations

import dataclasses
import html
import json
import platform
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import yaml

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs.listing import jobs_of
from smtrain.client.launch.stages import Chain
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.model.card import front_matter
from smtrain.core.protocol.log_lines import PROFILE
from smtrain.tools.report.gather import gather
from smtrain.tools.report.install_command import commands
from smtrain.tools.report.report import config_text, page
from smtrain.worker.engine.step_timing import PARTS
from smtrain.worker.train.profile import summary as profile_line
from tests.phone import assert_fits_a_phone
from tests.shared_run import COMMIT, CONFIG, SharedRun


@pytest.fixture
def run(shared_run: SharedRun) -> smtrain.Run:
    """A run of all stages with held-out text; the base model's card has a licence."""
    return shared_run.run


class Fetches(HTMLParser):
    """Requests that a browser would make for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "link", "object", "embed", "base", "form"):
            self.requests.append(tag)
        self.requests += [
            f"{tag} {key}={value}"
            for key, value in attrs
            if key in ("src", "href", "srcset", "action")
        ]
        self.requests += [f"{tag} {key}" for key, _ in attrs if key.startswith("on")]


@pytest.mark.slow
def test_the_page_says_what_the_run_did_and_fetches_nothing(
    run: smtrain.Run, tmp_path: Path
) -> None:
    file = smtrain.report("llama", tmp_path / "page.html")
    text = file.read_text("utf-8")
    fetches = Fetches()
    fetches.feed(text)
    assert fetches.requests == []
    assert not re.search(r"url\(|@import|(?<!git\+)https?://(?!www\.w3\.org)", text)
    assert "default-src 'none'" in text
    assert_fits_a_phone(text)
    for result in run.results:
        assert result.job.name in text
    assert f"{run.loss[-1]:.4f}" in text
    judged = [record["val_loss"] for record in run.records if "val_loss" in record]
    assert f"{min(judged):.4f}" in text
    assert f"{COMMIT} with changes" in text, "the commit that a tag of its jobs names"
    assert f"smtrain {smtrain.__version__}, torch {torch.__version__.partition('+')[0]}" in text
    assert re.search(
        r"<h2>What the machines used</h2>.*<td class=\"one\">algo-1</td><td class=\"n\">[0-9]+%",
        text,
    )
    assert "Waiting for data, over all steps: " in text
    assert smtrain.report(run.job("export").name, file) == file, (
        "a report is replaced by the next one"
    )


@pytest.mark.slow
def test_the_page_says_what_ran_and_from_which_inputs(run: smtrain.Run) -> None:
    account = gather("llama", "local")
    text = html.unescape(page(account))
    assert "s3://smtrain-local" not in text
    assert "<td>image</td>" not in text
    assert "<td>ran</td><td>as processes, in no container</td>" in text
    assert f"Python {platform.python_version()}, " in text
    config = smtrain.load_config(CONFIG)
    assert account.config["data"]["path"] == config.data.path
    assert account.config["model"]["path"] == config.model.path
    assert set(account.inputs) >= {config.data.path, config.model.path}
    for path, digest in account.inputs.items():
        assert re.fullmatch(r"[0-9a-f]{16}", digest)
        assert f"<td>input {path}</td><td>sha256 {digest}...</td>" in text
    assert all(line in text for line in commands())
    assert "smtrain run run.yaml" in text
    folded = text.partition("<details>")[2].partition("</details>")[0]
    first = text.partition("<details>")[0].rpartition("<pre>")[2]
    assert "weight_decay" in folded
    assert "steps: 6" in first
    assert "weight_decay" not in first, "a default"
    assert ">cost</th>" in text
    free = tuple(
        dataclasses.replace(job, cost=dataclasses.replace(job.cost, is_owned=True, dollars=None))
        for job in account.jobs
    )
    assert ">cost</th>" not in page(dataclasses.replace(account, jobs=free)), "no value in it"


@pytest.mark.slow
def test_a_loss_that_rose_is_marked(run: smtrain.Run) -> None:
    account = gather("llama", "local")
    (train,) = account.of("train")
    first, *_, last = (line for line in train.steps if " loss=" in line.text)
    rose = dataclasses.replace(last, text=re.sub(" loss=[^ ]+", " loss=9.5", last.text))
    for steps, words in (
        ((first, rose), r'loss <b class="warn">9\.5000</b> \(rose from'),
        (train.steps, r"loss <b>[0-9.]+</b> \(from"),
        ((first,), r"loss <b>[0-9.]+</b></span>"),
    ):
        jobs = tuple(
            dataclasses.replace(job, steps=steps) if job is train else job for job in account.jobs
        )
        assert re.search(words, page(dataclasses.replace(account, jobs=jobs)))


@pytest.mark.slow
def test_a_resume_with_another_learning_rate_is_marked(run: smtrain.Run) -> None:
    account = gather("llama", "local")
    (train,) = account.of("train")
    half = len(train.steps) // 2
    first, second = train.steps[:half], train.steps[half:]
    again = {
        **train.description,
        "HyperParameters": {**train.description["HyperParameters"], "lr": "5e-05"},
    }
    jobs = (
        dataclasses.replace(train, steps=first),
        dataclasses.replace(train, description=again, steps=second, name="llama-train-00000000"),
    )
    resumed = dataclasses.replace(account, jobs=jobs)
    old = train.description["HyperParameters"]["lr"]
    ((step, before, after),) = resumed.rate_changes
    assert (before, after) == (old, "5e-05")
    text = page(resumed)
    assert f"A resume changed the learning rate {old} to 5e-05 from step {step:.0f}" in text
    assert f"<title>learning rate {old} to 5e-05 from step {step:.0f}</title>" in text
    assert "A resume changed" not in page(account)


@pytest.mark.slow
def test_a_run_on_pairs_has_curves_of_its_rewards(run: smtrain.Run) -> None:
    pairs = (
        " rewards/chosen=0.1 rewards/rejected=-0.2 rewards/margins=0.3 rewards/accuracies=0.75 of="
    )
    account = gather("llama", "local")
    (train,) = account.of("train")
    steps = tuple(
        dataclasses.replace(line, text=line.text.replace(" of=", pairs)) for line in train.steps
    )
    jobs = tuple(
        dataclasses.replace(job, steps=steps) if job is train else job for job in account.jobs
    )
    text = page(dataclasses.replace(account, jobs=jobs))
    for words in (
        "loss, per pair",
        "rewards of chosen answers",
        "of rejected answers",
        "reward margin",
    ):
        assert words in text
    assert re.search(r"accuracy 75\s?%", text)
    assert "reward margin" not in page(account)


@pytest.mark.slow
def test_a_run_of_nearly_that_name_is_offered(run: smtrain.Run) -> None:
    for call in (
        lambda: smtrain.report("lama", target="local"),
        lambda: smtrain.Job("lama", "local").describe(),
        lambda: smtrain.compare("lama", "llama", target="local"),
        lambda: smtrain.chat("lama", target="local"),
    ):
        with pytest.raises(JobError, match=r"did you mean llama\? `smtrain list` lists the"):
            call()


@pytest.mark.slow
def test_a_profile_and_what_a_model_wrote_are_text(run: smtrain.Run) -> None:
    texts = ({"prompt": "the <b>red", "completion": " <i>fox"},)
    measured = {"step": 0.5, "parts": {**dict.fromkeys(PARTS, 0.0), "forward and backward": 0.4}}
    profile = profile_line([measured]).removeprefix(PROFILE)
    text = page(dataclasses.replace(gather("llama", "local"), texts=texts, profile=profile))
    assert "the &lt;b&gt;red" in text
    assert "&lt;i&gt;fox" in text
    assert re.search(r"a step takes [0-9.]+ s: .*forward and backward [0-9.]+ %", text)


@pytest.mark.slow
def test_its_config_is_that_of_the_run(run: smtrain.Run, tmp_path: Path) -> None:
    account = gather("llama", "local")
    (tmp_path / "again.yaml").write_text(config_text(account))
    place = SageMakerBackend("local")
    # Tests of other files run `llama` in this home too, with other prompts.
    stages = {
        r.stage: r.job.name for r in run.results if len(jobs_of(place, "llama", r.stage)) == 1
    }
    assert {"prepare", "train", "export"} <= {*stages}
    again = smtrain.Run("llama", "local").config
    for config in (smtrain.load_config(tmp_path / "again.yaml"), again):
        chain = Chain(config, place)
        assert {stage: chain.base_name(stage) for stage in stages} == stages


@pytest.mark.slow
def test_the_exported_folder_has_a_card_with_the_licence_of_the_base(
    run: smtrain.Run, tmp_path: Path
) -> None:
    card = (run.download(tmp_path / "model") / "README.md").read_text("utf-8")
    about = front_matter(card)
    assert about["license"] == "apache-2.0"
    assert about["language"] == ["en"]
    assert about["library_name"] == "transformers"
    assert "widget" not in about
    assert "# llama" in card
    assert "| steps | 6 |" in card
    assert "s3://" not in card, "our storage locations stay private"


@pytest.mark.slow
def test_a_file_that_is_no_report_is_left_alone(run: smtrain.Run, tmp_path: Path) -> None:
    (tmp_path / "notes.html").write_text("mine")
    with pytest.raises(ConfigError, match="is not a report"):
        smtrain.report("llama", tmp_path / "notes.html")
    assert (tmp_path / "notes.html").read_text() == "mine"
    smtrain.report("llama", tmp_path / "notes.html", overwrite=True)
    assert "llama" in (tmp_path / "notes.html").read_text()


@pytest.mark.slow
def test_a_run_that_failed_says_why(run: smtrain.Run) -> None:
    text = page(gather("llama", "local"), ["algo-1: the reason <is> this"])
    assert "algo-1: the reason &lt;is&gt; this" in text


def test_a_run_that_is_not_there_is_a_sentence(local_home: Path) -> None:
    for name, words in (
        ("no-such-run", "no run of this name"),
        ("a-train-1a2b3c4d", "no run of this name"),
        ("", "cannot be a run's name"),
        ("a\nb", "cannot be a run's name"),
    ):
        with pytest.raises(JobError, match=words):
            smtrain.report(name, target="local")


def test_the_card_of_a_base_carries_terms_only() -> None:
    from smtrain.core.model.card import card, hub_name, metadata

    readme = (
        "---\nlicense: llama3.1\nlicense_link: LICENSE\ntags: [a]\nmodel-index: [{name:"
        " x}]\n---\ntext"
    )
    about = metadata("org/base", readme, adapter=True)
    assert about == {
        "license": "llama3.1",
        "license_link": "LICENSE",
        "base_model": "org/base",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["smtrain", "lora"],
    }
    assert front_matter(card("t", about, ["x"])) == about
    assert (
        metadata(None, "", adapter=False, legal=["NOTICE", "LICENSE.txt"])["license_link"]
        == "LICENSE.txt"
    )
    for broken in ("", "---\n- 1\n---\n", "---\na: [\n---\n", "---\nno end", "\0"):
        assert front_matter(broken) == {}
    assert hub_name("hf://a/b@main") == "a/b"
    assert [hub_name(path) for path in ("s3://a/b", "/a/b", "./a", "model", None, "demo://x")] == [
        None
    ] * 6
    assert yaml.safe_load(json.dumps(about)) == about
