"""Every command in the documentation is run by a named test, or needs what a test machine lacks and says so, and parses."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_lilicorr.files import folders

from .commands import PAGES, ROOT, Command, Wrong, all_commands, blocks, check, commands, node_exists, simple_commands

SETUP_CPU = "test_command_completes_an_environment_once_and_pip_can_take_its_part_back"
CORE, TRAINER, BENCH, DEMO = "tests/core", "tests/trainer", "tests/bench", "tests/serving/test_demo.py"

# The test that runs each documented program for real. What a page shows is parsed with its own words besides.
RUN_BY = {
    "make setup": ".ci/run",
    "make test": ".ci/run",
    "make lint": ".ci/run",
    "make docs": "tests/docs/test_site.py::test_the_site_builds_strictly_and_fetches_nothing",
    "make soak": "tests/serving/test_http.py::test_a_minute_under_load_brings_no_error_and_no_other_token",
    "python tests/serving/soak.py": "tests/serving/test_http.py::"
    "test_request_steps_under_sampling_are_counted_and_no_index_is_out_of_range",
    "pip install": f"{CORE}/test_packaging.py::environment",
    "pip uninstall": f"{CORE}/test_setup_cpu.py::{SETUP_CPU}",
    "pytest": ".ci/run",
    "python -m build": f"{CORE}/test_packaging.py::distributions",
    "python -m vllm_lilicorr.check": f"{CORE}/test_packaging.py::test_installed_check_command_reads_a_checkpoint",
    "python -m vllm_lilicorr.files": f"{CORE}/test_packaging.py::test_what_comes_with_the_package_is_found",
    "python -m vllm_lilicorr.reference": f"{CORE}/test_reference.py::test_the_command_prints_tau_and_writes_one_object_a_prompt",
    "python -m vllm_lilicorr.smollm2": f"{CORE}/test_smollm2.py::test_second_call_does_nothing_and_loads_no_torch",
    "python -m vllm_lilicorr.setup_cpu": f"{CORE}/test_setup_cpu.py::{SETUP_CPU}",
    "python -m vllm_lilicorr.bench resources": "tests/kernels/test_resources.py::test_the_table_is_written_between_its_marks",
    "python -m vllm_lilicorr.bench acceptance": f"{BENCH}/test_acceptance.py::test_one_command_measures_everything_and_prints_it",
    "python -m vllm_lilicorr.bench serve": f"{BENCH}/test_serve.py::test_a_real_server_is_measured_by_vllms_client",
    "python -m vllm_lilicorr.bench cost": f"{BENCH}/test_serve.py::test_cost_measures_the_first_systems_backbone_as_control",
    "python -m vllm_lilicorr.bench run": f"{BENCH}/test_run.py::test_everything_runs_in_turn_and_the_report_is_written",
    "python -m vllm_lilicorr.bench report": f"{BENCH}/test_report.py::test_the_command_writes_report_and_plots",
    "python -m vllm_lilicorr.bench card": f"{BENCH}/test_card.py::"
    "test_the_card_tells_how_the_drafter_was_made_and_what_it_reaches",
    "python docs/drawings/lattice.py": "tests/docs/test_site.py::test_the_drawing_is_what_its_script_draws",
    "python trainer/regenerate.py": f"{TRAINER}/test_regenerate.py::test_vllm_writes_what_greedy_decoding_in_transformers_writes",
    "python trainer/cache.py": f"{TRAINER}/test_states.py::test_cached_rows_equal_what_the_target_computes",
    "python trainer/main.py": f"{TRAINER}/test_trainer.py::test_a_run_logs_every_term_saves_evaluates_and_exports",
    "python trainer/split_prompts.py": f"{TRAINER}/test_split_prompts.py::"
    "test_the_last_rows_of_every_file_are_held_out_and_the_rest_shuffled_the_same_way_twice",
    "python trainer/export.py": f"{TRAINER}/test_trainer.py::test_a_run_logs_every_term_saves_evaluates_and_exports",
    "make demo": f"{DEMO}::test_the_demo_serves_three_ways_and_shows_that_the_text_is_the_same",
    "python -m vllm_lilicorr.demo": f"{DEMO}::test_the_demo_serves_three_ways_and_shows_that_the_text_is_the_same",
    "vllm serve": "tests/serving/test_http.py::test_eight_clients_at_once_get_the_targets_tokens",
}

# Programs that no test runs, and why not; their words are parsed all the same.
NOT_RUN = {
    "pip freeze": "pip's own",
    "sbatch": "Slurm's own; what it wraps is checked like any command",
    "deepspeed": "the launcher; the same ranks are started by tests/trainer/worker.py",
    "python -m deepspeed.checkpoint.ds_to_universal": "DeepSpeed's own",
    "python -m vllm_lilicorr.bench": "a measurement: minutes of a quiet machine",
    "python -m vllm_lilicorr.bench head": "a measurement: minutes of a quiet machine",
    "python -m vllm_lilicorr.bench train": "a measurement: minutes of a quiet machine",
    "python tests/serving/real_target.py": "minutes of both cores; it compares as tests/serving/engines.py does",
    "python kernels/gpu_check.py": "for a GPU; what it runs there is tests/kernels",
    "vllm bench serve": "vLLM's own; what the plugin changes in it is tests/serving/test_configuration.py",
    "vllm bench throughput": "as vllm bench serve",
    "vllm bench latency": "as vllm bench serve",
}


def test_pages_show_commands_at_all() -> None:
    shown = all_commands()
    assert len(shown) > 40
    assert {page.relative_to(ROOT).as_posix() for page in PAGES} >= {"README.md", "docs/quickstart.md", "docs/training.md"}
    assert sum(command.inline for command in shown) > 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_parses_and_is_run_by_a_test_or_marked(page: Path) -> None:
    problems = []
    for command in commands(page):
        try:
            programs = check(command)
        except Wrong as error:
            problems.append(f"{command}\n    {error}")
            continue
        unknown = [program for program in programs if program not in RUN_BY and program not in NOT_RUN]
        if unknown and command.mark is None:
            problems.append(
                f"{command}\n    {', '.join(unknown)}: run by no test; name one in tests/docs/test_commands.py, or mark the "
                "command '# needs a GPU' or '# needs the network'"
            )
    assert not problems, "\n".join(problems)


def test_every_test_that_is_said_to_run_a_command_exists() -> None:
    assert [node for node in RUN_BY.values() if not node_exists(node)] == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("frobnicate --now", "no program"),
        ("python -m vllm_lilicorr.reference --target T --prompts P --rulle greedy", "unrecognized arguments: --rulle"),
        ("python -m vllm_lilicorr.reference --target T", "required: --prompts"),
        ("python -m vllm_lilicorr.refrence", "no module"),
        ("python -m vllm_lilicorr.bench haed", "haed"),
        ("python trainer/mian.py", "no trainer/mian.py"),
        ("deepspeed trainer/main.py --config configs/qwen3-8b.yaml run.epoch=1", "run.epoch is no known key"),
        ("make tset", "no target tset"),
        ("make setup PYTHOON=python3.12", "no variable PYTHOON"),
        ("pip install 'vllm-lilicorr[serv]'", "no extra serv"),
        ("pytest tests/core/test_check.py", "no tests/core/test_check.py"),
        ('cp "$(python -m vllm_lilicorr.files --configs)" .', "unrecognized arguments: --configs"),
        ("sbatch --wrap 'python trainer/regenerate.py --target T'", "required: --out"),
        ("python -m vllm_lilicorr.check 'CKPT", "shell cannot read"),
    ],
)
def test_a_command_that_would_not_start_is_found(text: str, reason: str) -> None:
    with pytest.raises(Wrong, match=re.escape(reason)):
        check(Command("page", 1, text))


def test_commands_are_found_wherever_a_page_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Run `make test`, not `make`.\n\n"
        "```console\n$ pip install 'x'    # the user's own; needs the network\noutput\n$ make lint \\\n    PYTHON=p\n```\n"
        "    make docs      builds the site\n\n"
        "```sh\n# a comment\nA=1 pytest tests\n```\n\n```\nvllm serve T\nprose in a block\n```\n"
    )
    monkeypatch.setattr(sys.modules[commands.__module__], "ROOT", tmp_path)
    found = [(command.text, command.mark, command.inline) for command in commands(page)]
    assert found == [
        ("make test", None, True),
        ("pip install 'x'    # the user's own; needs the network", "the network", False),
        ("make lint PYTHON=p", None, False),
        ("make docs", None, False),
        ("A=1 pytest tests", None, False),
        ("vllm serve T", None, False),
    ]


def test_python_and_json_in_the_documentation_are_valid() -> None:
    seen = 0
    for page in PAGES:
        for fence in blocks(page.read_text(encoding="utf-8"))[0]:
            text = "\n".join(fence.lines)
            if fence.language == "python":
                for words in _commands_in(ast.parse(text, filename=str(page))):
                    check(Command(page.name, fence.line, words))
                    seen += 1
            elif fence.language == "json":
                json.loads(text)
    assert seen


def _commands_in(tree: ast.AST) -> list[str]:
    """Return the command lines that a program holds as lists of words, what it computes replaced by a shard's number."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.List) and node.elts and isinstance(node.elts[0], ast.Constant) and node.elts[0].value == "python":
            words = [str(word.value) if isinstance(word, ast.Constant) else "0/1" for word in node.elts]
            found.append(" ".join(words))
    return found


@pytest.mark.slow
def test_vllm_parses_every_serve_command_of_the_documentation(tmp_path: Path) -> None:
    """By vLLM's own parser, with the plugin's reading of configuration files, in a folder that has ours."""
    shown = [words[2:] for command in all_commands() for words in simple_commands(command.text)
             if words[:2] == ["vllm", "serve"] and "..." not in words and len(words) > 2]
    assert len(shown) >= 3
    for file in (ROOT / "configs").glob("lilicorr*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shutil.copytree(folders()["smollm2-135m"], tmp_path / "lilicorr-smollm2")
    code = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
load_general_plugins()
parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
for words in json.loads(sys.argv[1]):
    print(parser.parse_args(words).speculative_config)
"""
    done = subprocess.run([sys.executable, "-c", code, json.dumps(shown)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
