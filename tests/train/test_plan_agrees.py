"""What `penstock plan` plans is what `penstock train` with the same arguments does.

Both write a plan file, and the files are equal byte for byte. The only declared difference is
`workload.steps` without `--steps` and without `--data`: training counts the steps of its data. The
number of steps affects nothing but the estimate of drive wear.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.cli import main
from penstock.engine.model_source import inspect_model
from penstock.engine.prepare import choose_plan as plan_of_prepare
from penstock.machine.machine import Machine
from penstock.machine.presets import preset
from penstock.machine.probe_cache import save_probe
from penstock.plan.plan import Plan
from penstock.settings import GROUP_OF, Settings
from penstock.train.inputs import load_model
from penstock.train.plan_choice import choose_plan
from penstock.units import GiB
from tests.support.engines import tiny_config
from tests.support.pretend_machine import pretend_to_be, unmeasured
from tests.support.samples import sample
from tests.support.small_tokenizers import MARKED, small_tokenizer
from tests.train.runs import make_texts, run_command

SIZES = ["--context", "32", "--steps", "1"]
RESIDENT = ["--hbm", "64MiB", "--dram", "64MiB"]
HOST = ["--hbm", "1500KiB", "--dram", "64MiB", "--batch", "4"]
DISK = ["--hbm", "1500KiB", "--dram", "500KiB", "--nvme", "{first}:64MiB"]
TWO_DISKS = [*DISK[:4], "--nvme", "{first}:32MiB", "--nvme", "{second}:64MiB"]

ARGUMENTS: dict[str, tuple[str, list[str]]] = {
    "default batch": ("llama", RESIDENT),
    "int8 moments, micro-batch": ("mistral", [*DISK, "--batch", "5", "--micro-batch", "2",
                                              "--moments", "int8"]),
    "two drives": ("qwen3", [*TWO_DISKS, "--batch", "4"]),
    "fp16, no clipping, blocks": ("gemma2", [*HOST, "--dtype", "fp16", "--clip", "0",
                                             "--steps", "8", "--blocks", "model.layers"]),
    "frozen, config, not deterministic": (
        "gemma3",
        [*RESIDENT, "--freeze", "model.embed_tokens.*", "--freeze", "*norm*", "--batch", "3",
         "--model-config", "attention_bias=true", "--no-deterministic", "--micro-batch", "auto"],
    ),
}  # fmt: skip

ONE_BY_ONE: dict[str, tuple[str, list[str]]] = {
    "host": ("llama", HOST),
    "one drive": ("llama", [*DISK, "--batch", "4"]),
    "bf16 moments": ("qwen3", [*HOST, "--moments", "bf16"]),
    "int8 moments": ("llama", [*DISK, "--batch", "4", "--moments", "int8"]),
    "frozen": ("gemma3", [*RESIDENT, "--freeze", "model.embed_tokens.*", "--freeze", "*norm*"]),
    "micro-batch": ("mistral", [*HOST[:4], "--batch", "5", "--micro-batch", "2"]),
    "micro-batch auto": ("olmo2", [*RESIDENT, "--batch", "3", "--micro-batch", "auto"]),
    "not deterministic": ("phi3", [*RESIDENT, "--no-deterministic"]),
    "fp16, no clipping": ("gemma2", [*RESIDENT, "--dtype", "fp16", "--clip", "0", "--steps", "8"]),
    "fp32": ("qwen3", [*DISK, "--batch", "4", "--dtype", "fp32"]),
    "config": ("llama", [*RESIDENT, "--model-config", "rope_theta=5000.0", "--batch", "2"]),
    "blocks": ("gpt_neox", [*RESIDENT, "--blocks", "gpt_neox.layers", "--batch", "2"]),
}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_texts(tmp_path_factory.mktemp("data") / "texts.jsonl")


def config_directory(directory: Path, family: str) -> str:
    """Save the config of a tiny model, without weights, and a tokenizer."""
    tokenizer = small_tokenizer(MARKED)
    config = tiny_config(family, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    config.architectures = None
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def with_paths(flags: list[str], tmp_path: Path) -> list[str]:
    paths = {name: tmp_path / name for name in ("first", "second")}
    for path in paths.values():
        path.mkdir(exist_ok=True)
    return [flag.format(**paths) for flag in flags]


def planned_file(tmp_path: Path, model: str, flags: list[str]) -> bytes:
    """Return the plan file that `penstock plan` writes for this machine."""
    path = tmp_path / "planned.json"
    done = run_command(["plan", model, "--machine", "this", *flags, "-o", str(path), "--json"])
    assert done.code == 0, done.errors
    return path.read_bytes()


def trained_file(tmp_path: Path, model: str, data: Path, flags: list[str]) -> bytes:
    """Return the plan file in the output directory of `penstock train`."""
    out = tmp_path / "out"
    more = ["--data", str(data), "--out", str(out), "--init", "random", "--json"]
    done = run_command(["train", model, *flags, *more, "--cache", str(tmp_path / "cache")])
    assert done.code == 0, done.errors
    return (out / "plan.json").read_bytes()


@pytest.mark.parametrize(
    "name",
    sample([*ARGUMENTS, *ONE_BY_ONE], ["two drives", "frozen, config, not deterministic"]),
)
def test_the_plan_of_a_run_is_the_planned_one(name: str, data: Path, tmp_path: Path) -> None:
    family, more = (ARGUMENTS | ONE_BY_ONE)[name]
    model = config_directory(tmp_path / "model", family)
    flags = [*SIZES, *with_paths(more, tmp_path)]

    inputs = ["--data", str(data), "--cache", str(tmp_path / "cache")]
    planned = planned_file(tmp_path, model, [*flags, *inputs])

    assert planned == trained_file(tmp_path, model, data, flags)
    placement = Plan.load(tmp_path / "planned.json").placement
    assert placement.staging_node is not None


def test_only_the_number_of_steps_differs_without_steps(data: Path, tmp_path: Path) -> None:
    model = config_directory(tmp_path / "model", "llama")
    flags = ["--context", "32", "--batch", "16", *RESIDENT]

    planned = json.loads(planned_file(tmp_path, model, flags))
    trained = json.loads(trained_file(tmp_path, model, data, flags))

    assert trained["workload"].pop("steps") > 1
    assert "steps" not in planned["workload"]
    assert planned == trained


def test_a_config_file_plans_what_it_trains(data: Path, tmp_path: Path) -> None:
    model = config_directory(tmp_path / "model", "llama")
    flags = [*SIZES, *RESIDENT, "--batch", "3", "--moments", "bf16"]
    trained = trained_file(tmp_path, model, data, flags)

    done = run_command(["plan", "--config", str(tmp_path / "out/run.yaml"), "--machine", "this",
                        "-o", str(tmp_path / "again.json"), "--json"])  # fmt: skip

    assert done.code == 0, done.errors
    assert (tmp_path / "again.json").read_bytes() == trained


def test_a_run_with_a_plan_file_follows_it(data: Path, tmp_path: Path) -> None:
    model = config_directory(tmp_path / "model", "llama")
    flags = [*SIZES, *with_paths(DISK, tmp_path), "--batch", "4"]
    planned = planned_file(tmp_path, model, flags)

    followed = ["--plan", str(tmp_path / "planned.json"), "--steps", "1"]
    assert planned == trained_file(tmp_path, model, data, followed)


def test_a_plan_file_of_an_earlier_version_gets_the_memory_of_the_process(
    data: Path, tmp_path: Path
) -> None:
    """Otherwise every run with such a file would report that it needs more than planned."""
    model = config_directory(tmp_path / "model", "llama")
    planned = json.loads(planned_file(tmp_path, model, [*SIZES, *HOST]))
    process = planned.pop("process_memory")
    (tmp_path / "planned.json").write_text(json.dumps(planned))

    followed = ["--plan", str(tmp_path / "planned.json"), "--steps", "1"]
    trained = json.loads(trained_file(tmp_path, model, data, followed))

    assert trained.pop("process_memory") == process > 0
    assert trained == planned


def test_a_plan_file_with_compiled_layers_is_refused_without_kernels(
    data: Path, tmp_path: Path
) -> None:
    """`penstock plan --machine h200` assumes kernels that the CPU does not have."""
    model = config_directory(tmp_path / "model", "llama")
    path = str(tmp_path / "h200.json")
    sizes = ["--hbm", "4GiB", "--dram", "64MiB", "--batch", "4", "--machine", "h200"]
    assert run_command(["plan", model, *SIZES, *sizes, "-o", path, "--json"]).code == 0
    assert Plan.load(path).workload.numerics.compiled

    more = ["--data", str(data), "--out", str(tmp_path / "out"), "--init", "random"]
    refused = run_command(["train", model, "--plan", path, "--steps", "1", *more])

    assert refused.code == 1
    assert "does not run compiled layers" in refused.errors
    assert "penstock plan --machine this" in refused.errors


def test_a_drive_that_is_not_here_is_refused_by_both(data: Path, tmp_path: Path) -> None:
    model = config_directory(tmp_path / "model", "llama")
    flags = [model, *SIZES, *RESIDENT, "--nvme", "/no/such/place:1GiB"]
    more = ["--data", str(data), "--out", str(tmp_path / "out"), "--init", "random"]

    for command in (["plan", *flags, "--machine", "this"], ["train", *flags, *more]):
        refused = run_command(command)
        assert refused.code != 0
        assert "/no/such/place is neither a directory nor a block device" in refused.errors
    elsewhere = [*flags, "--hbm", "4GiB", "--machine", "h200"]
    assert run_command(["plan", *elsewhere, "--json"]).code == 0


def test_the_default_batch_and_context_come_from_the_settings_alone(tmp_path: Path) -> None:
    """No command and no function has a default of its own."""
    model = config_directory(tmp_path / "model", "llama")
    flags = ["--steps", "1", "--model-config", "max_position_embeddings=4096"]
    flags += ["--hbm", "4GiB", "--dram", "1GiB"]
    settings = Settings.of({"model_config": {"max_position_embeddings": 4096}})

    planned_file(tmp_path, model, flags)
    workload = Plan.load(tmp_path / "planned.json").workload
    inventory = inspect_model(model, settings)[1]
    from_python = plan_of_prepare(inventory, settings, budget={"hbm": "4GiB", "dram": "1GiB"}).plan

    assert (workload.context, workload.batch) == (4096, 8)
    assert from_python.workload == replace(workload, steps=None)
    for name in ("plan", "train", "data show"):
        command = typer.main.get_command(main.app)
        for word in name.split():
            command = command.commands[word]  # type: ignore[attr-defined]
        shared = [p for p in command.params if p.name in GROUP_OF]
        assert shared
        assert all(parameter.default is None for parameter in shared), name


# On a GPU, as far as it can be decided without one.

NVME = preset("h200").storage[0]


GPUS: list[tuple[dict[str, Any], bool, bool]] = [
    ({}, True, True), ({}, False, False), ({"capability": "7.5"}, True, False),
    ({"free": 40 * GiB}, True, True), ({"uuid": "GPU-another"}, True, True),
]  # fmt: skip
"""What differs from the machine that was probed, whether Triton is installed, and whether layers
are compiled then."""

BUDGETS = [[], ["--dram", "40GiB"], ["--hbm", "9GiB", "--dram", "1GiB"]]


@pytest.mark.parametrize(
    ("gpu", "triton", "compiled", "budget"),
    [
        pytest.param(*gpu, budget, marks=() if i % len(BUDGETS) == j else pytest.mark.long)
        for i, gpu in enumerate(GPUS)
        for j, budget in enumerate(BUDGETS)
    ],
)
def test_plan_and_train_agree_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpu: dict[str, Any],
    triton: bool,
    compiled: bool,
    budget: list[str],
) -> None:
    """`auto` budgets, the speeds of the probe, kernels: from the same description of the machine.

    The probe was made on an H200 with another UUID in the last case, so it is ignored.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    drive = replace(NVME, path=str(tmp_path), free=30 * GiB)
    probed: Machine = replace(preset("h200"), storage=(drive,))
    save_probe(probed)
    pretend_to_be(monkeypatch, unmeasured(probed, **gpu), triton=triton)
    model = config_directory(tmp_path / "model", "llama")
    flags = ["--context", "64", "--steps", "5", *budget, "--nvme", f"{tmp_path}:auto"]
    values = dict(zip((flag[2:] for flag in flags[::2]), flags[1::2], strict=True))
    chosen = {"model": model, "init": "random", "context": 64, "steps": 5}
    settings = Settings.of({**values, **chosen})

    path = tmp_path / "planned.json"
    done = run_command(["plan", model, *flags, "-o", str(path), "--json"])
    choice, _ = choose_plan(settings, load_model(settings, None), 5, None)
    choice.plan.save(tmp_path / "trained.json")

    assert done.code == 0, done.errors
    assert path.read_bytes() == (tmp_path / "trained.json").read_bytes()
    assert choice.plan.workload.numerics.compiled is compiled
    assert choice.plan.budget.nvme[0].nbytes == 30 * GiB
    measured = choice.machine.gpus[0].block_flops is not None
    assert measured is ("uuid" not in gpu)
