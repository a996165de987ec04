"""What must hold of `autoprec probe`: data on stdout, talk on stderr, documented exit codes."""

import json
import subprocess
import sys

import pytest

from autoprec import api, measurement_cache
from autoprec.backends.shared import matmul_timing
from autoprec.cli import main
from autoprec.core.codec import from_plain
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.probe_result import ProbeResult
from autoprec.core.dtypes import DType, Policy
from autoprec.errors import UsageError


def test_json_holds_the_whole_result(capsys):
    assert main(["probe", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    result = from_plain(ProbeResult, json.loads(printed.out))
    assert result.devices[-1].facts.kind.value == "cpu"
    assert result == api.probe()


def test_the_table_recommends_and_says_why(capsys):
    assert main(["probe", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert "recommended: " in printed.out
    assert "float32" in printed.out
    assert printed.err == ""


def test_measuring_puts_numbers_beside_the_catalogue(capsys, monkeypatch):
    def launch(framework, device, dtypes):
        return Measurements(framework, (Product(DType.FLOAT32, gflops=123.0),), 45.0)

    monkeypatch.setattr(matmul_timing, "measure_in_child", launch)
    assert main(["probe", "--measure", "--device", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["devices"][0]["facts"]
    assert facts["dtypes"]["float32"]["measured_gflops"] == 123.0
    assert facts["measured_memory_bandwidth_gbps"] == 45.0


def test_what_was_measured_beside_other_work_is_told_and_not_remembered(
    capsys, monkeypatch, tmp_path
):
    def launch(framework, device, dtypes):
        rates = (3.0, 1000.0, 100.0)
        timed = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT32)
        pairs = zip(timed, rates, strict=True)
        return Measurements(framework, tuple(Product(d, gflops=rate) for d, rate in pairs))

    monkeypatch.setattr(matmul_timing, "measure_in_child", launch)
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path))
    assert main(["probe", "--measure", "--device", "cpu"]) == 0
    assert "float32 products ran at 3 and at 100 GFLOP/s" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_json_names_what_is_recommended(capsys):
    assert main(["probe", "--json", "--device", "cpu"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["proposal"]["recommended"] == device["proposal"]["candidates"][0]["policy"]


def test_a_recommendation_says_whether_it_was_measured_and_when(capsys, monkeypatch, tmp_path):
    """The catalogue's word is not taken for a measurement, and a measurement is remembered."""

    def launch(framework, device, dtypes):
        slow = Product(DType.BFLOAT16, gflops=50.0)
        return Measurements(framework, (Product(DType.FLOAT32, gflops=100.0), slow), 45.0)

    def said(*words):
        assert main(["probe", "--device", "cpu", *words]) == 0
        return " ".join(capsys.readouterr().out.replace("│", " ").split())

    monkeypatch.setattr(matmul_timing, "measure_in_child", launch)
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path))
    assert "(from the catalogue, not measured here): " in said()
    assert "recommended: float32 (measured here with " in said("--measure")
    again = said()
    assert "recommended: float32 (measured here with torch on 20" in again
    assert "0.5x float32" in again
    (file,) = (tmp_path / "measured").iterdir()
    file.write_text("{")
    damaged = said()
    assert "(from the catalogue, not measured here): " in damaged
    assert "note: " in damaged
    assert "left out" in damaged


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("cpu:7", "no device 'cpu:7' here"),
        ("cpu:x", "unknown device 'cpu:x': expected KIND[:INDEX]"),
        ("cqu", "unknown device 'cqu': neither a kind of device (cpu, cuda"),
        ("gpu", "give the name of one, or a kind of device in this machine (cpu, cuda"),
        ("h1000", "did you mean nvidia-h100"),
    ],
)
def test_a_wrong_device_is_told_and_exit_code_2(capsys, chosen, message):
    assert main(["probe", "--device", chosen]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert "Traceback" not in printed.err


def test_a_device_that_is_not_here_is_told_of_by_the_catalogue(capsys):
    assert main(["probe", "--device", "tpu v5e"]) == 0
    printed = capsys.readouterr()
    assert "not in this machine: Google TPU v5e" in printed.out
    assert "note: not in this machine: known from the catalogue" in printed.out
    assert "recommended: mixed_bfloat16" in printed.out
    assert "frameworks: " not in printed.out
    assert printed.err == ""


def test_a_device_that_is_not_here_is_told_of_as_json(capsys):
    assert main(["probe", "--json", "--device", "a100"]) == 0
    result = from_plain(ProbeResult, json.loads(capsys.readouterr().out))
    (report,) = result.devices
    assert report.facts.observation.hypothetical
    assert report.facts.family == "nvidia-a100"
    assert report.proposal.recommended is Policy.MIXED_BFLOAT16


def test_only_what_is_here_is_measured(capsys):
    assert main(["probe", "--measure", "--device", "a100"]) == 2
    assert "'a100' is no device here" in capsys.readouterr().err


def test_a_device_that_is_not_here_is_not_tuned_for(tmp_path):
    task = tmp_path / "task.py"
    task.write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="unknown device 'a100': expected KIND"):
        api.tune(task, device="a100")


def test_help_shows_examples_and_ends_with_0(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["probe", "--help"])
    assert ended.value.code == 0
    assert "autoprec probe --measure" in capsys.readouterr().out


def test_help_imports_neither_rich_nor_optuna_nor_a_framework():
    script = (
        "import sys\nfrom autoprec.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'rich', 'optuna', 'torch', 'tensorflow', 'keras', 'yaml', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"


def test_probing_imports_no_framework_and_little_else():
    """Most of a probe's time is imports; benchmarks/overhead measures it."""
    script = (
        "import sys\nfrom autoprec.cli import main\nmain(['probe'])\n"
        "heavy = {'torch', 'tensorflow', 'keras', 'jax', 'numpy', 'optuna'}\n"
        "print(len(sys.modules), *sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    modules, *heavy = done.stderr.split()
    assert heavy == []
    assert int(modules) < 450


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m autoprec probe | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, check=True)
    assert done.stderr == b""
