"""What must hold of `autoprec probe`: data on stdout, talk on stderr, documented exit codes."""

import json
import subprocess
import sys

import pytest

from autoprec import api
from autoprec.backends import products
from autoprec.cli import main
from autoprec.core.codec import from_plain
from autoprec.core.device import Measurements, Product
from autoprec.core.dtypes import DType
from autoprec.core.probe import ProbeResult


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

    monkeypatch.setattr(products, "launch", launch)
    assert main(["probe", "--measure", "--device", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["devices"][0]["facts"]
    assert facts["dtypes"]["float32"]["measured_gflops"] == 123.0
    assert facts["measured_memory_bandwidth_gbps"] == 45.0


@pytest.mark.parametrize(
    ("chosen", "message"), [("gpu", "unknown device 'gpu'"), ("cpu:7", "no device 'cpu:7' here")]
)
def test_a_wrong_device_is_one_sentence_and_exit_code_2(capsys, chosen, message):
    assert main(["probe", "--device", chosen]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert "Traceback" not in printed.err


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


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m autoprec probe | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, check=True)
    assert done.stderr == b""
