"Every tool with wrong, missing and unknown arguments: JSON with an error and a hint, no traceback."

import asyncio
import json

import pytest

from stabilitylab.cases.registry import sample
from stabilitylab.mcp.server import TOOLS, Tools, make_server

pytest.importorskip("mcp", reason="the extra stabilitylab[agent] is not installed: no MCP SDK")
RUN = "lm_high_lr"
WRONG = [  # tool, arguments that no call should have
    ("diagnose", {"run": "nowhere"}),
    ("diagnose", {"run": "../lm_high_lr"}),
    ("diagnose", {"run": [1]}),
    ("series", {"run": RUN, "names": ["lss"]}),
    ("series", {"run": RUN, "names": ["loss"], "every": 0}),
    ("tensor_stats", {"run": RUN, "group": "activation", "variable": "absmax", "step": 340}),
    ("tensor_stats", {"run": RUN, "group": "activations", "variable": "largest", "step": 340}),
    ("batch_stats", {"run": RUN, "steps": [999999]}),
    ("batch_stats", {"run": RUN, "steps": []}),
    ("state_diff", {"run": RUN, "a": 7, "b": 9}),
    ("explain", {"words": "xyzzy"}),
    ("trial_status", {"job": "trial-99"}),
    ("trial_cancel", {"job": "trial-99"}),
    ("scan", {"checkpoint": "lm_high_lr/train.log"}),
    ("diff", {"a": "nowhere", "b": "nowhere"}),
    ("replay", {"run": RUN, "step": -5}),
    ("replay", {"run": RUN, "what": "everything"}),
    ("replay", {"run": RUN, "setup": "/etc/passwd:f"}),
    ("trial_start", {"run": RUN, "fixes": ["no_such_fix"]}),
    ("trial_start", {"run": RUN, "fixes": ["lower_lr:factor=7"]}),
    ("trial_start", {"run": RUN, "seeds": 0}),
]


@pytest.fixture(scope="module")
def server():
    return make_server(Tools([sample(RUN).parent]))


def answered(server, tool, arguments):
    "What the SDK hands to a client: (whether it is an error, text)."
    from mcp import Client

    async def session():
        async with Client(server) as client:
            return await client.call_tool(tool, arguments)

    result = asyncio.run(session())
    return result.is_error, result.content[0].text


@pytest.mark.parametrize(("tool", "arguments"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_argument_is_an_error_with_a_hint(server, tool, arguments):
    is_error, text = answered(server, tool, arguments)
    told = json.loads(text)
    assert is_error and told["error"] and told["hint"], text
    assert "Traceback" not in text and "fault of this program" not in text, text


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("arguments", [{}, {"colour": "red"}], ids=["missing", "extra"])
def test_missing_and_unknown_arguments_are_errors_with_a_hint(server, tool, arguments):
    is_error, text = answered(server, tool, arguments)
    told = json.loads(text)
    assert is_error and told["error"] and told["hint"], text
    assert "Traceback" not in text and "fault of this program" not in text, text
    is_error, text = answered(server, "diagnose", {"run": RUN, "brif": True})
    assert is_error and "did you mean 'brief'?" in json.loads(text)["error"]


def test_every_tool_is_in_the_table():
    assert {tool for tool, _ in WRONG} == set(TOOLS)
