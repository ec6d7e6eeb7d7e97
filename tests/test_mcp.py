"The MCP server as a client sees it: over stdio, with the client of the official SDK."

import asyncio
import json
import os
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from stabilitylab.cases.registry import sample
from stabilitylab.mcp.reading import answer
from stabilitylab.mcp.server import TOOLS, Tools
from stabilitylab.mcp.trial_job import TrialJob
from stabilitylab.names.errors import InputError
from stabilitylab.trial.arm import arm_of, null_arm
from tests.command import command
from tests.notebooks import ROOT
from tests.zoo.__main__ import record

mcp = pytest.importorskip("mcp", reason="the extra stabilitylab[agent] is not installed: no MCP SDK")
SAMPLE = sample("lm_high_lr")
START = "import sys; from stabilitylab.cli.main import main; sys.exit(main())"


def over_stdio(root, talk):
    "What `talk(client)` returns, with a server that was started by the client."
    words = ["-c", START, "mcp", "--root", str(root)]
    env = {"PYTHONPATH": str(ROOT)}  # of all other variables the SDK passes on only harmless ones

    async def session():
        from mcp import Client, StdioServerParameters

        start = StdioServerParameters(command=sys.executable, args=words, cwd=str(root), env=env)
        async with Client(start) as client:
            return await talk(client)

    return asyncio.run(session())


async def called(client, name, **arguments):
    "An answer as data; it must be small, and name the next call."
    result = await client.call_tool(name, arguments)
    text = result.content[0].text
    told = json.loads(text)
    assert not result.is_error, told
    assert len(text) < 13_000 and told["next"]["tool"] in TOOLS, text[:300]
    return told


async def follow(client, told):
    "The call that an answer names, as it stands."
    return await called(client, told["next"]["tool"], **told["next"]["arguments"])


@pytest.mark.slow  # a server in a process of its own
def test_tools_and_resources_over_stdio(tmp_path):
    shutil.copytree(SAMPLE, tmp_path / "run")

    async def talk(client):
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == set(TOOLS)
        for tool in tools:
            assert tool.description and all(
                p["description"] for p in tool.input_schema["properties"].values()
            )
        first = await called(client, "diagnose", run="run")
        findings, figure = first["resources"]
        listed = json.loads((await client.read_resource(findings)).contents[0].text)
        assert listed["most_likely"]["id"] == "rate_too_high"
        picture = (await client.read_resource(figure)).contents[0]
        assert picture.mime_type == "image/png" and len(picture.blob) > 10_000
        refused = await client.call_tool("diagnose", {"run": "/etc"})
        told = json.loads(refused.content[0].text)
        assert refused.is_error and "is not accepted" in told["error"] and told["hint"]
        with pytest.raises(Exception, match="etc"):
            await client.read_resource("stabilitylab://findings//etc/passwd")
        return first

    first = over_stdio(tmp_path, talk)
    assert len(json.dumps(first, ensure_ascii=False)) <= 1500 and first["symptom_step"] == 337


@pytest.mark.slow
def test_an_agent_comes_from_a_failed_run_to_a_verified_fix(tmp_path):
    "Only the tools, and mostly the calls that the answers name."
    shutil.copytree(SAMPLE, tmp_path / "run")

    async def talk(client):
        told = await called(client, "diagnose", run="run")
        assert "rate is too high" in told["text"]
        stats = await called(
            client,
            "tensor_stats",
            run="run",
            group="activations",
            variable="absmax",
            step=told["symptom_step"],
        )
        assert stats["rows"][0]["ratio"] > 100
        replayed = await called(client, "replay", run="run", step=352, what="swap")
        assert replayed["check"]["is_step"] and replayed["swap"]["verdict"] == "bad state"
        plan = replayed["next"]
        assert plan["tool"] == "trial_start"
        begun = await called(client, "trial_start", run="run", fixes=["lower_lr"], seeds=4, steps=60)
        until = time.monotonic() + 500
        while begun.get("state") == "running" and time.monotonic() < until:
            await asyncio.sleep(1)
            assert begun["next"]["tool"] == "trial_status"
            begun = await follow(client, begun)
        [fix] = [arm for arm in begun["arms"] if arm["fix"].startswith("lower_lr")]
        return begun["state"], fix

    state, fix = over_stdio(tmp_path, talk)
    assert state == "done" and fix["verdict"] == "helps" and fix["interval"][1] < 0


FAILING = {"vit raised": "lower_lr", "mlp wide": "redraw"}  # row -> what clearly helps


@pytest.mark.slow  # records a run, and trains about twenty arms
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", FAILING)
def test_next_alone_leads_to_a_verified_fix(name, tmp_path):
    "An agent that only ever makes the call that the last answer names."
    path = record(name, tmp_path)

    async def talk(client):
        told, calls, until = await called(client, "diagnose", run=path.name), [], time.monotonic() + 1200
        assert len(json.dumps(told, ensure_ascii=False)) <= 1500
        while "trial" not in told and time.monotonic() < until:
            calls.append(told["next"]["tool"])
            told = await follow(client, told)
        return told, calls

    told, calls = over_stdio(tmp_path, talk)
    assert calls[:2] == ["replay", "trial_start"] and calls[-1] == "diagnose"
    assert FAILING[name] in {fix["fix"] for fix in told["trial"]["helps"]}, told["trial"]
    assert told["next"]["tool"] == "explain" and len(json.dumps(told, ensure_ascii=False)) <= 1500


@pytest.mark.slow
def test_each_next_call_runs_and_a_trial_can_be_cancelled():
    tools = Tools([SAMPLE.parent])
    box = "lm_high_lr/blackbox"
    calls = [
        tools.diagnose("lm_high_lr"),
        tools.diagnose("lm_high_lr", brief=False),
        tools.diagnose("lm_high_lr/train.log"),
        tools.series("lm_high_lr"),
        tools.series("lm_high_lr", ["loss"], 330, 340),
        tools.tensor_stats("lm_high_lr", "gradients", "rms", 340, top=3),
        tools.batch_stats("lm_high_lr", [340, 341]),
        tools.explain("loss is NaN"),
        tools.scan(f"{box}/snapshot-300.pt", top=3),
        tools.diff(f"{box}/snapshot-300.pt", f"{box}/snapshot-350.pt"),
        tools.replay("lm_high_lr", 301, what="samples"),
    ]
    assert len(calls[-1]["samples"]) == 3 and calls[-1]["check"]["is_step"]
    job = tools.trial_start("lm_high_lr", ["lower_lr"], seeds=2, steps=2000)
    assert job["state"] == "running"
    stopped = tools.trial_cancel(job["job"])
    assert stopped["state"] == "cancelled"
    for told in {json.dumps(call["next"], sort_keys=True): call for call in calls}.values():
        following = told["next"]
        if following["tool"] == "trial_start":  # it trains for minutes
            assert set(following["arguments"]) <= {"run", "fixes", "seeds", "steps", "setup"}
            continue
        assert getattr(tools, following["tool"])(**following["arguments"])["next"], following


def test_a_first_step_is_not_sent_to_a_swap_test_without_controls(monkeypatch):
    tools = Tools([SAMPLE.parent])
    recording, _ = tools._open("lm_high_lr")
    assert tools.diagnose("lm_high_lr")["next"]["arguments"]["what"] == "swap"
    monkeypatch.setattr(tools, "_replayable", lambda run: min(recording.steps))
    assert tools.diagnose("lm_high_lr")["next"]["arguments"]["what"] == "samples"


def verdicts(**by_fix):
    "A trial's answer with these verdicts, and how many more seeds each would take."
    arms = [{"fix": "unchanged", "verdict": "unchanged", "more_seeds": 0, "seeds": [0]}]
    arms += [{"fix": f, "verdict": v, "more_seeds": more, "seeds": [0]} for f, (v, more) in by_fix.items()]
    return {"arms": arms, "words": ""}


def test_more_seeds_are_asked_only_where_they_may_decide(monkeypatch):
    tools = Tools([SAMPLE.parent])
    arms = [arm_of("lower_lr:factor=0.25"), arm_of("qk_norm"), null_arm(100)]
    job = TrialJob.__new__(TrialJob)
    training = SimpleNamespace(arms=arms, state="done", stage="ended", share=1.0, seconds=1.0, error="")
    job.training, job.run, job.again = training, "lm_high_lr", {"steps": 40}
    open_ = {"another order": ("can't tell yet", 5)}
    training.verdicts = verdicts(lower_lr=("can't tell yet", 2), qk_norm=("can't tell yet", 0), **open_)
    assert job.undecided() == ["lower_lr:factor=0.25"]
    assert [arm_of(words) for words in job.undecided()] == arms[:1]
    training.verdicts = verdicts(lower_lr=("can't tell yet", 2), qk_norm=("helps", 0), **open_)
    assert job.undecided() == []
    training.verdicts = verdicts(lower_lr=("can't tell yet", 2))
    tools._jobs["trial-1"] = job
    called = tools.trial_status("trial-1")["next"]
    assert called["tool"] == "trial_start" and called["arguments"]["steps"] == 40
    assert called["arguments"]["fixes"] == ["lower_lr:factor=0.25"]


@pytest.mark.slow  # trains in processes
def test_a_running_trial_says_what_the_seeds_so_far_say(tmp_path):
    tools = Tools([SAMPLE.parent])
    told = tools.trial_start("lm_high_lr", ["lower_lr"], seeds=2, steps=20)
    stages, partial = set(), []
    while told["state"] == "running":
        told = tools.trial_status(told["job"])
        stages.add(told["stage"].partition(":")[0])
        partial += [told] if told["state"] == "running" and "arms" in told else []
    assert told["stage"] == "ended" and told["share"] == 1 and "training" in stages
    assert len(told["arms"]) == 3 and all(arm["seeds"] == [0, 1] for arm in told["arms"])
    for early in partial:
        # on a busy machine one arm may have its second seed before another has its first
        assert early["words"].startswith("Preliminary, 1 of")
        assert len(early["arms"]) == 3 and min(len(arm["seeds"]) for arm in early["arms"]) == 1
    assert len(json.dumps(told)) < 4000


def test_what_changed_between_two_snapshots():
    told = Tools([SAMPLE.parent]).state_diff("lm_high_lr", 300, 350, top=3)
    assert len(told["rows"]) == 3 and told["rows"][0]["all_zero"] is False
    assert any("lr" in str(row[0]) for row in told["settings"])


def test_of_a_growing_log_only_the_last_version_is_kept(tmp_path):
    log, tools = tmp_path / "run.log", Tools([tmp_path])
    for n in (20, 30, 40):
        log.write_text("".join(f"step {i} loss {3 - i / 100}\n" for i in range(n)))
        os.utime(log, (n, n))
        assert len(tools._open("run.log")[0].run["scalars"].step) == n
    assert len(tools._runs) == 1


@pytest.mark.parametrize(
    "path", ["../outside/run.log", "/etc/passwd", "link.log", "linked", "s3://bucket/x", "none.log"]
)
def test_paths_outside_the_folders_are_refused(tmp_path, path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir(), outside.mkdir()
    (outside / "run.log").write_text("step 1 loss 2\nstep 2 loss 2\n")
    (root / "link.log").symlink_to(outside / "run.log")
    (root / "linked").mkdir()
    (root / "linked" / "train.log").symlink_to(outside / "run.log")
    tools = Tools([root])
    for call in (tools.diagnose, tools.series, tools.scan):
        with pytest.raises(InputError) as refused:
            call(path)
        assert "\n" not in str(refused.value) and "is not accepted" in str(refused.value)


def test_a_long_answer_is_cut_and_says_so():
    told = answer({"rows": [[i, 1 / 3] for i in range(5000)]}, "explain", words="loss_spike")
    assert (
        len(json.dumps(told)) < 12_200 and told["cut"] == {"rows": 5000} and told["rows"][0] == [0, 0.333333]
    )


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path):
    done = command("mcp", "--root", tmp_path / "none")
    assert done.returncode == 2 and "a folder that is there" in done.stderr
    assert {line.split()[0] for line in command("mcp", "--list").stdout.splitlines()} == set(TOOLS)


def test_the_tensors_of_a_batch_in_a_class_of_its_own_have_their_names():
    from stabilitylab.mcp.reading import _tensors

    inner = SimpleNamespace(ids=torch.ones(2), lengths=[torch.ones(1)])
    assert list(dict(_tensors({"x": inner}))) == ["x.ids", "x.lengths.0"]
