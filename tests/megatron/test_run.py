"""The launcher installs, then runs the script as if it had been started directly."""

import subprocess
import sys
from pathlib import Path

import pytest

from padded_dispatch.megatron.run import main
from tests.support.ahead import ENVIRONMENT

SCRIPT = """
import sys
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
import beside

config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=2,
    moe_router_topk=2, moe_aux_loss_coeff=0.0, moe_token_dispatcher_type="padded_alltoall")
print(__name__, sys.argv[1:], config.padded_dispatch.alignment, beside.VALUE)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "padded_dispatch.megatron.run", *words]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


@pytest.mark.ahead
def test_script_runs_as_main_with_its_own_arguments(tmp_path: Path):
    (tmp_path / "beside.py").write_text("VALUE = 7")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("--padded-alignment", "16", str(tmp_path / "script.py"), "--lr", "3", "-x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "__main__ ['--lr', '3', '-x'] 16 7"


def test_missing_script_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run", "nowhere.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "script must be an existing file, got 'nowhere.py'" in capsys.readouterr().err


def test_a_wrong_option_is_named_by_its_flag(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run", "--padded-grow-after", "0", __file__])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "error: --padded-grow-after must" in error and "got 0" in error
